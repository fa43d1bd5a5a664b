"""Exceptions of any class, raised by operators' code at any place: they fail the effect or the agent, nothing else."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.functions import Snapshot, condition, input_builder, rewriter
from bough_server.runtime.agent import Context, Outcome
from bough_server.tools.tool import Tool, tool
from tests.support.composite_agents import loop, sequence
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, results_of
from tests.support.run_harness import ME, open_harness
from tests.support.teams import Scripts, call, calls, llm, open_team, script


class Bare(BaseException):
    """An exception that no `except Exception` catches."""


class Unspeakable(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


RAISED = [KeyboardInterrupt, SystemExit, GeneratorExit, Bare, asyncio.CancelledError, Unspeakable]


def fail(kind: type[BaseException]) -> NoReturn:
    raise kind("hostile")


def async_tool(kind: type[BaseException]) -> Tool:
    @tool(name="hostile")
    async def hostile() -> str:
        """Fails."""
        await asyncio.sleep(0)
        fail(kind)

    return hostile


def plain_tool(kind: type[BaseException]) -> Tool:
    @tool(name="hostile")
    def hostile() -> str:
        """Fails."""
        fail(kind)

    return hostile


def generator_tool(kind: type[BaseException]) -> Tool:
    @tool(name="hostile")
    def hostile() -> Iterator[str]:
        """Fails."""
        yield "one"
        fail(kind)

    return hostile


def async_generator_tool(kind: type[BaseException]) -> Tool:
    @tool(name="hostile")
    async def hostile() -> AsyncIterator[str]:
        """Fails."""
        yield "one"
        fail(kind)

    return hostile


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("make", [async_tool, plain_tool, generator_tool, async_generator_tool])
async def test_whatever_a_tool_raises_is_its_failed_result(
    tmp_path: Path, make: Callable[[type[BaseException]], Tool], kind: type[BaseException]
) -> None:
    turns = script(p=[calls(call("hostile")), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["hostile"]), tools=[make(kind)]) as harness:
        log = await harness.turn("p")
        check_laws(log)
        await check_replay(harness, log)
    (result,) = results_of(log)
    assert result.error.reason == error_pb2.ERROR_REASON_TOOL_FAILED
    assert result.error.message.startswith(kind.__name__)
    assert answer_of(log) == "Done."


@pytest.mark.parametrize("kind", RAISED)
async def test_a_call_whose_approval_cannot_be_decided_needs_one(tmp_path: Path, kind: type[BaseException]) -> None:
    @tool(approval=lambda _: fail(kind))
    def pay() -> str:
        """Pays."""
        return "paid"

    turns = script(p=[calls(call("pay")), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["pay"]), tools=[pay]) as harness:
        log = await harness.until_interrupted(await harness.start("p"))
    assert log[-1].run_interrupted.requests[0].call.name == "pay"


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_an_agent_raises_fails_it_and_its_caller_continues(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    @agent(description="Fails.")
    async def hostile(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.now()
        fail(kind)

    @agent(description="Calls.", agents=["hostile"])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        with pytest.raises(RunError) as failed:
            await ctx.dispatch("hostile", "go")
        return failed.value.reason_name

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[caller, hostile]) as harness:
        log = await harness.turn("caller")
        check_laws(log)
        await check_replay(harness, log)
        alone = await harness.turn("hostile")
        check_laws(alone)
    assert answer_of(log) == "SUB_AGENT_FAILED"
    assert alone[-1].HasField("run_failed")


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_a_lane_raises_fails_its_agent(tmp_path: Path, kind: type[BaseException]) -> None:
    @agent(description="Fails in a lane.")
    async def hostile(ctx: Context, input: message_pb2.Message) -> str:
        async def lane(lane: Context) -> None:
            await lane.now()
            fail(kind)

        await ctx.gather(lane, lane)
        return "never"

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[hostile]) as harness:
        log = await harness.turn("hostile")
        check_laws(log)
    assert log[-1].HasField("run_failed")


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_the_work_of_a_step_raises_fails_the_step(tmp_path: Path, kind: type[BaseException]) -> None:
    @agent(description="Has a step.")
    async def stepping(ctx: Context, input: message_pb2.Message) -> str:
        async def work() -> None:
            await asyncio.sleep(0)
            fail(kind)

        with pytest.raises(RunError) as failed:
            await ctx.step("work", work)
        return failed.value.reason_name

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[stepping]) as harness:
        log = await harness.turn("stepping")
        check_laws(log)
        await check_replay(harness, log)
    assert answer_of(log) == "TOOL_FAILED"


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_a_function_of_a_definition_raises_fails_its_agent(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    @input_builder
    def build(snapshot: Snapshot) -> str:
        fail(kind)

    @condition
    def enough(snapshot: Snapshot) -> bool:
        fail(kind)

    @rewriter
    def rewrite(message: message_pb2.Message) -> list[message_pb2.Message]:
        fail(kind)

    built = agent_pb2.AgentLink(agent="a", input=agent_pb2.InputBuilder(function="build"))
    rewriting = llm("c", history_rewriter="rewrite")
    looping = loop("looping", "a", rounds=3)
    looping.loop.until.predicate = "enough"
    team = [sequence("building", built), looping, sequence("rewriting", "a", "c")]
    turns = script(a=["A.", "A.", "A."], c=["C."])
    async with open_team(tmp_path, turns, *team, llm("a"), rewriting, functions=[build, enough, rewrite]) as harness:
        logs = {name: await harness.turn(name) for name in ("building", "looping", "rewriting")}
        for log in logs.values():
            check_laws(log)
    assert {name: log[-1].WhichOneof("payload") for name, log in logs.items()} == dict.fromkeys(logs, "run_failed")
    for log in logs.values():
        assert kind.__name__ in log[-1].run_failed.error.message


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_numbers_that_json_does_not_have_are_stored_nowhere(tmp_path: Path, number: float) -> None:
    @agent(description="Has a step.")
    async def stepping(ctx: Context, input: message_pb2.Message) -> str:
        async def measure() -> list[float]:
            return [number]

        with pytest.raises(RunError) as failed:
            await ctx.step("measure", measure)
        return failed.value.message

    @agent(description="Answers with it.")
    async def answering(ctx: Context, input: message_pb2.Message) -> message_pb2.Message:
        return message_pb2.Message(parts=[message_pb2.Part(data_json=json.dumps([number]))])

    class Raw:
        """An agent that is no function."""

        kind = execution_pb2.AGENT_KIND_FUNCTION
        revision, tool_links, version = "raw", (), "1"
        definition = agent_pb2.AgentDefinition(name="raw", description="Answers with it.")

        async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
            return Outcome(output=message_pb2.Message(parts=[message_pb2.Part(data_json=json.dumps(number))]))

    agents = [stepping, answering, Raw()]
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=agents) as harness:  # type: ignore[arg-type]
        logs = {name: await harness.turn(name) for name in ("stepping", "answering", "raw")}
    assert "JSON compliant" in answer_of(logs["stepping"])
    for name in ("answering", "raw"):
        assert logs[name][-1].run_failed.error.reason == error_pb2.ERROR_REASON_INVALID_OUTPUT


async def test_an_agent_that_ignores_its_cancellation_stays_referenced_after_its_run(tmp_path: Path) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @agent(description="Ignores its cancellation.")
    async def stubborn(ctx: Context, input: message_pb2.Message) -> str:
        started.set()
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()
        return "late"

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[stubborn]) as harness:
        run = await harness.start("stubborn")
        await started.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        await harness.until_over(run)
        gc.collect()
        assert len(harness.dependencies.abandoned) == 1
        go_on.set()
        while len(harness.dependencies.abandoned):  # noqa: ASYNC110 # it ends in the next turns of the loop
            await asyncio.sleep(0)
        assert (await harness.log(run)) == log
    assert log[-1].HasField("run_cancelled") or log[-1].HasField("run_failed")


async def test_a_model_call_that_a_limit_refuses_was_not_sent(tmp_path: Path) -> None:
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(model_calls=1))
    turns = script(p=[calls(call("hostile")), "Never."])
    async with open_team(tmp_path, turns, llm("p", tools=["hostile"]), tools=[plain_tool(ValueError)]) as harness:
        log = await harness.turn("p", policy=policy)
        check_laws(log)
        await check_replay(harness, log)
    (refused,) = having(log, "llm_failed")
    assert refused.llm_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert refused.llm_failed.not_sent
