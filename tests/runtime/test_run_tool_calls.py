"""Agents in code that run a model's calls themselves: in parts, once each, as the model made them; names of effects."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, step_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.log_readings import check_replay, having, results_of, text_of
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, open_team, script

CHANGED = message_pb2.ToolCall(call_id="call_0_0", name="look", arguments_json='{"what":"other"}')
MADE_BY_HAND = message_pb2.ToolCall(name="look", arguments_json='{"what":"a"}')


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


async def ask(ctx: Context) -> step_pb2.LlmResponse:
    return await ctx.model(ModelRequest(messages=ctx.history(), tools=ctx.offers()))


def calls_of(response: step_pb2.LlmResponse) -> list[message_pb2.ToolCall]:
    return [part.tool_call for part in response.message.parts if part.HasField("tool_call")]


async def test_calls_of_an_answer_may_be_run_in_parts_and_their_step_ends_with_the_last(tmp_path: Path) -> None:
    @agent(description="Runs one call, then the others.", tools=["look"])
    async def parts(ctx: Context, input: message_pb2.Message) -> str:
        first, *others = calls_of(await ask(ctx))
        said = [text_of(answer.result) for answer in [*await ctx.tools(others[::-1]), *await ctx.tools([first])]]
        return f"{said}, {text_of((await ask(ctx)).message)}"

    turns = script(parts=[calls(call("look", what="a"), call("look", what="b"), call("look", what="c")), "Done."])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[parts]) as harness:
        log = await harness.turn("parts")
        await check_replay(harness, log)
    assert text_of(log[-1].run_completed.final_answer) == "['c is red', 'b is red', 'a is red'], Done."
    assert sorted(event.effect_key for event in having(log, "tool_started")[:2]) == ["s0.t1", "s0.t2"]
    assert having(log, "tool_started")[2].effect_key == "s0.t0"
    step = having(log, "step_completed")[0].step_completed.step
    assert [text_of(result) for result in step.tool_results] == ["a is red", "b is red", "c is red"]


async def test_a_step_whose_calls_are_not_all_run_ends_with_the_next_model_call(tmp_path: Path) -> None:
    @agent(description="Runs one call of two.", tools=["look"])
    async def picky(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.tools(calls_of(await ask(ctx))[1:])
        return text_of((await ask(ctx)).message)

    heard: list[ModelRequest] = []
    turns = script(picky=[calls(call("look", what="a"), call("look", what="b")), "Done."])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[picky], heard=heard) as harness:
        log = await harness.turn("picky")
        await check_replay(harness, log)
    ended = having(log, "step_completed")
    assert [event.sequence - 1 for event in ended] == [
        having(log, "tool_completed")[0].sequence,
        having(log, "llm_completed")[1].sequence,
    ]
    asked = [part.tool_call.call_id for one in heard[1].messages for part in one.parts if part.HasField("tool_call")]
    assert asked == ["call_0_1"]


@pytest.mark.parametrize("given", ["by hand", "changed", "changed in place", "twice", "again", "of an earlier answer"])
async def test_calls_that_are_not_of_the_last_answer_or_were_run_are_refused(tmp_path: Path, given: str) -> None:
    refused: list[RunError] = []

    @agent(description="Runs what it should not.", tools=["look"])
    async def careless(ctx: Context, input: message_pb2.Message) -> str:
        made = [] if given == "by hand" else calls_of(await ask(ctx))
        wrong: Sequence[message_pb2.ToolCall] = made
        if given in ("by hand", "changed"):
            wrong = [MADE_BY_HAND if given == "by hand" else CHANGED]
        elif given == "changed in place":
            made[0].arguments_json = CHANGED.arguments_json
        elif given == "twice":
            wrong = [*made, *made]
        elif given == "again":
            await ctx.tools(made)
        else:
            await ask(ctx)
        try:
            await ctx.tools(wrong)
        except RunError as error:
            refused.append(error)
        return "survived"

    turns = script(careless=[calls(call("look", what="a")), "Done."])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[careless]) as harness:
        log = await harness.turn("careless")
        await check_replay(harness, log)
    assert [error.reason for error in refused] == [error_pb2.ERROR_REASON_BAD_ARGUMENTS] * 2
    assert "Pass ctx.tools calls of the last answer" in refused[0].message
    assert len(results_of(log)) == (1 if given == "again" else 0)
    assert log[-1].HasField("run_completed")


async def test_a_lane_does_not_run_the_calls_of_another(tmp_path: Path) -> None:
    @agent(description="Runs its calls in a lane.", tools=["look"])
    async def parent(ctx: Context, input: message_pb2.Message) -> str:
        made = calls_of(await ask(ctx))
        await ctx.gather(lambda lane: lane.tools(made))
        return "never"

    async with open_team(
        tmp_path, script(parent=[calls(call("look", what="a"))]), tools=[look], code_agents=[parent]
    ) as harness:
        log = await harness.turn("parent")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS


async def test_a_run_that_is_cancelled_between_parts_of_an_answer_replays(tmp_path: Path) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    @agent(description="Runs one call and waits.", tools=["look"])
    async def waiting(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.tools(calls_of(await ask(ctx))[:1])
        reached.set()
        await go_on.wait()
        return text_of((await ask(ctx)).message)

    turns = script(waiting=[calls(call("look", what="a"), call("look", what="b")), "Never."])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[waiting]) as harness:
        run = await harness.start("waiting")
        await reached.wait()
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        go_on.set()
        await check_replay(harness, log)
    assert names(log)[-3:] == ["waiting: control.cancel_requested", "waiting: step.failed", "waiting: run.cancelled"]


async def test_lanes_whose_models_give_one_call_id_keep_their_calls_apart(tmp_path: Path) -> None:
    shown: list[tuple[str, str]] = []
    both = asyncio.Barrier(2)

    async def together(agent: str, turn: int, chunk: int) -> None:
        if chunk == 1:
            await both.wait()

    @agent(description="Asks its model in two lanes.", tools=["look"])
    async def lanes(ctx: Context, input: message_pb2.Message) -> str:
        async def lane(own: Context) -> None:
            await own.tools(calls_of(await ask(own)))

        await ctx.gather(lane, lane)
        results = [part.tool_result for one in ctx.history() for part in one.parts if part.HasField("tool_result")]
        shown.extend((result.call.call_id, text_of(result)) for result in results)
        return "done"

    turns = script(lanes=[calls(call("look", what="leaf"), call("look", what="bark"))])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[lanes], gate=together) as harness:
        log = await harness.turn("lanes")
        await check_replay(harness, log)
    started = {event.tool_started.call.call_id for event in having(log, "tool_started")}
    assert len(started) == 4
    assert {one for one, _ in shown[:4]} == started
    assert [text for _, text in shown[:4]] == ["leaf is red", "bark is red"] * 2
    assert shown[:4] == shown[4:], "a replay is shown the same"


async def test_an_attempt_that_is_made_again_keeps_the_providers_call_id(tmp_path: Path) -> None:
    @agent(description="Asks.", tools=["look"])
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.tools(calls_of(await ask(ctx)))
        return "done"

    fault = {"reason": "TRANSPORT", "message": "gone", "after_chunks": 2, "times": 1}
    turns = script(asker=[calls(call("look", what="leaf"), error=fault)])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[asker]) as harness:
        log = await harness.turn("asker")
        await check_replay(harness, log)
    assert len(having(log, "llm_retrying")) == 1
    deltas = having(log, "llm_tool_call_delta")
    assert {(one.attempt, one.llm_tool_call_delta.call_id) for one in deltas} == {(1, "call_0_0"), (2, "call_0_0")}


async def test_a_lane_sees_what_its_agent_was_told_and_did_before_the_fork(tmp_path: Path) -> None:
    shown: list[list[str]] = []

    @agent(description="Looks in a lane of a lane.", tools=["look"])
    async def child(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.tools(calls_of(await ask(ctx)))

        async def inner(lane: Context) -> None:
            shown.append([f"{message.role} {text_of(message)}" for message in lane.history()])
            shown.append([part.WhichOneof("content") or "" for one in lane.history() for part in one.parts])

        await ctx.gather(lambda lane: lane.gather(inner))
        return "done"

    none = agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE)

    @agent(description="Calls.", agents=[agent_pb2.AgentLink(agent="child", history=none)])
    async def root(ctx: Context, input: message_pb2.Message) -> str:
        return text_of(await ctx.dispatch("child", "the task"))

    turns = script(child=[calls(call("look", what="leaf"))])
    async with open_team(tmp_path, turns, tools=[look], code_agents=[child, root]) as harness:
        await harness.turn("root")
    assert shown[0][0] == f"{message_pb2.ROLE_USER} the task"
    assert shown[1] == ["text", "tool_call", "tool_result"]


async def _named(folder: Path, key: str) -> list[event_pb2.AgentEvent]:
    """The log of an agent in code that does a step under a name."""

    @agent(description="Names its effect.")
    async def namer(ctx: Context, input: message_pb2.Message) -> str:
        async def nothing() -> None:
            return None

        await ctx.step("nothing", nothing, key=key)
        return "named"

    async with open_team(folder, script(), code_agents=[namer]) as harness:
        log = await harness.turn("namer")
        await check_replay(harness, log)
    return log


@pytest.mark.parametrize("key", ["a/e0", "report.pdf", "e0", "s12", "", "x" * 65, "über", "e0\n"])
async def test_a_name_of_an_effect_that_could_be_another_ones_is_refused(tmp_path: Path, key: str) -> None:
    log = await _named(tmp_path, key)
    if key:
        assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
        assert log[-1].run_failed.error.message.startswith(f"The key {key!r} cannot name an effect.")
    else:
        assert having(log, "value_recorded")[0].effect_key == "e0"


@pytest.mark.parametrize("key", ["report", "e", "e1x", "step_2", "A-1", "x" * 64])
async def test_a_name_of_an_effect_is_its_key(tmp_path: Path, key: str) -> None:
    log = await _named(tmp_path, key)
    assert having(log, "value_recorded")[0].effect_key == key


async def test_a_failure_with_a_very_long_message_ends_its_run_and_its_callers_in_small_events(tmp_path: Path) -> None:
    @agent(description="Fails at length.")
    async def wordy(ctx: Context, input: message_pb2.Message) -> str:
        raise RunError(
            "ä" * 3_000_000, reason=error_pb2.ERROR_REASON_INTERNAL, details_json='"' + "x" * 3_000_000 + '"'
        )

    @agent(description="Calls.", agents=["wordy"])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        return text_of(await ctx.dispatch("wordy", "speak"))

    async with open_team(tmp_path, script(), code_agents=[wordy, caller]) as harness:
        log = await harness.turn("caller")
        await check_replay(harness, log)
    assert names(log)[-2:] == ["wordy: sub_agent.failed", "caller: run.failed"]
    assert all(event.ByteSize() < 32 * 1024 for event in log)
    error = log[-1].run_failed.error
    assert (error.reason, error.details_json) == (error_pb2.ERROR_REASON_SUB_AGENT_FAILED, "")
