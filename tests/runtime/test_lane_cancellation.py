"""Lanes that the failure of one beside them ends: what they wrote stays, and what had not begun leaves no trace."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, execution_pb2, message_pb2, policy_pb2, run_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Context
from bough_server.tools.tool import ToolContext, tool
from tests.durability.prefixes.recovery import cut_off
from tests.support.composite_agents import parallel
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script


@tool
async def put(name: str, ctx: ToolContext) -> str:
    """Keeps a value."""
    ctx.state[name] = True
    return "kept"


@tool
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return "never"


async def test_calls_that_had_answered_keep_what_they_wrote_although_one_between_them_never_did(
    tmp_path: Path,
) -> None:
    has_written = asyncio.Event()

    @agent(description="Fails when the calls beside it have answered.")
    async def failing(ctx: Context, input: message_pb2.Message) -> str:
        await has_written.wait()
        raise ValueError("no luck")

    @agent(description="Goes on.", agents=["p"])
    async def root(ctx: Context, input: message_pb2.Message) -> str:
        with pytest.raises(RunError):
            await ctx.dispatch("p", "go")
        return json.dumps(dict(ctx.state))

    team = (parallel("p", "writing", "failing", fails_fast=True), llm("writing", tools=["put", "hang"]))
    turns = script(writing=[calls(call("put", name="first"), call("hang"), call("put", name="last"))])
    async with open_team(tmp_path, turns, *team, tools=[put, hang], code_agents=[root, failing]) as harness:
        run = await harness.start("root")
        log = []
        async for event in harness.follow(run):
            log.append(event)
            if len(having(log, "tool_completed")) == 2:
                has_written.set()
        await check_replay(harness, log)
    assert json.loads(answer_of(log)) == {"first": True, "last": True}


def _lanes(folder: Path, reason: execution_pb2.CancelReason.ValueType) -> AbstractAsyncContextManager[RunHarness]:
    """Three lanes, two at once: the first answers at the moment when the second fails."""
    both = asyncio.Event()

    @agent(description="Answers.")
    async def first(ctx: Context, input: message_pb2.Message) -> str:
        await both.wait()
        return "done"

    @agent(description="Fails.")
    async def second(ctx: Context, input: message_pb2.Message) -> str:
        asyncio.get_running_loop().call_soon(both.set)
        await both.wait()
        raise ValueError("no luck")

    @agent(description="Has no place while the others run.")
    async def third(ctx: Context, input: message_pb2.Message) -> str:
        return "never"

    @agent(description="Goes on.", agents=["p"])
    async def root(ctx: Context, input: message_pb2.Message) -> str:
        with suppress(RunError):
            await ctx.dispatch("p", "go")
        return f"{await ctx.now()}"

    is_abort = reason == execution_pb2.CANCEL_REASON_ABORT
    policy = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT if is_abort else policy_pb2.SUB_AGENT_FAILURE_POLICY_UNSPECIFIED
    links = [agent_pb2.AgentLink(agent=name, on_failure=policy) for name in ("first", "second", "third")]
    p = parallel("p", *links, fails_fast=not is_abort, max_concurrency=2)
    return open_team(folder, script(), p, code_agents=[root, first, second, third])


@pytest.mark.parametrize("reason", [execution_pb2.CANCEL_REASON_FAIL_FAST, execution_pb2.CANCEL_REASON_ABORT])
async def test_a_lane_that_had_not_begun_when_its_caller_failed_is_not_ended_after_a_crash(
    tmp_path: Path, reason: execution_pb2.CancelReason.ValueType
) -> None:
    (tmp_path / "whole").mkdir()
    async with _lanes(tmp_path / "whole", reason) as harness:
        log = await harness.turn("root")
        await check_replay(harness, log)
    # The first had answered, but the task that starts the third had not run yet.
    (wish,) = having(log, "cancel_requested")
    assert (wish.cancel_requested.effect_scope, wish.cancel_requested.reason) == ("e0/g0", reason)
    end = next(event for event in log if event.effect_key == "e0" and event.HasField("sub_agent_failed"))
    cut_off(tmp_path / "whole", log[: end.sequence], tmp_path / "again")
    async with _lanes(tmp_path / "again", reason) as harness:
        await harness.runs.recover()
        again = await harness.log(run_pb2.Run(run_id=log[0].run_id, session_id=log[0].session_id))
        await check_replay(harness, again)
    assert len(having(again, "cancel_requested")) == 1
