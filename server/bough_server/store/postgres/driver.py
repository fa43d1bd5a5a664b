"""Appends to logs by psycopg, and the meaning of PostgreSQL's errors."""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from struct import Struct, pack
from typing import Any, Final

import psycopg
import structlog
from psycopg import errors, sql
from psycopg.adapt import Dumper
from psycopg.pq import Format
from sqlalchemy import Column, Connection, Integer, LargeBinary, Table, text
from sqlalchemy.exc import DBAPIError

from bough_server.store.sql.driver import Driver, EventTuple, LogMove, Reach, Session, Sharing, Values, build_lock_name
from bough_server.store.sql.rows import Row
from bough_server.store.sql.statements import DriverCursor

_log = structlog.get_logger(__name__)

_APPEND: Final = """
WITH wanted AS (
  SELECT * FROM unnest(%b::bigint[], %b::text[], %b::bigint[], %b::bigint[]) AS w(last, run_id, epoch, expected)
), locked AS (
  SELECT r.run_id FROM runs r JOIN wanted USING (run_id) ORDER BY r.run_id FOR UPDATE OF r
), moved AS (
  UPDATE runs r SET last_sequence = w.last FROM wanted w, locked l
  WHERE r.run_id = w.run_id AND l.run_id = w.run_id
    AND r.epoch = w.epoch AND r.last_sequence = w.expected AND NOT r.ended
  RETURNING r.run_id
), stored AS (
  INSERT INTO events (run_id, sequence, kind, data)
  SELECT e.* FROM unnest(%b::text[], %b::bigint[], %b::bigint[], %b::bytea[]) AS e(run_id, sequence, kind, data)
  JOIN moved USING (run_id)
)
SELECT run_id FROM moved
"""
"""One statement for a batch: it skips runs that another worker has taken over, and writes the others.

This relies on READ COMMITTED: the conditions are checked on the newest version of each row. The rows are locked in one
order, so that batches of several servers wait for one another and never deadlock.
"""


class _Array(bytes):
    """An array in PostgreSQL's binary format; the statement says of which type.

    psycopg would make it element by element in Python.
    """


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        return obj


psycopg.adapters.register_dumper(_Array, _ArrayDumper)

_HEAD: Final = Struct("!iiIii")
"""How many dimensions, whether there are NULLs, the type of the elements, how many, and the index of the first."""
_LENGTH: Final = Struct("!i")
_BIGINT, _TEXT, _BYTEA = 20, 25, 17


def _array(element: int, values: Sequence[bytes]) -> _Array:
    parts = [b""] * (2 * len(values))
    parts[::2] = map(_LENGTH.pack, map(len, values))
    parts[1::2] = values
    return _Array(b"".join((_HEAD.pack(1, 0, element, len(values), 1), *parts)))


def _numbers(values: Sequence[int]) -> _Array:
    parts = [8] * (2 * len(values))
    parts[1::2] = values
    return _Array(_HEAD.pack(1, 0, _BIGINT, len(values), 1) + pack("!" + "iq" * len(values), *parts))


def _texts(values: Iterable[str]) -> _Array:
    return _array(_TEXT, [value.encode() for value in values])


def _bytes(values: Sequence[bytes]) -> _Array:
    return _array(_BYTEA, values)


def _append_events(cursor: DriverCursor, moves: Mapping[str, LogMove], events: Sequence[EventTuple]) -> Collection[str]:
    lasts, run_ids, epochs, expected = zip(*moves.values(), strict=True)
    its_runs, sequences, kinds, data = zip(*events, strict=True)
    wanted = [_numbers(lasts), _texts(run_ids), _numbers(epochs), _numbers(expected)]
    rows = [_texts(its_runs), _numbers(sequences), _numbers(kinds), _bytes(data)]
    cursor.driver.execute(_APPEND, [*wanted, *rows])
    moved = {run_id for (run_id,) in cursor.driver.fetchall()}
    return moves.keys() - moved


