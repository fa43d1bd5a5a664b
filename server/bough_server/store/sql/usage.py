"""The usage ledger: reads, and the columns of an entry. Appends write entries with the events that hold the usage."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Row, bindparam, select

from bough.v1 import usage_pb2
from bough_server.store.ports.runs import UsageEntry
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers

_usage = tables.usage_entries.c

_KNOWN: Final = (
    "input_tokens",
    "cached_input_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "total_tokens",
    "cost_nanos",
)
"""Numbers that may be unknown: NULL, which SQL sums leave out, as the sums in usage.Sums do."""
_COUNTED: Final = ("model_calls", "model_calls_without_usage", "currency_code")

_OF_RUN: Final = select(tables.usage_entries).where(_usage.run_id == bindparam("run")).order_by(_usage.sequence)


class SqlUsageLedger:
    """UsageLedger on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def of_run(self, run_id: str) -> Sequence[UsageEntry]:
        """See UsageLedger."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [_entry(row) for row in rows]


def usage_values(usage: usage_pb2.Usage) -> dict[str, object]:
    """Return a usage as columns of its entry."""
    values: dict[str, object] = {name: getattr(usage, name) for name in _COUNTED}
    for name in _KNOWN:
        values[name] = getattr(usage, name) if usage.HasField(name) else None
    return values


def _usage_of(row: Row[Any]) -> usage_pb2.Usage:
    return usage_pb2.Usage(**{name: getattr(row, name) for name in (*_KNOWN, *_COUNTED)})


def _entry(row: Row[Any]) -> UsageEntry:
    return UsageEntry(
        run_id=row.run_id,
        sequence=row.sequence,
        tenant_id=row.tenant_id,
        user_id=row.user_id,
        session_id=row.session_id,
        agent=row.agent,
        invocation_id=row.invocation_id,
        model=row.model,
        time_ns=row.time_ns,
        usage=_usage_of(row),
    )
