"""Recover open runs in the background, and expire overdue requests."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Final, Protocol

import structlog

from bough_server.clock import Clock
from bough_server.errors import StorageFailed
from bough_server.ownership.background import (
    INITIAL_BACKOFF,
    MAX_BACKOFF,
    POLL_SECONDS,
    Background,
    poll,
    retry_until_stored,
    wait_at_most,
)
from bough_server.store.ports.runs import RunIndex, RunRow

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
"""How many runs are replayed at once; the others wait, oldest first."""

YOUNG_OBJECTS: Final = 100_000
"""How many objects may be created between two garbage collections while runs are replayed; CPython's default is 700.

It bounds the garbage in cycles to some ten megabytes.
"""

_usual: Final[list[int]] = []
"""What is restored at the end, once for every `collect_garbage_rarely` that is open."""


@contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Collect garbage rarely inside the block. Blocks may overlap: the last one restores what was there before.

    Almost everything that a replay creates lives on, so collections find nothing, and visit it again and again.
    """
    _usual.append(_usual[0] if _usual else gc.get_threshold()[0])
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        yield
    finally:
        before = _usual.pop()
        if not _usual:
            gc.set_threshold(before)


class Recoverable(Protocol):
    """The runs that a recovery continues."""

    def room(self) -> int:
        """Return how many more runs this worker may continue that no worker owns."""
        ...

    async def claim(self, most: int) -> Sequence[RunRow]:
        """Make this worker the owner of up to `most` runs that no live worker owns, and return them.

        Raises StorageFailed.
        """
        ...

    async def revive(self, run_row: RunRow) -> None:
        """Continue a run that this worker has claimed or owned before, and wait until its replay is over.

        Raises StorageFailed.
        """
        ...

    async def expire(self, run_id: str) -> None:
        """Answer the overdue requests of a run that waits for input as expired, and continue the run."""
        ...

    async def count_crashes(self, run_row: RunRow) -> int:
        """Return how many servers crashed with a run since its last progress, not counting the last one."""
        ...

    async def wait_for_progress(self, run_row: RunRow) -> None:
        """Wait until a run that was continued has made progress or is no longer live, for a bounded time."""
        ...