def _insert_rows(cursor: DriverCursor, table: Table, rows: Sequence[Values]) -> None:
    assert isinstance(cursor.driver, psycopg.Cursor)
    names = sql.SQL(", ").join(map(sql.Identifier, table.columns.keys()))
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table.name), names)
    with cursor.driver.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _insert_at_once(cursor: DriverCursor, table: Table, rows: Sequence[Row]) -> None:
    columns: list[_Array] = []
    for column in table.columns:
        values: list[Any] = [row[column.name] for row in rows]
        make, _ = _kind(column)
        columns.append(make(values))
    cursor.driver.execute(_insert_of_arrays(table), columns)


@cache
def _insert_of_arrays(table: Table) -> str:
    names, types = ", ".join(table.columns.keys()), ", ".join(f"%b::{_kind(column)[1]}[]" for column in table.columns)
    return f"INSERT INTO {table.name} ({names}) SELECT * FROM unnest({types})"


def _kind(column: Column[Any]) -> tuple[Callable[[list[Any]], _Array], str]:
    """Return what makes an array of a column's values, and their type."""
    if isinstance(column.type, LargeBinary):
        return _bytes, "bytea"
    return (_numbers, "bigint") if isinstance(column.type, Integer) else (_texts, "text")


_FILES_LOCK: Final = 0x626F7567_00000003
"""The key of the advisory lock that is shared by those who refer to definitions and files, and taken by who deletes."""

_LOCK_FILES: Final = {
    Sharing.ADDS: "SELECT pg_advisory_xact_lock_shared(%b)",
    Sharing.DROPS: "SELECT pg_advisory_xact_lock(%b)",
}
_NAMES: Final = 2048
"""How many locks there are for names, so that PostgreSQL's table of locks cannot become full of them.

Names that share one lock wait for each other, which costs time and nothing else.
"""
_FIRST_NAME: Final = 0x626F7568_00000000
"""The key of the first of the advisory locks for names; the others follow it."""

_LOCK_NAMES: Final = """
SELECT pg_advisory_xact_lock(key) FROM (
  SELECT w.key FROM unnest(%b::bigint[], %b::text[]) AS w(key, revision)
  WHERE NOT EXISTS (SELECT FROM definitions d WHERE d.revision = w.revision) ORDER BY w.key
) AS ordered
"""
"""A definition that is there is not inserted, so runs of one agent do not wait for each other.

It stays there: a transaction that would delete it waits for the lock of files and definitions.
"""

_LOCK_SESSIONS: Final = """
SELECT FROM sessions s JOIN unnest(%b::text[], %b::text[]) AS w(tenant_id, session_id) USING (tenant_id, session_id)
ORDER BY s.tenant_id, s.session_id FOR UPDATE OF s
"""


_LOCK_RUNS: Final = """
SELECT FROM runs r JOIN unnest(%b::text[]) AS w(run_id) USING (run_id) ORDER BY r.run_id FOR UPDATE OF r
"""

_FIND_AND_LOCK_RUNS: Final = """
SELECT FROM runs r JOIN (
  SELECT unnest(%b::text[]) AS run_id
  UNION SELECT o.run_id FROM runs o JOIN unnest(%b::text[], %b::text[]) AS w(tenant_id, session_id)
    USING (tenant_id, session_id)
  UNION SELECT run_id FROM runs WHERE owner = ANY(%b::text[]) AND NOT ended
  UNION SELECT run_id FROM run_commands WHERE command_id = ANY(%b::bigint[])
) AS found USING (run_id) ORDER BY r.run_id FOR UPDATE OF r
"""


_FIRST_TENANT: Final = 0x626F7569_00000000
"""The key of the first of the advisory locks for tenants with quotas on runs, of which there are _NAMES too."""

_LOCK_TENANTS: Final = """
SELECT pg_advisory_xact_lock(key) FROM (SELECT w.key FROM unnest(%b::bigint[]) AS w(key) ORDER BY w.key) AS ordered
"""


