"""Runs that are ended while their logs are replayed, or whose ends a crash cut in two."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

from bough.v1 import agent_pb2, event_pb2, execution_pb2, input_pb2, message_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Context
from bough_server.store.opening import rebuild_projections
from bough_server.tools.tool import Tool, tool
from tests.support.held_clock import HeldClock
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

CALLER = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_CALLER)


class Lives:
    """Code that is lost with its server in its first life, and that is ended in its second."""

    def __init__(self) -> None:
        self.harness: RunHarness | None = None
        self.lost = asyncio.Event()

    async def __call__(self, run_id: str) -> None:
        """Waits to be lost, or has its run ended at this moment."""
        if self.harness is None:
            self.lost.set()
            await asyncio.Event().wait()
            return
        live = self.harness.live(run_id)
        if live is not None:  # no replay of it from its log alone
            assert not live.execution.barrier.live
            live.end_soon(CALLER)


async def test_a_run_that_is_ended_when_its_code_has_ended_in_a_replay_ends(tmp_path: Path) -> None:
    lives = Lives()

    @agent
    async def one(ctx: Context, input: message_pb2.Message) -> str:
        """Does one step."""
        await ctx.step("step", nothing)
        await lives(ctx.run_id)
        return "done"

    async with harness(tmp_path, one) as first:
        run = await first.start("one")
        await lives.lost.wait()
        await first.live(run.run_id).execution.writer.wait_for_commit()  # type: ignore[union-attr]
        await first.crash()
    async with harness(tmp_path, one) as second:
        lives.harness = second
        await second.runs.recover()
        log = await second.log(run)
        await second.until_over(run)
    check_laws(log)
    assert log[-1].HasField("run_cancelled")


async def test_a_refused_call_stays_ended_where_a_crash_cuts_the_end_of_its_agent_in_two(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    clock = HeldClock()
    began = asyncio.Event()
    async with bounded(whole, clock, began) as first:
        run = await first.start("lead")
        await began.wait()
        async for event in first.follow(run):
            if event.HasField("input_requested"):
                refusal = input_pb2.InputAnswer(input_id=event.input_requested.request.input_id)
                refusal.approval.approved = False
                await first.resume(run, refusal)
            if event.HasField("tool_failed"):
                break
        clock.advance(10)
        log = await first.log(run)
        assert answer_of(log) == "went on"
        await check_replay(first, log)
    wish = having(log, "cancel_requested")[0]
    cut(whole, part, wish.sequence)
    async with bounded(part, HeldClock(clock.now_ns()), began) as second:
        await second.runs.recover()
        finished = await second.log(run)
        await check_replay(second, finished)
    assert answer_of(finished) == "went on"


async def test_whose_time_was_up_is_said_by_who_ends_the_run_after_a_crash_too(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    lead = llm("lead", tools=["wait"])
    lead.limits.wall_duration.FromMilliseconds(30)

    @tool
    async def wait() -> str:
        """Waits."""
        await asyncio.Event().wait()
        return "never"

    said = script(lead=[calls(call("wait")), "never"])
    async with open_team(whole, said, lead, tools=[wait]) as first:
        run = await first.start("lead")
        log = await first.log(run)
    cut(whole, part, having(log, "cancel_requested")[0].sequence)
    async with open_team(part, said, lead, tools=[wait]) as second:
        await second.runs.recover()
        finished = await second.log(run)
        check_laws(finished)
    messages = [each[-1].run_failed.error.message for each in (log, finished)]
    assert messages == ["The agent 'lead' took longer than its wall_duration."] * 2


@asynccontextmanager
async def bounded(folder: Path, clock: HeldClock, began: asyncio.Event) -> AsyncIterator[RunHarness]:
    """A harness with an agent in code that goes on without a child whose time is up."""

    @tool(approval=True)
    async def pay() -> str:
        """Pays."""
        return "paid"

    @tool
    async def wait() -> str:
        """Waits."""
        began.set()
        await asyncio.Event().wait()
        return "never"

    link = agent_pb2.AgentLink(agent="p")
    link.limits.wall_duration.seconds = 5

    @agent(agents=[link])
    async def lead(ctx: Context, input: message_pb2.Message) -> str:
        """Leads."""
        try:
            await ctx.dispatch("p", "go")
        except RunError:
            return "went on"
        return "not cut"

    tools: list[Tool] = [pay, wait]
    p = llm("p", tools=["pay", "wait"])
    said = script(p=[calls(call("pay"), call("wait")), "never"])
    async with open_team(folder, said, p, code_agents=[lead], tools=tools, clock=clock) as it:
        yield it


def harness(folder: Path, *agents: FunctionAgent) -> AbstractAsyncContextManager[RunHarness]:
    """A harness with agents in code alone."""
    return open_team(folder, script(), code_agents=agents)


def cut(whole: Path, part: Path, through: int) -> None:
    """A copy of a harness's database as it was after one of the events of its only run."""
    part.mkdir()
    shutil.copyfile(whole / "bough.db", part / "bough.db")
    with closing(sqlite3.connect(part / "bough.db", isolation_level=None)) as connection:
        connection.execute("DELETE FROM events WHERE sequence > ?", (through,))
    rebuild_projections(f"sqlite:///{part / 'bough.db'}")


async def nothing() -> None:
    """Does nothing."""
