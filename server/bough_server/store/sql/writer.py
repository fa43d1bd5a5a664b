"""The one thread that writes: it takes whatever is queued into one transaction; it knows no event loop but by its jobs.

A commit that fails is tried again in place, the same rows, a bounded number of times. What still fails stops its run's
log and no other's: nothing later of that run is written under that owner's epoch. While writes fail, commands are tried
once, and where nothing is queued the thread writes a row as it is, to find out when the disk is well again.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from bough_server.errors import BoughError, StorageFailed
from bough_server.store.ports import RequestIdTaken, RunMoved, SessionMoved
from bough_server.store.sql.append import Refused, is_stored, write_appends
from bough_server.store.sql.jobs import Append, Command, Settled
from bough_server.store.sql.log_heads import LogHeads, refusal

Job = Append | Command[Any]

MAX_GROUP_JOBS: Final = 1024
MAX_GROUP_BYTES: Final = 8 * 1024 * 1024

_PROBE_SECONDS: Final = 1.0
_UNCHANGED: Final = text("UPDATE alembic_version SET version_num = version_num")

_TRANSIENT: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
    }
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHooks:
    """Where a test holds a commit or lets it fail: called on the writer's thread, right before and right after it."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


class WriterThread:
    """Owns the writing connection and the order of what is written."""

    def __init__(
        self,
        engine: Engine,
        heads: LogHeads,
        *,
        settle: Callable[[Sequence[Settled]], None],
        tell: Callable[[bool], None],
        retry_delays: Sequence[float],
        hooks: CommitHooks,
    ) -> None:
        self._engine, self._heads, self._settle, self._tell, self._hooks = engine, heads, settle, tell, hooks
        self._retry_delays = tuple(retry_delays)
        self._is_failing = False
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._connection = engine.connect()
        self._thread = threading.Thread(target=self._work, name="bough-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; it is settled after every job before it."""
        self._queue.put(job)

    def close(self) -> None:
        """Writes what is queued, and ends; blocks."""
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
        """The job that has waited longest; None to end."""
        while self._is_failing:
            try:
                return self._queue.get(timeout=_PROBE_SECONDS)
            except queue.Empty:
                self._probe()
        return self._queue.get()

    def _probe(self) -> None:
        """Writes what changes nothing, to see whether that can be written."""
        try:
            transaction = self._connection.begin()
            self._connection.execute(_UNCHANGED)
            if self._hooks.before is not None:
                self._hooks.before()
            transaction.commit()
        except Exception as error:
            _log.warning("storage still fails", error=str(error))
            self._roll_back()
        else:
            self._turn(is_failing=False)

    def _turn(self, *, is_failing: bool) -> None:
        if is_failing != self._is_failing:
            self._is_failing = is_failing
            self._tell(is_failing)

    def _commit(self, group: Sequence[Job]) -> list[Settled]:
        """Commits a group, with patience; then whoever can be committed alone."""
        settled = self._committed(group)
        if any(one.error is None for one in settled):
            self._turn(is_failing=False)
        return settled

    def _committed(self, group: Sequence[Job]) -> list[Settled]:
        error: Exception | None = None
        is_patient = not self._is_failing or any(isinstance(job, Append) for job in group)
        for delay in (0.0, *(self._retry_delays if is_patient else ())):
            if delay:
                self._closing.wait(delay)
            try:
                return self._attempt(group)
            except Exception as failed:
                error = failed
                if not _is(failed, _TRANSIENT):
                    break
                _log.warning("commit failed", error=str(failed), jobs=len(group))
        assert error is not None
        if len(group) == 1 or _is(error, {sqlite3.SQLITE_BUSY}):
            return [self._failed(job, error) for job in group]
        return [self._alone(job) for job in group]

    def _alone(self, job: Job) -> Settled:
        try:
            (settled,) = self._attempt([job])
        except Exception as error:
            return self._failed(job, error)
        return settled

    def _attempt(self, group: Sequence[Job]) -> list[Settled]:
        """One transaction for a group; again, job by job, where some append of it is refused."""
        try:
            return self._transact(group, self._write_batch)
        except Refused:
            return self._transact(group, self._write_singly)

    def _transact(self, group: Sequence[Job], write: Callable[[Sequence[Append]], Iterator[Settled]]) -> list[Settled]:
        settled: list[Settled] = []
        connection = self._connection
        transaction = connection.begin()
        try:
            for segment in _segments(group):
                if isinstance(segment, Command):
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
            for job in group:
                if isinstance(job, Append):
                    job.is_uncertain = True
            self._roll_back()
            raise
        for job in group:
            if isinstance(job, Append):
                self._heads.committed(job)
        return settled

    def _roll_back(self) -> None:
        """Ends a transaction that failed, if it is open; a connection that cannot is replaced at its next use."""
        try:
            self._connection.rollback()
        except Exception as error:
            _log.warning("rollback failed", error=str(error))
            self._connection.invalidate()
            self._connection.rollback()

    def _run(self, command: Command[Any]) -> Settled:
        try:
            return Settled(command, command.run(self._connection))
        except (BoughError, SessionMoved, RunMoved, RequestIdTaken) as refused:
            return Settled(command, error=refused)

    def _write_batch(self, appends: Sequence[Append]) -> Iterator[Settled]:
        ready: list[Append] = []
        for append in appends:
            error = self._prepare(append)
            if error is None:
                ready.append(append)
            else:
                yield Settled(append, error=error)
        if ready:
            write_appends(self._connection, ready)
        for append in ready:
            yield Settled(append)

    def _write_singly(self, appends: Sequence[Append]) -> Iterator[Settled]:
        for append in appends:
            error = self._prepare(append)
            if error is None:
                error = self._write_one(append)
            yield Settled(append, error=error)

    def _write_one(self, append: Append) -> Exception | None:
        savepoint = self._connection.begin_nested()
        try:
            write_appends(self._connection, [append])
        except Refused:
            savepoint.rollback()
            if append.is_uncertain and is_stored(
                self._connection, run_id=append.run_id, epoch=append.epoch, records=append.records
            ):
                return None
            return self._heads.poison(append, refusal(append.run_id))
        savepoint.commit()
        return None

    def _prepare(self, append: Append) -> Exception | None:
        """Makes an append ready to be written, or says why it is refused."""
        poison = self._heads.poison_of(append)
        # One that was ready before its transaction failed is not refused for what was refused behind it.
        if poison is not None and (append.projected is None or isinstance(poison, StorageFailed)):
            return poison
        try:
            self._heads.prepare(self._connection, append)
        except BoughError as refused:
            return self._heads.poison(append, refused)
        return None

    def _failed(self, job: Job, error: Exception) -> Settled:
        """Gives up a job; the driver's words go to the server's log only."""
        _log.error("write given up", run_id=job.run_id, exc_info=error)
        if _is(error, _TRANSIENT):
            self._turn(is_failing=True)
        failure = StorageFailed("The server could not write to its storage; its log says why.")
        if isinstance(job, Append):
            return Settled(job, error=self._heads.poison_of(job) or self._heads.poison(job, failure))
        self._heads.forget(job.run_id)
        return Settled(job, error=failure)


def _segments(group: Sequence[Job]) -> Iterator[Command[Any] | list[Append]]:
    """A group in its order: commands one by one, and the appends between them together."""
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


def _is(error: Exception, codes: "frozenset[int] | set[int]") -> bool:
    """Whether an error is one of SQLite's, of the given primary result codes, or the operating system's."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in codes
    return isinstance(cause, OSError) and sqlite3.SQLITE_IOERR in codes
