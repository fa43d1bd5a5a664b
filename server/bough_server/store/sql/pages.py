"""Pages of lists that are sorted newest first: their queries, and the tokens of the pages that follow."""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    exists,
    literal,
    literal_column,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.sql.selectable import Select, Subquery

from bough.v1 import error_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.store.sql.readers import IN_PIECES
from bough_server.store.sql.statements import json_members
from bough_server.store.window import PAGE_BYTES

Key = tuple[int, str]
"""The sort key of a list: a number, such as a time, and an id."""

MAX_SCANNED: Final = 10_000
"""The most rows whose labels are read for a page."""


def read_page(
    connection: Connection, statement: Select[Any], *, count: int, size: Callable[[Row[Any]], int]
) -> tuple[list[Row[Any]], bool]:
    """Return the first rows of a query as a page, and whether there are more.

    A page has at most `count` rows and PAGE_BYTES, with the bytes of a row as `size` estimates them, and at least one
    row if there is one.
    """
    page: list[Row[Any]] = []
    total = 0
    limited = statement.limit(count + 1)  # one more, to see whether there is a next page
    with connection.execute(limited.execution_options(**IN_PIECES)) as rows:
        for row in rows:
            total += size(row)
            if page and (len(page) == count or total > PAGE_BYTES):
                return page, True
            page.append(row)
    return page, False


def encode_token(key: Key, filters: Sequence[object]) -> str:
    """Return the token of the page that follows a key."""
    return base64.urlsafe_b64encode(json.dumps([*key, _digest(filters)]).encode()).decode()


def decode_token(token: str, filters: Sequence[object]) -> Key | None:
    """Return the key that a token's page follows; None for the first page.

    Raises InvalidRequest for a token that is not from this list with these filters.
    """
    if not token:
        return None
    try:
        number, name, digest = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError):
        raise _build_token_error() from None
    # Clients can forge tokens: `type` rejects booleans, and SQLite takes no integer of more than 64 bits.
    if type(number) is not int or number.bit_length() > 63 or not _is_name(name) or digest != _digest(filters):
        raise _build_token_error()
    return number, name


def _is_name(name: object) -> TypeGuard[str]:
    """Return whether a value can be compared with names of the database; PostgreSQL has no text with U+0000."""
    return isinstance(name, str) and "\0" not in name


def _digest(filters: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(filters, sort_keys=True).encode()).hexdigest()[:16]


def _build_token_error() -> InvalidRequest:
    description = "is not a token of this list with these filters: start again without one"
    reason = error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN
    return InvalidRequest([FieldViolation(field="page_token", description=description, reason=reason)], reason=reason)


def is_before(number: ColumnElement[int], name: ColumnElement[str], key: Key) -> ColumnElement[bool]:
    """Return the condition that a row comes after a key in a list that is sorted newest first."""
    return tuple_(number, name) < tuple_(literal(key[0]), literal(key[1]))


def _has_labels(column: ColumnElement[str], labels: Mapping[str, str]) -> list[ColumnElement[bool]]:
    """Return conditions that a column's JSON object has these members."""
    # json_each rather than a JSON path: a label may be any text, also one that a path cannot name.
    conditions: list[ColumnElement[bool]] = []
    for key, value in labels.items():
        member = json_members(column).table_valued("key", "value", name=f"member_{len(conditions)}")
        conditions.append(exists(select(member.c.key).where(member.c.key == key, member.c.value == value)))
    return conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Rows of a table, newest first: those that meet `common`, one of `branches` if there are any, and have `labels`.

    Each branch is read through its index. Labels have no index, so at most MAX_SCANNED rows are searched for a page:
    then it may have fewer rows than asked for, even none, and be followed by another one.
    """

    table: Table
    name: ColumnElement[str]
    """The column that identifies a row among those that meet `scope`."""
    scope: Sequence[ColumnElement[bool]] = ()
    common: Sequence[ColumnElement[bool]] = ()
    branches: Sequence[ColumnElement[bool]] = ()
    labels: Mapping[str, str]
    after: Key | None
    columns: Sequence[ColumnElement[Any]] = ()
    """The columns of the rows; all of the table if empty."""

    def read(
        self, connection: Connection, *, count: int, size: Callable[[Row[Any]], int]
    ) -> tuple[Sequence[Row[Any]], Key | None]:
        """Return a page, as `read_page` does, and the key after which the next page begins; None on the last page."""
        scanned = self._select_keys(MAX_SCANNED if self.labels else count + 1)
        found = (
            select(scanned.c.name)
            .where(*_has_labels(scanned.c.labels, self.labels))
            .order_by(scanned.c.time.desc(), scanned.c.name.desc())
        )
        rows = select(*self.columns) if self.columns else select(self.table)
        time = self.table.c.create_time_ns
        statement = rows.where(*self.scope, self.name.in_(found.limit(count + 1)))
        page, more = read_page(connection, statement.order_by(time.desc(), self.name.desc()), count=count, size=size)
        if more:
            return page, (page[-1].create_time_ns, getattr(page[-1], str(self.name.key)))
        return page, self._find_last_key(connection, scanned) if self.labels else None

    def _select_keys(self, bound: int) -> Subquery:
        """Return a query of the keys and labels of the first rows, regardless of their labels."""
        table = self.table.c
        keys = select(table.create_time_ns.label("time"), self.name.label("name"), table.labels)
        keys = keys.where(*self.scope, *self.common)
        if self.after is not None:
            keys = keys.where(is_before(table.create_time_ns, self.name, self.after))
        if len(self.branches) < 2:
            return _sort_newest_first(keys.where(*self.branches)).limit(bound).subquery()
        # Each branch by itself in a subquery: SQLite accepts no LIMIT inside of a UNION.
        each = [select(_sort_newest_first(keys.where(branch)).limit(bound).subquery()) for branch in self.branches]
        return _sort_newest_first(select(union_all(*each).subquery())).limit(bound).subquery()

    def _find_last_key(self, connection: Connection, scanned: Subquery) -> Key | None:
        """Return the last key that was searched; None if there are no more."""
        row = connection.execute(
            _sort_newest_first(select(scanned.c.time, scanned.c.name)).offset(MAX_SCANNED - 1)
        ).first()
        return (row.time, row.name) if row is not None else None


def _sort_newest_first(statement: Select[Any]) -> Select[Any]:
    """Sort a query of keys."""
    return statement.order_by(literal_column("time").desc(), literal_column("name").desc())
