"""Properties of agents in code: nested lanes and children with little time replay, and are finished after crashes."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bough.v1 import event_pb2, run_pb2
from tests.durability.prefixes.recovery import cut_off
from tests.support.examples import examples
from tests.support.held_clock import HeldClock
from tests.support.log_readings import check_replay
from tests.support.random_code import Code, Maker, agent_of, passing_time
from tests.support.run_harness import RunHarness, open_harness
from tests.support.teams import Scripts

PATIENCE = 10.0
"""Seconds after which a run is stuck."""

Log = Sequence[event_pb2.AgentEvent]


@asynccontextmanager
async def time_passes(code: Code, folder: Path, numbers: random.Random, clock: HeldClock) -> AsyncIterator[RunHarness]:
    agents = [agent_of(one, clock) for one in code.everybody()]
    async with (
        open_harness(folder, models=Scripts("agents: {}"), code_agents=agents, clock=clock) as harness,
        passing_time(clock, numbers),
        asyncio.timeout(PATIENCE),
    ):
        yield harness


async def whole(code: Code, folder: Path, numbers: random.Random) -> Log:
    async with time_passes(code, folder, numbers, HeldClock()) as harness:
        log = await harness.turn(code.name)
        await check_replay(harness, log)
    return log


async def recovered(code: Code, folder: Path, numbers: random.Random, prefix: Log) -> Log:
    clock = HeldClock(prefix[-1].record_time.ToNanoseconds() + numbers.choice([0, 10**9]))
    async with time_passes(code, folder, numbers, clock) as harness:
        await harness.runs.recover()
        run = run_pb2.Run(run_id=prefix[0].run_id, session_id=prefix[0].session_id)
        log = await harness.log(run)
        await check_replay(harness, log)
    return log


@pytest.mark.grid
@examples(20)
@given(st.integers(0, 2**32))
@example(56)
@example(63)
def test_lanes_whose_children_run_out_of_time_replay(seed: int) -> None:
    numbers = random.Random(seed)
    code = Maker(numbers).code(3)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(whole(code, Path(folder), numbers))


@pytest.mark.grid
@examples(8)
@given(st.integers(0, 2**32))
@example(46)
@example(113)
@example(345)
@example(26307829)
def test_lanes_whose_children_run_out_of_time_are_finished_after_crashes_and_replay(seed: int) -> None:
    numbers = random.Random(seed)
    code = Maker(numbers).code(3)

    async def crash(folder: Path) -> None:
        folder.joinpath("0").mkdir()
        log = await whole(code, folder / "0", numbers)
        for number in range(1, 4):
            prefix = log[: numbers.randint(1, len(log))]
            cut_off(folder / str(number - 1), prefix, folder / str(number))
            log = await recovered(code, folder / str(number), numbers, prefix)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(crash(Path(folder)))
