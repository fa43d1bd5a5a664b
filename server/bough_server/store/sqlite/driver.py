"""Appends to logs by SQLite's driver, and the meaning of its errors."""

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from sqlalchemy import Insert, Table, Update, bindparam, insert, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

from bough_server.store.sql import tables
from bough_server.store.sql.driver import Driver, EventTuple, LogMove, Refused, Values
from bough_server.store.sql.statements import DriverCursor

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


def _compile(statement: Update | Insert, *order: str) -> str:
    """Compile a statement to text for the driver, for rows whose values are in this order.

    Appends bypass SQLAlchemy's execution, which costs as much time as SQLite itself.
    """
    compiled = statement.compile(dialect=sqlite.dialect())
    assert isinstance(compiled, SQLCompiler)
    assert tuple(compiled.positiontup or ()) == order, f"the parameters are {compiled.positiontup}"
    return str(compiled)


_runs = tables.runs.c
_COMPARE_AND_SET: Final = _compile(
    update(tables.runs)
    .where(
        _runs.run_id == bindparam("run"),
        _runs.epoch == bindparam("own_epoch"),
        _runs.last_sequence == bindparam("expected"),
        ~_runs.ended,
    )
    .values(last_sequence=bindparam("last")),
    *("last", "run", "own_epoch", "expected"),
)
_INSERT_EVENTS: Final = _compile(insert(tables.events), "run_id", "sequence", "kind", "data")


def _append_events(cursor: DriverCursor, moves: Mapping[str, LogMove], events: Sequence[EventTuple]) -> Collection[str]:
    cursor.driver.executemany(_COMPARE_AND_SET, tuple(moves.values()))
    # executemany sums the row counts, so this says that a log did not match, but not which one.
    if cursor.driver.rowcount != len(moves):
        raise Refused
    cursor.driver.executemany(_INSERT_EVENTS, events)
    return ()


def _insert_rows(cursor: DriverCursor, table: Table, rows: Sequence[Values]) -> None:
    cursor.driver.executemany(_compile(insert(table), *table.columns.keys()), rows)


def _has_code(error: Exception, codes: "frozenset[int] | set[int]") -> bool:
    """Return True for an SQLite error with one of these primary result codes; OSError counts as SQLITE_IOERR."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in codes  # the low byte of an extended code
    return isinstance(cause, OSError) and sqlite3.SQLITE_IOERR in codes


SQLITE: Final = Driver(
    append_events=_append_events,
    insert_rows=_insert_rows,
    insert_at_once=None,
    lock=None,
    can_lock=lambda connection, reach: True,
    is_locked=lambda error: False,
    is_transient=lambda error: _has_code(error, _TRANSIENT),
    is_busy=lambda error: _has_code(error, {sqlite3.SQLITE_BUSY}),
    is_raced=lambda error: False,
    free_locks=None,
)
"""The driver of the standard library."""
