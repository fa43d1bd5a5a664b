"""What both databases share of statements: functions that each names in its own way, and statements for the driver."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Delete, Insert, Integer, Select, Table, Update, bindparam, func
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite.dml import OnConflictDoNothing, OnConflictDoUpdate
from sqlalchemy.engine import Dialect
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction

from bough_server.identity import Scope
from bough_server.store.sql.rows import Row
from bough_server.store.sql.tables import TEXT

T = TypeVar("T")

Selected = TypeVar("Selected", bound=Select[Any])


def in_scope(table: Table) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return the conditions that a row of a table is in the scope that `scope_parameters` sets."""
    user = bindparam("user", type_=TEXT)
    return table.c.tenant_id == bindparam("tenant"), table.c.user_id == func.coalesce(user, table.c.user_id)


def scope_parameters(scope: Scope) -> Mapping[str, str | None]:
    """Return the parameters of the conditions of `in_scope`."""
    return {"tenant": scope.tenant_id, "user": scope.user_id}


def for_update(statement: Selected) -> Selected:
    """Return a statement that reads a session which its transaction has locked in advance.

    A session that another server has created and locked since is not seen: to wait for it here, out of the order in
    which all servers lock, could be a deadlock.
    """
    return statement.with_for_update(skip_locked=True)


class greatest(GenericFunction[int]):  # a function of SQL
    """The largest of some values, none of which is NULL."""

    type = Integer()
    inherit_cache = True


@compiles(greatest, "sqlite")
def _greatest_of_sqlite(element: "greatest", compiler: SQLCompiler, **options: Any) -> str:
    return f"max({compiler.process(element.clauses, **options)})"


class unindexed(GenericFunction[Any]):
    """A column, without the use of its indexes; PostgreSQL knows by its statistics which index is worth it."""

    inherit_cache = True


@compiles(unindexed)
def _render_without_index(element: "unindexed", compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(unindexed, "sqlite")
def _render_without_index_in_sqlite(element: "unindexed", compiler: SQLCompiler, **options: Any) -> str:
    return f"+{compiler.process(element.clauses, **options)}"


_NAMED_SQLITE: Final[Dialect] = sqlite.dialect(paramstyle="named")
"""SQLite with names of parameters, for rows that are mappings; PostgreSQL's driver has them anyway."""


@compiles(OnConflictDoNothing, "postgresql")
def _nothing_in_postgresql(element: OnConflictDoNothing, compiler: Any, **options: Any) -> str:
    return str(compiler.visit_on_conflict_do_nothing(_without_constraint(element), **options))


@compiles(OnConflictDoUpdate, "postgresql")
def _update_in_postgresql(element: OnConflictDoUpdate, compiler: Any, **options: Any) -> str:
    return str(compiler.visit_on_conflict_do_update(_without_constraint(element), **options))


def _without_constraint(element: T) -> T:
    """Let PostgreSQL's compiler read an upsert of SQLite, which is the same but can name no constraint.

    A server on SQLite need not load PostgreSQL's dialect, which takes 2 MB.
    """
    vars(element).setdefault("constraint_target", None)
    return element


class DriverCursor:
    """The driver's cursor of a connection, which statements bypass SQLAlchemy's execution with.

    As a context, it is a pipeline if the driver has them: statements are sent without a wait for the answers of those
    before, unless one fetches, and an error is raised by a later statement or at the end. Meanwhile, the connection
    cannot be used otherwise. A single statement takes a round trip more in a pipeline than without.
    """

    def __init__(self, connection: Connection, *, is_pipeline: bool = True) -> None:
        self.dialect = connection.dialect
        self.driver: DBAPICursor = connection.connection.cursor()
        pipeline = getattr(connection.connection.driver_connection, "pipeline", None) if is_pipeline else None
        self._pipeline: AbstractContextManager[object] = nullcontext() if pipeline is None else pipeline()

    def __enter__(self) -> "DriverCursor":
        self._pipeline.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._pipeline.__exit__(*raised)
        finally:
            self.driver.close()


class DriverStatement:
    """A write statement compiled once for each driver, with named parameters."""

    def __init__(self, statement: Update | Insert | Delete) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, dict[str, Any]]] = {}

    def write(self, cursor: DriverCursor, rows: Sequence[Row]) -> None:
        """Write the rows, if there are any."""
        if rows:
            text, fixed = self._compiled.get(cursor.dialect.name) or self._compile(cursor.dialect)
            cursor.driver.executemany(text, [{**fixed, **row} for row in rows] if fixed else rows)

    def _compile(self, dialect: Dialect) -> tuple[str, dict[str, Any]]:
        compiled = self._statement.compile(dialect=_NAMED_SQLITE if dialect.name == "sqlite" else dialect)
        # Values in the statement itself, such as ended=True, are compiled to parameters: each row must bring them too.
        fixed = {name: value for name, value in compiled.params.items() if value is not None}
        self._compiled[dialect.name] = str(compiled), fixed
        return self._compiled[dialect.name]
