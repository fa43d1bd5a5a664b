"""Garbage collections are rare while runs are recovered, and usual again afterwards, however that ended."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest

from bough.v1 import execution_pb2, run_pb2
from bough_server.clock import SystemClock
from bough_server.ownership.background import Background
from bough_server.runs.recovery import YOUNG_OBJECTS, Recovery, collect_garbage_rarely
from bough_server.store.ports.runs import RunIndex, RunRow
from tests.support.run_harness import ME

USUAL = 701


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(USUAL)
    yield
    gc.set_threshold(*before)


class Index(RunIndex):
    """An index of runs whose requests never expire."""

    async def next_expiry(self, *, but: object = ()) -> None:
        return None


def _record(run_id: str) -> RunRow:
    run = run_pb2.Run(run_id=run_id, state=execution_pb2.EXECUTION_STATE_RUNNING)
    return RunRow(run=run, principal=ME, epoch=1, request_digest="")


class Revivals:
    """Notes the thresholds with which runs are continued; the suspect comes when all others have been replayed."""

    def __init__(self, *, error: Exception | None = None, waits: bool = False) -> None:
        self.thresholds: dict[str, int] = {}
        self.begun, self.settled, self._may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._error = error
        self._open = [_record("innocent"), _record("suspect")]
        if not waits:
            self._may_end.set()

    async def revive(self, run_row: RunRow) -> None:
        self.thresholds[run_row.run.run_id] = gc.get_threshold()[0]
        self.begun.set()
        await self._may_end.wait()
        if self._error is not None:
            raise self._error

    def room(self) -> int:
        return 10

    async def count_crashes(self, run_row: RunRow) -> int:
        return int(run_row.run.run_id == "suspect")

    async def wait_for_progress(self, run_row: RunRow) -> None:
        self.settled.set()

    async def expire(self, run_id: str) -> NoReturn:
        raise AssertionError("nothing expires")

    async def claim(self, most: int) -> Sequence[RunRow]:
        claimed, self._open = self._open[:most], self._open[most:]
        return claimed

    async def recover(self) -> Background:
        background = Background()
        await Recovery(self, Index(), background, SystemClock(), is_shared=False).start()
        return background


@pytest.mark.parametrize("error", [None, ValueError("the run cannot be continued")])
async def test_collections_are_rare_until_the_runs_are_replayed(error: ValueError | None) -> None:
    revivals = Revivals(error=error)
    background = await revivals.recover()
    await revivals.settled.wait()
    await background.close()
    assert revivals.thresholds == {"innocent": YOUNG_OBJECTS, "suspect": USUAL}


async def test_collections_are_usual_again_after_a_recovery_that_was_cancelled() -> None:
    revivals = Revivals(waits=True)
    background = await revivals.recover()
    await revivals.begun.wait()
    await background.close()
    assert (revivals.thresholds, gc.get_threshold()[0]) == ({"innocent": YOUNG_OBJECTS}, USUAL)


def test_collections_are_usual_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), collect_garbage_rarely():
        raise ValueError("broken")
    assert gc.get_threshold()[0] == USUAL


def test_only_the_last_of_several_that_overlap_restores_the_threshold() -> None:
    one, other = collect_garbage_rarely(), collect_garbage_rarely()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    other.__exit__(None, None, None)
    assert gc.get_threshold()[0] == USUAL
