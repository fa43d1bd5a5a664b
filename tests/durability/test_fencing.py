"""A worker whose runs were taken over while it still executes them: it writes nothing more, and the log stays whole."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from structlog.testing import capture_logs

from bough_server.runs.runs import Runs
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.support.databases import in_each_database
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import call, calls, llm, open_team, script

pytestmark = in_each_database


@dataclass(slots=True)
class World:
    """What the tool of both owners touches: who came, by the call's key, and whether each may go on."""

    came: list[str] = field(default_factory=list)
    arrivals: "asyncio.Queue[asyncio.Event]" = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def touch(self) -> Tool:
        """The tool."""

        @tool(name="touch")
        async def touching(context: ToolContext) -> str:
            """Touches something."""
            self.came.append(context.idempotency_key)
            number, may_go = len(self.came), asyncio.Event()
            self.arrivals.put_nowait(may_go)
            try:
                await may_go.wait()
            finally:
                self.left.set()
            return f"touched by {number}"

        return touching


def _team(folder: Path, world: World) -> AbstractAsyncContextManager[RunHarness]:
    said = script(root=[calls(call("touch")), "It is touched."])
    return open_team(folder, said, llm("root", tools=["touch"]), tools=[world.touch()])


async def test_a_worker_that_was_overtaken_writes_nothing_more_and_its_successor_ends_the_run(tmp_path: Path) -> None:
    world = World()
    async with _team(tmp_path, world) as harness:
        await harness.runs.recover()
        run = await harness.start("root")
        first = await world.arrivals.get()
        # To the others it looks dead, as one does that has not been heard of for too long.
        await harness.store.leases.release(harness.dependencies.worker)
        successor = Runs(replace(harness.dependencies, worker="successor"))
        await successor.recover()
        second = await world.arrivals.get()
        with capture_logs() as logged:
            first.set()
            await harness.until_over(run)
        second.set()
        log = await harness.log(run)
        await successor.close()
        await check_replay(harness, log)
    assert _stopped(logged) == [run.run_id]
    assert world.came == [world.came[0]] * 2, "one key, however often it is tried"
    assert [text_of(result) for result in results_of(log)] == ["touched by 2"]
    assert [event.attempt for event in having(log, "tool_started")] == [1, 2]
    assert [event.run_resumed.owner for event in having(log, "run_resumed")] == ["successor"]
    assert answer_of(log) == "It is touched."


async def test_a_cancelled_run_that_was_overtaken_is_cancelled_once(tmp_path: Path) -> None:
    world = World()
    async with _team(tmp_path, world) as harness:
        await harness.runs.recover()
        run = await harness.start("root")
        await world.arrivals.get()
        await harness.store.leases.release(harness.dependencies.worker)
        successor = Runs(replace(harness.dependencies, worker="successor"))
        await successor.recover()
        await world.arrivals.get()
        await asyncio.gather(*(runs.cancel(ME, run.run_id) for runs in (successor, harness.runs)))
        log = await harness.log(run)
        await successor.close()
    check_laws(log)
    assert len(having(log, "cancel_requested")) == 1
    assert log[-1].HasField("run_cancelled")


def _stopped(logged: Sequence[Mapping[str, object]]) -> list[str]:
    return [str(entry["run_id"]) for entry in logged if entry["event"] == "run stopped unrecorded"]
