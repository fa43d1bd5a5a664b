"""Children whose time is up at once, where the failure of one ends the others: the log says who was first."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, event_pb2, policy_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Context
from tests.durability.prefixes.recovery import cut_off
from tests.support.composite_agents import parallel
from tests.support.fork_agents import run_of
from tests.support.held_clock import HeldClock
from tests.support.log_readings import check_replay, having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

SECONDS = 5
NAMES = "abc"
TOLD = calls(*(call(f"call_{name}", message="go") for name in NAMES))
SAID = script(p=[TOLD, "never"], **{name: ["never"] for name in NAMES})


def judged(policy: str) -> policy_pb2.RunPolicy:
    value = policy_pb2.SubAgentFailurePolicy.Value(f"SUB_AGENT_FAILURE_POLICY_{policy}")
    return policy_pb2.RunPolicy(on_sub_agent_failure=value)


def short(name: str, *, aborts: bool = True) -> agent_pb2.AgentLink:
    link = agent_pb2.AgentLink(agent=name)
    link.limits.wall_duration.FromSeconds(SECONDS)
    if aborts:
        link.on_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT
    return link


@agent(name="p", description="Runs all at once.", agents=[short(name) for name in NAMES])
async def code(ctx: Context, input: object) -> str:
    await ctx.gather(*(lambda lane, name=name: lane.dispatch(name, "go") for name in NAMES))
    return "never"


TEAMS = {
    "lanes": parallel("p", *(short(name, aborts=False) for name in NAMES), fails_fast=True),
    "lanes that abort": parallel("p", *(short(name) for name in NAMES)),
    "calls": llm("p", links=[short(name) for name in NAMES]),
}


async def run(folder: Path, root: str, prefix: Sequence[event_pb2.AgentEvent] = ()) -> list[event_pb2.AgentEvent]:
    """The log of a run whose children have the same time and use it up; after a prefix, what becomes of that."""
    clock = HeldClock(*[event.record_time.ToNanoseconds() for event in prefix[-1:]])

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent in NAMES:
            await asyncio.Event().wait()

    team = [*map(llm, NAMES), *([TEAMS[root]] if root in TEAMS else [])]
    agents = [code] if root == "code" else []
    async with open_team(folder, SAID, *team, gate=gate, clock=clock, code_agents=agents) as harness:
        if prefix:
            going = run_pb2.Run(run_id=prefix[0].run_id, session_id=prefix[0].session_id)
            await harness.runs.recover()
        else:
            going = await harness.start("p")
        log = await finished(harness, clock, going)
        await check_replay(harness, log)
    return log


async def finished(harness: RunHarness, clock: HeldClock, going: run_pb2.Run) -> list[event_pb2.AgentEvent]:
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(_pass(clock))
        log = await harness.log(going)
        passing.cancel()
    return log


async def _pass(clock: HeldClock) -> None:
    while True:
        await clock.next_sleep()
        for _ in range(100):
            await asyncio.sleep(0)
        clock.advance(SECONDS)


@pytest.mark.parametrize("root", [*TEAMS, "code"])
async def test_one_of_three_is_first_and_the_log_is_finished_wherever_it_ends_and_replays(
    tmp_path: Path, root: str
) -> None:
    (tmp_path / "whole").mkdir()
    log = await run(tmp_path / "whole", root)
    assert "took longer" in log[-1].run_failed.error.message
    assert len(having(log, "sub_agent_failed")) == len(NAMES)
    for last in range(having(log, "cancel_requested")[0].sequence, len(log)):
        cut_off(tmp_path / "whole", log[:last], tmp_path / str(last))
        again = await run(tmp_path / str(last), root, log[:last])
        assert "took longer" in again[-1].run_failed.error.message, last
        assert len(having(again, "sub_agent_failed")) == len(NAMES)


def _slow_and_fast(begun: asyncio.Barrier, is_decided: asyncio.Event) -> list[FunctionAgent]:
    """Lanes that go on after their child's failure; the child of the first stops only when the event is set."""

    async def wait() -> None:
        await begun.wait()
        await asyncio.Event().wait()

    async def wait_and_hold() -> None:
        try:
            await wait()
        finally:
            await is_decided.wait()

    @agent(description="Stops late.")
    async def slow(ctx: Context, input: object) -> str:
        await ctx.step("wait", wait_and_hold)
        return "never"

    @agent(description="Stops at once.")
    async def fast(ctx: Context, input: object) -> str:
        await ctx.step("wait", wait)
        return "never"

    @agent(description="Answers.")
    async def late(ctx: Context, input: object) -> str:
        return "done"

    @agent(description="Runs both.", agents=[*(short(name, aborts=False) for name in ("slow", "fast")), "late"])
    async def root(ctx: Context, input: object) -> str:
        async def lane(ctx: Context, name: str) -> None:
            with suppress(RunError):
                await ctx.dispatch(name, "go")
            await ctx.dispatch("late", "go")

        await ctx.gather((lane, "slow"), (lane, "fast"))
        return "never"

    return [root, slow, fast, late]


async def _decided(folder: Path) -> tuple[list[event_pb2.AgentEvent], list[FunctionAgent]]:
    """The log of a run in which both were late and the second failed first, up to that; and its agents."""
    (folder / "whole").mkdir()
    begun, is_decided, log = asyncio.Barrier(3), asyncio.Event(), list[event_pb2.AgentEvent]()
    clock, agents = HeldClock(), _slow_and_fast(begun, is_decided)
    async with open_team(folder / "whole", SAID, clock=clock, code_agents=agents) as harness:
        going = await harness.start("root", policy=judged("ABORT"))
        await begun.wait()
        clock.advance(SECONDS)
        async for event in harness.follow(going):
            log.append(event)
            if event.cancel_requested.effect_scope == "e0.0":
                is_decided.set()
    requests = having(log, "cancel_requested")
    assert [event.cancel_requested.effect_scope for event in requests] == ["e0.0/e0", "e0.1/e0", "e0.0"]
    return log[: requests[-1].sequence], agents


async def test_a_lane_that_was_cancelled_before_a_crash_begins_nothing_after_it_although_its_child_stops_first(
    tmp_path: Path,
) -> None:
    prefix, agents = await _decided(tmp_path)
    cut_off(tmp_path / "whole", prefix, tmp_path / "cut")
    clock = HeldClock(prefix[-1].record_time.ToNanoseconds())
    async with open_team(tmp_path / "cut", SAID, clock=clock, code_agents=agents) as harness:
        await harness.runs.recover()
        log = await finished(harness, clock, run_of(prefix))
        await check_replay(harness, log)
    assert [event.effect_key for event in having(log, "sub_agent_started")] == ["e0.0/e0", "e0.1/e0", "e0.1/e1"]
    assert "'fast' took longer" in log[-1].run_failed.error.message


async def test_a_fork_whose_policy_judges_a_failure_otherwise_starts_before_what_it_cancelled(tmp_path: Path) -> None:
    prefix, agents = await _decided(tmp_path)
    clock = HeldClock(prefix[-1].record_time.ToNanoseconds())
    async with open_team(tmp_path / "whole", SAID, clock=clock, code_agents=agents) as harness:
        fork = await harness.fork(run_of(prefix), len(prefix), policy=judged("CONTINUE"))
        log = await finished(harness, clock, fork)
        await check_replay(harness, log)
    assert fork.forked_from.sequence == len(prefix) - 1
    assert log[-1].HasField("run_completed")
