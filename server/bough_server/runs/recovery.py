"""Recover open runs in the background, expire overdue requests, and retry with backoff."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Final

import structlog

from bough_server.clock import Clock
from bough_server.errors import ServerStopping, StorageFailed
from bough_server.store.ports.runs import RunIndex, RunRecord

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
"""How many runs are replayed at once; the others wait, oldest first."""

INITIAL_BACKOFF: Final = 1.0
MAX_BACKOFF: Final = 60.0
"""Bounds of the seconds between two tries."""

LOOK_SECONDS: Final = 2.0
"""Seconds between two looks at what other servers may have left, if no notification comes."""

YOUNG_OBJECTS: Final = 100_000
"""How many objects may be created between two garbage collections while runs are replayed; CPython's default is 700.

It bounds the garbage in cycles to some ten megabytes.
"""

_usual: Final[list[int]] = []
"""What is restored at the end, once for every `rare_collections` that is open."""


@contextmanager
def rare_collections() -> Iterator[None]:
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


class Recovery:
    """Background tasks that continue runs; `close` ends them all.

    `claim` makes this worker the owner of up to some number of runs that no live worker owns, and returns them; `room`
    returns how many it may have more. `losses` returns how many servers were lost with a run since its last progress;
    `settled` waits until a run that was continued makes progress.
    """

    def __init__(
        self,
        index: RunIndex,
        clock: Clock,
        *,
        is_shared: bool,
        room: Callable[[], int],
        claim: Callable[[int], Awaitable[Sequence[RunRecord]]],
        revive: Callable[[RunRecord], Awaitable[None]],
        expire: Callable[[str], Awaitable[None]],
        losses: Callable[[RunRecord], Awaitable[int]],
        settled: Callable[[RunRecord], Awaitable[None]],
    ) -> None:
        self._index = index
        self._clock = clock
        self._is_shared = is_shared
        # What other servers have left must not wait for a minute because the database was away.
        self._longest = LOOK_SECONDS if is_shared else MAX_BACKOFF
        self._room, self._claim = room, claim
        self._revive = revive
        self._expire = expire
        self._losses = losses
        self._settled = settled
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._offered = asyncio.Event()
        self._left = 0
        """How many runs are to be continued, suspects excepted."""
        self._suspects: list[tuple[int, int, str, RunRecord]] = []
        """A heap of the runs that have lost several servers: how many, then the age of the run."""
        self._suspecting = False
        self._interrupted = asyncio.Event()
        self._backoffs: dict[str, float] = {}
        self._is_failing = False
        self._works = asyncio.Event()
        """Set, and replaced, when a look succeeds after one that failed."""
        self._put_off: set[str] = set()
        """Runs whose overdue requests could not be answered; left out for a while so that they do not block others."""

    async def start(self) -> int:
        """Start continuing runs without a live owner, oldest first, and watching for overdue requests.

        Return the number of runs that were found to continue at once; that happens in the background, while calls are
        served.
        """
        found = await self._claim(self._most()) if self._most() > 0 else ()
        self.spawn(self._continue_all(found))
        self.spawn(retry_until_stored(self._clock, self._watch_expiries, longest=self._longest))
        return len(found)

    def offered(self) -> None:
        """Look for runs to continue: some have no owner any more, or there is room for more."""
        self._offered.set()
        self._interrupted.set()  # the server that watched for the next expiry may be gone

    def interrupted(self) -> None:
        """Notify the watch that a run has been interrupted: one of its requests may expire before all others."""
        self._interrupted.set()

    def try_later(self, record: RunRecord) -> None:
        """Continue a run whose log could not be written, after a backoff."""
        self.spawn(self._later(record, self._next_backoff(record.run.run_id)))

    def is_well(self, run_id: str) -> None:
        """Reset the backoff of a run whose log can be written."""
        self._backoffs.pop(run_id, None)

    def _next_backoff(self, run_id: str) -> float:
        """Return the seconds to wait with a run this time, and double those for the next."""
        backoff = self._backoffs.get(run_id, INITIAL_BACKOFF)
        self._backoffs[run_id] = min(MAX_BACKOFF, backoff * 2)
        return backoff

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        while self._tasks:  # a task may spawn another while it is being cancelled
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a background task, which `close` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def _later(self, record: RunRecord, seconds: float) -> None:
        await wait_at_most(self._clock, self._works, seconds)
        async with self._slots:  # many may wait for the same storage
            await self.try_now(record)

    def _most(self) -> int:
        """Return how many runs to claim at once."""
        # Beside other servers only as many as are continued at once: the rest is for them.
        return min(self._room(), AT_ONCE) if self._is_shared else self._room()

    async def _continue_all(self, found: Sequence[RunRecord]) -> None:
        """Continue runs, and all that can be claimed later."""
        await self._continue(found)
        while True:
            self._offered.clear()  # before the look: an offer after it must wake the wait below
            await retry_until_stored(self._clock, self._look, longest=self._longest)
            await wait_at_most(self._clock, self._offered, LOOK_SECONDS if self._is_shared else None)

    async def _look(self) -> None:
        """Continue all runs that can be claimed, and those that wait for the storage if it works again."""
        try:
            while (most := self._most()) > 0 and (found := await self._claim(most)):
                await self._continue(found)
        except StorageFailed:
            self._is_failing = True
            raise
        if self._is_failing:
            self._is_failing = False
            self._backoffs.clear()
            self._works.set()
            self._works = asyncio.Event()

    async def _continue(self, found: Sequence[RunRecord]) -> None:
        """Begin to continue runs, a bounded number at once."""
        self._left += len(found)
        for record in found:
            await self._slots.acquire()  # before the task is created, so that the runs start oldest first
            self.spawn(self._continue_one(record))

    async def _continue_one(self, record: RunRecord) -> None:
        try:
            with rare_collections():
                if losses := await self._losses(record):
                    run = record.run
                    heappush(self._suspects, (losses, run.create_time.ToNanoseconds(), run.run_id, record))
                else:
                    await self.try_now(record)
        finally:
            self._slots.release()
            self._left -= 1
        if self._suspects and not self._left and not self._suspecting:
            self._suspecting = True
            self.spawn(self._continue_suspects())

    async def _continue_suspects(self) -> None:
        """Continue one at a time, while there are no others, the runs that have lost several servers.

        The least suspicious first: all but the one that kills its servers make progress, and their losses no longer
        count. Together, each of them would end with RECOVERY_LIMIT because of that one.
        """
        _log.warning("continuing one at a time the runs that have lost several servers", runs=len(self._suspects))
        try:
            while self._suspects and not self._left:
                *_, record = heappop(self._suspects)
                await self.try_now(record)
                await self._settled(record)
        finally:
            self._suspecting = False

    async def try_now(self, record: RunRecord) -> None:
        """Continue a run, later if the storage fails, and log any other error that keeps it from being continued."""
        try:
            await self._revive(record)
        except StorageFailed:
            self.try_later(record)
        except Exception as error:
            _log.error("run not continued", run_id=record.run.run_id, exc_info=error)

    async def _watch_expiries(self) -> None:
        while True:
            self._interrupted.clear()  # before the read: an interruption after it must wake the wait below
            expiry = await self._index.next_expiry(but=self._put_off)
            most = LOOK_SECONDS if self._is_shared else None  # another server may interrupt a run, and be lost
            if expiry is None:
                await wait_at_most(self._clock, self._interrupted, most)
                continue
            due_ns, run_id = expiry
            left = (due_ns - self._clock.now_ns()) / 1e9
            if left > 0:
                await wait_at_most(self._clock, self._interrupted, left if most is None else min(left, most))
                continue
            try:
                await self._expire(run_id)
            except Exception as error:
                _log.error("expired requests not answered", run_id=run_id, exc_info=error)
                self._put_off.add(run_id)
                self.spawn(self._put_off_for(run_id, self._next_backoff(run_id)))

    async def _put_off_for(self, run_id: str, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._put_off.discard(run_id)
        self._interrupted.set()


async def wait_at_most(clock: Clock, event: asyncio.Event, seconds: float | None) -> None:
    """Wait until an event is set, or for some seconds."""
    if seconds is None:
        await event.wait()
        return
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({sleeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeping.cancel()
        waiting.cancel()
        await asyncio.wait({sleeping, waiting})


async def retry_until_stored(
    clock: Clock, work: Callable[[], Awaitable[object]], *, longest: float = MAX_BACKOFF
) -> None:
    """Call `work` with backoff until it no longer raises StorageFailed; return too if it raises ServerStopping.

    `longest` is the most seconds between two tries.
    """
    backoff = INITIAL_BACKOFF
    while True:
        try:
            await work()
            break
        except ServerStopping:
            break
        except StorageFailed as error:
            if backoff == INITIAL_BACKOFF:  # the store's log says how long it lasts
                _log.warning("storage failed; retrying", error=error.message)
        await clock.sleep(backoff)
        backoff = min(longest, backoff * 2)
