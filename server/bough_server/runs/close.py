"""End a run that no worker executes, with the reason for its end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server import events
from bough_server.engine.cancellation import closing
from bough_server.engine.journal import Journal
from bough_server.engine.open_invocations import Invocations
from bough_server.engine.run_metrics import RunMetrics
from bough_server.errors import RunError
from bough_server.runs.dependencies import RunDependencies
from bough_server.store.ports import Catalog, EventLog, Record, RunRecord

RUN: Final = "The run"

Bound = tuple[float, execution_pb2.CancelReason.ValueType]
"""Seconds after which a run ends by itself, and why."""


def deadline_bound(deadline_ns: int, now_ns: int) -> Bound:
    """When the caller's deadline ends a run; a time that is over gives no seconds."""
    return max(0.0, (deadline_ns - now_ns) / 1e9), execution_pb2.CANCEL_REASON_DEADLINE


def wall_bounds(limits: Iterable[policy_pb2.Limits], spent_ns: int) -> list[Bound]:
    """When a run's time on the wall is up, after so much of it was spent."""
    return [
        (max(0.0, (one.wall_duration.ToNanoseconds() - spent_ns) / 1e9), execution_pb2.CANCEL_REASON_LIMIT)
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
    reason: execution_pb2.CancelReason.ValueType, owner: str = RUN
) -> tuple[error_pb2.AgentError, error_pb2.AgentError]:
    """The error of a run that is ended from outside, and that of everything below its root.

    `owner` is whose time was up, where that is the reason.
    """
    said = {
        execution_pb2.CANCEL_REASON_CALLER: ("The run was cancelled.", error_pb2.ERROR_REASON_CANCELLED),
        execution_pb2.CANCEL_REASON_DISCONNECTED: (
            "The run was cancelled because nobody followed it any more.",
            error_pb2.ERROR_REASON_CANCELLED,
        ),
        execution_pb2.CANCEL_REASON_SUPERSEDED: (
            "The run was cancelled because another run took over its session.",
            error_pb2.ERROR_REASON_CANCELLED,
        ),
        execution_pb2.CANCEL_REASON_DEADLINE: (
            "The caller's deadline passed before the run ended.",
            error_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
        ),
        execution_pb2.CANCEL_REASON_LIMIT: (
            f"{owner} took longer than its wall_duration.",
            error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        ),
        execution_pb2.CANCEL_REASON_SERVER: (
            "The server stopped while the run was going.",
            error_pb2.ERROR_REASON_SERVER_STOPPED,
        ),
    }
    message, why = said[reason]
    retryable = why == error_pb2.ERROR_REASON_SERVER_STOPPED
    below = RunError(message, reason=error_pb2.ERROR_REASON_CANCELLED)
    return RunError(message, reason=why, retryable=retryable).to_agent_error(), below.to_agent_error()


@dataclass(frozen=True, slots=True)
class CloseReason:
    """Why a run is ended: the request to record, if its log has none, and the errors of its root and of all below."""

    request: event_pb2.CancelRequested
    error: error_pb2.AgentError
    below: error_pb2.AgentError


def close_reason(request: event_pb2.CancelRequested, owner: str = RUN) -> CloseReason:
    """The words for an end from outside; `owner` is whose time was up, where that is the reason."""
    return CloseReason(request, *why_ended(request.reason, owner))


def failed(error: RunError) -> CloseReason:
    """The words for a run that cannot go on."""
    below = RunError("The run cannot go on.", reason=error_pb2.ERROR_REASON_CANCELLED)
    request = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_SERVER)
    return CloseReason(request, error.to_agent_error(), below.to_agent_error())


async def close_run(equipment: RunDependencies, record: RunRecord, why: CloseReason) -> None:
    """Ends every open invocation of a run under a new epoch, and then the run.

    A wish to end the run that its log holds already is the one that counts. Raises RunMoved where somebody else acted
    meanwhile, Fenced where it has ended, StorageFailed.
    """
    log = await read_log(equipment.log, record.run.run_id)
    invocations = Invocations()
    for event in log:
        invocations.observe(event)
    made: list[event_pb2.AgentEvent] = []
    if (requested := cancel_of(log)) is not None:
        why = close_reason(requested, await _wall_owner(equipment.catalog, log))
    else:
        wish = invocations.root().event("")
        wish.cancel_requested.CopyFrom(why.request)
        invocations.observe(wish)
        made.append(wish)
    now = equipment.clock.now_ns()
    made.extend(closing(invocations, "", why.error, why.below, now))
    records = as_records(made, after=record.run.last_sequence, now_ns=now)
    await equipment.log.take_over(record.run.run_id, epoch=record.epoch + 1, owner=equipment.worker, records=records)
    if equipment.metrics is not None:
        measuring = RunMetrics(equipment.metrics, invocations, Journal(log))
        for event in made:
            measuring.take(event)


def cancel_of(log: Iterable[event_pb2.AgentEvent]) -> event_pb2.CancelRequested | None:
    """The request to end a whole run that its log holds; None if it holds none."""
    requests = (event.cancel_requested for event in log if event.HasField("cancel_requested"))
    return next((request for request in requests if not request.effect_scope), None)


def policy_of(log: Sequence[event_pb2.AgentEvent]) -> policy_pb2.RunPolicy:
    """The policy in force at the end of a log: that of the run's start, or the one that its last fork brought."""
    policy = log[0].run_started.policy
    for event in log:
        if event.HasField("run_forked") and event.run_forked.HasField("policy"):
            policy = event.run_forked.policy
    return policy


async def _wall_owner(catalog: Catalog, log: Sequence[event_pb2.AgentEvent]) -> str:
    """Whose time on the wall is up first, as wall_owner has it; agents in code have no bounds of their own."""
    started = log[0].run_started
    for ref in started.definition_refs:
        definition = await catalog.get(ref.revision) if ref.name == started.agent else None
        if definition is not None:
            return wall_owner(policy_of(log).limits, definition)
    return RUN


async def read_log(log: EventLog, run_id: str) -> list[event_pb2.AgentEvent]:
    """A run's events without its deltas, and without the stamp that only readers need."""
    found: list[event_pb2.AgentEvent] = []
    after = 0
    while page := await log.read(run_id, after=after, deltas=False):
        found.extend(events.parse(stored.data) for stored in page)
        after = page[-1].sequence
    return found


def as_records(made: Sequence[event_pb2.AgentEvent], *, after: int, now_ns: int) -> list[Record]:
    """Events as the log takes them, numbered on from a sequence."""
    records = []
    for sequence, event in enumerate(made, after + 1):
        event.sequence = sequence
        event.record_time.FromNanoseconds(now_ns)
        records.append(
            Record(sequence=sequence, kind=events.kind_of(event), data=event.SerializeToString(), event=event)
        )
    return records
