"""Recover runs of lost workers in the background, expire requests, and retry with backoff."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import structlog

from bough.v1 import execution_pb2
from bough_server.clock import Clock
from bough_server.errors import ServerStopping, StorageFailed
from bough_server.store.ports import RunIndex, RunRecord

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
"""How many logs are handed back at once: the others wait, the oldest first."""

INITIAL_BACKOFF: Final = 1.0
LONGEST_PATIENCE: Final = 60.0
"""Seconds between two tries."""


class Recovery:
    """Tasks that bring runs back to life; all end with `close`."""

    def __init__(
        self,
        index: RunIndex,
        clock: Clock,
        *,
        revive: Callable[[RunRecord], Awaitable[None]],
        expire: Callable[[str], Awaitable[None]],
    ) -> None:
        self._index = index
        self._clock = clock
        self._revive = revive
        self._expire = expire
        self._tasks: set[asyncio.Task[None]] = set()
        self._interrupted = asyncio.Event()
        self._patience: dict[str, float] = {}
        self._put_off: set[str] = set()
        """Runs whose overdue requests could not be answered just now: those of others do not wait for them."""

    async def start(self) -> int:
        """Begins to continue what is open, the oldest first, and to watch for answers that are overdue.

        Gives how many runs there are to continue; they are continued while calls are served.
        """
        open_runs = await self._index.open_runs()
        found = [record for record in open_runs if record.run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED]
        self.spawn(self._revive_all(found))
        self.spawn(retry_until_stored(self._clock, self._watch_expiries))
        return len(found)

    def interrupted(self) -> None:
        """A run waits for input from now on: its answers may be due earlier than all others."""
        self._interrupted.set()

    def try_later(self, record: RunRecord) -> None:
        """Continues a run whose log could not be written, after a while."""
        self.spawn(self._later(record, self._longer(record.run.run_id)))

    def is_well(self, run_id: str) -> None:
        """A run's log can be written again."""
        self._patience.pop(run_id, None)

    def _longer(self, run_id: str) -> float:
        """How many seconds to wait with a run this time: each time twice as long."""
        patience = self._patience.get(run_id, INITIAL_BACKOFF)
        self._patience[run_id] = min(LONGEST_PATIENCE, patience * 2)
        return patience

    async def close(self) -> None:
        """Ends everything that waits here."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something in a task of its own that ends with `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, record: RunRecord, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await self._try(record)

    async def _revive_all(self, found: list[RunRecord]) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def revive(record: RunRecord) -> None:
            try:
                await self._try(record)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            for record in found:
                await slots.acquire()
                group.create_task(revive(record))

    async def _try(self, record: RunRecord) -> None:
        try:
            await self._revive(record)
        except Exception as error:
            _log.error("run not continued", run_id=record.run.run_id, exc_info=error)

    async def _watch_expiries(self) -> None:
        while True:
            self._interrupted.clear()
            expiry = await self._index.next_expiry(but=self._put_off)
            if expiry is None:
                await self._interrupted.wait()
                continue
            due_ns, run_id = expiry
            left = (due_ns - self._clock.now_ns()) / 1e9
            if left > 0:
                await self._wait(left)
                continue
            try:
                await self._expire(run_id)
            except Exception as error:
                _log.error("expired requests not answered", run_id=run_id, exc_info=error)
                self._put_off.add(run_id)
                self.spawn(self._put_off_for(run_id, self._longer(run_id)))

    async def _put_off_for(self, run_id: str, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._put_off.discard(run_id)
        self._interrupted.set()

    async def _wait(self, seconds: float) -> None:
        """Waits so long, or until another run is interrupted."""
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        told = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait({sleeping, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            told.cancel()
            await asyncio.wait({sleeping, told})


async def retry_until_stored(clock: Clock, work: Callable[[], Awaitable[object]]) -> None:
    """Does something again and again until storage no longer fails at it, or the server stops."""
    patience = INITIAL_BACKOFF
    while True:
        try:
            await work()
            break
        except ServerStopping:
            break
        except StorageFailed as error:
            _log.warning("storage failed; tried again", seconds=patience, error=error.message)
        await clock.sleep(patience)
        patience = min(LONGEST_PATIENCE, patience * 2)