def _lock(cursor: DriverCursor, reach: Reach) -> None:
    if reach.tenants:
        keys = [_key(tenant_id, first=_FIRST_TENANT) for tenant_id in reach.tenants]
        cursor.driver.execute(_LOCK_TENANTS, [_numbers(keys)])
    if reach.sharing is not Sharing.NOTHING:
        cursor.driver.execute(_LOCK_FILES[reach.sharing], [_FILES_LOCK])
    if reach.names or reach.revisions:
        keys = [
            _key(name) for name in (*reach.names, *(build_lock_name("definition", each) for each in reach.revisions))
        ]
        revisions = [*[""] * len(reach.names), *reach.revisions]
        cursor.driver.execute(_LOCK_NAMES, [_numbers(keys), _texts(revisions)])
    if reach.sessions:
        cursor.driver.execute(_LOCK_SESSIONS, _columns(reach.sessions))
    if reach.finds_runs:
        found = [*_columns(reach.runs_of_sessions), _texts(reach.runs_of_owners), _numbers([*reach.runs_of_commands])]
        cursor.driver.execute(_FIND_AND_LOCK_RUNS, [_texts(reach.runs), *found])
    elif reach.runs:
        cursor.driver.execute(_LOCK_RUNS, [_texts(reach.runs)])


_DO_NOT_WAIT: Final = text("SET LOCAL lock_timeout = '1ms'")
"""The shortest time that there is; 0 would be no limit."""


def _can_lock(connection: Connection, reach: Reach) -> bool:
    connection.execute(_DO_NOT_WAIT)
    try:
        with DriverCursor(connection) as cursor:
            _lock(cursor, reach)
    except errors.LockNotAvailable:
        return False
    return True


def _key(name: str, *, first: int = _FIRST_NAME) -> int:
    """Return the key of a name's lock; not by hash(), which is another one in each process."""
    return first + zlib.crc32(name.encode()) % _NAMES


def _columns(sessions: Collection[Session]) -> list[_Array]:
    return [_texts(tenant_id for tenant_id, _ in sessions), _texts(session_id for _, session_id in sessions)]


WRITER: Final = "bough writer"
"""How the names of all connections begin that write."""

_END_STUCK: Final = text(f"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name LIKE '{WRITER} %'
  AND state LIKE 'idle in transaction%' AND state_change < clock_timestamp() - interval '3 seconds'
""")
"""Ends transactions that their servers have abandoned, and frees their locks: the server stopped, or lost its network.

PostgreSQL's own idle_in_transaction_session_timeout does not see them: psycopg's executemany sends a message after
the end of its pipeline, which turns the timer off. The time is shorter than a writer retries for.
"""


def _free_locks(connection: Connection, error: Exception) -> None:
    if _is_locked(error):
        ended = connection.execute(_END_STUCK).all()
        connection.commit()
        if ended:
            _log.warning("rolled back abandoned transactions of other servers", transactions=len(ended))


def _cause(error: Exception) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


_UNAVAILABLE: Final = ("08", "53", "55", "57", "58", "25006", "25P03", "25P04")
"""Beginnings of the codes of a database that cannot write now.

08: the connection; 53: resources; 55: a lock was not available; 57: an operator intervened; 58: its system; 25006: it
reads only, such as after a failover; 25P03, 25P04: a transaction took too long.
"""


def _is_locked(error: Exception) -> bool:
    return getattr(_cause(error), "sqlstate", None) == errors.LockNotAvailable.sqlstate


def _is_raced(error: Exception) -> bool:
    """Return True for a deadlock, a serialization failure, and a row that another transaction has inserted first."""
    code = getattr(_cause(error), "sqlstate", None) or ""
    return code.startswith("40") or code == errors.UniqueViolation.sqlstate


def _is_transient(error: Exception) -> bool:
    cause = _cause(error)
    if isinstance(cause, psycopg.Error):
        if cause.sqlstate is None:  # from the driver: a lost connection, or a value that it cannot send
            return isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
        return cause.sqlstate.startswith(_UNAVAILABLE)
    return isinstance(cause, OSError)


POSTGRES: Final = Driver(
    append_events=_append_events,
    insert_rows=_insert_rows,
    insert_at_once=_insert_at_once,
    lock=_lock,
    can_lock=_can_lock,
    is_locked=_is_locked,
    is_transient=_is_transient,
    is_busy=_is_transient,
    is_raced=_is_raced,
    free_locks=_free_locks,
)
"""psycopg 3, synchronous."""
