"""The event loop's side of the writer thread: the queue of writes, and their health.

The writer thread reports health, and probes the disk while writes fail.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine

from bough_server.clock import Clock, loop_time
from bough_server.errors import DatabaseRemoved, Fenced, ServerStopping, StorageFailed
from bough_server.store.ports.log import AnyLogEvent
from bough_server.store.ports.workers import Topic
from bough_server.store.sql.driver import Driver, Reach
from bough_server.store.sql.jobs import ALONE, Append, JobOutcome, Transaction
from bough_server.store.sql.log_heads import LogHeads
from bough_server.store.sql.notifications import Notifier
from bough_server.store.sql.writer import CommitHooks, Job, WriterThread
from bough_server.store.window import RecentEventsOfRuns
from bough_server.threads import run_in_thread

STALL_SECONDS: Final = 5.0
"""How long a write may take before the disk is taken not to respond."""

_GRACE: Final = 0.1
"""Seconds for outcomes that are already on their way to the event loop."""

T = TypeVar("T")


class WriteHealth:
    """The health of writes: whether they fail, and whether they stall."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._jobs = 0
        self._since = 0.0
        self._is_failing = self._is_stalled = self._is_missing = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def is_possible(self) -> bool:
        """True if the last write succeeded, none has been waiting too long, and the database file is in its place."""
        return not (self._is_failing or self._is_stalled or self._is_missing)

    def check(self) -> None:
        """Raise StorageFailed if queued writes have been waiting too long, or would go to a file without a name."""
        if self._is_missing:
            raise DatabaseRemoved(
                "The server's database file was deleted or replaced: nothing new is accepted. Its operator has to put "
                "the file back, or to restart the server."
            )
        if self._is_stalled:
            raise StorageFailed(
                "The server's storage does not respond: nothing new is accepted until it does. Try again later."
            )

    def on_job_queued(self) -> None:
        """Count a job that is queued."""
        loop = asyncio.get_running_loop()
        if not self._jobs:
            self._since = loop_time()
        self._jobs += 1
        if self._timer is None:
            self._timer = loop.call_later(self._stall_seconds, self._check_stall)

    def on_jobs_done(self, jobs: int) -> None:
        """Count these jobs as done; the wait of those left is measured from now."""
        self._jobs -= jobs
        self._since = loop_time()
        self._set_health(is_failing=self._is_failing, is_stalled=False)

    def report_health(self, is_failing: bool) -> None:
        """Set whether the last write failed."""
        self._set_health(is_failing=is_failing, is_stalled=self._is_stalled)

    def report_missing_file(self, is_missing: bool) -> None:
        """Set whether the database file has been deleted or replaced."""
        if is_missing != self._is_missing:
            self._is_missing = is_missing
            self._notify()

    async def changes(self) -> AsyncIterator[bool]:
        """Yield whether writing is possible: now, and at every change."""
        was: bool | None = None
        while True:
            changed, now = self._changed, self.is_possible
            if now is not was:
                was = now
                yield now
            else:
                await changed.wait()

    def close(self) -> None:
        """Stop checking for stalled writes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_stall(self, is_suspected: bool = False) -> None:
        self._timer = None
        if not self._jobs:
            return
        loop = asyncio.get_running_loop()
        left = self._since + self._stall_seconds - loop_time()
        if left > 0:
            self._timer = loop.call_later(left, self._check_stall)
        elif not is_suspected:
            # If it was the event loop that stalled, outcomes are waiting to be reported: check again after them.
            self._timer = loop.call_later(_GRACE, self._check_stall, True)
        else:
            self._set_health(is_failing=self._is_failing, is_stalled=True)
            self._timer = loop.call_later(self._stall_seconds, self._check_stall)

    def _set_health(self, *, is_failing: bool, is_stalled: bool) -> None:
        if (is_failing, is_stalled) == (self._is_failing, self._is_stalled):
            return
        self._is_failing, self._is_stalled = is_failing, is_stalled
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # a new one for the next change, so that nothing needs to clear it


class WriteQueue:
    """Submits writes in order and reports their outcomes; readers see committed events before their writer does."""

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        windows: RecentEventsOfRuns,
        write_health: WriteHealth,
        *,
        notifier: Notifier,
        retry_delays: Sequence[float],
        hooks: CommitHooks,
        report_commit: Callable[[int, float], None] | None = None,
        clock: Clock,
    ) -> None:
        self.heads = LogHeads()
        self._engine, self._windows, self._health, self._notifier = engine, windows, write_health, notifier
        self._pending_bytes = 0
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = WriterThread(
            engine,
            driver,
            self.heads,
            settle=self._settle,
            report_health=self._report_health,
            retry_delays=retry_delays,
            hooks=hooks,
            report_commit=report_commit,
            clock=clock,
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes of all runs' events that wait for their commit."""
        return self._pending_bytes

    def append(self, run_id: str, epoch: int, log_events: Sequence[AnyLogEvent]) -> asyncio.Future[None]:
        """Queue an append; see EventLog."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            future.set_exception(_stopping_error())
            return future
        append = Append(run_id, epoch, log_events, future)
        self._pending_bytes += append.size
        self._submit(append)
        return future

    async def execute(
        self,
        run: Callable[[Connection], T],
        *,
        run_id: str = "",
        reach: Reach = ALONE,
        then: Callable[[], None] | None = None,
    ) -> T:
        """Run a transaction on the writer thread and return its result. Raises what `run` raises, and StorageFailed.

        `run_id` is the run whose log it writes to, `reach` is what else it changes; `then` is called once it is
        committed, even if this call has been cancelled. While the disk does not respond, StorageFailed is raised at
        once.
        """
        if self._is_closed:
            raise _stopping_error()
        self._health.check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit(Transaction(run, future, run_id=run_id, reach=reach, then=then))
        return await future

    async def close(self) -> None:
        """Write all queued jobs, refuse later ones, and end every reader with ServerStopping."""
        self._is_closed = True
        await run_in_thread(self._writer.close)
        self._health.close()
        self._windows.close_readers(_stopping_error())
        self._engine.dispose()

    def _submit(self, job: Job) -> None:
        self._loop = job.future.get_loop()
        self._health.on_job_queued()
        self._writer.submit(job)

    def _report_health(self, is_failing: bool) -> None:
        assert self._loop is not None, "a job has failed, so one was submitted"
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._health.report_health, is_failing)

    def _settle(self, settled: Sequence[JobOutcome]) -> None:
        assert self._loop is not None, "a job is done, so one was submitted"
        with suppress(RuntimeError):  # the loop is closed, so no caller is waiting
            self._loop.call_soon_threadsafe(self._resolve, settled)

    def _resolve(self, settled: Sequence[JobOutcome]) -> None:
        self._health.on_jobs_done(len(settled))
        for outcome in settled:
            job = outcome.job
            if isinstance(job, Append):
                self._pending_bytes -= job.size
                if outcome.error is None:
                    self._windows.add(job.run_id, job.log_events)
                elif isinstance(outcome.error, StorageFailed):
                    self._windows.fail(job.run_id, outcome.error, epoch=job.epoch)
                elif isinstance(outcome.error, Fenced):
                    self._windows.release(job.run_id)
            elif outcome.error is None and job.then is not None:
                job.then()
            if outcome.error is None and job.run_id:
                self._notifier.publish(Topic.LOG, job.run_id)
            outcome.resolve()  # last: a caller that sees its write done must find readers up to date


def _stopping_error() -> ServerStopping:
    return ServerStopping("The server is stopping: try again when it is back.")
