"""The event loop's side of the writer thread: what waits for it, and who is told when it is done; it writes nothing."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection, Engine

from bough_server.errors import ServerStopping, StorageFailed
from bough_server.store.ports import Record
from bough_server.store.sql.heads import Heads
from bough_server.store.sql.jobs import Append, Command, Settled
from bough_server.store.sql.writer import CommitHooks, Job, WriterThread
from bough_server.store.sql.writing import Writing
from bough_server.store.window import Windows

T = TypeVar("T")


class WriteQueue:
    """Takes writes in their order and tells their outcome; what was committed it shows to readers first."""

    def __init__(
        self,
        engine: Engine,
        windows: Windows,
        writing: Writing,
        *,
        retry_delays: Sequence[float],
        hooks: CommitHooks,
    ) -> None:
        self.heads = Heads()
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
