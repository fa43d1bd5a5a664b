"""A worker whose runs were taken over while it still executes them: it writes nothing more, and the log stays whole."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from structlog.testing import capture_logs

from bough import reply
from bough.v1 import agent_service_pb2
from bough_server import Context, Message, agent
from bough_server.runs.close import read_log
from bough_server.runs.runs import Runs
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.support.databases import in_each_database
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts, call, calls, llm, open_team, script

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


async def test_an_answer_to_a_run_that_was_overtaken_reaches_the_new_owner(tmp_path: Path) -> None:
    arrivals: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def hold() -> str:
        may_go = asyncio.Event()
        arrivals.put_nowait(may_go)
        await may_go.wait()
        return "held"

    @agent(description="Holds, and asks for a word meanwhile.")
    async def asker(ctx: Context, input: Message) -> str:
        held, word = await ctx.gather(
            lambda lane: lane.step("hold", hold), lambda lane: lane.ask("Which word?", schema={"type": "string"})
        )
        return f"{held} {word}"

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[asker]) as harness:
        await harness.runs.recover()
        run = await harness.start("asker")
        await arrivals.get()
        await harness.store.leases.release(harness.dependencies.worker)
        successor = Runs(replace(harness.dependencies, worker="successor"))
        await successor.recover()
        may_go = await arrivals.get()
        (asked,) = having(await read_log(harness.store.log, run.run_id), "input_requested")
        answers = [reply(asked.input_requested.request, "good")]
        request = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=answers)
        await harness.runs.resume(ME, request, deadline_time_ns=None)
        may_go.set()
        log = await harness.log(run)
        await successor.close()
        await check_replay(harness, log)
    assert len(having(log, "input_received")) == 1
    assert answer_of(log) == "held good"
