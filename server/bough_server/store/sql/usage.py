"""Reads of the usage ledger: its lines and their sums."""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    bindparam,
    func,
    literal,
    literal_column,
    select,
    tuple_,
)

from bough.v1 import usage_pb2
from bough_server.identity import Scope
from bough_server.log.charges import Charge
from bough_server.log.usage import Sums
from bough_server.store.ports.runs import Page
from bough_server.store.ports.usage import LineKind, UsageFilter, UsageLine, UsageTotals
from bough_server.store.sql import tables
from bough_server.store.sql.pages import build_token_error, decode_token, encode_token, read_page
from bough_server.store.sql.readers import IN_PIECES, NO_END, Readers
from bough_server.store.sql.usage_rows import NUMBERS, line_of

_usage = tables.usage_entries.c

CHARGE: Final = func.coalesce(_usage.charge_nanos, _usage.cost_nanos, literal_column("0"))
"""The charge of a line. NULL is what a server of an older version wrote, which charged what had been reported."""

TOKENS: Final = func.coalesce(
    _usage.input_tokens + _usage.output_tokens,
    _usage.total_tokens,
    _usage.input_tokens,
    _usage.output_tokens,
    literal_column("0"),
)
IS_START: Final = _usage.kind == literal_column(str(int(LineKind.START)))
STARTS: Final = func.sum(_usage.kind)  # of which 1 is a start

_HALF_BITS, _HALF = literal_column("32", Integer()), literal_column("4294967295", Integer())
LARGEST: Final = 2**63 - 1

_DAY_NS: Final = 86_400_000_000_000

