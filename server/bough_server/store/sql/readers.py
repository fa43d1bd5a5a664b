"""A few threads that read, each with a connection of its own while it does; nothing here writes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from bough_server.errors import ServerStopping, StorageFailed
from bough_server.store.sql.engine import reader_engine

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Readers:
    """Runs reading functions off the event loop, a bounded number at once."""

    def __init__(self, path: Path, *, threads: int, busy_timeout: float) -> None:
        self._engine = reader_engine(path, connections=threads, busy_timeout=busy_timeout)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bough-reader")
        self._is_closed = False

    async def run(self, read: Callable[[Connection], T]) -> T:
        """What `read` gives. Raises what it raises, and StorageFailed where the database fails it."""
        if self._is_closed:
            raise ServerStopping("The store is closed: call again when the server is back.")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, read)

    def _run(self, read: Callable[[Connection], T]) -> T:
        try:
            with self._engine.connect() as connection:
                return read(connection)
        except SQLAlchemyError as error:
            _log.error("read failed", exc_info=error)
            raise StorageFailed("The server could not read its storage; its log says why.") from error

    async def close(self) -> None:
        """Lets reads in flight end, and refuses later ones."""
        self._is_closed = True
        await asyncio.to_thread(self._pool.shutdown)
        self._engine.dispose()
