"""Rows of the derived tables, in the form that the statements that write them expect; and reads of the usage ledger."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy
from sqlalchemy import bindparam, select

from bough.v1 import usage_pb2
from bough_server.log.run_state import RunState
from bough_server.store.ports.runs import UsageEntry
from bough_server.store.ports.sessions import StoredCall, StoredMessage
from bough_server.store.projected import EvaluationChange, Projected, RunEnd
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers

Row = Mapping[str, object]

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


def strip_nul(text: str) -> str:
    """Return a text from an event for a column, without U+0000, which PostgreSQL cannot hold.

    Requests with it are refused where it matters; what remains are names and media types from agents' code, models and
    tools. The event keeps it.
    """
    return text.replace("\0", "")


def message_rows(tenant_id: str, session_id: str, messages: Sequence[StoredMessage]) -> list[Row]:
    """Return rows of the messages table."""
    return [
        {
            "tenant_id": tenant_id,
            "session_id": session_id,
            "position": stored.message.position,
            "run_id": stored.run_id,
            "agent": strip_nul(stored.agent),
            "chain": stored.chain,
            "data": stored.message.SerializeToString(deterministic=True),
        }
        for stored in messages
    ]


def call_rows(tenant_id: str, session_id: str, calls: Sequence[StoredCall]) -> list[Row]:
    """Return rows of the table of calls."""
    return [
        {**row, "sequence": call.sequence, "inside": strip_nul(" ".join(call.inside))}
        for row, call in zip(message_rows(tenant_id, session_id, calls), calls, strict=True)
    ]


def usage_rows(projected: Projected) -> list[Row]:
    """Return rows of the usage table."""
    return [
        {
            "run_id": entry.run_id,
            "sequence": entry.sequence,
            "tenant_id": entry.tenant_id,
            "user_id": entry.user_id,
            "session_id": entry.session_id,
            "agent": strip_nul(entry.agent),
            "invocation_id": strip_nul(entry.invocation_id),
            "model": strip_nul(entry.model),
            "time_ns": entry.time_ns,
            **_usage_values(entry.usage),
            "currency_code": strip_nul(entry.usage.currency_code),
        }
        for entry in projected.usage
    ]


def _usage_values(usage: usage_pb2.Usage) -> dict[str, object]:
    """Return a usage as columns of its entry."""
    values: dict[str, object] = {name: getattr(usage, name) for name in _COUNTED}
    for name in _KNOWN:
        values[name] = getattr(usage, name) if usage.HasField(name) else None
    return values


def end_row(run_id: str, end: RunEnd) -> Row:
    """Return the parameters of END_RUN."""
    return {
        "run": run_id,
        "end_state": end.state,
        "end_time": end.end_time_ns,
        "end_error": end.error,
        "end_usage": end.tree_usage,
    }


def run_state_row(run_id: str, run_state: RunState) -> Row:
    """Return the parameters of MOVE_RUN."""
    return {
        "run": run_id,
        "new_state": run_state.state,
        "start_time": run_state.start_time_ns,
        "requests": run_state.open_requests,
        "expire_time": run_state.next_expire_time_ns,
        "deadline_time": run_state.deadline_time_ns,
    }


def usage_row(run_id: str, tree_usage: bytes) -> Row:
    """Return the parameters of SPEND."""
    return {"run": run_id, "used": tree_usage}


def evaluation_row(run_id: str, change: EvaluationChange) -> Row:
    """Return the parameters of SET_EVALUATION."""
    return {"run": run_id, "new_totals": change.totals, "new_verdict": change.verdict}


def state_row(tenant_id: str, session_id: str, run_id: str, state_json: str) -> Row:
    """Return the parameters of SET_STATE; `run_id` is empty if a call changes the state rather than a run."""
    return {"tenant": tenant_id, "session": session_id, "state": state_json, "run": run_id}


class SqlUsageLedger:
    """UsageLedger on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def list_for_run(self, run_id: str) -> Sequence[UsageEntry]:
        """See UsageLedger."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [_entry(row) for row in rows]


def _usage_of(row: sqlalchemy.Row[Any]) -> usage_pb2.Usage:
    return usage_pb2.Usage(**{name: getattr(row, name) for name in (*_KNOWN, *_COUNTED)})


def _entry(row: sqlalchemy.Row[Any]) -> UsageEntry:
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
