"""Find the aborts that are under way at a sequence of a log, for forks whose policy does not abort any more.

A failure that aborts its caller is recorded last: before it come the cancellations of what runs beside it, and the ends
of that. In between the abort is under way. A fork that started there under a policy that judges the failure otherwise
would wait forever for what was cancelled.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bough.v1 import event_pb2, execution_pb2, policy_pb2
from bough_server.engine import keys
from bough_server.log import events
from bough_server.runs.close import policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """An event that stops something of `caller` because a failure aborts that."""

    caller: str
    scope: str
    sequence: int


def find_start_under_policy(log: Sequence[event_pb2.AgentEvent], sequence: int, policy: policy_pb2.RunPolicy) -> int:
    """Return where a fork with a policy starts: at `sequence`, or right before the aborts that are under way there."""
    shared = [event for event in log if event.sequence <= sequence]
    if not _is_abort_policy(policy_of(shared)) or _is_abort_policy(policy):
        return sequence
    # Look again after each move: an abort that is over at a sequence may be under way at an earlier one.
    while begun := min(_find_open_aborts(shared), default=0):
        sequence = begun - 1
        shared = [event for event in shared if event.sequence <= sequence]
    return sequence


def _is_abort_policy(policy: policy_pb2.RunPolicy) -> bool:
    return policy.on_sub_agent_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT


def _find_open_aborts(shared: Sequence[event_pb2.AgentEvent]) -> Iterator[int]:
    """Yield the sequences of the stops whose cause has not ended by the end of a log.

    The log does not name the cause: it is a child of the same caller that began before and is not stopped itself.
    """
    stops: dict[str, list[_Stop]] = defaultdict(list)
    for stop in _find_stops(shared):
        stops[stop.caller].append(stop)
    for started in _find_open_children(shared) if stops else ():
        of_caller = stops[started.parent_invocation_id]
        if not any(keys.covers(stop.scope, started.effect_key) for stop in of_caller):
            yield from (stop.sequence for stop in of_caller if stop.sequence > started.sequence)


def _find_stops(shared: Sequence[event_pb2.AgentEvent]) -> Iterator[_Stop]:
    late: set[str] = set()
    for event in shared:
        scope, reason = event.cancel_requested.effect_scope, event.cancel_requested.reason
        if reason == execution_pb2.CANCEL_REASON_LIMIT:
            late.add(scope)
        elif reason == execution_pb2.CANCEL_REASON_ABORT:
            yield _Stop(caller=event.invocation_id, scope=scope, sequence=event.sequence)
        # A child whose time was up too has no second request: its end shows that the abort came before its timeout.
        elif event.sub_agent_failed.end_reason == execution_pb2.END_REASON_CANCELLED and event.effect_key in late:
            yield _Stop(caller=event.parent_invocation_id, scope=event.effect_key, sequence=event.sequence)


def _find_open_children(shared: Sequence[event_pb2.AgentEvent]) -> list[event_pb2.AgentEvent]:
    """Return the starts of the sub-agents that have no end in a log."""
    started: dict[str, event_pb2.AgentEvent] = {}
    for event in shared:
        if event.HasField("sub_agent_started"):
            started[event.invocation_id] = event
        elif events.kind_of(event) in events.AGENT_END_KINDS:
            started.pop(event.invocation_id, None)
    return list(started.values())
