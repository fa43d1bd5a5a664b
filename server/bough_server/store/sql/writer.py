"""The writer thread: commits all queued jobs as a group, in one transaction.

A failed commit is retried with the same rows, a bounded number of times. A job that still fails fences the log of its
run and no other: nothing later of that run is written under that epoch. While writes fail, groups without appends are
tried only once, and when nothing is queued the thread probes the disk until a write succeeds.
"""

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from sqlalchemy import Engine, text

from bough_server.clock import Clock
from bough_server.errors import BoughError, Fenced, StorageFailed
from bough_server.store.ports import RequestIdTaken, RunMoved, SessionMoved
from bough_server.store.sql.append import is_stored, write_appends
from bough_server.store.sql.driver import Driver, Reach, Refused, Session, Sharing
from bough_server.store.sql.failure_log import FailureLog, cause_of
from bough_server.store.sql.jobs import Append, Settled, Transaction
from bough_server.store.sql.log_heads import LogHeads, refusal
from bough_server.store.sql.statements import DriverCursor
from bough_server.threads import make_thread

Job = Append | Transaction[Any]

MAX_GROUP_JOBS: Final = 1024
MAX_GROUP_BYTES: Final = 8 * 1024 * 1024

PROBE_SECONDS: Final = 1.0
"""Seconds between two probes of the disk while writes fail."""

_RACES: Final = 5
"""How often a transaction is tried again at once because others were faster."""

