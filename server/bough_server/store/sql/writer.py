"""The writer thread: commits all queued jobs as a group, in one transaction.

A failed commit is retried with the same rows, a bounded number of times. If another transaction holds a lock, only jobs
that need it wait, and others pass them. A job that still fails fences the log of its run and no other: nothing later of
that run is written under that epoch. While writes fail, groups without appends are tried only once, and when nothing is
queued the thread probes the disk until a write succeeds.
"""

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from sqlalchemy import Engine, text

from bough_server.clock import Clock
from bough_server.errors import BoughError, Fenced, StorageFailed
from bough_server.store.ports.log import RequestIdTaken, RunMoved, SessionMoved
from bough_server.store.sql.append import is_stored, write_appends
from bough_server.store.sql.driver import Driver, Reach, Refused
from bough_server.store.sql.failure_log import FailureLog, cause_of
from bough_server.store.sql.jobs import Append, JobOutcome, Transaction
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
        settle: Callable[[Sequence[JobOutcome]], None],
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
        self._is_failing = self._is_ending = False
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
        while (job := self._wait_for_job()) is not None:
            self._commit([job, *self._drain_queue(job)])
        self._connection.close()

    def _drain_queue(self, *group: Job) -> list[Job]:
        """Return the jobs that are queued, in order, as many as a group takes besides some that it has already."""
        found: list[Job] = []
        size = sum(map(_size, group))
        while len(group) + len(found) < MAX_GROUP_JOBS and size < MAX_GROUP_BYTES and not self._is_ending:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._is_ending = True
            else:
                found.append(job)
                size += _size(job)
        return found

    def _wait_for_job(self) -> Job | None:
        """Return the oldest job, waiting for one; None to end."""
        while self._is_failing and not self._is_ending:
            try:
                return self._queue.get(timeout=PROBE_SECONDS)
            except queue.Empty:
                self._probe()
        return None if self._is_ending else self._queue.get()

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

    def _commit(self, group: Sequence[Job]) -> None:
        """Commit a group, with retries; if that fails, commit each job alone."""
        self._report(self._commit_group(group))

    def _report(self, settled: Sequence[JobOutcome]) -> None:
        """Report outcomes; none, if the database works but no job could be done yet."""
        if any(one.error is None for one in settled):
            self._set_failing(is_failing=False)
        self._settle(settled)

    def _commit_group(self, group: Sequence[Job]) -> list[JobOutcome]:
        error: Exception | None = None
        may_wait = not self._is_failing or any(isinstance(job, Append) for job in group)
        delays = [0.0, *(self._retry_delays if may_wait else ())]
        for retries_left, delay in zip(reversed(range(len(delays))), delays, strict=True):
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
                if self._driver.is_locked(failed):
                    # Those that are queued meanwhile, as long as they get a retry too if they have to wait.
                    done, group = self._commit_free_jobs([*group, *(self._drain_queue(*group) if retries_left else ())])
                    self._report(done)
        assert error is not None
        # One bad job must not fail the others. If others are in the way, each would only wait for the lock once more.
        if len(group) == 1 or self._driver.is_busy(error):
            return [self._fail_job(job, error) for job in group]
        self._failures.warn("a group of writes failed: each is tried alone", error, jobs=len(group))
        return [self._commit_alone(job) for job in group]

    def _commit_free_jobs(self, group: Sequence[Job]) -> tuple[list[JobOutcome], Sequence[Job]]:
        """Commit the jobs that need no lock which another transaction holds; return their outcomes, and the others."""
        free: Sequence[Job] = ()
        held = group
        try:
            free, held = self._part(group)
            if not free or not held:  # with nothing held any more, the next retry commits all
                return [], group
            return self._attempt(free), held
        except Exception as failed:
            self._roll_back()
            if self._driver.is_transient(failed):
                return [], group
            return [self._commit_alone(job) for job in free], held

    def _part(self, group: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """Part a group into jobs whose locks are free, and those that have to wait."""
        free: list[Job] = []
        held: list[Job] = []
        held_runs: set[str] = set()
        pending = [list(group)]
        while pending:
            jobs = pending.pop()
            runs, can_lock = self._try_locks(jobs, held_runs)
            if can_lock:
                free += jobs
            elif len(jobs) == 1:
                held += jobs
                held_runs |= runs
            else:  # by halves: nearly all are free, and to try each would keep the writer from renewing its lease
                middle = len(jobs) // 2
                pending += [jobs[middle:], jobs[:middle]]
        return free, held

    def _try_locks(self, jobs: Sequence[Job], held_runs: Collection[str]) -> tuple[set[str], bool]:
        """Return the runs of jobs, and whether all locks of the jobs are free."""
        with self._connection.begin() as transaction:
            reach = Reach.union(map(self._reach_of, jobs))
            runs = {*(job.run_id for job in jobs), *reach.runs} - {""}
            # What follows in the log of a run stays behind what waits, even if the lock has been freed since.
            can_lock = runs.isdisjoint(held_runs) and self._driver.can_lock(self._connection, reach)
            transaction.rollback()
        return runs, can_lock

    def _free_locks(self, error: Exception) -> None:
        if self._driver.free_locks is not None:
            try:
                self._driver.free_locks(self._connection, error)
            except Exception as failed:
                self._failures.warn("locks not freed", failed)
                self._roll_back()

    def _commit_alone(self, job: Job) -> JobOutcome:
        try:
            (settled,) = self._attempt([job])
        except Exception as error:
            return self._fail_job(job, error)
        return settled

    def _attempt(self, group: Sequence[Job]) -> list[JobOutcome]:
        """Commit a group in one transaction, again if another one was faster."""
        for _ in range(_RACES):
            try:
                return self._attempt_once(group)
            except Exception as failed:
                if not self._driver.is_raced(failed):
                    raise
                _log.info("retrying: a concurrent transaction committed first", error=cause_of(failed), jobs=len(group))
        return self._attempt_once(group)

    def _attempt_once(self, group: Sequence[Job]) -> list[JobOutcome]:
        """Commit a group in one transaction; if an append is refused, once more with each append in a savepoint."""
        try:
            return self._transact(group, self._write_batch)
        except Refused:
            return self._transact(group, self._write_singly)

    def _transact(
        self, group: Sequence[Job], write: Callable[[Sequence[Append]], Iterator[JobOutcome]]
    ) -> list[JobOutcome]:
        settled: list[JobOutcome] = []
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
                self._heads.on_commit(job)
        if self._report_commit is not None:
            self._report_commit(len(group), self._clock.monotonic() - started)
        return settled

    def _lock(self, group: Sequence[Job], lock: Callable[[DriverCursor, Reach], None]) -> None:
        """Lock all that the jobs of a group may change, at once; appends by themselves do so in their statements."""
        reach = Reach.union(map(self._reach_of, group))
        if len(group) == 1 and not reach.finds_runs:
            reach = replace(reach, runs=())  # a single run is locked by the statement that reads its row
        if not reach.is_nothing:
            with DriverCursor(self._connection) as cursor:
                lock(cursor, reach)

    def _reach_of(self, job: Job) -> Reach:
        """Return all that a job changes, its run and the session of that among it."""
        moved = self._heads.session_of(self._connection, job.run_id) if _moves_session(job) else None
        sessions = [] if moved is None else [moved]
        if isinstance(job, Append):
            return replace(job.reach, sessions=sessions, runs=[job.run_id])
        return replace(job.reach, sessions=[*job.reach.sessions, *sessions])

    def _roll_back(self) -> None:
        """Roll back a failed transaction, if it is open; if that fails, replace the connection at its next use."""
        try:
            self._connection.rollback()
        except Exception as error:
            self._failures.warn("rollback failed", error)
            self._connection.invalidate()
            self._connection.rollback()  # SQLAlchemy reconnects only once the invalid transaction is rolled back

    def _run(self, transaction: Transaction[Any]) -> JobOutcome:
        try:
            return JobOutcome(transaction, transaction.run(self._connection))
        except (BoughError, SessionMoved, RunMoved, RequestIdTaken) as refused:
            if not isinstance(refused, Fenced | RunMoved):  # what an earlier attempt was about to create is not there
                self._heads.forget(transaction.run_id)
            return JobOutcome(transaction, error=refused)

    def _write_batch(self, appends: Sequence[Append]) -> Iterator[JobOutcome]:
        ready: list[Append] = []
        for append in appends:
            error = self._prepare(append)
            if error is None:
                ready.append(append)
            else:
                yield JobOutcome(append, error=error)
        refused = write_appends(self._connection, self._driver, ready) if ready else ()
        for append in ready:
            yield JobOutcome(append, error=self._refuse(append) if append.run_id in refused else None)

    def _write_singly(self, appends: Sequence[Append]) -> Iterator[JobOutcome]:
        for append in appends:
            error = self._prepare(append)
            if error is None:
                error = self._write_append(append)
            yield JobOutcome(append, error=error)

    def _write_append(self, append: Append) -> Exception | None:
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
            self._connection, run_id=append.run_id, epoch=append.epoch, log_events=append.log_events
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

    def _fail_job(self, job: Job, error: Exception) -> JobOutcome:
        """Fail a job; the driver's error goes only to the server's log."""
        if self._driver.is_transient(error):
            self._failures.warn("write given up", error, run_id=job.run_id)
            if not self._driver.is_locked(error):  # the database works: it is these rows that cannot be written
                self._set_failing(is_failing=True)
        else:
            _log.error("write given up", run_id=job.run_id, exc_info=error)
        failure = StorageFailed("The server could not write to its storage; its log says why.")
        if isinstance(job, Append):
            return JobOutcome(job, error=self._heads.fence_of(job) or self._heads.fence(job, failure))
        self._heads.forget(job.run_id)
        return JobOutcome(job, error=failure)


def _size(job: Job) -> int:
    return job.size if isinstance(job, Append) else 0


def _moves_session(job: Job) -> bool:
    """Return True if a job may change the session of its run, and does not name it itself."""
    if isinstance(job, Transaction):
        return bool(job.run_id) and not job.reach.sessions
    return not job.has_only_deltas


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
