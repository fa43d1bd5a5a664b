"""Copy all rows of a database into an empty one, of the same kind or the other.

Leases are rows too. No server holds one while a database is copied, so the first server at the target finds their
workers dead, and continues their runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Table, exists, func, select
from sqlalchemy.exc import DBAPIError

from bough_server.errors import ConfigurationError
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Driver, Values
from bough_server.store.sql.failure_log import cause_of
from bough_server.store.sql.statements import DriverCursor

BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 4 * 1024 * 1024
"""Rows are written together up to one of these bounds; a larger row is written alone."""

_FETCHED_ROWS: Final = 64
"""How many rows are fetched at once; an event has 1 MiB at most."""

Report = Callable[[str, int], None]
"""Called with a table and the number of its rows that have been copied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnd:
    """A database that is copied from or to, in a transaction that nothing else disturbs."""

    name: str
    """How messages call it."""
    connection: Connection
    driver: Driver

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors of the database: as SQLAlchemy raises them, and as its driver does."""
        return DBAPIError, self.connection.dialect.loaded_dbapi.Error


def copy_rows(source: CopyEnd, target: CopyEnd, report: Report) -> Mapping[str, int]:
    """Copy all rows in order of their keys; return the number of rows by table.

    Raises ConfigurationError if the target has rows already, if the source cannot be read, and if the target refuses a
    row, which the message names. The caller rolls back then.
    """
    _check_empty(target)
    # Triggers make the index of labels again.
    every = (table for table in tables.metadata.sorted_tables if table is not tables.labels)
    copied = {table.name: _copy_table(table, source, target, report) for table in every}
    _advance_sequences(target.connection)
    return copied


def _check_empty(target: CopyEnd) -> None:
    every = tables.metadata.sorted_tables
    if used := [table.name for table in every if target.connection.execute(select(exists(select(table)))).scalar()]:
        raise ConfigurationError(
            f"The database {target.name} is not empty, it has rows in {', '.join(used)}: copy to one that is empty or "
            "does not exist yet."
        )


def _copy_table(table: Table, source: CopyEnd, target: CopyEnd, report: Report) -> int:
    copied = 0
    for batch in _batches(table, source):
        _write(table, batch, target)
        copied += len(batch)
        report(table.name, copied)
    return copied


def _batches(table: Table, source: CopyEnd) -> Iterator[Sequence[Values]]:
    """Yield the rows of a table, as many at a time as are written together."""
    batch: list[Values] = []
    size = 0
    last: Values | None = None
    try:
        for row in _rows(table, source.connection):
            row_size = sum(len(value) for value in row if isinstance(value, bytes | str))
            if batch and (len(batch) == BATCH_ROWS or size + row_size > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(row)
            size += row_size
            last = row
    except source.errors as error:
        place = f"the first rows of {table.name}" if last is None else f"rows after {_describe_row(table, last)}"
        raise ConfigurationError(f"The database {source.name} cannot be read at {place}: {cause_of(error)}.") from error
    if batch:
        yield batch


def _rows(table: Table, connection: Connection) -> Iterator[Values]:
    # A file can have as many bytes as a request may; of those only one is held at a time.
    fetched = 1 if table is tables.blobs else _FETCHED_ROWS
    statement = select(table).order_by(*table.primary_key)
    for rows in connection.execute(statement, execution_options={"yield_per": fetched}).partitions():
        yield from map(tuple, rows)


def _write(table: Table, batch: Sequence[Values], target: CopyEnd) -> None:
    try:
        _insert(table, batch, target)
    except target.errors as error:
        if target.driver.is_transient(error):
            raise
        for row in batch:
            _write_alone(table, row, target)
        raise  # each row is taken alone


def _write_alone(table: Table, row: Values, target: CopyEnd) -> None:
    try:
        _insert(table, [row], target)
    except target.errors as error:
        if target.driver.is_transient(error):
            raise
        raise ConfigurationError(
            f"The database {target.name} does not take {_describe_row(table, row)}: {cause_of(error)}. "
            "Nothing was copied."
        ) from None  # the driver's error may quote its parameters


def _insert(table: Table, rows: Sequence[Values], target: CopyEnd) -> None:
    # What PostgreSQL refuses would end the whole transaction.
    with target.connection.begin_nested(), DriverCursor(target.connection, is_pipeline=False) as cursor:
        target.driver.insert_rows(cursor, table, rows)


def _describe_row(table: Table, row: Values) -> str:
    values = zip(table.columns, row, strict=True)
    key = ", ".join(f"{column.name} {value!r}" for column, value in values if column.primary_key)
    return f"the row of {table.name} with {key}"


def _advance_sequences(connection: Connection) -> None:
    """Let the database assign ids after the copied ones; SQLite does so by itself."""
    if connection.dialect.name != "postgresql":
        return
    for table in tables.metadata.sorted_tables:
        column = table.autoincrement_column
        highest = None if column is None else connection.execute(select(func.max(column))).scalar()
        if column is not None and (highest or 0) > 0:
            sequence = func.pg_get_serial_sequence(table.name, column.name)
            connection.execute(select(func.setval(sequence, highest)))
