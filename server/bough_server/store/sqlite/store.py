"""A SQLite file as the server's store: open, lock and migrate it."""

import asyncio
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import event

from bough_server.store.sql.notifications import Notifier
from bough_server.store.sql.options import StoreOptions
from bough_server.store.sql.ownership import end_leases
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.store import Store
from bough_server.store.sql.write_queue import WriteHealth, WriteQueue
from bough_server.store.sqlite.database import make_folder, migrate, reader_engine, translate_errors, writer_engine
from bough_server.store.sqlite.database_path import database_path
from bough_server.store.sqlite.driver import SQLITE
from bough_server.store.sqlite.file_lock import FileLock
from bough_server.store.window import RecentEventsOfRuns

_FILE_SECONDS: Final = 0.5
"""Seconds between two looks at the database file's name."""

_log = structlog.get_logger(__name__)


class _FileGuard:
    """The lock of a database file, and the look at the names of its files."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self._lock = lock
        self._path, self._paths = path, [path.with_name(path.name + ending) for ending in ("", "-wal", "-shm")]
        self._files: dict[Path, tuple[int, int]] = {}
        self._find_lost_file()

    def on_connect(self, *_: object) -> None:
        """Forget the other files: SQLite removes them with the last connection, and makes them with the next."""
        self._files = {path: found for path, found in self._files.items() if path == self._path}

    def publish(self, address: str) -> None:
        """See Guard."""
        self._lock.publish(address)

    def release(self) -> None:
        """See Guard."""
        self._lock.release()

    async def watch(self, write_health: WriteHealth) -> None:
        """See Guard. The file may be deleted or replaced, and its write-ahead log and the index of that too.

        SQLite continues to write to the files that it has open, and all of that would be lost with the process.
        """
        lost: Path | None = None
        while True:
            found = self._find_lost_file()
            if found and not lost:
                _log.error(
                    "the database file was deleted or replaced while the server uses it: "
                    "put it back, or stop the server; what it writes now is lost",
                    path=str(found),
                )
            elif lost and not found:
                _log.warning("the database file is back", path=str(lost))
            lost = found
            write_health.report_missing_file(found is not None)
            await asyncio.sleep(_FILE_SECONDS)

    def _find_lost_file(self) -> Path | None:
        """Return a file that is no longer the one that had its name when it was first there; None without one."""
        for path in self._paths:
            found = _identity(path)
            if found != self._files.get(path, found):
                return path
            if found is not None:
                self._files[path] = found
        return None


def open_sqlite(url: str, options: StoreOptions) -> Store:
    """Open a database file, creating or migrating it if necessary.

    Raises ConfigurationError with advice if the file cannot be used: another process uses it, its schema is newer than
    this version or too old for it, it is not a database, or it is not writable.
    """
    path = database_path(url)
    make_folder(path)
    lock = FileLock(path)
    try:
        engine = writer_engine(path, durability=options.durability, busy_timeout=options.busy_timeout)
        try:
            migrate(engine, path, may_upgrade=options.may_upgrade)
            with translate_errors(path), engine.begin() as connection:
                crashed = end_leases(connection)  # with the lock held, every worker with a lease has crashed
        except BaseException:
            engine.dispose()
            raise
    except BaseException:
        lock.release()
        raise
    guard = _FileGuard(path, lock)
    event.listen(engine, "connect", guard.on_connect)
    windows = RecentEventsOfRuns(options.window_bytes)
    write_health = WriteHealth(stall_seconds=options.stall_seconds)
    notifier = Notifier()
    queue = WriteQueue(
        engine,
        SQLITE,
        windows,
        write_health,
        notifier=notifier,
        retry_delays=options.retry_delays,
        hooks=options.hooks,
        report_commit=options.report_commit,
        clock=options.clock,
    )
    readers = Readers(
        reader_engine(path, connections=options.reader_threads, busy_timeout=options.busy_timeout),
        threads=options.reader_threads,
        clock=options.clock,
    )
    return Store(
        guard,
        queue,
        readers,
        windows=windows,
        write_health=write_health,
        crashed=crashed,
        notifier=notifier,
        clock=options.clock,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the number of the file that has a path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
