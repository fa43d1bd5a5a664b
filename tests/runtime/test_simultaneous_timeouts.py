"""Children whose time is up at once, where the failure of one ends the others: the log says who was first."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, event_pb2, policy_pb2, run_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context
from tests.durability.prefixes.recovery import cut_off
from tests.support.composite_agents import parallel
from tests.support.held_clock import HeldClock
from tests.support.log_readings import check_replay, having
from tests.support.teams import call, calls, llm, open_team, script

SECONDS = 5
NAMES = "abc"
TOLD = calls(*(call(f"call_{name}", message="go") for name in NAMES))
SAID = script(p=[TOLD, "never"], **{name: ["never"] for name in NAMES})


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
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
            passing = tasks.create_task(_pass(clock))
            log = await harness.log(going)
            passing.cancel()
        await check_replay(harness, log)
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
