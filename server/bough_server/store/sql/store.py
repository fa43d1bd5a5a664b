"""A SQLite file as the server's store: open, lock and migrate it, and close everything in order."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

import structlog
from sqlalchemy import Connection

from bough_server.store.sql.agents import SqlAgents, SqlCatalog
from bough_server.store.sql.blobs import SqlBlobs
from bough_server.store.sql.database import (
    Durability,
    make_folder,
    migrate,
    opening,
    writer_engine,
)
from bough_server.store.sql.database_path import database_path
from bough_server.store.sql.evaluations import SqlEvaluations
from bough_server.store.sql.event_log import SqlEventLog
from bough_server.store.sql.file_lock import FileLock
from bough_server.store.sql.mailbox import SqlMailbox
from bough_server.store.sql.ownership import SqlLease, end_leases
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.runs import SqlRunIndex
from bough_server.store.sql.sessions import SqlSessions
from bough_server.store.sql.usage import SqlUsageLedger
from bough_server.store.sql.write_queue import STALL_SECONDS, WriteHealth, WriteQueue
from bough_server.store.sql.writer import CommitHooks
from bough_server.store.window import RecentEventsOfRuns

WINDOW_BYTES: Final = 8 * 1024 * 1024
"""Bytes of recent events kept in memory for readers, over all live runs."""

READER_THREADS: Final = 4

BUSY_TIMEOUT: Final = 2.0
"""Seconds that SQLite waits for a lock of another connection."""

_FILE_SECONDS: Final = 0.5
"""Seconds between two looks at the database file's name."""

RETRY_DELAYS: Final = (0.05, 0.2, 0.5)
"""Seconds before each retry of a failed commit."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Store:
    """All ports of the store, on one file that only this process writes; an async context manager that closes it."""

    def __init__(
        self,
        path: Path,
        lock: FileLock,
        queue: WriteQueue,
        readers: Readers,
        *,
        windows: RecentEventsOfRuns,
        write_health: WriteHealth,
        crashed: frozenset[str],
    ) -> None:
        self.log = SqlEventLog(queue, readers, windows)
        self.runs = SqlRunIndex(readers)
        self.evaluations = SqlEvaluations(queue, readers)
        self.catalog = SqlCatalog(readers)
        self.sessions = SqlSessions(queue, readers, on_delete=self.catalog.clear)
        self.blobs = SqlBlobs(readers)
        self.agents = SqlAgents(queue, readers)
        self.usage = SqlUsageLedger(readers)
        self.leases = SqlLease(queue, readers, crashed)
        self.mailbox = SqlMailbox(queue, readers)
        self.write_health = write_health
        self._lock, self._queue, self._readers = lock, queue, readers
        self._path, self._file = path, _identity(path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def publish(self, address: str, *, is_passing: bool = False) -> None:
        """Name the address that serves the file in its lock, for commands that find it locked; empty: none does.

        `is_passing` for a server inside a command, which ends with that.
        """
        self._lock.publish(address, is_passing=is_passing)

    async def write(self, run: Callable[[Connection], T]) -> T:
        """Run a transaction on the writing connection, in order with all other writes, and return its result."""
        return await self._queue.execute(run)

    async def watch_file(self) -> None:
        """Report writes as impossible whenever the database file has been deleted or replaced, until cancelled.

        SQLite continues to write to the file that it has open, and all of that would be lost with the process.
        """
        was_lost = False
        while True:
            is_lost = _identity(self._path) != self._file
            if is_lost and not was_lost:
                _log.error(
                    "the database file was deleted or replaced while the server uses it: "
                    "put it back, or stop the server; what it writes now is lost",
                    path=str(self._path),
                )
            elif was_lost and not is_lost:
                _log.warning("the database file is back", path=str(self._path))
            was_lost = is_lost
            self.write_health.report_lost(is_lost)
            await asyncio.sleep(_FILE_SECONDS)

    async def close(self) -> None:
        """Write all queued jobs, end readers with ServerStopping, and release the file."""
        self.mailbox.close()
        await self._queue.close()
        await self._readers.close()
        self._lock.release()


def open_store(
    url: str,
    *,
    durability: Durability = "disk",
    window_bytes: int = WINDOW_BYTES,
    busy_timeout: float = BUSY_TIMEOUT,
    retry_delays: Sequence[float] = RETRY_DELAYS,
    stall_seconds: float = STALL_SECONDS,
    hooks: CommitHooks | None = None,
) -> Store:
    """Open a database file, creating or migrating it if necessary.

    `busy_timeout` and `retry_delays` (seconds) bound how long a failing commit is retried. If a write takes longer than
    `stall_seconds`, the disk is taken not to respond. Raises ConfigurationError with advice if the file cannot be used:
    another process uses it, its schema is newer than this version or too old for it, it is not a database, or it is not
    writable.
    """
    path = database_path(url)
    make_folder(path)
    lock = FileLock(path)
    try:
        engine = writer_engine(path, durability=durability, busy_timeout=busy_timeout)
        try:
            migrate(engine, path)
            with opening(path), engine.begin() as connection:
                crashed = end_leases(connection)  # with the lock held, every worker with a lease has crashed
        except BaseException:
            engine.dispose()
            raise
    except BaseException:
        lock.release()
        raise
    windows = RecentEventsOfRuns(window_bytes)
    write_health = WriteHealth(stall_seconds=stall_seconds)
    queue = WriteQueue(engine, windows, write_health, retry_delays=retry_delays, hooks=hooks or CommitHooks())
    readers = Readers(path, threads=READER_THREADS, busy_timeout=busy_timeout)
    return Store(path, lock, queue, readers, windows=windows, write_health=write_health, crashed=crashed)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the number of the file that has a path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
