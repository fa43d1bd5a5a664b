"""Reads of the usage ledger: its lines and their sums."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ColumnElement, Connection, Integer, bindparam, case, func, literal_column, select

from bough_server.store.ports.usage import EntryKind, UsageEntry, UsageTotals
from bough_server.store.sql import tables
from bough_server.store.sql.readers import NO_END, Readers
from bough_server.store.sql.usage_rows import entry_of

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
IS_START: Final = _usage.kind == literal_column(str(int(EntryKind.START)))
STARTS: Final = func.sum(case((IS_START, literal_column("1")), else_=literal_column("0")))

_HALF: Final = literal_column("4294967296", Integer())
LARGEST: Final = 2**63 - 1


def sum_halves(number: ColumnElement[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the sums of a number's upper and lower 32 bits: a sum of whole numbers may be too large for SQLite."""
    return func.coalesce(func.sum(number // _HALF), 0), func.coalesce(func.sum(number % _HALF), 0)


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

    async def list_for_run(self, run_id: str) -> Sequence[UsageEntry]:
        """See UsageLedger."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [entry_of(row) for row in rows]

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
