"""Tool calls of a run: refusals, failures, streaming, order, and what a tool knows of its call."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, message_pb2, policy_pb2
from bough_server import ids
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import ToolContext, tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script

PASSTHROUGH = policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()))


def calling(*made: Mapping[str, object]) -> str:
    """A script of one step with these calls, and an answer."""
    return script(p=[calls(*made), "Done."])


@tool
def add(first: int, second: int) -> int:
    """Adds."""
    return first + second


@tool
def explode() -> str:
    """Fails."""
    raise ValueError("key sk-hidden\nsecond line")


@tool
def table() -> dict[str, list[int]]:
    """Gives a table."""
    return {"rows": [1, 2]}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call("nothing"), error_pb2.ERROR_REASON_UNKNOWN_TOOL),
        (call("call_c", message="hi"), error_pb2.ERROR_REASON_NOT_LINKED),
        (call("call_absent", message="hi"), error_pb2.ERROR_REASON_NOT_LINKED),
        ({"name": "add", "arguments_json": '{"first": 1, '}, error_pb2.ERROR_REASON_BAD_ARGUMENTS),
        (call("add", first=1, second="two"), error_pb2.ERROR_REASON_BAD_ARGUMENTS),
        (call("add", first=1), error_pb2.ERROR_REASON_BAD_ARGUMENTS),
    ],
)
async def test_a_call_that_is_refused_never_starts_and_the_model_is_told(
    tmp_path: Path, made: Mapping[str, object], reason: error_pb2.ErrorReason.ValueType
) -> None:
    heard: list[ModelRequest] = []
    team = (llm("p", tools=["add"]), llm("c"))
    async with open_team(tmp_path, calling(made), *team, tools=[add], heard=heard) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    (result,) = results_of(log)
    assert (result.error.reason, result.error.agent, result.agent) == (reason, "p", "p")
    assert having(log, "tool_started") == []
    assert heard[1].messages[-1].parts[0].tool_result.error.message == result.error.message
    assert answer_of(log) == "Done."
    assert log[-1].run_completed.tree_usage.tool_calls == 0


async def test_a_refusal_of_an_unknown_tool_lists_those_there_are(tmp_path: Path) -> None:
    team = (llm("p", tools=["add"], links=["c"], final_answer_tool=True), llm("c"))
    async with open_team(tmp_path, calling(call("subtract")), *team, tools=[add]) as harness:
        log = await harness.turn("p")
    assert results_of(log)[0].error.message == "There is no tool 'subtract'. There are: add, call_c, final_answer."


async def test_a_tool_that_raises_is_a_failed_result_in_one_line_without_a_stack(tmp_path: Path) -> None:
    async with open_team(tmp_path, calling(call("explode")), llm("p", tools=["explode"]), tools=[explode]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    (result,) = results_of(log)
    assert result.error.reason == error_pb2.ERROR_REASON_TOOL_FAILED
    assert result.error.message == "ValueError: key sk-hidden second line"
    assert answer_of(log) == "Done."
    assert not any(word in str(log) for word in ("Traceback", "test_tools.py", "line 1"))


async def test_a_tool_that_takes_too_long_is_a_failed_result(tmp_path: Path) -> None:
    @tool
    async def hang() -> str:
        """Never ends."""
        await asyncio.Event().wait()
        return "never"

    link = agent_pb2.ToolLink(name="hang")
    link.timeout.FromMilliseconds(10)
    async with open_team(tmp_path, calling(call("hang")), llm("p", tools=[link]), tools=[hang]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert results_of(log)[0].error.reason == error_pb2.ERROR_REASON_TOOL_TIMEOUT
    assert names(log)[5:7] == ["p: tool.failed", "p: step.completed"]


async def test_json_stays_the_text_it_was(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    made = {"name": "table", "arguments_json": "{ }"}
    async with open_team(tmp_path, calling(made), llm("p", tools=["table"]), tools=[table], heard=heard) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    (result,) = results_of(log)
    assert list(result.parts) == [message_pb2.Part(data_json='{"rows":[1,2]}')]
    assert result.call.arguments_json == "{ }"
    assert heard[1].messages[-1].parts[0].tool_result == result


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_tool_streams_text_that_is_recorded_before_its_end(tmp_path: Path, is_async: bool) -> None:
    if is_async:

        @tool(name="tell")
        async def tell_async() -> AsyncIterator[str]:
            """Tells."""
            for piece in ("One ", "two ", "three."):
                yield piece

        telling = tell_async
    else:

        @tool(name="tell")
        def tell() -> Iterator[str]:
            """Tells."""
            yield from ("One ", "two ", "three.")

        telling = tell
    team = llm("p", tools=["tell"])
    async with open_team(tmp_path, calling(call("tell")), team, tools=[telling]) as harness:
        joined = await harness.turn("p")
        one_by_one = await harness.turn("p", policy=PASSTHROUGH)
        await check_replay(harness, joined)
        await check_replay(harness, one_by_one)
    assert names(joined)[4:8] == ["p: tool.started", "p: tool.output", "p: tool.output", "p: tool.completed"]
    assert [event.tool_output.text for event in having(joined, "tool_output")] == ["One ", "two three."]
    assert [event.tool_output.text for event in having(one_by_one, "tool_output")] == ["One ", "two ", "three."]
    assert text_of(results_of(joined)[0]) == text_of(results_of(one_by_one)[0]) == "One two three."


async def test_what_a_tool_streamed_before_it_failed_is_recorded(tmp_path: Path) -> None:
    @tool
    async def tell() -> AsyncIterator[str]:
        """Tells and fails."""
        yield "Half"
        raise RuntimeError("enough")

    async with open_team(tmp_path, calling(call("tell")), llm("p", tools=["tell"]), tools=[tell]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert names(log)[4:7] == ["p: tool.started", "p: tool.output", "p: tool.failed"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_tool_streamed_before_it_was_cancelled_is_recorded(tmp_path: Path, is_async: bool) -> None:
    told, closed, go_on = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @tool(name="tell")
    async def tell_async() -> AsyncIterator[str]:
        """Tells and waits."""
        try:
            yield "Half"
            told.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    @tool(name="tell")
    def tell() -> Iterator[str]:
        """Tells and waits."""
        try:
            yield "Half"
            loop.call_soon_threadsafe(told.set)
            go_on.wait(30)
            yield "never recorded"
        finally:
            closed.set()

    team = llm("p", tools=["tell"])
    slow = policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_chars=10_000))
    slow.aggregated.max_interval.FromSeconds(10)
    telling = tell_async if is_async else tell
    async with open_team(tmp_path, calling(call("tell")), team, tools=[telling]) as harness:
        run = await harness.start("p", policy=policy_pb2.RunPolicy(deltas=slow))
        await told.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        go_on.set()
        await check_replay(harness, log)
        await asyncio.to_thread(closed.wait, 30)
    assert names(log)[4:] == [
        "p: tool.started",
        "p: tool.output",
        "p: control.cancel_requested",
        "p: tool.failed",
        "p: step.failed",
        "p: run.cancelled",
    ]


@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_run_at_once_unless_the_agent_wants_order(tmp_path: Path, parallel: bool) -> None:
    running = [0, 0]
    second_ended = asyncio.Event()

    @tool
    async def work(what: str) -> str:
        """Works."""
        running[0] += 1
        running[1] = max(running)
        if parallel and what == "a":
            await second_ended.wait()
        second_ended.set()
        await asyncio.sleep(0)
        running[0] -= 1
        return what

    turns = calling(call("work", what="a"), call("work", what="b"))
    async with open_team(tmp_path, turns, llm("p", tools=["work"], parallel_tools=parallel), tools=[work]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    step = having(log, "step_completed")[0].step_completed.step
    assert [text_of(result) for result in step.tool_results] == ["a", "b"]
    assert [text_of(result) for result in results_of(log)] == (["b", "a"] if parallel else ["a", "b"])
    assert running[1] == (2 if parallel else 1)


async def test_more_calls_than_lanes_are_all_answered_in_call_order(tmp_path: Path) -> None:
    turns = calling(*(call("add", first=n, second=0) for n in range(40)))
    async with open_team(tmp_path, turns, llm("p", tools=["add"]), tools=[add]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    step = having(log, "step_completed")[0].step_completed.step
    assert [text_of(result) for result in step.tool_results] == [str(n) for n in range(40)]


async def test_a_tool_knows_its_call_and_gets_a_stable_key(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []

    @tool
    def who(ctx: ToolContext) -> str:
        """Says who calls."""
        seen.append((ctx.run_id, ctx.session_id, ctx.invocation_id, ctx.agent, ctx.call_id, ctx.idempotency_key))
        return "me"

    turns = calling(call("who"), call("who"))
    async with open_team(tmp_path, turns, llm("p", tools=["who"]), tools=[who]) as harness:
        log = await harness.turn("p", policy=policy_pb2.RunPolicy())
        await check_replay(harness, log)
    started = having(log, "tool_started")
    assert sorted(seen) == sorted(
        (
            log[0].run_id,
            log[0].session_id,
            log[0].invocation_id,
            "p",
            event.tool_started.call.call_id,
            ids.derive_id(log[0].run_id, event.effect_key),
        )
        for event in started
    )
    assert len({event.tool_started.idempotency_key for event in started}) == 2


async def test_steps_and_results_say_when_they_began_and_how_long_they_took(tmp_path: Path) -> None:
    clock = HeldClock()
    began = clock.now_ns()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if turn == chunk == 0:
            clock.advance(2)

    @tool
    def long() -> str:
        """Takes three seconds."""
        clock.advance(3)
        return "done"

    script = calling(call("long"))
    async with open_team(tmp_path, script, llm("p", tools=["long"]), tools=[long], gate=gate, clock=clock) as harness:
        log = await harness.turn("p")
    steps = [event.step_completed.step for event in having(log, "step_completed")]
    assert len({step.step_id for step in steps}) == 2
    times = [(step.start_time.ToNanoseconds() - began, step.duration.ToSeconds()) for step in steps]
    assert times == [(0, 5), (5_000_000_000, 0)]
    (result,) = steps[0].tool_results
    assert (result.start_time.ToNanoseconds() - began, result.duration.ToSeconds()) == (2_000_000_000, 3)
