"""A SQLite file as the server's store: opened, migrated and locked here, and closed in order."""

from collections.abc import Sequence
from typing import Final, Self

from sqlalchemy import Connection

from bough_server.store.sql.agents import SqlAgents, SqlCatalog
from bough_server.store.sql.database import (
    Durability,
    FileLock,
    database_path,
    make_folder,
    migrate,
    opening,
    writer_engine,
)
from bough_server.store.sql.event_log import SqlEventLog
from bough_server.store.sql.mailbox import SqlMailbox
from bough_server.store.sql.ownership import SqlLease, end_leases
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.runs import SqlRunIndex
from bough_server.store.sql.sessions import SqlSessions
from bough_server.store.sql.usage import SqlUsageLedger
from bough_server.store.sql.write_queue import STALL_SECONDS, WriteQueue, Writing
from bough_server.store.sql.writer import CommitHooks
from bough_server.store.window import RecentEventsOfRuns

WINDOW_BYTES: Final = 8 * 1024 * 1024
"""How much of the live runs' logs is kept in memory for their readers, over all runs."""

READER_THREADS: Final = 4
BUSY_TIMEOUT: Final = 2.0
RETRY_DELAYS: Final = (0.05, 0.2, 0.5)


class Store:
    """Every port of the store, on one file that this process alone writes; closed at the end of `async with`."""

    def __init__(
        self,
        lock: FileLock,
        queue: WriteQueue,
        readers: Readers,
        *,
        windows: RecentEventsOfRuns,
        writing: Writing,
        crashed: frozenset[str],
    ) -> None:
        self.log = SqlEventLog(queue, readers, windows)
        self.runs = SqlRunIndex(readers)
        self.sessions = SqlSessions(queue, readers)
        self.catalog = SqlCatalog(readers)
        self.agents = SqlAgents(queue, readers)
        self.usage = SqlUsageLedger(readers)
        self.leases = SqlLease(queue, readers, crashed)
        self.mailbox = SqlMailbox(queue, readers)
        self.writing = writing
        self._lock, self._queue, self._readers = lock, queue, readers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def synchronous(self) -> int:
        """SQLite's `synchronous` of the connection that writes: 2 survives a power cut, 1 a killed process."""
        return await self._queue.execute(_synchronous)

    async def close(self) -> None:
        """Writes what is queued, ends readers with ServerStopping, and gives the file back."""
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
    """Opens a database file, made or migrated where it has to be.

    `busy_timeout` and `retry_delays` (seconds) bound how long a commit that fails is tried again; one that takes longer
    than `stall_seconds` is taken for a disk that does not answer. Raises ConfigurationError, with what to do, where the
    file cannot be used: another process has it, it is newer than this version, no database, or not writable.
    """
    path = database_path(url)
    make_folder(path)
    lock = FileLock(path)
    try:
        engine = writer_engine(path, durability=durability, busy_timeout=busy_timeout)
        try:
            migrate(engine, path)
            with opening(path), engine.begin() as connection:
                crashed = end_leases(connection)
        except BaseException:
            engine.dispose()
            raise
    except BaseException:
        lock.release()
        raise
    windows = RecentEventsOfRuns(window_bytes)
    writing = Writing(stall_seconds=stall_seconds)
    queue = WriteQueue(engine, windows, writing, retry_delays=retry_delays, hooks=hooks or CommitHooks())
    readers = Readers(path, threads=READER_THREADS, busy_timeout=busy_timeout)
    return Store(lock, queue, readers, windows=windows, writing=writing, crashed=crashed)


def _synchronous(connection: Connection) -> int:
    return int(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())
