"""Bounds for reads of large rows from PostgreSQL, whose driver fetches whole results; SQLite's fetches row by row."""

from typing import Any, Final

from sqlalchemy import Select, bindparam, func, select

from bough_server.store.sql import tables

IN_PIECES: Final[dict[str, Any]] = {"stream_results": True, "max_row_buffer": 64}
"""Execution options of a query with large rows: PostgreSQL's driver fetches a whole result otherwise."""


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
