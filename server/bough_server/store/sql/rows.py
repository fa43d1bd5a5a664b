"""Rows of what is derived from events, as the statements that write them take them."""

from collections.abc import Mapping, Sequence

from bough_server.run_state import RunState
from bough_server.store.ports import StoredMessage
from bough_server.store.projected import Projected, RunEnd
from bough_server.store.sql.usage import usage_values

Row = Mapping[str, object]


def message_rows(tenant_id: str, session_id: str, messages: Sequence[StoredMessage]) -> list[Row]:
    """Rows of the messages table."""
    return [
        {
            "tenant_id": tenant_id,
            "session_id": session_id,
            "position": stored.message.position,
            "run_id": stored.run_id,
            "agent": stored.agent,
            "chain": stored.chain,
            "data": stored.message.SerializeToString(deterministic=True),
        }
        for stored in messages
    ]


def usage_rows(projected: Projected) -> list[Row]:
    """Rows of the usage table."""
    return [
        {
            "run_id": entry.run_id,
            "sequence": entry.sequence,
            "tenant_id": entry.tenant_id,
            "user_id": entry.user_id,
            "session_id": entry.session_id,
            "agent": entry.agent,
            "invocation_id": entry.invocation_id,
            "model": entry.model,
            "time_ns": entry.time_ns,
            **usage_values(entry.usage),
        }
        for entry in projected.usage
    ]


def end_row(run_id: str, end: RunEnd) -> Row:
    """What END_RUN takes."""
    return {
        "run": run_id,
        "end_state": end.state,
        "end_time": end.end_time_ns,
        "end_error": end.error,
        "end_usage": end.tree_usage,
    }


def standing_row(run_id: str, standing: RunState) -> Row:
    """What MOVE_RUN takes."""
    return {
        "run": run_id,
        "new_state": standing.state,
        "start_time": standing.start_time_ns,
        "requests": standing.open_requests,
        "expire_time": standing.next_expire_time_ns,
        "deadline_time": standing.deadline_time_ns,
    }


def usage_row(run_id: str, tree_usage: bytes) -> Row:
    """What SPEND takes."""
    return {"run": run_id, "used": tree_usage}


def state_row(tenant_id: str, session_id: str, run_id: str, state_json: str) -> Row:
    """What SET_STATE takes; an empty run where no log makes the state."""
    return {"tenant": tenant_id, "session": session_id, "state": state_json, "run": run_id}
