"""The append case's floor: a bare sqlite3 writer thread with group commit of the same bytes, and nothing else."""

import asyncio
import queue
import sqlite3
import threading
from pathlib import Path
from typing import Final

Row = tuple[str, int, int, bytes]
Job = tuple[Row, asyncio.Future[None]]

_MAKE: Final = (
    "CREATE TABLE events (run_id TEXT, sequence INTEGER, kind INTEGER, data BLOB, PRIMARY KEY (run_id, sequence)) "
    "WITHOUT ROWID"
)
_INSERT: Final = "INSERT INTO events VALUES (?, ?, ?, ?)"


class BareWriter:
    """Commits whatever is queued; `commits` counts how often it did."""

    def __init__(self, path: Path, *, synchronous: str) -> None:
        self.commits = 0
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {synchronous}")
        self._connection.execute(_MAKE)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def append(self, row: Row) -> asyncio.Future[None]:
        """Queues a row; the future is done when it is committed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put((row, future))
        return future

    def close(self) -> None:
        """Ends the thread."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            group = [job]
            while not self._queue.empty() and (job := self._queue.get()) is not None:
                group.append(job)
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, [row for row, _ in group])
            self._connection.execute("COMMIT")
            self.commits += 1
            group[0][1].get_loop().call_soon_threadsafe(_resolve, group)
            if job is None:
                return


def _resolve(group: list[Job]) -> None:
    for _, future in group:
        future.set_result(None)
