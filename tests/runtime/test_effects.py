"""The effects of agents in code: recorded once, answered from the log, one at a time in a lane."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import NoReturn

from bough.v1 import error_pb2, execution_pb2, message_pb2, model_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.runtime.agent import Context
from tests.support.log_laws import check_laws
from tests.support.log_readings import check_replay
from tests.support.run_harness import ME, RunHarness, names, open_harness


class NoModels:
    """A configuration without any model."""

    def get(self, name: str) -> NoReturn:
        raise KeyError(name)

    def list(self) -> list[model_pb2.ModelInfo]:
        return []


def harness(folder: Path, *agents: FunctionAgent) -> AbstractAsyncContextManager[RunHarness]:
    return open_harness(folder, models=NoModels(), code_agents=agents)


@agent(description="Says what it is told.")
async def echo(ctx: Context, input: message_pb2.Message) -> str:
    return f"echo {input.parts[0].text}"


@agent(description="Always fails.")
async def broken(ctx: Context, input: message_pb2.Message) -> str:
    raise ValueError("no luck")


async def test_values_are_recorded_and_a_replay_gets_the_same(tmp_path: Path) -> None:
    seen: list[tuple[str, str, float, object]] = []

    @agent(description="Reads the world.")
    async def reader(ctx: Context, input: message_pb2.Message) -> str:
        async def count() -> object:
            counted.append(1)
            return {"rows": [1, 2, len(counted)]}

        now = await ctx.now()
        value = await ctx.step("count", count)
        seen.append((now.isoformat(), ctx.new_id(), ctx.random.random(), value))
        return "done"

    counted: list[int] = []
    async with harness(tmp_path, reader) as it:
        log = await it.turn("reader")
        replayed = await it.replay(log)
    assert names(log) == [
        "reader: run.started",
        "reader: control.value_recorded",
        "reader: control.value_recorded",
        "reader: run.completed",
    ]
    assert (replayed.results, replayed.divergence) == (2, "")
    assert seen[0] == seen[1]
    assert len(counted) == 1


async def test_a_failed_step_raises_the_same_error_on_a_replay(tmp_path: Path) -> None:
    caught: list[str] = []

    @agent(description="Tries.")
    async def trier(ctx: Context, input: message_pb2.Message) -> str:
        async def fail() -> None:
            raise OSError("the disk is gone")

        try:
            await ctx.step("read", fail)
        except RunError as error:
            caught.append(f"{error.reason} {error.message}")
        return "survived"

    async with harness(tmp_path, trier) as it:
        replayed = await it.replay(await it.turn("trier"))
    assert replayed.divergence == ""
    assert caught == [f"{error_pb2.ERROR_REASON_TOOL_FAILED} The step 'read' failed: OSError: the disk is gone"] * 2


async def test_a_dispatched_child_is_a_node_with_one_start_and_one_end(tmp_path: Path) -> None:
    @agent(description="Calls.", agents=["echo"])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        answer = await ctx.dispatch("echo", "first")
        return f"{answer.parts[0].text}!"

    async with harness(tmp_path, caller, echo) as it:
        log = await it.turn("caller")
        replayed = await it.replay(log)
    assert names(log) == [
        "caller: run.started",
        "echo: sub_agent.started",
        "echo: sub_agent.completed",
        "caller: run.completed",
    ]
    assert log[-1].run_completed.final_answer.parts[0].text == "echo first!"
    assert log[1].sub_agent_started.trigger == execution_pb2.INVOCATION_TRIGGER_WORKFLOW
    assert replayed.divergence == ""


async def test_an_agent_that_is_not_linked_cannot_be_dispatched(tmp_path: Path) -> None:
    @agent(description="Calls.")
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.dispatch("echo", "first")
        return "never"

    async with harness(tmp_path, caller, echo) as it:
        log = await it.turn("caller")
    assert names(log) == ["caller: run.started", "caller: control.value_recorded", "caller: run.failed"]
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_NOT_LINKED


async def test_lanes_run_at_once_and_give_results_in_lane_order(tmp_path: Path) -> None:
    @agent(description="Fans out.", agents=["echo"])
    async def fan(ctx: Context, input: message_pb2.Message) -> str:
        both = asyncio.Barrier(2)

        async def lane(ctx: Context, name: str, wait: bool) -> str:
            async def meet() -> str:
                await both.wait()
                return name

            value = await ctx.step("meet", meet) if wait else name
            answer = await ctx.dispatch("echo", str(value))
            return answer.parts[0].text

        said = await ctx.gather(
            lambda ctx: lane(ctx, "a", True), lambda ctx: lane(ctx, "b", True), lambda ctx: lane(ctx, "c", False)
        )
        return ", ".join(said)

    async with harness(tmp_path, fan, echo) as it:
        log = await it.turn("fan")
        assert log[-1].run_completed.final_answer.parts[0].text == "echo a, echo b, echo c"
        assert sorted(event.effect_key for event in log if event.HasField("sub_agent_started")) == [
            "e0.0/e1",
            "e0.1/e1",
            "e0.2/e0",
        ]


async def test_two_effects_at_once_in_one_lane_are_refused_with_what_to_do(tmp_path: Path) -> None:
    @agent(description="Fights.", agents=["echo"])
    async def fighter(ctx: Context, input: message_pb2.Message) -> str:
        await asyncio.gather(ctx.dispatch("echo", "a"), ctx.dispatch("echo", "b"))
        return "never"

    async with harness(tmp_path, fighter, echo) as it:
        log = await it.turn("fighter")
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_CONCURRENT_EFFECTS
    assert "ctx.gather" in error.message
    check_laws(log)


async def test_a_childs_exception_becomes_an_error_without_a_stack(tmp_path: Path) -> None:
    @agent(description="Calls.", agents=["broken"])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        try:
            await ctx.dispatch("broken", "x")
        except RunError as error:
            return f"caught {error.message}"
        return "never"

    async with harness(tmp_path, caller, broken) as it:
        log = await it.turn("caller")
        replayed = await it.replay(log)
    assert log[-1].run_completed.final_answer.parts[0].text == ("caught The agent 'broken' failed: ValueError: no luck")
    assert "Traceback" not in str(log)
    assert replayed.divergence == ""


async def test_a_changed_agent_body_is_named_by_a_replay(tmp_path: Path) -> None:
    version = ["first"]

    @agent(description="Changes.", agents=["echo"])
    async def changing(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.dispatch("echo", version[0])
        return "done"

    async with harness(tmp_path, changing, echo) as it:
        log = await it.turn("changing")
        version[0] = "second"
        replayed = await it.replay(log)
    assert "The effect e0 asked for something else" in replayed.divergence


async def test_code_that_does_more_than_the_log_holds_diverges_and_touches_nothing(tmp_path: Path) -> None:
    extra = [False]

    @agent(description="Grows.", agents=["echo"])
    async def growing(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.now()
        if extra[0]:
            await ctx.now()
        return "done"

    async with harness(tmp_path, growing, echo) as it:
        log = await it.turn("growing")
        extra[0] = True
        replayed = await it.replay(log)
    assert replayed.divergence.startswith("The log holds the run's end at sequence 3, but the agents asked for e1. ")


def ping_and_pong(bottom: Callable[[], Awaitable[str]]) -> list[FunctionAgent]:
    """Two agents that call each other as often as they are told, and then do what is at the bottom."""

    def one(name: str, other: str) -> FunctionAgent:
        @agent(name=name, description="Calls the other.", agents=[other])
        async def call(ctx: Context, input: message_pb2.Message) -> str:
            left = int(input.parts[0].text)
            return (await ctx.dispatch(other, str(left - 1))).parts[0].text if left else await bottom()

        return call

    return [one("ping", "pong"), one("pong", "ping")]


async def test_recursion_does_not_limit_depth(tmp_path: Path) -> None:
    depth = sys.getrecursionlimit() + 100

    async def bottom() -> str:
        return "the bottom"

    async with harness(tmp_path, *ping_and_pong(bottom)) as it:
        run = await it.start("ping", str(depth))
        log = await it.log(run)
    assert log[-1].run_completed.final_answer.parts[0].text == "the bottom"
    assert max(event.depth for event in log) == depth
    assert sum(event.HasField("sub_agent_completed") for event in log) == depth


async def test_cancelling_a_deep_run_ends_every_invocation_once_leaf_first(tmp_path: Path) -> None:
    depth, there = sys.getrecursionlimit() + 100, asyncio.Event()

    async def bottom() -> str:
        there.set()
        await asyncio.Event().wait()
        return "never"

    async with harness(tmp_path, *ping_and_pong(bottom)) as it:
        run = await it.start("ping", str(depth))
        await there.wait()
        await it.runs.cancel(ME, run.run_id)
        log = await it.log(run)
    ends = [event.depth for event in log if event.HasField("sub_agent_failed")]
    assert ends == list(range(depth, 0, -1))
    assert events.name_of(log[-1]) == "agent.run.cancelled"


async def test_code_that_swallows_its_cancellation_writes_nothing(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    @agent(description="Will not go.", agents=["echo"])
    async def stubborn(ctx: Context, input: message_pb2.Message) -> str:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except BaseException:
            with suppress(Exception):
                await ctx.dispatch("echo", "from the grave")
            raise
        return "never"

    async with harness(tmp_path, stubborn, echo) as it:
        run = await it.start("stubborn")
        await waiting.wait()
        await it.runs.cancel(ME, run.run_id)
        log = await it.log(run)
    assert names(log) == ["stubborn: run.started", "stubborn: control.cancel_requested", "stubborn: run.cancelled"]


HUGE = "x" * (600 * 1024)


async def test_an_answer_of_code_that_no_event_can_hold_fails_it(tmp_path: Path) -> None:
    @agent(description="Says too much.")
    async def talker(ctx: Context, input: message_pb2.Message) -> str:
        return HUGE

    async with harness(tmp_path, talker) as it:
        log = await it.turn("talker")
        await check_replay(it, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE


async def test_a_value_that_no_event_can_hold_fails_its_step(tmp_path: Path) -> None:
    @agent(description="Reads too much.")
    async def reader(ctx: Context, input: message_pb2.Message) -> str:
        async def read() -> object:
            return HUGE

        try:
            await ctx.step("read", read)
        except RunError as error:
            return error_pb2.ErrorReason.Name(error.reason)
        return "never"

    async with harness(tmp_path, reader) as it:
        log = await it.turn("reader")
        await check_replay(it, log)
    assert log[-1].run_completed.final_answer.parts[0].text == "ERROR_REASON_OUTPUT_TOO_LARGE"


async def test_a_message_to_a_child_that_no_event_can_hold_is_refused(tmp_path: Path) -> None:
    @agent(description="Tells too much.", agents=["echo"])
    async def teller(ctx: Context, input: message_pb2.Message) -> str:
        try:
            await ctx.dispatch("echo", HUGE)
        except RunError as error:
            return error_pb2.ErrorReason.Name(error.reason)
        return "never"

    async with harness(tmp_path, teller, echo) as it:
        log = await it.turn("teller")
        await check_replay(it, log)
    assert log[-1].run_completed.final_answer.parts[0].text == "ERROR_REASON_BAD_ARGUMENTS"