_UNCHANGED: Final = text("UPDATE alembic_version SET version_num = version_num")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHooks:
    """Hooks for tests that delay a commit or make it fail: called on the writer thread right before and after it."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


class WriterThread:
    """Owns the writing connection, and commits jobs in the order they were submitted."""

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        heads: LogHeads,
        *,
        settle: Callable[[Sequence[Settled]], None],
        report_health: Callable[[bool], None],
        retry_delays: Sequence[float],
        hooks: CommitHooks,
        report_commit: Callable[[int, float], None] | None,
        clock: Clock,
    ) -> None:
        self._engine, self._driver, self._heads = engine, driver, heads
        self._settle, self._report_health, self._hooks = settle, report_health, hooks
        self._report_commit, self._clock = report_commit, clock
        self._retry_delays = tuple(retry_delays)
        self._is_failing = False
        self._failures = FailureLog(clock)
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._connection = engine.connect()
        self._thread = make_thread(self._work, name="bough-writer")
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; jobs are done in the order they were submitted."""
        self._queue.put(job)

    def close(self) -> None:
        """Write all queued jobs and end the thread; blocks until it has ended."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        is_open = True
        while is_open:
            job = self._next()
            group: list[Job] = []
            size = 0
            while job is not None:
                group.append(job)
                size += job.size if isinstance(job, Append) else 0
                if len(group) >= MAX_GROUP_JOBS or size >= MAX_GROUP_BYTES:
                    break
                try:
                    job = self._queue.get_nowait()
                except queue.Empty:
                    break
            is_open = job is not None
            if group:
                self._settle(self._commit(group))
        self._connection.close()

    def _next(self) -> Job | None:
        """Return the oldest job, waiting for one; None to end."""
        while self._is_failing:
            try:
                return self._queue.get(timeout=PROBE_SECONDS)
            except queue.Empty:
                self._probe()
        return self._queue.get()

    def _probe(self) -> None:
        """Test whether the disk can be written, by writing a row unchanged."""
        try:
            transaction = self._connection.begin()
            self._connection.execute(_UNCHANGED)
            if self._hooks.before is not None:
                self._hooks.before()
            transaction.commit()
        except Exception as error:
            self._failures.warn("storage still fails", error)
            self._roll_back()
        else:
            self._set_failing(is_failing=False)

    def _set_failing(self, *, is_failing: bool) -> None:
        if is_failing != self._is_failing:
            self._is_failing = is_failing
            self._report_health(is_failing)
            if not is_failing:
                _log.info("storage can be written again")
        if not is_failing:
            self._failures.clear()

    def _commit(self, group: Sequence[Job]) -> list[Settled]:
        """Commit a group, with retries; if that fails, commit each job alone."""
        settled = self._commit_group(group)
        if any(one.error is None for one in settled):
            self._set_failing(is_failing=False)
        return settled

    def _commit_group(self, group: Sequence[Job]) -> list[Settled]:
        error: Exception | None = None
        may_wait = not self._is_failing or any(isinstance(job, Append) for job in group)
        for delay in (0.0, *(self._retry_delays if may_wait else ())):
            if delay:
                self._closing.wait(delay)  # ends early, so that close() does not sit through the delays
            try:
                return self._attempt(group)
            except Exception as failed:
                error = failed
                if not self._driver.is_transient(failed):
                    break
                self._failures.warn("commit failed", failed)
                self._free_locks(failed)
        assert error is not None
        # One bad job must not fail the others. If others are in the way, each would only wait for the lock once more.
        if len(group) == 1 or self._driver.is_busy(error):
            return [self._failed(job, error) for job in group]
        return [self._commit_alone(job) for job in group]

    def _free_locks(self, error: Exception) -> None:
        if self._driver.free_locks is not None:
            try:
                self._driver.free_locks(self._connection, error)
            except Exception as failed:
                self._failures.warn("locks not freed", failed)
                self._roll_back()

    def _commit_alone(self, job: Job) -> Settled:
        try:
            (settled,) = self._attempt([job])
        except Exception as error:
            return self._failed(job, error)
        return settled

    def _attempt(self, group: Sequence[Job]) -> list[Settled]:
        """Commit a group in one transaction, again if another one was faster."""
        for _ in range(_RACES):
            try:
                return self._attempt_once(group)
            except Exception as failed:
                if not self._driver.is_raced(failed):
                    raise
                _log.info("another transaction was faster", error=cause_of(failed), jobs=len(group))
        return self._attempt_once(group)

    def _attempt_once(self, group: Sequence[Job]) -> list[Settled]:
        """Commit a group in one transaction; if an append is refused, once more with each append in a savepoint."""
        try:
            return self._transact(group, self._write_batch)
        except Refused:
            return self._transact(group, self._write_singly)

    def _transact(self, group: Sequence[Job], write: Callable[[Sequence[Append]], Iterator[Settled]]) -> list[Settled]:
        settled: list[Settled] = []
        started = self._clock.monotonic()
        connection = self._connection
        transaction = connection.begin()
        try:
            if self._driver.lock is not None and any(isinstance(job, Transaction) for job in group):
                self._lock(group, self._driver.lock)
            for segment in _segments(group):
                if isinstance(segment, Transaction):
                    settled.append(self._run(segment))
                else:
                    settled.extend(write(segment))
            if self._hooks.before is not None:
                self._hooks.before()
        except BaseException:
            self._roll_back()
            raise
        try:
            transaction.commit()
            if self._hooks.after is not None:
                self._hooks.after()
        except BaseException:
            # A commit may fail after its rows are on disk: a retry must look for them before it refuses an append.
            for job in group:
                if isinstance(job, Append):
                    job.is_uncertain = True
            self._roll_back()
            raise
        for job in group:
            if isinstance(job, Append):
                self._heads.committed(job)
        if self._report_commit is not None:
            self._report_commit(len(group), self._clock.monotonic() - started)
        return settled

    def _lock(self, group: Sequence[Job], lock: Callable[[DriverCursor, Reach], None]) -> None:
        """Lock whatever the jobs of a group may change, all at once; appends by themselves lock their runs."""
        sessions: set[Session] = set()
        sharing = Sharing.NOTHING
        for job in group:
            if isinstance(job, Transaction):
                sessions.update(job.reach.sessions)
                sharing = max(sharing, job.reach.sharing)
            elif job.has_blobs:
                sharing = max(sharing, Sharing.ADDS)
            if _moves_session(job) and (session := self._heads.session_of(self._connection, job.run_id)) is not None:
                sessions.add(session)
        runs = _runs_to_lock(group)
        if sessions or sharing or runs:
            with DriverCursor(self._connection) as cursor:
                lock(cursor, Reach(sessions=sessions, runs=runs, sharing=sharing))

    def _roll_back(self) -> None:
        """Roll back a failed transaction, if it is open; if that fails, replace the connection at its next use."""
        try:
            self._connection.rollback()
        except Exception as error:
            self._failures.warn("rollback failed", error)
            self._connection.invalidate()
            self._connection.rollback()  # SQLAlchemy reconnects only once the invalid transaction is rolled back

    def _run(self, transaction: Transaction[Any]) -> Settled:
        try:
            return Settled(transaction, transaction.run(self._connection))
        except (BoughError, SessionMoved, RunMoved, RequestIdTaken) as refused:
            if not isinstance(refused, Fenced | RunMoved):  # what an earlier attempt was about to create is not there
                self._heads.forget(transaction.run_id)
            return Settled(transaction, error=refused)

    def _write_batch(self, appends: Sequence[Append]) -> Iterator[Settled]:
        ready: list[Append] = []
        for append in appends:
            error = self._prepare(append)
            if error is None:
                ready.append(append)
            else:
                yield Settled(append, error=error)
        refused = write_appends(self._connection, self._driver, ready) if ready else ()
        for append in ready:
            yield Settled(append, error=self._refuse(append) if append.run_id in refused else None)

    def _write_singly(self, appends: Sequence[Append]) -> Iterator[Settled]:
        for append in appends:
            error = self._prepare(append)
            if error is None:
                error = self._write_one(append)
            yield Settled(append, error=error)

    def _write_one(self, append: Append) -> Exception | None:
        savepoint = self._connection.begin_nested()
        try:
            refused = write_appends(self._connection, self._driver, [append])
        except Refused:
            savepoint.rollback()
            return self._refuse(append)
        savepoint.commit()
        return self._refuse(append) if refused else None

    def _refuse(self, append: Append) -> Exception | None:
        """Return the error of an append that did not continue its log; None if an earlier attempt has written it."""
        if append.is_uncertain and is_stored(
            self._connection, run_id=append.run_id, epoch=append.epoch, records=append.records
        ):
            return None
        return self._heads.fence(append, refusal(append.run_id))

    def _prepare(self, append: Append) -> Exception | None:
        """Prepare an append to be written, or return the error that refuses it."""
        fence = self._heads.fence_of(append)
        # An append that was prepared before its transaction failed is not refused because of a later one that was.
        if fence is not None and (append.projected is None or isinstance(fence, StorageFailed)):
            return fence
        try:
            self._heads.prepare(self._connection, append)
        except BoughError as refused:
            return self._heads.fence(append, refused)
        return None

    def _failed(self, job: Job, error: Exception) -> Settled:
        """Fail a job; the driver's error goes only to the server's log."""
        if self._driver.is_transient(error):
            self._failures.warn("write given up", error, run_id=job.run_id)
            self._set_failing(is_failing=True)
        else:
            _log.error("write given up", run_id=job.run_id, exc_info=error)
        failure = StorageFailed("The server could not write to its storage; its log says why.")
        if isinstance(job, Append):
            return Settled(job, error=self._heads.fence_of(job) or self._heads.fence(job, failure))
        self._heads.forget(job.run_id)
        return Settled(job, error=failure)


def _moves_session(job: Job) -> bool:
    """Return True if a job may change the session of its run, and does not name it itself."""
    if isinstance(job, Transaction):
        return bool(job.run_id) and not job.reach.sessions
    return not job.has_only_deltas


def _runs_to_lock(group: Sequence[Job]) -> Collection[str]:
    """Return the runs that a group changes; a list of appends alone locks its runs in order itself."""
    segments = [*_segments(group)]
    if len(segments) == 1:
        return ()
    runs: set[str] = set()
    for segment in segments:
        runs.update(segment.reach.runs if isinstance(segment, Transaction) else (append.run_id for append in segment))
    return runs


def _segments(group: Sequence[Job]) -> Iterator[Transaction[Any] | list[Append]]:
    """Split a group, in order, into single transactions and lists of the consecutive appends between them."""
    appends: list[Append] = []
    for job in group:
        if isinstance(job, Append):
            appends.append(job)
            continue
        if appends:
            yield appends
            appends = []
        yield job
    if appends:
        yield appends
