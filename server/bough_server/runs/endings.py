"""Why and when a run is ended from outside, in words and codes; who ends it is not here."""

from collections.abc import Iterable
from typing import Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, policy_pb2
from bough_server.errors import RunError

RUN: Final = "The run"

Bound = tuple[float, event_pb2.CancelReason.ValueType]
"""Seconds after which a run ends by itself, and why."""


def deadline_bound(deadline_ns: int, now_ns: int) -> Bound:
    """When the caller's deadline ends a run; a time that is over gives no seconds."""
    return max(0.0, (deadline_ns - now_ns) / 1e9), event_pb2.CANCEL_REASON_DEADLINE


def wall_bounds(limits: Iterable[policy_pb2.Limits], spent_ns: int) -> list[Bound]:
    """When a run's time on the wall is up, after so much of it was spent."""
    return [
        (max(0.0, (one.wall_duration.ToNanoseconds() - spent_ns) / 1e9), event_pb2.CANCEL_REASON_LIMIT)
        for one in limits
        if one.HasField("wall_duration")
    ]


def wall_owner(policy: policy_pb2.Limits, root: agent_pb2.AgentDefinition) -> str:
    """Whose time on the wall is up first, in words: the run's, unless its root's definition allows it less."""
    if not root.limits.HasField("wall_duration"):
        return RUN
    own = root.limits.wall_duration.ToNanoseconds()
    if policy.HasField("wall_duration") and policy.wall_duration.ToNanoseconds() <= own:
        return RUN
    return f"The agent {root.name!r}"


def why_ended(
    reason: event_pb2.CancelReason.ValueType, owner: str = RUN
) -> tuple[error_pb2.AgentError, error_pb2.AgentError]:
    """The error of a run that is ended from outside, and that of everything below its root.

    `owner` is whose time was up, where that is the reason.
    """
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
            f"{owner} took longer than its wall_duration.",
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