class Recovery:
    """Background tasks that continue runs."""

    def __init__(
        self, runs: Recoverable, index: RunIndex, background: Background, clock: Clock, *, is_shared: bool
    ) -> None:
        self._runs, self._index, self._background, self._clock = runs, index, background, clock
        self._is_shared = is_shared
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._offered = asyncio.Event()
        self._left = 0
        """How many runs are to be continued, suspects excepted."""
        self._suspects: list[tuple[int, int, str, RunRow]] = []
        """A heap of the runs during which several servers crashed, ordered by how many, then by the age of the run."""
        self._suspecting = False
        self._interrupted = asyncio.Event()
        self._backoffs: dict[str, float] = {}
        self._is_failing = False
        self._works = asyncio.Event()
        """Set, and replaced, when a poll succeeds after a failed one."""
        self._postponed: set[str] = set()
        """Runs whose overdue requests could not be answered; left out for a while so that they do not block others."""

    async def start(self) -> int:
        """Start continuing runs without a live owner, oldest first, and watching for overdue requests.

        Return the number of runs that were found to continue at once; that happens in the background, while calls are
        served.
        """
        found = await self._runs.claim(self._claim_limit()) if self._claim_limit() > 0 else ()
        self._background.spawn(self._continue_all(found))
        longest = POLL_SECONDS if self._is_shared else MAX_BACKOFF
        self._background.spawn(retry_until_stored(self._clock, self._watch_expiries, longest=longest))
        return len(found)

    def on_offer(self) -> None:
        """Look for runs to continue: some have no owner any more, or there is room for more."""
        self._offered.set()
        self._interrupted.set()  # the server that watched for the next expiry may be gone

    def on_interruption(self) -> None:
        """Notify the watch that a run has been interrupted: one of its requests may expire before all others."""
        self._interrupted.set()

    def try_later(self, run_row: RunRow) -> None:
        """Continue a run whose log could not be written, after a backoff."""
        self._background.spawn(self._retry_after(run_row, self._next_backoff(run_row.run.run_id)))

    def reset_backoff(self, run_id: str) -> None:
        """Reset the backoff of a run whose log can be written."""
        self._backoffs.pop(run_id, None)

    def _next_backoff(self, run_id: str) -> float:
        """Return the seconds to wait with a run this time, and double those for the next."""
        backoff = self._backoffs.get(run_id, INITIAL_BACKOFF)
        self._backoffs[run_id] = min(MAX_BACKOFF, backoff * 2)
        return backoff

    async def _retry_after(self, run_row: RunRow, seconds: float) -> None:
        await wait_at_most(self._clock, self._works, seconds)
        async with self._slots:  # many may wait for the same storage
            await self.try_now(run_row)

    def _claim_limit(self) -> int:
        """Return how many runs to claim at once."""
        # Beside other servers only as many as are continued at once: the rest is for them.
        return min(self._runs.room(), AT_ONCE) if self._is_shared else self._runs.room()

    async def _continue_all(self, found: Sequence[RunRow]) -> None:
        """Continue runs, and all that can be claimed later."""
        await self._continue(found)
        await poll(self._clock, self._poll, self._offered, is_shared=self._is_shared)

    async def _poll(self) -> None:
        """Continue all runs that can be claimed, and those that wait for the storage if it works again."""
        try:
            while (most := self._claim_limit()) > 0 and (found := await self._runs.claim(most)):
                await self._continue(found)
        except StorageFailed:
            self._is_failing = True
            raise
        if self._is_failing:
            self._is_failing = False
            self._backoffs.clear()
            self._works.set()
            self._works = asyncio.Event()

    async def _continue(self, found: Sequence[RunRow]) -> None:
        """Begin to continue runs, a bounded number at once."""
        self._left += len(found)
        for record in found:
            await self._slots.acquire()  # before the task is created, so that the runs start oldest first
            self._background.spawn(self._continue_claimed_run(record))

    async def _continue_claimed_run(self, run_row: RunRow) -> None:
        try:
            with collect_garbage_rarely():
                if losses := await self._runs.count_crashes(run_row):
                    run = run_row.run
                    heappush(self._suspects, (losses, run.create_time.ToNanoseconds(), run.run_id, run_row))
                else:
                    await self.try_now(run_row)
        finally:
            self._slots.release()
            self._left -= 1
        if self._suspects and not self._left and not self._suspecting:
            self._suspecting = True
            self._background.spawn(self._continue_suspects())

    async def _continue_suspects(self) -> None:
        """Continue the runs during which several servers crashed, one at a time and after all others.

        The runs with the fewest crashes come first. All but the run that causes the crashes make progress, which resets
        their counts. If they were continued together, all of them would end with RECOVERY_LIMIT because of that run.
        """
        _log.warning("continuing runs during which several servers crashed, one at a time", runs=len(self._suspects))
        try:
            while self._suspects and not self._left:
                *_, record = heappop(self._suspects)
                await self.try_now(record)
                await self._runs.wait_for_progress(record)
        finally:
            self._suspecting = False

    async def try_now(self, run_row: RunRow) -> None:
        """Continue a run, later if the storage fails, and log any other error that keeps it from being continued."""
        try:
            await self._runs.revive(run_row)
        except StorageFailed:
            self.try_later(run_row)
        except Exception as error:
            _log.error("run not continued", run_id=run_row.run.run_id, exc_info=error)

    async def _watch_expiries(self) -> None:
        while True:
            self._interrupted.clear()  # before the read: an interruption after it must wake the wait below
            expiry = await self._index.next_expiry(but=self._postponed)
            most = POLL_SECONDS if self._is_shared else None  # another server may interrupt a run, and be lost
            if expiry is None:
                await wait_at_most(self._clock, self._interrupted, most)
                continue
            due_ns, run_id = expiry
            left = (due_ns - self._clock.now_ns()) / 1e9
            if left > 0:
                await wait_at_most(self._clock, self._interrupted, left if most is None else min(left, most))
                continue
            try:
                await self._runs.expire(run_id)
            except Exception as error:
                _log.error("expired requests not answered", run_id=run_id, exc_info=error)
                self._postponed.add(run_id)
                self._background.spawn(self._postpone_for(run_id, self._next_backoff(run_id)))

    async def _postpone_for(self, run_id: str, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._postponed.discard(run_id)
        self._interrupted.set()
