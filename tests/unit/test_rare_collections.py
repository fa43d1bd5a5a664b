"""Garbage collections are rare while runs are recovered, and usual again afterwards, however that ended."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest

from bough.v1 import execution_pb2, run_pb2
from bough_server.clock import SystemClock
from bough_server.runs.recovery import YOUNG_OBJECTS, Recovery, rare_collections
from bough_server.store.ports.runs import RunIndex, RunRecord
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


def _record(run_id: str) -> RunRecord:
    run = run_pb2.Run(run_id=run_id, state=execution_pb2.EXECUTION_STATE_RUNNING)
    return RunRecord(run=run, principal=ME, epoch=1, request_digest="")


class Revivals:
    """Notes the thresholds with which runs are continued; the suspect comes when all others have been replayed."""

    def __init__(self, *, error: Exception | None = None, waits: bool = False) -> None:
        self.thresholds: dict[str, int] = {}
        self.begun, self.settled, self._may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._error = error
        self._open = [_record("innocent"), _record("suspect")]
        if not waits:
            self._may_end.set()

    async def revive(self, record: RunRecord) -> None:
        self.thresholds[record.run.run_id] = gc.get_threshold()[0]
        self.begun.set()
        await self._may_end.wait()
        if self._error is not None:
            raise self._error

    def recovery(self) -> Recovery:
        async def losses(record: RunRecord) -> int:
            return int(record.run.run_id == "suspect")

        async def settled(_: RunRecord) -> None:
            self.settled.set()

        async def expire(_: str) -> NoReturn:
            raise AssertionError("nothing expires")

        async def claim(most: int) -> Sequence[RunRecord]:
            claimed, self._open = self._open[:most], self._open[most:]
            return claimed

        return Recovery(
            Index(),
            SystemClock(),
            is_shared=False,
            room=lambda: 10,
            claim=claim,
            revive=self.revive,
            expire=expire,
            losses=losses,
            settled=settled,
        )


@pytest.mark.parametrize("error", [None, ValueError("the run cannot be continued")])
async def test_collections_are_rare_until_the_runs_are_replayed(error: ValueError | None) -> None:
    revivals = Revivals(error=error)
    recovery = revivals.recovery()
    await recovery.start()
    await revivals.settled.wait()
    await recovery.close()
    assert revivals.thresholds == {"innocent": YOUNG_OBJECTS, "suspect": USUAL}


async def test_collections_are_usual_again_after_a_recovery_that_was_cancelled() -> None:
    revivals = Revivals(waits=True)
    recovery = revivals.recovery()
    await recovery.start()
    await revivals.begun.wait()
    await recovery.close()
    assert (revivals.thresholds, gc.get_threshold()[0]) == ({"innocent": YOUNG_OBJECTS}, USUAL)


def test_collections_are_usual_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), rare_collections():
        raise ValueError("broken")
    assert gc.get_threshold()[0] == USUAL


def test_only_the_last_of_several_that_overlap_restores_the_threshold() -> None:
    one, other = rare_collections(), rare_collections()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    other.__exit__(None, None, None)
    assert gc.get_threshold()[0] == USUAL
