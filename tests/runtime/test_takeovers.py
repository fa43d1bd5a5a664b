"""Runs that another worker continues: with the right code, or parked, or ended if they cannot be continued."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from bough.v1 import error_pb2, event_pb2, execution_pb2, fork_pb2, message_pb2, policy_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunParked
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.tools.tool import Tool, tool
from tests.support.held_clock import HeldClock
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts, call, calls, llm, open_team, script

Run = run_pb2.Run
TURNS = script(p=[calls(call("look", what="leaf")), "Done."])


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


@tool(name="look")
def look_harder(what: str, how: str) -> str:
    """Looks something up."""
    return f"{what} is red"


def coder(version: str) -> FunctionAgent:
    @agent(name="coder", description="Codes.", version=version, agents=["p"])
    async def code(ctx: Context, input: message_pb2.Message) -> str:
        return (await ctx.dispatch("p", "go")).parts[0].text

    return code


class Held:
    """Holds a model at its first piece of its second turn, until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, agent: str, turn: int, chunk: int) -> None:
        if turn == 1:
            self.reached.set()
            await self.released.wait()


class Lacking(Scripts):
    """A configuration without the model `other`."""

    def get(self, name: str):  # type: ignore[no-untyped-def]
        if name == "other":
            raise KeyError(name)
        return super().get(name)


def at_work(
    folder: Path,
    *,
    version: str = "1",
    tools: Sequence[Tool] = (look,),
    gate: Held | None = None,
    heard: list[ModelRequest] | None = None,
    models: type[Scripts] = Scripts,
    clock: HeldClock | None = None,
) -> AbstractAsyncContextManager[RunHarness]:
    return open_harness(
        folder,
        models=models(TURNS, gate=gate, heard=heard),
        definitions=[llm("p", tools=["look"], model="" if models is Lacking else "other")],
        tools=tools,
        code_agents=[coder(version)],
        clock=clock,
    )


async def crashed_at_work(folder: Path) -> Run:
    """A run whose server was killed while its model answered for the second time."""
    held = Held()
    async with at_work(folder, gate=held) as harness:
        await harness.runs.recover()
        run = await harness.start("coder")
        await held.reached.wait()
        await harness.crash()
    return run


async def revived(harness: RunHarness, run: Run) -> Run:
    """The run's row, once this harness has tried to go on with it."""
    record = await harness.store.runs.find(run.run_id)
    assert record is not None
    await harness.try_again(record)
    return (await harness.runs.get(ME, run.run_id)).run


def without_definition(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "bough.db", isolation_level=None)) as intruder:
        intruder.execute("DELETE FROM definitions WHERE name = 'p'")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"version": "2"}, ["'coder'", "'1'", "'2'", "Restore"]),
        ({"tools": [look_harder]}, ["'look'", "Restore"]),
        ({"models": Lacking}, ["'other'", "configured"]),
    ],
)
async def test_a_run_whose_code_is_not_here_is_parked_until_it_is(
    tmp_path: Path, lacks: dict[str, object], said: list[str]
) -> None:
    run = await crashed_at_work(tmp_path)
    heard: list[ModelRequest] = []
    async with at_work(tmp_path, heard=heard, **lacks) as harness:  # type: ignore[arg-type]
        before = await harness.store.runs.find(run.run_id)
        row = await revived(harness, run)
        (listed,), _ = await harness.runs.list(ME, RunFilter(), Page(size=10))
        assert await harness.store.runs.find(run.run_id) == before
    assert row.state == execution_pb2.EXECUTION_STATE_RUNNING
    assert [word for word in said if word not in row.parked_reason] == []
    assert listed.parked_reason == row.parked_reason
    assert heard == []
    async with at_work(tmp_path) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        assert (await harness.runs.get(ME, run.run_id)).run.parked_reason == ""
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert len(having(log, "run_resumed")) == 1