_DIMENSIONS: Final[Mapping[str, tuple[usage_pb2.UsageDimension.ValueType, ColumnElement[Any]]]] = {
    "user_id": (usage_pb2.USAGE_DIMENSION_USER, _usage.user_id),
    "session_id": (usage_pb2.USAGE_DIMENSION_SESSION, _usage.session_id),
    "run_id": (usage_pb2.USAGE_DIMENSION_RUN, _usage.run_id),
    "agent": (usage_pb2.USAGE_DIMENSION_AGENT, _usage.agent),
    "invocation_id": (usage_pb2.USAGE_DIMENSION_INVOCATION, _usage.invocation_id),
    "model": (usage_pb2.USAGE_DIMENSION_MODEL, _usage.model),
    "day": (usage_pb2.USAGE_DIMENSION_DAY, _usage.time_ns // literal_column(str(_DAY_NS), Integer())),
}
"""Fields of UsageGroup that lines can be grouped by, in the order of groups, and what they are in SQL; the day is a
number of days since 1970."""

_TOKENS: Final = tuple(name for name in NUMBERS if name != "cost_nanos")


def sum_halves(number: ColumnElement[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the sums of a number's upper and lower 32 bits: a sum of whole numbers may be too large for SQLite."""
    upper, lower = number.bitwise_rshift(_HALF_BITS), number.bitwise_and(_HALF)
    return func.coalesce(func.sum(upper), 0), func.coalesce(func.sum(lower), 0)


def join_halves(upper: int, lower: int) -> int:
    """Return the sum of which `sum_halves` are the parts, as far as it fits into 64 bits."""
    return max(-LARGEST, min(LARGEST, int(upper) * 2**32 + int(lower)))


_OF_RUN: Final = (
    select(tables.usage_entries).where(_usage.run_id == bindparam("run"), ~IS_START).order_by(_usage.sequence)
)

_TOTALS: Final = (
    select(_usage.currency_code, STARTS, *sum_halves(TOKENS), *sum_halves(CHARGE))
    .where(
        _usage.tenant_id == bindparam("tenant"), _usage.time_ns >= bindparam("first"), _usage.time_ns < bindparam("end")
    )
    .group_by(_usage.currency_code)
)
_TOTALS_OF_USER: Final = _TOTALS.where(_usage.user_id == bindparam("user"))


class SqlUsageLedger:
    """UsageLedger on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def list_for_run(self, run_id: str) -> Sequence[UsageLine]:
        """See UsageLedger."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [line_of(row) for row in rows]

    async def list_groups(
        self,
        scope: Scope,
        usage_filter: UsageFilter,
        group_by: Sequence[usage_pb2.UsageDimension.ValueType],
        page: Page,
    ) -> tuple[Sequence[usage_pb2.UsageGroup], str]:
        """See UsageLedger."""
        fields = [field for field, (dimension, _) in _DIMENSIONS.items() if dimension in group_by]
        filters = ["groups", *_filters_of(scope, usage_filter), *fields]
        after = _decode_group(page.token, filters, fields)
        statement = _select_groups(scope, usage_filter, fields, after)

        def read(connection: Connection) -> tuple[list[_Group], bool]:
            if not fields and after is None:
                total = connection.execute(_select_total(scope, usage_filter)).one()
                if total.lowest is None or total.lowest == total.currency_code:
                    return [_Group.of(total[1:])] if total.lines else [], False
            # A group has one row in each currency, and one more if some of its lines have none.
            with connection.execute(statement.limit(2 * page.size + 2).execution_options(**IN_PIECES)) as rows:
                groups = list(islice(_merge(map(_Group.of, rows)), page.size + 1))
            return groups[: page.size], len(groups) > page.size

        groups, more = await self._readers.run(read)
        token = encode_token((0, json.dumps(groups[-1].key)), filters) if more else ""
        return [group.message(fields) for group in groups], token

    async def list_attempts(
        self, scope: Scope, usage_filter: UsageFilter, page: Page
    ) -> tuple[Sequence[UsageLine], str]:
        """See UsageLedger."""
        filters = ["attempts", *_filters_of(scope, usage_filter)]
        after = _decode_line(page.token, filters)
        statement = select(tables.usage_entries).where(~IS_START, *_conditions(scope, usage_filter))
        key = _usage.time_ns, _usage.run_id, _usage.sequence
        if after is not None:
            statement = statement.where(tuple_(*key) < tuple_(*map(literal, after)))
        statement = statement.order_by(*(column.desc() for column in key))

        def read(connection: Connection) -> tuple[list[Row[Any]], bool]:
            return read_page(connection, statement, count=page.size, size=lambda _: _LINE_BYTES)

        rows, more = await self._readers.run(read)
        lines = [line_of(row) for row in rows]
        last = (lines[-1].time_ns, f"{lines[-1].sequence} {lines[-1].run_id}") if more else None
        return lines, "" if last is None else encode_token(last, filters)

    async def sum_lines(
        self, tenant_id: str, *, user_id: str | None = None, from_ns: int, before_ns: int | None = None
    ) -> UsageTotals:
        """See UsageLedger."""
        return await self._readers.run(
            lambda connection: sum_lines(connection, tenant_id, user_id=user_id, from_ns=from_ns, before_ns=before_ns)
        )


def sum_lines(
    connection: Connection, tenant_id: str, *, user_id: str | None, from_ns: int, before_ns: int | None = None
) -> UsageTotals:
    """Return the sums over lines; see UsageLedger."""
    parameters = {"tenant": tenant_id, "first": from_ns, "end": NO_END if before_ns is None else before_ns}
    if user_id is None:
        rows = connection.execute(_TOTALS, parameters).all()
    else:
        rows = connection.execute(_TOTALS_OF_USER, {**parameters, "user": user_id}).all()
    starts = tokens = 0
    charges: dict[str, int] = {}
    for currency, started, *halves in rows:
        starts += int(started)
        tokens += join_halves(*halves[:2])
        if charge := join_halves(*halves[2:]):
            charges[currency] = charge
    return UsageTotals(starts=starts, tokens=min(tokens, LARGEST), charges=charges)


_LINE_BYTES: Final = 512
"""About as many bytes has a line."""


def _filters_of(scope: Scope, usage_filter: UsageFilter) -> list[object]:
    return [scope.tenant_id, scope.user_id, *dataclasses.astuple(usage_filter)]


def _conditions(scope: Scope, usage_filter: UsageFilter) -> Iterator[ColumnElement[bool]]:
    yield _usage.tenant_id == scope.tenant_id
    if scope.user_id is not None:
        yield _usage.user_id == scope.user_id
    for name in ("user_id", "session_id", "run_id", "invocation_id", "agent", "model"):
        if value := getattr(usage_filter, name):
            yield _usage[name] == value
    if usage_filter.from_ns is not None:
        yield _usage.time_ns >= usage_filter.from_ns
    if usage_filter.before_ns is not None:
        yield _usage.time_ns < usage_filter.before_ns


_Value: TypeAlias = str | int


@dataclass(slots=True, kw_only=True)
class _Group:
    """Sums of lines of one group and one currency."""

    values: Sequence[_Value]
    """What its lines have in common, by the dimensions."""
    charge: Charge
    runs: int
    sums: Sums

    @classmethod
    def of(cls, row: Sequence[Any]) -> "_Group":
        """Return the values of some dimensions, a currency and `_sums` as a group."""
        sums = row[-len(_SUMS) :]
        *values, currency = row[: -len(_SUMS)]
        lines, starts, known, priced, *rest = sums
        attempts = lines - int(starts)
        numbers = {name: int(number) for name, number in zip(_TOKENS, rest[4:], strict=True) if number is not None}
        counts = {"model_calls_without_usage": attempts - known, "model_calls_without_cost": attempts - priced}
        numbers |= {"model_calls": attempts, **counts}
        if priced:
            numbers["cost_nanos"] = join_halves(*rest[2:4])
        return cls(
            values=values,
            charge=Charge(nanos=join_halves(*rest[:2]), currency_code=currency),
            runs=int(starts),
            sums=Sums(numbers, currency if priced else ""),
        )

    @property
    def key(self) -> Sequence[_Value]:
        """Where it is in the order of groups."""
        return [*self.values, self.charge.currency_code]

    def message(self, fields: Sequence[str]) -> usage_pb2.UsageGroup:
        """Return the group as clients see it."""
        group = usage_pb2.UsageGroup(
            runs=self.runs,
            usage=self.sums.usage(),
            charge_nanos=self.charge.nanos,
            currency_code=self.charge.currency_code,
        )
        for field, value in zip(fields, self.values, strict=True):
            setattr(group, field, _format_day(value) if isinstance(value, int) else value)
        return group


def _format_day(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_NS // 10**9, UTC).strftime("%Y-%m-%d")


def _merge(groups: Iterable[_Group]) -> Iterator[_Group]:
    """Add each group without a currency to the one of the same values that follows it, if one does."""
    waiting: _Group | None = None
    for group in groups:
        if waiting is not None and waiting.values == group.values:
            group.runs += waiting.runs
            group.sums.add(waiting.sums)
        elif waiting is not None:
            yield waiting
        waiting = None if group.charge.currency_code else group
        if waiting is None:
            yield group
    if waiting is not None:
        yield waiting


_SUMS: Final = (
    func.count().label("lines"),
    func.coalesce(STARTS, 0),
    func.count(func.coalesce(_usage.input_tokens, _usage.output_tokens, _usage.total_tokens)),
    func.count(_usage.cost_nanos),
    *sum_halves(CHARGE),
    *sum_halves(_usage.cost_nanos),
    *(func.sum(_usage[name]) for name in _TOKENS),
)


def _select_total(scope: Scope, usage_filter: UsageFilter) -> Select[Any]:
    """Return the query of all lines as one group, with the lowest and the highest currency.

    Most sums are in one currency; to group lines that come in the order of time, they would have to be sorted.
    """
    currency = _usage.currency_code
    lowest, highest = func.min(func.nullif(currency, "")), func.coalesce(func.max(currency), "")
    keys = lowest.label("lowest"), highest.label("currency_code")
    return select(*keys, *_SUMS).where(*_conditions(scope, usage_filter))


def _select_groups(
    scope: Scope, usage_filter: UsageFilter, fields: Sequence[str], after: Sequence[_Value] | None
) -> Select[Any]:
    keys = [*(_DIMENSIONS[field][1] for field in fields), _usage.currency_code]
    statement = select(*keys, *_SUMS).where(*_conditions(scope, usage_filter)).group_by(*keys).order_by(*keys)
    return statement if after is None else statement.where(tuple_(*keys) > tuple_(*map(literal, after)))


def _decode_group(token: str, filters: Sequence[object], fields: Sequence[str]) -> Sequence[_Value] | None:
    """Return the key of the last group of the page before; None for the first page. Raises InvalidRequest."""
    decoded = decode_token(token, filters)
    if decoded is None:
        return None
    types = [*(int if field == "day" else str for field in fields), str]
    try:
        values = json.loads(decoded[1])
    except (ValueError, RecursionError):
        raise build_token_error() from None
    # Clients can forge tokens, also those of lists that they may read.
    if not isinstance(values, list) or [type(value) for value in values] != types:
        raise build_token_error()
    if any("\0" in value if isinstance(value, str) else value.bit_length() > 63 for value in values):
        raise build_token_error()
    return values


def _decode_line(token: str, filters: Sequence[object]) -> tuple[int, str, int] | None:
    """Return the key of the last line of the page before; None for the first page. Raises InvalidRequest."""
    decoded = decode_token(token, filters)
    if decoded is None:
        return None
    sequence, _, run_id = decoded[1].partition(" ")
    if not re.fullmatch(r"[0-9]{1,18}", sequence):
        raise build_token_error()
    return decoded[0], run_id, int(sequence)
