"""End runs that no worker executes, and state the reasons for ends from outside."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server.engine.cancellation import build_end_events
from bough_server.engine.journal import Journal
from bough_server.engine.open_invocations import Invocations
from bough_server.engine.run_log import log_events
from bough_server.engine.run_metrics import RunMetrics
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.log.blobs import StoredBlob
from bough_server.runs.dependencies import RunDependencies
from bough_server.store.ports.log import EventLog, LogEvent
from bough_server.store.ports.runs import Catalog, RunRow

RUN: Final = "The run"

Bound = tuple[float, execution_pb2.CancelReason.ValueType]
"""Seconds until a run is ended automatically, and the reason."""


def deadline_bound(deadline_ns: int, now_ns: int) -> Bound:
    """Return the bound of a caller's deadline; 0 seconds if it has passed."""
    return max(0.0, (deadline_ns - now_ns) / 1e9), execution_pb2.CANCEL_REASON_DEADLINE


def wall_bounds(limits: Iterable[policy_pb2.Limits], spent_ns: int) -> list[Bound]:
    """Return the bounds of a run's wall_duration limits, of which `spent_ns` nanoseconds have been used."""
    return [
        (max(0.0, (one.wall_duration.ToNanoseconds() - spent_ns) / 1e9), execution_pb2.CANCEL_REASON_LIMIT)
        for one in limits
        if one.HasField("wall_duration")
    ]


def wall_owner(policy: policy_pb2.Limits, root: agent_pb2.AgentDefinition) -> str:
    """Return whose wall_duration is shorter, the run's or the root agent's, for an error message."""
    if not root.limits.HasField("wall_duration"):
        return RUN
    own = root.limits.wall_duration.ToNanoseconds()
    if policy.HasField("wall_duration") and policy.wall_duration.ToNanoseconds() <= own:
        return RUN
    return f"The agent {root.name!r}"


def build_end_errors(
    reason: execution_pb2.CancelReason.ValueType, owner: str = RUN
) -> tuple[error_pb2.AgentError, error_pb2.AgentError]:
    """Return the error of a run that is ended from outside, and the error of everything below its root.

    `owner` is used for CANCEL_REASON_LIMIT: the subject of its message (see wall_owner).
    """
    messages = {
        execution_pb2.CANCEL_REASON_CALLER: ("The run was cancelled.", error_pb2.ERROR_REASON_CANCELLED),
        execution_pb2.CANCEL_REASON_DISCONNECTED: (
            "The run was cancelled because no client followed it any more.",
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
            "The server stopped while the run was executing.",
            error_pb2.ERROR_REASON_SERVER_STOPPED,
        ),
    }
    message, error_reason = messages[reason]
    retryable = error_reason == error_pb2.ERROR_REASON_SERVER_STOPPED
    below = RunError(message, reason=error_pb2.ERROR_REASON_CANCELLED)
    return RunError(message, reason=error_reason, retryable=retryable).to_agent_error(), below.to_agent_error()


@dataclass(frozen=True, slots=True)
class CloseReason:
    """Why a run is ended: the request to record if its log has none, and the errors of its root and of all below it."""

    request: event_pb2.CancelRequested
    error: error_pb2.AgentError
    below: error_pb2.AgentError


def close_reason(request: event_pb2.CancelRequested, owner: str = RUN) -> CloseReason:
    """Return the reason of an end from outside; `owner` as in build_end_errors."""
    return CloseReason(request, *build_end_errors(request.reason, owner))


def to_close_reason(error: RunError) -> CloseReason:
    """Return the reason of a run that cannot continue because of an error."""
    below = RunError("The run cannot continue.", reason=error_pb2.ERROR_REASON_CANCELLED)
    request = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_SERVER)
    return CloseReason(request, error.to_agent_error(), below.to_agent_error())


