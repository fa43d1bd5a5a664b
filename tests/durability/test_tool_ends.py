"""A tool's end on its way to the disk: its agent continues, and the world and every reader wait for its commit."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bough.v1 import event_pb2, execution_pb2, message_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.log import events
from bough_server.runs.runs import Runs
from bough_server.runtime.agent import Context
from bough_server.store.sql.writer import CommitHooks
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts, script


class Commits:
    """The commits of a store: they are held, or fail, from the moment that a test says so."""

    def __init__(self) -> None:
        self.error_before: sqlite3.Error | None = None
        """What the next commit raises instead of committing."""
        self.error_after: sqlite3.Error | None = None
        """What the next commit raises although it commits."""
        self.reached = threading.Event()
        """Set when a commit is held."""
        self._may_pass = threading.Event()
        self._may_pass.set()

    def hold(self) -> None:
        """Hold every commit from now on."""
        self._may_pass.clear()

    def release(self) -> None:
        """Let the commits pass."""
        self._may_pass.set()

    def before(self) -> None:
        """The hook before a commit."""
        if not self._may_pass.is_set():
            self.reached.set()
            self._may_pass.wait()
        error, self.error_before = self.error_before, None
        if error is not None:
            raise error

    def after(self) -> None:
        """The hook after a commit."""
        error, self.error_after = self.error_after, None
        if error is not None:
            raise error


def _failure(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("the disk is at fault")
    error.sqlite_errorcode = code
    return error


@dataclass(slots=True)
class World:
    """What an agent, its tool and the step that follows touch."""

    commits: Commits = field(default_factory=Commits)
    holds: bool = True
    """True if the end of the tool's first call is held on its way to the disk."""
    touched: list[str] = field(default_factory=list)
    """The idempotency key of each run of the tool."""
    sent: list[str] = field(default_factory=list)
    """What each run of the step sent."""
    went_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the agent has the tool's result."""
    arrivals: "asyncio.Queue[asyncio.Event]" = field(default_factory=asyncio.Queue)
    """For each run of the tool, if none is held, what lets it end."""

    def touch(self) -> Tool:
        """The tool."""

        @tool(name="touch")
        async def touching(context: ToolContext) -> str:
            """Touches something."""
            self.touched.append(context.idempotency_key)
            if not self.holds:
                self.arrivals.put_nowait(may_end := asyncio.Event())
                await may_end.wait()
            elif len(self.touched) == 1:
                self.commits.hold()
            return "touched"

        return touching

    def sender(self) -> FunctionAgent:
        """The agent."""

        @agent(description="Touches something, then sends word of it.", tools=["touch"])
        async def sender(ctx: Context, input: message_pb2.Message) -> str:
            result = await ctx.call_tool("touch")
            self.went_on.set()

            async def send() -> str:
                self.sent.append(str(result))
                return "sent"

            return str(await ctx.step("send", send))

        return sender


@asynccontextmanager
async def _open(folder: Path, world: World) -> AsyncIterator[RunHarness]:
    hooks = CommitHooks(before=world.commits.before, after=world.commits.after)
    models, agents, tools = Scripts(script(sender=[])), [world.sender()], [world.touch()]
    async with open_harness(folder, models=models, code_agents=agents, tools=tools, hooks=hooks) as harness:
        try:
            yield harness
        finally:
            world.commits.release()


async def _until_it_went_on(harness: RunHarness, world: World) -> run_pb2.Run:
    """Start a run, and wait until its agent has the tool's result while the commit of the tool's end is held."""
    run = await harness.start("sender")
    await world.went_on.wait()
    await asyncio.to_thread(world.commits.reached.wait)
    return run


def _names(log: Iterable[event_pb2.AgentEvent]) -> list[str | None]:
    return [event.WhichOneof("payload") for event in log]


_WHOLE: Final = ["run_started", "tool_started", "tool_completed", "value_recorded", "run_completed"]


async def test_an_agent_goes_on_before_its_tools_end_is_committed_and_the_world_waits_for_that(tmp_path: Path) -> None:
    world = World()
    async with _open(tmp_path, world) as harness:
        run = await _until_it_went_on(harness, world)
        seen = [events.NAME_OF_KIND[stored.kind] for stored in await harness.store.log.read(run.run_id)]
        sent = list(world.sent)
        world.commits.release()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert (seen, sent) == (["agent.run.started", "agent.tool.started"], [])
    assert _names(log) == _WHOLE
    assert (len(world.touched), world.sent, answer_of(log)) == (1, ["touched"], "sent")


async def test_a_tools_end_whose_commit_fails_after_its_agent_went_on_is_made_again_and_nothing_is_sent_twice(
    tmp_path: Path,
) -> None:
    world = World()
    async with _open(tmp_path, world) as harness:
        run = await _until_it_went_on(harness, world)
        world.commits.error_before = _failure(sqlite3.SQLITE_ERROR)  # not one that the writer would try again
        world.commits.release()
        await harness.until_over(run)
        sent = list(world.sent)
        await harness.try_again(await harness.store.runs.get(ME, run.run_id))
        log = await harness.log(run)
        await check_replay(harness, log)
    assert sent == []
    assert _names(log) == [*_WHOLE[:2], "run_resumed", *_WHOLE[1:]]
    assert world.touched == [world.touched[0]] * 2, "one key, however often it is tried"
    assert (world.sent, answer_of(log)) == (["touched"], "sent")


async def test_a_tools_end_whose_commit_happened_in_spite_of_its_error_is_written_once(tmp_path: Path) -> None:
    world = World()
    async with _open(tmp_path, world) as harness:
        run = await _until_it_went_on(harness, world)
        world.commits.error_after = _failure(sqlite3.SQLITE_IOERR)
        world.commits.release()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert _names(log) == _WHOLE
    assert (len(world.touched), world.sent) == (1, ["touched"])


async def test_a_run_that_is_cancelled_before_its_tools_end_is_committed_keeps_that_end_and_does_nothing_more(
    tmp_path: Path,
) -> None:
    world = World()
    async with _open(tmp_path, world) as harness:
        run = await _until_it_went_on(harness, world)
        live = harness.live(run.run_id)
        assert live is not None
        live.end_soon(event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_CALLER))
        world.commits.release()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert _names(log) == [*_WHOLE[:3], "cancel_requested", "run_cancelled"]
    assert (len(world.touched), world.sent) == (1, [])


async def test_a_worker_that_was_overtaken_goes_on_from_its_tools_end_and_sends_nothing(tmp_path: Path) -> None:
    world = World(holds=False)
    async with _open(tmp_path, world) as harness:
        await harness.runs.recover()
        run = await harness.start("sender")
        first = await world.arrivals.get()
        await harness.store.leases.release(harness.dependencies.worker)
        successor = Runs(replace(harness.dependencies, worker="successor"))
        await successor.recover()
        second = await world.arrivals.get()
        first.set()
        await harness.until_over(run)
        went_on, sent = world.went_on.is_set(), list(world.sent)
        second.set()
        log = await harness.log(run)
        await successor.close()
        await check_replay(harness, log)
    assert (went_on, sent) == (True, [])
    assert [event.attempt for event in having(log, "tool_completed")] == [2]
    assert (world.sent, answer_of(log)) == (["touched"], "sent")
