"""A clock that is an hour back, while a run goes on or between two servers: runs go on or wait, and logs stay whole."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path

from bough import reply
from bough.v1 import event_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context
from bough_server.tools.tool import Tool, tool
from tests.support.held_clock import HeldClock
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay
from tests.support.run_harness import RunHarness, open_harness
from tests.support.teams import Scripts, call, calls, llm, open_team, script

HOUR = 3600.0
START_NS = 1_750_000_000_000_000_000
Event = event_pb2.AgentEvent


@agent(description="Sleeps for ten seconds.")
async def sleeper(ctx: Context, input: message_pb2.Message) -> str:
    """Answers when it has slept."""
    await ctx.sleep(10)
    return "awake"


@agent(description="Asks for a minute.")
async def asker(ctx: Context, input: message_pb2.Message) -> str:
    """Answers with what it is answered in time."""
    return str(await ctx.ask("what?", expires=60, default="nothing"))


def _look(look: Callable[[], None], opened: asyncio.Event) -> Tool:
    """A tool that says that it looks, and then waits."""

    @tool(name="look")
    async def looking() -> str:
        """Looks."""
        look()
        await opened.wait()
        return "seen"

    return looking


def _team(folder: Path, clock: HeldClock, look: Tool) -> AbstractAsyncContextManager[RunHarness]:
    said = script(root=[calls(call("look")), "It is there."])
    return open_team(folder, said, llm("root", tools=["look"]), tools=[look], clock=clock)


def _harness(folder: Path, clock: HeldClock) -> AbstractAsyncContextManager[RunHarness]:
    return open_harness(folder, models=Scripts("agents: {}"), code_agents=[sleeper, asker], clock=clock)


def _back(clock: HeldClock) -> HeldClock:
    """The clock of the next server: an hour behind."""
    return HeldClock(clock.now_ns() - int(HOUR * 1e9))


async def _check(harness: RunHarness, log: list[Event]) -> None:
    check_laws(log)
    await check_replay(harness, log)
    tree = await harness.tree(log)
    assert tree.complete
    assert list(tree.anomalies) == []


async def test_a_clock_that_is_set_back_during_a_run_changes_nothing_of_it(tmp_path: Path) -> None:
    clock, looks, opened = HeldClock(START_NS), asyncio.Event(), asyncio.Event()
    async with _team(tmp_path, clock, _look(looks.set, opened)) as harness:
        run = await harness.start("root")
        await looks.wait()
        clock.turn(-HOUR)
        opened.set()
        log = await harness.log(run)
        again = await harness.turn("root", session_id=run.session_id)
        await _check(harness, log)
        await _check(harness, again)
    (result,) = [event.tool_completed.result for event in log if event.HasField("tool_completed")]
    assert result.duration.ToNanoseconds() == 0, "nothing takes less than no time"
    assert (answer_of(log), answer_of(again)) == ("It is there.", "It is there.")


async def test_a_run_of_an_hour_from_now_is_recovered(tmp_path: Path) -> None:
    clock, looks = HeldClock(START_NS), asyncio.Event()
    async with _team(tmp_path, clock, _look(looks.set, asyncio.Event())) as harness:
        run = await harness.start("root")
        await looks.wait()
        await harness.crash()
    opened = asyncio.Event()
    opened.set()
    async with _team(tmp_path, _back(clock), _look(looks.set, opened)) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(run)
        await _check(harness, log)
        assert (await harness.turn("root", session_id=run.session_id))[-1].HasField("run_completed")
    assert answer_of(log) == "It is there."
    (resumed,) = [event for event in log if event.HasField("run_resumed")]
    assert resumed.record_time.ToNanoseconds() < log[0].record_time.ToNanoseconds()


async def test_a_sleep_ends_at_its_time_on_the_next_servers_clock(tmp_path: Path) -> None:
    clock = HeldClock(START_NS)
    async with _harness(tmp_path, clock) as harness:
        run = await harness.start("sleeper")
        async with aclosing(harness.follow(run, after=1)) as log:
            assert (await anext(log)).HasField("value_recorded")
        await harness.crash()
    clock = _back(clock)
    async with _harness(tmp_path, clock) as harness:
        await harness.runs.recover()
        assert await clock.next_sleep() == HOUR + 10
        clock.advance(HOUR + 10)
        log = await harness.log(run)
        await _check(harness, log)
    assert answer_of(log) == "awake"


async def test_a_question_is_open_until_its_time_on_the_next_servers_clock(tmp_path: Path) -> None:
    clock = HeldClock(START_NS)
    async with _harness(tmp_path, clock) as harness:
        expiring, answered = await harness.start("asker"), await harness.start("asker")
        for run in (expiring, answered):
            await harness.until_interrupted(run)
    clock = _back(clock)
    async with _harness(tmp_path, clock) as harness:
        await harness.runs.recover()
        assert await clock.next_sleep() == HOUR + 60
        request = (await harness.until_interrupted(answered))[-1].run_interrupted.requests[0]
        await harness.resume(answered, reply(request, "this"))
        logs = [await harness.log(answered)]
        clock.advance(HOUR + 60)
        logs.append(await harness.log(expiring))
        for log in logs:
            await _check(harness, log)
    assert [answer_of(log) for log in logs] == ["this", "nothing"]