async def close_run(dependencies: RunDependencies, run_row: RunRow, reason: CloseReason) -> None:
    """Take a run over under the next epoch and end it, with every open invocation, in one append.

    If the log already holds a cancel request for the whole run, its reason is used instead. Raises RunMoved if
    another worker acted meanwhile, Fenced if the run has ended, and StorageFailed.
    """
    log = await read_log(dependencies.store.log, run_row.run.run_id)
    journal = Journal(log)
    invocations = Invocations(fork_ns=journal.fork_ns)
    for event in log:
        invocations.observe(event)
    made: list[event_pb2.AgentEvent] = []
    if (requested := find_cancel(log)) is not None:
        reason = close_reason(requested, await _wall_owner(dependencies.store.catalog, log))
    else:
        cancel = invocations.root().event("")
        cancel.cancel_requested.CopyFrom(reason.request)
        invocations.observe(cancel)
        made.append(cancel)
    now = dependencies.clock.now_ns()
    made.extend(build_end_events(invocations, "", reason.error, below=reason.below, now_ns=now))
    records = to_log_events(made, after=run_row.run.last_sequence, now_ns=now)
    # The new epoch fences a former owner that may still execute the run.
    await dependencies.store.log.take_over(
        run_row.run.run_id, epoch=run_row.epoch + 1, owner=dependencies.worker, log_events=records
    )
    log_events(run_row.run.run_id, made)
    if dependencies.metrics is not None:
        measuring = RunMetrics(dependencies.metrics, invocations, journal)
        for event in made:
            measuring.report(event)


def find_cancel(log: Iterable[event_pb2.AgentEvent]) -> event_pb2.CancelRequested | None:
    """Return the log's cancel request for the whole run, or None."""
    requests = (event.cancel_requested for event in log if event.HasField("cancel_requested"))
    return next((request for request in requests if not request.effect_scope), None)  # others cancel only a part


def policy_of(log: Sequence[event_pb2.AgentEvent]) -> policy_pb2.RunPolicy:
    """Return the policy in force at the end of a log: that of its last fork that has one, or of run_started."""
    policy = log[0].run_started.policy
    for event in log:
        if event.HasField("run_forked") and event.run_forked.HasField("policy"):
            policy = event.run_forked.policy
    return policy


async def _wall_owner(catalog: Catalog, log: Sequence[event_pb2.AgentEvent]) -> str:
    """Return wall_owner for a log; agents in code, which have no stored definition, have no limits either."""
    started = log[0].run_started
    for ref in started.definition_refs:
        definition = await catalog.get(ref.revision) if ref.name == started.agent else None
        if definition is not None:
            return wall_owner(policy_of(log).limits, definition)
    return RUN


async def read_log(log: EventLog, run_id: str) -> list[event_pb2.AgentEvent]:
    """Return a run's events without deltas, and without the run and session ids that are stamped for readers."""
    return [record.event for record in await read_log_events(log, run_id)]


async def read_log_events(log: EventLog, run_id: str, *, last_sequence: int = 0) -> list[LogEvent]:
    """Return what `read_log` returns, as records of the log; `last_sequence` is that of its last event, if known."""
    found: list[LogEvent] = []
    after = 0
    while page := await log.read(run_id, after=after, deltas=False):
        found += [LogEvent(sequence, kind, data, events.parse(data)) for sequence, kind, data in page]
        after = page[-1].sequence
        if after == last_sequence:
            break  # saves the read of an empty page
    return found


def to_log_events(
    made: Sequence[event_pb2.AgentEvent], *, after: int, now_ns: int, files: Sequence[StoredBlob] = ()
) -> list[LogEvent]:
    """Number and time events, and return them as records for the log; the first gets sequence `after` + 1.

    `files` are those that the events refer to and that are to be stored with them.
    """
    records = []
    for sequence, event in enumerate(made, after + 1):
        event.sequence = sequence
        event.record_time.FromNanoseconds(now_ns)
        kind, data = events.kind_of(event), event.SerializeToString()
        records.append(LogEvent(sequence=sequence, kind=kind, data=data, event=event, blobs=files))
        files = ()
    return records
