"""What is derived from a run's events, as the rows that statements take; it writes none."""

from collections.abc import Mapping

from bough_server.store.derived import Projected, RunEnd
from bough_server.store.standing import RunStanding

Row = Mapping[str, object]


def message_rows(session_id: str, tenant_id: str, projected: Projected) -> list[Row]:
    """Rows of the messages table."""
    return [
        {
            "session_id": session_id,
            "position": stored.message.position,
            "tenant_id": tenant_id,
            "run_id": stored.run_id,
            "agent": stored.agent,
            "chain": stored.chain,
            "data": stored.message.SerializeToString(deterministic=True),
        }
        for stored in projected.messages
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
            "usage": entry.usage.SerializeToString(deterministic=True),
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


def standing_row(run_id: str, standing: RunStanding) -> Row:
    """What MOVE_RUN takes."""
    return {
        "run": run_id,
        "new_state": standing.state,
        "start_time": standing.start_time_ns,
        "requests": standing.open_requests,
        "expire_time": standing.next_expire_time_ns,
    }


def state_row(session_id: str, run_id: str, state_json: str) -> Row:
    """What SET_STATE takes; an empty run where no log makes the state."""
    return {"session": session_id, "state": state_json, "run": run_id}
