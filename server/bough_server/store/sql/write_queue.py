"""The event loop's side of the writer thread: a bounded queue, and the health of writes.

Health is reported by the writer thread, which probes the disk while writes fail.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine

from bough_server.errors import ServerStopping, StorageFailed
from bough_server.store.ports import Record
from bough_server.store.sql.jobs import Append, Command, Settled
from bough_server.store.sql.log_heads import LogHeads
from bough_server.store.sql.writer import CommitHooks, Job, WriterThread
from bough_server.store.window import RecentEventsOfRuns

STALL_SECONDS: Final = 5.0
"""From how long on a write that has not ended is one of a disk that does not answer."""

_GRACE: Final = 0.1

T = TypeVar("T")


class Writing:
    """The state of all writes together."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._jobs = 0
        self._since = 0.0
        self._is_failing = self._is_stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def is_possible(self) -> bool:
        """Whether the last write was written, and none waits too long."""
        return not (self._is_failing or self._is_stalled)

    def check(self) -> None:
        """Raises StorageFailed where what was queued before has waited too long."""
        if self._is_stalled:
            raise StorageFailed("The server's storage does not answer: nothing new is taken until it does.")

    def begin(self) -> None:
        """A job is queued."""
        loop = asyncio.get_running_loop()
        if not self._jobs:
            self._since = loop.time()
        self._jobs += 1
        if self._timer is None:
            self._timer = loop.call_later(self._stall_seconds, self._look)

    def end(self, jobs: int) -> None:
        """So many jobs are settled."""
        self._jobs -= jobs
        self._since = asyncio.get_running_loop().time()
        self._turn(is_failing=self._is_failing, is_stalled=False)

    def tell(self, is_failing: bool) -> None:
        """Whether the disk refused the last write that there was."""
        self._turn(is_failing=is_failing, is_stalled=self._is_stalled)

    async def turns(self) -> AsyncIterator[bool]:
        """Whether writing is possible: as it is now, and at every change."""
        was: bool | None = None
        while True:
            changed, now = self._changed, self.is_possible
            if now is not was:
                was = now
                yield now
            else:
                await changed.wait()

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, is_suspected: bool = False) -> None:
        self._timer = None
        if not self._jobs:
            return
        loop = asyncio.get_running_loop()
        left = self._since + self._stall_seconds - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        elif not is_suspected:
            # Where the loop was held up, what ended meanwhile is told first.
            self._timer = loop.call_later(_GRACE, self._look, True)
        else:
            self._turn(is_failing=self._is_failing, is_stalled=True)
            self._timer = loop.call_later(self._stall_seconds, self._look)

    def _turn(self, *, is_failing: bool, is_stalled: bool) -> None:
        if (is_failing, is_stalled) == (self._is_failing, self._is_stalled):
            return
        self._is_failing, self._is_stalled = is_failing, is_stalled
        self._changed.set()
        self._changed = asyncio.Event()


class WriteQueue:
    """Takes writes in their order and tells their outcome; what was committed it shows to readers first."""

    def __init__(
        self,
        engine: Engine,
        windows: RecentEventsOfRuns,
        writing: Writing,
        *,
        retry_delays: Sequence[float],
        hooks: CommitHooks,
    ) -> None:
        self.heads = LogHeads()
        self._engine, self._windows, self._writing = engine, windows, writing
        self._pending_bytes = 0
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = WriterThread(
            engine, self.heads, settle=self._settle, tell=self._tell, retry_delays=retry_delays, hooks=hooks
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes of events of all runs that wait for their commit."""
        return self._pending_bytes

    def append(self, run_id: str, epoch: int, records: Sequence[Record]) -> asyncio.Future[None]:
        """Queues an append; see EventLog."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            future.set_exception(_stopping())
            return future
        append = Append(run_id, epoch, records, future)
        self._pending_bytes += append.size
        self._submit(append)
        return future

    async def execute(
        self, run: Callable[[Connection], T], *, run_id: str = "", then: Callable[[], None] | None = None
    ) -> T:
        """Runs a transaction on the writer's thread and gives its result. Raises what it raises, and StorageFailed.

        `run_id` is the run whose log it writes to; `then` is called once it is committed, whether or not anybody still
        waits for it. Where the disk does not answer, it is refused at once.
        """
        if self._is_closed:
            raise _stopping()
        self._writing.check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit(Command(run, future, run_id=run_id, then=then))
        return await future

    async def close(self) -> None:
        """Writes what is queued, refuses the rest, and sends every reader home."""
        self._is_closed = True
        await asyncio.to_thread(self._writer.close)
        self._writing.close()
        self._windows.dismiss(_stopping())
        self._engine.dispose()

    def _submit(self, job: Job) -> None:
        self._loop = job.future.get_loop()
        self._writing.begin()
        self._writer.submit(job)

    def _tell(self, is_failing: bool) -> None:
        assert self._loop is not None, "what failed was submitted"
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._writing.tell, is_failing)

    def _settle(self, settled: Sequence[Settled]) -> None:
        loop = settled[0].job.future.get_loop()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._resolve, settled)

    def _resolve(self, settled: Sequence[Settled]) -> None:
        self._writing.end(len(settled))
        for outcome in settled:
            job = outcome.job
            if isinstance(job, Append):
                self._pending_bytes -= job.size
                if outcome.error is None:
                    self._windows.add(job.run_id, job.records)
                elif isinstance(outcome.error, StorageFailed):
                    self._windows.fail(job.run_id, outcome.error)
            elif outcome.error is None and job.then is not None:
                job.then()
            outcome.resolve()


def _stopping() -> ServerStopping:
    return ServerStopping("The server is stopping: call again when it is back.")