async def test_a_run_whose_definition_is_lost_is_parked(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    without_definition(tmp_path)
    async with at_work(tmp_path) as harness:
        row = await revived(harness, run)
    assert (row.state, row.parked_reason.startswith("The definition of 'p' with revision")) == (
        execution_pb2.EXECUTION_STATE_RUNNING,
        True,
    )


async def test_followers_of_a_parked_run_are_told_why_after_what_is_committed(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    async with at_work(tmp_path, version="2") as harness:
        committed = await harness.store.log.last_sequence(run.run_id)
        early = harness.follow(run)
        told = [(await anext(early)).sequence for _ in range(committed)]
        waiting = asyncio.ensure_future(anext(early))
        reason = (await revived(harness, run)).parked_reason
        with pytest.raises(RunParked) as heard_early:
            await waiting
        later = harness.follow(run)
        late = [(await anext(later)).sequence for _ in range(committed)]
        with pytest.raises(RunParked) as heard_late:
            await anext(later)
    assert told == late == list(range(1, committed + 1))
    assert reason in heard_early.value.message
    assert reason in heard_late.value.message


async def test_a_parked_run_that_is_cancelled_is_followed_to_its_end(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    async with at_work(tmp_path, version="2") as harness:
        await revived(harness, run)
        with pytest.raises(RunParked):
            await harness.log(run)
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
    assert log[-1].HasField("run_cancelled")


async def test_a_worker_that_lacks_the_code_sends_no_followers_of_the_owner_away(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    async with at_work(tmp_path, version="2") as harness:
        before = await harness.store.runs.find(run.run_id)
        assert before is not None
        await harness.park(replace(before, epoch=before.epoch - 1), "missing")
        assert (await harness.runs.get(ME, run.run_id)).run.parked_reason == ""


async def test_a_parked_run_is_cancelled_like_any_other(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    async with at_work(tmp_path, version="2") as harness:
        assert (await revived(harness, run)).parked_reason
        record = await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        check_laws(log)
        again = await harness.turn("p", session_id=run.session_id)
    assert (record.run.state, record.run.parked_reason) == (execution_pb2.EXECUTION_STATE_CANCELLED, "")
    assert log[-1].HasField("run_cancelled")
    assert again[0].run_started.session_cut > 0


async def test_runs_that_are_cancelled_just_while_they_are_taken_over_are_cancelled(tmp_path: Path) -> None:
    @agent(description="Never ends by itself.")
    async def endless(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.step("wait", asyncio.Event().wait)
        return "never"

    async with open_harness(tmp_path, models=Scripts(script()), code_agents=[endless]) as harness:
        runs = [await harness.start("endless") for _ in range(40)]
        await harness.crash()
    async with open_harness(tmp_path, models=Scripts(script()), code_agents=[endless]) as harness:
        for moment, run in enumerate(runs):
            taking_over = asyncio.create_task(revived(harness, run))
            for _ in range(4 * moment):
                await asyncio.sleep(0)
            await harness.runs.cancel(ME, run.run_id)
            await taking_over
            log = await harness.log(run)
            check_laws(log)
            assert log[-1].HasField("run_cancelled")


async def test_a_fork_that_asks_another_model_is_parked_where_that_one_is_missing(tmp_path: Path) -> None:
    held = Held()
    async with open_harness(
        tmp_path, models=Scripts(TURNS), definitions=[llm("p", tools=["look"])], tools=[look]
    ) as harness:
        origin = await harness.turn("p")
    async with open_harness(
        tmp_path, models=Scripts(TURNS, gate=held), definitions=[llm("p", tools=["look"])], tools=[look]
    ) as harness:
        cut = having(origin, "step_completed")[0].sequence
        fork = await harness.fork(
            Run(run_id=origin[0].run_id), cut, agents={"p": fork_pb2.AgentOverride(model="other")}
        )
        await held.reached.wait()
        await harness.crash()
    async with open_harness(
        tmp_path, models=Lacking(TURNS), definitions=[llm("p", tools=["look"])], tools=[look]
    ) as harness:
        row = await revived(harness, fork)
    assert (row.state, "'other'" in row.parked_reason) == (execution_pb2.EXECUTION_STATE_RUNNING, True)


async def test_an_agent_with_another_body_under_its_old_version_fails_without_touching_anything(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    heard: list[ModelRequest] = []

    @agent(name="coder", description="Codes.", version="1", agents=["p"])
    async def other(ctx: Context, input: message_pb2.Message) -> str:
        async def touch() -> None:
            raise AssertionError("a run that cannot be replayed touched the world")

        await ctx.step("new", touch)
        return "new"

    async with open_harness(
        tmp_path,
        models=Scripts(TURNS, heard=heard),
        definitions=[llm("p", tools=["look"], model="other")],
        tools=[look],
        code_agents=[other],
    ) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        check_laws(log)
        tree = await harness.tree(log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_NON_DETERMINISTIC
    assert "e0" in error.message
    assert "sub_agent.started" in error.message
    assert heard == []
    assert not having(log[log.index(having(log, "run_resumed")[0]) :], "value_recorded")
    assert {node.state for node in tree.agents} <= {
        execution_pb2.EXECUTION_STATE_FAILED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
    }


async def test_a_run_that_brings_its_server_down_again_and_again_is_given_up(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    for times in range(1, 6):
        async with at_work(tmp_path, gate=Held()) as harness:
            await harness.runs.recover()
            await until_resumed(harness, run, times)
            await harness.crash()
    heard: list[ModelRequest] = []
    async with at_work(tmp_path, heard=heard) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        check_laws(log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_RECOVERY_LIMIT
    assert len(having(log, "run_resumed")) == 5
    assert heard == []


async def until_resumed(harness: RunHarness, run: Run, times: int) -> None:
    follower = harness.follow(run)
    async for event in follower:
        times -= event.HasField("run_resumed")
        if not times:
            break
    await follower.aclose()


async def test_a_run_that_is_found_overdue_is_ended_without_an_effect(tmp_path: Path) -> None:
    held, heard, clock = Held(), list[ModelRequest](), HeldClock()
    deadline = clock.now_ns() + 10**9
    async with at_work(tmp_path, gate=held, clock=clock) as harness:
        run = await harness.start("coder", deadline_time_ns=deadline)
        await held.reached.wait()
        await harness.crash()
    async with at_work(tmp_path, heard=heard, clock=HeldClock(deadline)) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        check_laws(log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert not having(log, "run_resumed")
    assert heard == []


@pytest.mark.parametrize(("spent", "is_over"), [(40, False), (61, True)])
async def test_time_that_was_spent_before_a_crash_counts_and_time_between_does_not(
    tmp_path: Path, spent: int, is_over: bool
) -> None:
    clock = HeldClock()

    @tool(name="look")
    def look_long(what: str) -> str:
        """Looks something up."""
        clock.advance(spent)
        return f"{what} is red"

    policy, held = policy_pb2.RunPolicy(), Held()
    policy.limits.wall_duration.FromSeconds(60)
    async with at_work(tmp_path, tools=[look_long], gate=held, clock=clock) as harness:
        run = await harness.start("coder", policy=policy)
        await held.reached.wait()
        await harness.crash()
    async with at_work(tmp_path, clock=HeldClock(clock.now_ns() + 3_600 * 10**9)) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        check_laws(log)
    if is_over:
        assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    else:
        assert answer_of(log) == "Done."


async def test_forty_runs_are_recovered_through_the_limits_of_their_model(tmp_path: Path) -> None:
    held = Held()
    team = llm("p", tools=["look"])
    background = policy_pb2.RunPolicy(background=True)
    async with open_team(tmp_path, TURNS, team, tools=[look], gate=held) as harness:
        runs = [await harness.start("p", str(number), policy=background) for number in range(40)]
        await held.reached.wait()
        await harness.crash()
    busy = Busy()
    async with open_team(tmp_path, TURNS, team, tools=[look], gate=busy, max_concurrency=2) as harness:
        assert await harness.runs.recover() == 40
        logs = [await harness.log(run) for run in runs]
        for log in logs:
            check_laws(log)
    assert {answer_of(log) for log in logs} == {"Done."}
    assert busy.most == 2


class Busy:
    """A gate that lets all through, and knows how many were there at once."""

    def __init__(self) -> None:
        self._now = self.most = 0

    async def __call__(self, agent: str, turn: int, chunk: int) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        self._now -= 1


async def test_a_run_whose_servers_stop_in_order_again_and_again_is_not_given_up(tmp_path: Path) -> None:
    run = await crashed_at_work(tmp_path)
    for times in range(1, 8):
        async with at_work(tmp_path, gate=Held()) as harness:
            await harness.runs.recover()
            await until_resumed(harness, run, times)
    async with at_work(tmp_path) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    causes = [event.run_resumed.cause for event in having(log, "run_resumed")]
    assert causes == [event_pb2.RESUME_CAUSE_RECOVERY] + [event_pb2.RESUME_CAUSE_TAKEOVER] * 7
    assert log[-1].HasField("run_completed")
