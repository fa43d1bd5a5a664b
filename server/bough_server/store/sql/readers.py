"""Reader threads, and the reads of ranges of a log that run on them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from sqlalchemy import Connection, Engine, Select, bindparam, func, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from bough_server.clock import Clock
from bough_server.errors import NotFound, ServerStopping, StorageFailed
from bough_server.log import events
from bough_server.store.ports.log import StoredEvent
from bough_server.store.sql import tables
from bough_server.store.sql.failure_log import FailureLog, is_outage
from bough_server.store.window import PAGE_BYTES, PackedEvents
from bough_server.threads import make_pool, run_in_thread

T = TypeVar("T")

_log = structlog.get_logger(__name__)

MAX_READ_EVENTS: Final = 2048
"""The most events of one read: switching to a reader thread costs as much as reading a hundred events."""

NO_END: Final = 2**63 - 1

_CHUNK: Final = 16
"""How many events are fetched from the driver at once before their bytes are counted."""

IN_PIECES: Final[dict[str, Any]] = {"stream_results": True, "max_row_buffer": 64}
"""Execution options of a query with large rows: PostgreSQL's driver fetches a whole result otherwise."""

_events, _runs = tables.events.c, tables.runs.c

_WHICH: Final = (
    _events.run_id == bindparam("run"),
    _events.sequence > bindparam("after"),
    _events.sequence <= bindparam("through"),
)
_RANGE: Final = select(_events.kind, _events.data).where(*_WHICH).order_by(_events.sequence).limit(bindparam("count"))
_WITHOUT_DELTAS: Final = (
    select(_events.sequence, _events.kind, _events.data)
    .where(*_WHICH, _events.kind.not_in(sorted(events.DELTA_KINDS)))
    .order_by(_events.sequence)
    .limit(bindparam("count"))
)


def within_bytes(statement: Select[Any]) -> Select[Any]:
    """Return a query's rows in order, up to the one with which its last column exceeds `bytes`.

    The lengths of values are known without reading them.
    """
    rows = statement.add_columns(tables.events.c.sequence.label("place")).subquery()
    *_, data, place = rows.c
    size = func.octet_length(data)
    before = (func.sum(size).over(order_by=place, rows=(None, 0)) - size).label("before")
    counted = select(rows, before).subquery()
    shown = [counted.c[column.key] for column in list(rows.c)[:-1]]
    return select(*shown).where(counted.c.before <= bindparam("bytes")).order_by(counted.c.place)


_BOUNDED: Final = {statement: within_bytes(statement) for statement in (_RANGE, _WITHOUT_DELTAS)}
"""For PostgreSQL, whose driver fetches a whole result: only as many rows as exceed PAGE_BYTES."""

_END: Final = select(_runs.last_sequence, _runs.ended, _runs.epoch).where(_runs.run_id == bindparam("run"))

# Skips the named tuple's own __new__, which would run as Python code once per event.
_stored_event: Final = partial(tuple.__new__, StoredEvent)
_data: Final = itemgetter(-1)


class Readers:
    """Runs reading functions on a bounded number of threads."""

    def __init__(self, engine: Engine, *, threads: int, clock: Clock) -> None:
        self._engine = engine
        self._pool = make_pool("bough-reader", threads=threads)
        self._is_closed = False
        self._failures = FailureLog(clock)

    async def run(self, read: Callable[[Connection], T], *, is_logged: bool = True) -> T:
        """Return the result of `read`. Raises what `read` raises, and StorageFailed for errors of the database.

        An outage of the database is logged once a minute. Another error is logged whole, unless `is_logged` is False:
        the caller has logged it the last time.
        """
        if self._is_closed:
            raise ServerStopping("The store is closed: call again when the server is back.")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, read, is_logged)

    def _run(self, read: Callable[[Connection], T], is_logged: bool) -> T:
        try:
            try:
                return self._read(read)
            except DBAPIError as lost:
                if not lost.connection_invalidated:
                    raise
                return self._read(read)  # the connection was lost while nothing used it, such as by a restart
        except SQLAlchemyError as error:
            if is_outage(error):
                self._failures.warn("read failed", error)
            elif is_logged:
                _log.error("read failed", exc_info=error)
            raise StorageFailed("The server could not read its storage; its log says why.") from error

    def _read(self, read: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            found = read(connection)
            connection.commit()  # else the statistics of the database count a rollback
            return found

    async def close(self) -> None:
        """Wait for reads in progress, and refuse later ones."""
        self._is_closed = True
        await run_in_thread(self._pool.shutdown)
        self._engine.dispose()


def read_range(
    connection: Connection,
    *,
    run_id: str,
    after: int,
    through: int = NO_END,
    count: int = MAX_READ_EVENTS,
    deltas: bool = True,
) -> Sequence[StoredEvent]:
    """Read up to `count` events after a sequence, stopping once they exceed PAGE_BYTES; may be empty."""
    parameters = {"run": run_id, "after": after, "through": through, "count": count}
    if deltas:
        return PackedEvents(after + 1, _rows(connection, _RANGE, parameters))
    return list(map(_stored_event, _rows(connection, _WITHOUT_DELTAS, parameters)))


def _rows(connection: Connection, statement: Select[Any], parameters: Mapping[str, object]) -> list[Any]:
    """Fetch rows of a statement whose last column is the data, stopping once the data exceeds PAGE_BYTES."""
    if connection.dialect.name == "postgresql":
        statement, parameters = _BOUNDED[statement], {**parameters, "bytes": PAGE_BYTES}
    with connection.execute(statement, parameters) as result:
        # Fetch from the driver directly: making SQLAlchemy rows costs as much as reading them.
        cursor = result.cursor
        assert cursor is not None, "a query has a cursor until its result is closed"
        rows: list[Any] = []
        size = 0
        while size <= PAGE_BYTES and (chunk := cursor.fetchmany(_CHUNK)):
            rows += chunk
            size += sum(map(len, map(_data, chunk)))
    return rows


def read_range_of_run(
    connection: Connection, *, run_id: str, after: int, through: int, count: int, deltas: bool
) -> Sequence[StoredEvent]:
    """Read a range like `read_range`, of a run that must exist. Raises NotFound."""
    found = read_range(connection, run_id=run_id, after=after, through=through, count=count, deltas=deltas)
    if not found:
        read_end(connection, run_id=run_id)  # only to raise NotFound
    return found


class LogEnd(NamedTuple):
    """The last sequence of a log, whether the run has ended, and the epoch of its owner."""

    last_sequence: int
    is_ended: bool
    epoch: int


def read_end(connection: Connection, *, run_id: str) -> LogEnd:
    """Return the log's end. Raises NotFound."""
    row = connection.execute(_END, {"run": run_id}).one_or_none()
    if row is None:
        raise NotFound("run", run_id)
    return LogEnd(*row)


def read_range_and_end(connection: Connection, *, run_id: str, after: int) -> tuple[Sequence[StoredEvent], LogEnd]:
    """Read a range of a log, then its end. Raises NotFound.

    The end is read last, so that it is never behind the events.
    """
    found = read_range(connection, run_id=run_id, after=after)
    return found, read_end(connection, run_id=run_id)
