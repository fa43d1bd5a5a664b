"""Rows of the derived tables, in the form that the statements that write them expect."""

from collections.abc import Mapping, Sequence

from bough_server.log.run_state import RunState
from bough_server.store.ports.sessions import StoredCall, StoredMessage
from bough_server.store.projected import EvaluationChange, RunEnd

Row = Mapping[str, object]


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


def usage_row(run_id: str, tree_usage: bytes, reserved_nanos: int) -> Row:
    """Return the parameters of SPEND."""
    return {"run": run_id, "used": tree_usage, "reserved": reserved_nanos}


def evaluation_row(run_id: str, change: EvaluationChange) -> Row:
    """Return the parameters of SET_EVALUATION."""
    return {"run": run_id, "new_totals": change.totals, "new_verdict": change.verdict}


def state_row(tenant_id: str, session_id: str, run_id: str, state_json: str) -> Row:
    """Return the parameters of SET_STATE; `run_id` is empty if a call changes the state rather than a run."""
    return {"tenant": tenant_id, "session": session_id, "state": state_json, "run": run_id}
