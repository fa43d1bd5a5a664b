"""Bounds of tool calls where calls never start, or are of a child that was cut: what counts follows from the log."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, policy_pb2
from bough_server.tools.tool import tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import check_replay, results_of
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

EXCEEDED = error_pb2.ERROR_REASON_LIMIT_EXCEEDED
SHORT = agent_pb2.AgentLink(agent="c")
SHORT.limits.wall_duration.FromSeconds(5)


def within(**limits: Any) -> policy_pb2.RunPolicy:
    return policy_pb2.RunPolicy(limits=policy_pb2.Limits(**limits))


def refused(log: list[event_pb2.AgentEvent]) -> list[str]:
    return [result.call.name for result in results_of(log) if result.error.reason == EXCEEDED]


class Place:
    """A team whose c has five seconds and calls a tool that does not end; then p looks. `holds` stops p in between."""

    def __init__(self, folder: Path, *, first: list[dict[str, object]], calls_of_c: str = "sit") -> None:
        self.folder, self.clock, self.holds = folder, HeldClock(), False
        self.sat = asyncio.Event()
        self.turns = script(p=[calls(*first), calls(call("look")), "Done."], c=[calls(call(calls_of_c)), "never"])

    @asynccontextmanager
    async def harness(self) -> AsyncIterator[RunHarness]:
        @tool
        async def sit() -> str:
            """Sits."""
            self.sat.set()
            await asyncio.Event().wait()
            return "never"

        @tool
        async def look() -> str:
            """Looks."""
            return "seen"

        @tool(approval=True)
        async def pay() -> str:
            """Pays."""
            return "paid"

        async def gate(agent: str, turn: int, chunk: int) -> None:
            if self.holds and agent == "p" and turn == 1:
                await asyncio.Event().wait()

        once = agent_pb2.ToolLink(name="sit", max_calls_per_run=1)
        team = (llm("p", links=[SHORT], tools=["look"]), llm("c", tools=[once, "pay", "look"]))
        async with open_team(
            self.folder, self.turns, *team, tools=[sit, look, pay], gate=gate, clock=self.clock
        ) as harness:
            yield harness

    async def log(self, policy: policy_pb2.RunPolicy, *, crashes: bool, until: str) -> list[event_pb2.AgentEvent]:
        """The run's log; c's time is up when it has recorded such an event."""
        self.holds = crashes
        async with self.harness() as harness:
            run = await harness.start("p", policy=policy)
            async for event in harness.follow(run):
                if event.agent == "c" and event.HasField(until):
                    await self.clock.next_sleep()
                    self.clock.advance(5)
                if event.agent == "p" and event.HasField("llm_started") and event.step_index == 1 and crashes:
                    await harness.crash()
                    break
            else:
                log = await harness.log(run)
                await check_replay(harness, log)
                return log
        self.holds = False
        async with self.harness() as harness:
            await harness.runs.recover()
            log = await harness.log(run)
            await check_replay(harness, log)
            return log


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize(("most", "names"), [(2, ["look"]), (3, [])])
async def test_a_tool_of_a_child_that_was_cut_counts_for_its_caller_after_a_crash_too(
    tmp_path: Path, crashes: bool, most: int, names: list[str]
) -> None:
    place = Place(tmp_path, first=[call("call_c", message="go")])
    log = await place.log(within(tool_calls=most), crashes=crashes, until="tool_started")
    assert refused(log) == names


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_call_that_is_ended_while_it_waits_for_its_approval_counts_no_more(
    tmp_path: Path, crashes: bool
) -> None:
    place = Place(tmp_path, first=[call("call_c", message="go")], calls_of_c="pay")
    log = await place.log(within(tool_calls=2), crashes=crashes, until="input_requested")
    assert refused(log) == []
