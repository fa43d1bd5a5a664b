"""The index of labels: a table that triggers derive from the labels of runs, evaluations and sessions.

Triggers, so that each statement that writes, copies or deletes a row keeps the index, those of servers of an older
version too. A row without labels costs nothing.
"""

from collections.abc import Iterable
from typing import Any, Final, cast

from sqlalchemy import DDL, Connection, delete, event

from bough_server.store.sql import tables

MAX_VALUE: Final = 256
"""The most characters of a value, as the schema has it."""

_MEMBERS: Final = {"sqlite": "json_each({row}.labels)", "postgresql": "json_each_text(({row}.labels)::json)"}
_INDEXED: Final = (("runs", "{row}.kind", "run_id"), ("sessions", str(tables.SESSION), "session_id"))
"""The tables that have labels, with the kind and the name of a row in the index."""

_INSERT: Final = (
    "INSERT INTO labels (tenant_id, kind, key, value, create_time_ns, name) "
    "SELECT {row}.tenant_id, {kind}, key, value, {row}.create_time_ns, {row}.{name} FROM {source}{members} "
    # PostgreSQL indexes rows of 2.7 kB at most; no filter can name a longer value.
    f"WHERE length(value) <= {MAX_VALUE}"
)
_DELETE: Final = (
    "DELETE FROM labels WHERE tenant_id = OLD.tenant_id AND kind = {kind} AND create_time_ns = OLD.create_time_ns "
    "AND name = OLD.{name} AND (key, value) IN (SELECT key, value FROM {members})"
)


def list_triggers(dialect: str) -> Iterable[str]:
    """Return the statements that create the triggers in a kind of database."""
    for table, kind, name in _INDEXED:
        new, old = (
            statement.format(
                row=row, kind=kind.format(row=row), name=name, source="", members=_MEMBERS[dialect].format(row=row)
            )
            for row, statement in (("NEW", _INSERT), ("OLD", _DELETE))
        )
        for change, condition, body in (
            ("INSERT", "NEW.labels <> '{}'", [new]),
            ("UPDATE OF labels", "NEW.labels <> OLD.labels", [old, new]),
            ("DELETE", "OLD.labels <> '{}'", [old]),
        ):
            trigger = f"{table}_labels_{change.split()[0].lower()}"
            begun = f"CREATE TRIGGER {trigger} AFTER {change} ON {table} FOR EACH ROW WHEN ({condition})"
            block = f"BEGIN {'; '.join(body)};"
            if dialect == "sqlite":
                yield f"{begun} {block} END"
            else:
                yield f"CREATE FUNCTION {trigger}() RETURNS trigger LANGUAGE plpgsql AS $$ {block} RETURN NULL; END $$"
                yield f"{begun} EXECUTE FUNCTION {trigger}()"


def fill_index(connection: Connection) -> None:
    """Make the index again from the labels of all rows."""
    connection.execute(delete(tables.labels))
    for table, kind, name in _INDEXED:
        members = _MEMBERS[connection.dialect.name].format(row=table)
        values = {"row": table, "kind": kind.format(row=table), "name": name, "members": members}
        filling = _INSERT.format(**values, source=f"{table}, ")
        connection.exec_driver_sql(f"{filling} AND {table}.labels <> '{{}}'")


def _create_with_tables() -> None:
    """Let a new database have the triggers."""
    for dialect in _MEMBERS:
        for statement in list_triggers(dialect):
            created = cast(Any, DDL)(statement).execute_if(dialect=dialect)
            event.listen(tables.metadata, "after_create", created)


_create_with_tables()
