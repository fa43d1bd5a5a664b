"""SQL on a database beside the store, whichever it is, and the plans of the store's statements."""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from sqlalchemy import Engine, event

from bough_server.store.sqlite.database_path import database_path, is_postgres

Statement = tuple[str, Any]

_INDEX: Final = re.compile(r"(?:Index Scan|Index Only Scan|Bitmap Index Scan)(?: Backward)? (?:using|on) (\S+)")


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Execute a statement in a transaction, and return its rows."""
    if is_postgres(url):
        with psycopg.connect(url) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
    file = sqlite3.connect(database_path(url))
    try:
        with file:
            return file.execute(statement).fetchall()
    finally:
        file.close()


@contextmanager
def seen_statements() -> Iterator[list[Statement]]:
    """Collect the statements that the store sends, with their parameters."""
    seen: list[Statement] = []

    def note(*said: object) -> None:
        _, _, statement, parameters, *_ = said
        assert isinstance(statement, str)
        seen.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def plans_of(url: str, statements: Sequence[Statement]) -> list[list[str]]:
    """Return the steps of each statement's plan."""
    if not is_postgres(url):
        file = sqlite3.connect(database_path(url))
        try:
            return [
                [row[3] for row in file.execute(f"EXPLAIN QUERY PLAN {text}", values)] for text, values in statements
            ]
        finally:
            file.close()
    with psycopg.connect(url) as connection:
        return [
            [row[0] for row in connection.execute(f"EXPLAIN {text}".encode(), values)] for text, values in statements
        ]


def indexes_in(plan: Sequence[str]) -> set[str]:
    """Return the indexes that a plan of PostgreSQL uses."""
    return {index for step in plan for index in _INDEX.findall(step)}
