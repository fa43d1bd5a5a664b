"""Pages of lists that are sorted newest first: their queries, and the tokens of the pages that follow."""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeGuard

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    and_,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.sql.selectable import Select, Subquery

from bough.v1 import error_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.identity import Scope
from bough_server.store.sql import tables
from bough_server.store.sql.readers import IN_PIECES
from bough_server.store.sql.statements import unindexed
from bough_server.store.window import PAGE_BYTES

Key = tuple[int, str]
"""The sort key of a list: a number, such as a time, and an id."""

MAX_SCANNED: Final = 10_000
"""The most rows that are searched for a page of a filter by labels."""

MAX_COUNTED: Final = 1_000
"""Up to as many rows are counted to find out what fewest of them meet."""

_SelectKeys = Callable[[int], Subquery]
"""A query of the keys of rows, at most as many as its argument says."""

_Choice = tuple[_SelectKeys, Sequence[ColumnElement[bool]]]
"""What rows are read by, and the conditions that are then checked on them."""

_labels: Final = tables.labels.c


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
        raise build_token_error() from None
    # Clients can forge tokens: `type` rejects booleans, and SQLite takes no integer of more than 64 bits.
    if type(number) is not int or number.bit_length() > 63 or not _is_name(name) or digest != _digest(filters):
        raise build_token_error()
    return number, name


def _is_name(name: object) -> TypeGuard[str]:
    """Return whether a value can be compared with names of the database; PostgreSQL has no text with U+0000."""
    return isinstance(name, str) and "\0" not in name


def _digest(filters: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(filters, sort_keys=True).encode()).hexdigest()[:16]


def build_token_error() -> InvalidRequest:
    """Return the error of a token that is not from a list with its filters."""
    description = "is not a token of this list with these filters: start again without one"
    reason = error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN
    return InvalidRequest([FieldViolation(field="page_token", description=description, reason=reason)], reason=reason)


def is_before(number: ColumnElement[int], name: ColumnElement[str], key: Key) -> ColumnElement[bool]:
    """Return the condition that a row comes after a key in a list that is sorted newest first."""
    return tuple_(number, name) < tuple_(literal(key[0]), literal(key[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Rows of a table, newest first: those that meet `common`, one of `branches` if there are any, and have `labels`.

    Each branch is read through its index, and so is each label: with labels, what fewest rows meet is read, and the
    rest is checked on these. At most MAX_SCANNED are searched for a page: then it may have fewer rows than asked for,
    even none, and be followed by another one.
    """

    table: Table
    kind: int
    """Of which kind the rows are in the index of labels."""
    name: ColumnElement[str]
    """The column that identifies a row among those of the tenant."""
    scope: Scope
    """Whose rows are listed; `common` has the condition on the user, if there is one."""
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
        select_keys, conditions = self._choose_keys(connection)
        for bound in (count + 1, MAX_SCANNED):
            keys = select_keys(bound)
            page, following = self._read_rows(connection, keys, conditions, count=count, size=size)
            if following is not None or not conditions:
                break
            if (following := self._find_last_key(connection, keys, bound)) is None:
                break
        return page, following

    def _choose_keys(self, connection: Connection) -> _Choice:
        """Return the query that finds the fewest rows, and the conditions that are to be checked on these."""
        labelled = {label: self._has_label(*label) for label in self.labels.items()}
        by_filters: _Choice = self._select_keys, list(labelled.values())
        if not labelled:
            return by_filters
        # Without the indexes of their columns, which SQLite would rather use than the keys.
        filters = [unindexed(condition) for condition in self.common]
        filters += [unindexed(or_(*self.branches))] if self.branches else []
        by_label: list[_Choice] = [
            (
                partial(self._select_by_label, label),
                [*filters, *(labelled[other] for other in labelled if other != label)],
            )
            for label in labelled
        ]

        def count(choice: _Choice) -> int:
            return connection.execute(select(func.count()).select_from(choice[0](MAX_COUNTED))).scalar_one()

        fewest, best = min(((count(choice), choice) for choice in by_label), key=itemgetter(0))
        if self.scope.user_id is not None:
            # A page that ends in between would name another user's row in its token: only a label that is read whole.
            return best if fewest < MAX_COUNTED else by_filters
        return best if fewest <= count(by_filters) else by_filters

    def _read_rows(
        self,
        connection: Connection,
        keys: Subquery,
        conditions: Sequence[ColumnElement[bool]],
        *,
        count: int,
        size: Callable[[Row[Any]], int],
    ) -> tuple[Sequence[Row[Any]], Key | None]:
        """Return those rows of some keys that meet conditions, and the last one's key if there are more of them."""
        rows = select(*self.columns) if self.columns else select(self.table)
        rows = rows.join(keys, and_(self.table.c.tenant_id == self.scope.tenant_id, self.name == keys.c.name))
        rows = rows.where(*conditions).order_by(keys.c.time.desc(), keys.c.name.desc())
        page, more = read_page(connection, rows, count=count, size=size)
        return page, (page[-1].create_time_ns, getattr(page[-1], str(self.name.key))) if more else None

    def _select_keys(self, bound: int) -> Subquery:
        """Return a query of the keys of the first rows, without a look at their labels."""
        table = self.table.c
        keys = select(table.create_time_ns.label("time"), self.name.label("name"))
        keys = keys.where(table.tenant_id == self.scope.tenant_id, *self.common)
        if self.after is not None:
            keys = keys.where(is_before(table.create_time_ns, self.name, self.after))
        if len(self.branches) < 2:
            return _sort_newest_first(keys.where(*self.branches)).limit(bound).subquery()
        # Each branch by itself in a subquery: SQLite accepts no LIMIT inside of a UNION.
        each = [select(_sort_newest_first(keys.where(branch)).limit(bound).subquery()) for branch in self.branches]
        return _sort_newest_first(select(union_all(*each).subquery())).limit(bound).subquery()

    def _select_by_label(self, label: tuple[str, str], bound: int) -> Subquery:
        """Return a query of the keys of the first rows that have a label."""
        keys = select(_labels.create_time_ns.label("time"), _labels.name.label("name")).where(*self._is_label(*label))
        if self.after is not None:
            keys = keys.where(is_before(_labels.create_time_ns, _labels.name, self.after))
        return _sort_newest_first(keys).limit(bound).subquery()

    def _is_label(self, key: str, value: str) -> Sequence[ColumnElement[bool]]:
        return [
            _labels.tenant_id == self.scope.tenant_id,
            _labels.kind == self.kind,
            _labels.key == key,
            _labels.value == value,
        ]

    def _has_label(self, key: str, value: str) -> ColumnElement[bool]:
        """Return the condition that a row has a label."""
        same = _labels.create_time_ns == self.table.c.create_time_ns, _labels.name == self.name
        return exists().where(*self._is_label(key, value), *same)

    def _find_last_key(self, connection: Connection, keys: Subquery, bound: int) -> Key | None:
        """Return the last of as many keys as a query is bounded by; None if it has fewer."""
        row = connection.execute(_sort_newest_first(select(keys.c.time, keys.c.name)).offset(bound - 1)).first()
        return (row.time, row.name) if row is not None else None


def _sort_newest_first(statement: Select[Any]) -> Select[Any]:
    """Sort a query of keys."""
    return statement.order_by(literal_column("time").desc(), literal_column("name").desc())
