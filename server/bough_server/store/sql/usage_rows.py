"""Rows of the usage ledger."""

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy

from bough.v1 import usage_pb2
from bough_server.log.charges import Charge
from bough_server.store.ports.usage import LineKind, UsageLine
from bough_server.store.sql.rows import Row, strip_nul

NUMBERS: Final = (
    "input_tokens",
    "cached_input_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "total_tokens",
    "cost_nanos",
)
"""Numbers that may be unknown: NULL, which SQL sums leave out, as the sums in usage.Sums do."""
_COUNTS: Final = ("model_calls", "model_calls_without_usage")


def usage_rows(lines: Sequence[UsageLine]) -> list[Row]:
    """Return rows of the usage table."""
    return [
        {
            "run_id": line.run_id,
            "sequence": line.sequence,
            "tenant_id": line.tenant_id,
            "user_id": line.user_id,
            "session_id": line.session_id,
            "agent": strip_nul(line.agent),
            "invocation_id": strip_nul(line.invocation_id),
            "model": strip_nul(line.model),
            "time_ns": line.time_ns,
            **_usage_values(line.usage),
            "currency_code": strip_nul(line.charge.currency_code),
            "kind": int(line.kind),
            "charge_nanos": line.charge.nanos,
        }
        for line in lines
    ]


def _usage_values(usage: usage_pb2.Usage) -> dict[str, object]:
    """Return a usage as columns of its line, without the currency."""
    values: dict[str, object] = {name: getattr(usage, name) for name in _COUNTS}
    for name in NUMBERS:
        values[name] = getattr(usage, name) if usage.HasField(name) else None
    return values


def line_of(row: sqlalchemy.Row[Any]) -> UsageLine:
    """Return a row of the usage table as a line; a server of an older version wrote no charge, which is the cost."""
    usage = usage_pb2.Usage(**{name: getattr(row, name) for name in (*NUMBERS, *_COUNTS)})
    if usage.HasField("cost_nanos"):
        usage.currency_code = row.currency_code
    nanos = (row.cost_nanos or 0) if row.charge_nanos is None else row.charge_nanos
    return UsageLine(
        run_id=row.run_id,
        sequence=row.sequence,
        tenant_id=row.tenant_id,
        user_id=row.user_id,
        session_id=row.session_id,
        agent=row.agent,
        invocation_id=row.invocation_id,
        model=row.model,
        time_ns=row.time_ns,
        usage=usage,
        kind=LineKind(row.kind),
        charge=Charge(nanos=nanos, currency_code=row.currency_code),
    )
