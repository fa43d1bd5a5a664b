"""Why and when a run is ended from outside, in words and codes; who ends it is not here."""

from bough.v1 import error_pb2, event_pb2
from bough_server.admission import Admission
from bough_server.errors import RunError


def bounds(admission: Admission, now_ns: int) -> list[tuple[float, event_pb2.CancelReason.ValueType]]:
    """When a run is to end by itself: seconds from now, and why."""
    bounds: list[tuple[float, event_pb2.CancelReason.ValueType]] = []
    if admission.deadline_time_ns is not None:
        bounds.append(((admission.deadline_time_ns - now_ns) / 1e9, event_pb2.CANCEL_REASON_DEADLINE))
    bounds.extend(
        (limits.wall_duration.ToTimedelta().total_seconds(), event_pb2.CANCEL_REASON_LIMIT)
        for limits in (admission.policy.limits, admission.agent.definition.limits)
        if limits.HasField("wall_duration")
    )
    return bounds


def why_ended(reason: event_pb2.CancelReason.ValueType) -> tuple[error_pb2.AgentError, error_pb2.AgentError]:
    """The error of a run that is ended from outside, and that of everything below its root."""
    said = {
        event_pb2.CANCEL_REASON_CALLER: ("The run was cancelled.", error_pb2.ERROR_REASON_CANCELLED),
        event_pb2.CANCEL_REASON_DISCONNECTED: (
            "The run was cancelled because nobody followed it any more.",
            error_pb2.ERROR_REASON_CANCELLED,
        ),
        event_pb2.CANCEL_REASON_DEADLINE: (
            "The caller's deadline passed before the run ended.",
            error_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
        ),
        event_pb2.CANCEL_REASON_LIMIT: (
            "The run took longer than its wall_duration.",
            error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        ),
        event_pb2.CANCEL_REASON_SERVER: (
            "The server stopped while the run was going.",
            error_pb2.ERROR_REASON_SERVER_STOPPED,
        ),
    }
    message, why = said[reason]
    retryable = why == error_pb2.ERROR_REASON_SERVER_STOPPED
    below = RunError(message, reason=error_pb2.ERROR_REASON_CANCELLED)
    return RunError(message, reason=why, retryable=retryable).to_agent_error(), below.to_agent_error()
