"""State of one agent invocation, accumulated from its events.

Parts of events are copied before they are kept: a reference to a part keeps the whole message in memory, for example a
request of 8 MiB.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from google.protobuf import timestamp_pb2

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, message_pb2, model_pb2
from bough_server.log import events
from bough_server.log.usage import Sums
from bough_server.messages import copy_of

_NOT_AGENTS: Final = frozenset({"", "user", "graph-node", "graph-pregel", "graph-executor"})
"""Authors that are not agents and so do not name an invocation."""

_MAX_FAULTS: Final = 64
"""The most faults of a run, see ToolMocks.faults."""

_STATES: Final = {
    events.RUN_COMPLETED: execution_pb2.EXECUTION_STATE_SUCCEEDED,
    events.RUN_FAILED: execution_pb2.EXECUTION_STATE_FAILED,
    events.RUN_CANCELLED: execution_pb2.EXECUTION_STATE_CANCELLED,
    events.SUB_AGENT_COMPLETED: execution_pb2.EXECUTION_STATE_SUCCEEDED,
    events.SUB_AGENT_FAILED: execution_pb2.EXECUTION_STATE_FAILED,
}


def anomaly(
    kind: invocation_pb2.AnomalyKind.ValueType, message: str, invocation_id: str = ""
) -> invocation_pb2.Anomaly:
    """Return an inconsistency of an invocation, or of the run if no invocation is named."""
    return invocation_pb2.Anomaly(kind=kind, message=message, invocation_id=invocation_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an invocation ended."""

    state: execution_pb2.ExecutionState.ValueType
    reason: execution_pb2.EndReason.ValueType
    usage: Sums | None
    """None if the end event reports none."""
    time: timestamp_pb2.Timestamp | None
    generation: int
    """Number of forks before it in the log."""
    output: message_pb2.Message | None = None
    error: error_pb2.AgentError | None = None
    cancel_reason: execution_pb2.CancelReason.ValueType = execution_pb2.CANCEL_REASON_UNSPECIFIED

    @classmethod
    def of(cls, event: event_pb2.AgentEvent, kind: int, *, generation: int) -> "End":
        """Return the end that an end event of a run or of a sub-agent records."""
        state, output, error = _STATES[kind], None, None
        payload: _Payload
        if kind == events.RUN_COMPLETED:
            payload = event.run_completed
            output = copy_of(payload.final_answer) if payload.HasField("final_answer") else None
        elif kind == events.SUB_AGENT_COMPLETED:
            payload = event.sub_agent_completed
            output = copy_of(payload.output) if payload.HasField("output") else None
        else:
            payload = _failure(event, kind)
            error = copy_of(payload.error) if payload.HasField("error") else None
            if kind == events.SUB_AGENT_FAILED and _is_cancel(payload.error):
                state = execution_pb2.EXECUTION_STATE_CANCELLED
        return cls(
            state=state,
            reason=payload.end_reason,
            usage=Sums.of(payload.usage) if payload.HasField("usage") else None,
            time=events.time_of(event),
            generation=generation,
            output=output,
            error=error,
            cancel_reason=_cancel_reason(payload),
        )


_Failure: TypeAlias = event_pb2.RunFailed | event_pb2.RunCancelled | event_pb2.SubAgentFailed
_Payload: TypeAlias = event_pb2.RunCompleted | event_pb2.SubAgentCompleted | _Failure


def _failure(event: event_pb2.AgentEvent, kind: int) -> _Failure:
    if kind == events.RUN_FAILED:
        return event.run_failed
    return event.run_cancelled if kind == events.RUN_CANCELLED else event.sub_agent_failed


def _cancel_reason(payload: _Payload) -> execution_pb2.CancelReason.ValueType:
    is_cancelled = payload.end_reason == execution_pb2.END_REASON_CANCELLED
    if is_cancelled and isinstance(payload, event_pb2.RunCancelled | event_pb2.SubAgentFailed):
        return payload.cancel_reason
    return execution_pb2.CANCEL_REASON_UNSPECIFIED


def _is_cancel(error: error_pb2.AgentError) -> bool:
    return error.reason == error_pb2.ERROR_REASON_CANCELLED


@dataclass(slots=True)
class Node:
    """What is known of one invocation so far. The first value of a field wins, except that a start overrides others."""

    invocation_id: str
    parent: str = ""
    branch: str = ""
    author: str = ""
    call_id: str = ""
    start: event_pb2.AgentEvent | None = None
    fork_time: timestamp_pb2.Timestamp | None = None
    """Time of the last fork while it was open: there the fork's own execution of it begins."""
    start_generation: int = 0
    """Number of forks before its start."""
    is_known: bool = False
    """Whether the envelopes of later events can add nothing."""
    first_time: timestamp_pb2.Timestamp | None = None
    trace: tuple[str, str] = ("", "")
    end: End | None = None
    error: error_pb2.AgentError | None = None
    """Error of its last model call or step, until the next model call starts."""
    step_count: int = 0
    running: Sums = field(default_factory=Sums)
    """Usage summed from its own events; counts as long as no end reports one."""
    open_calls: set[str] = field(default_factory=set)
    """Keys of model calls that have started and not ended."""
    open_tools: set[str] = field(default_factory=set)
    """Call ids of tool calls that have started and not ended."""
    intermediate_responses: list[message_pb2.Message] = field(default_factory=list)
    settings: model_pb2.ModelSettings | None = None
    """Settings of its last model call that belongs to a step."""
    anomalies: dict[str, invocation_pb2.AnomalyKind.ValueType] = field(default_factory=dict)
    """Kinds by message."""
    faults: Counter[int] = field(default_factory=Counter)
    """How often each fault was injected into its model calls, by number."""

    def apply_envelope(self, event: event_pb2.AgentEvent) -> None:
        """Apply the envelope of any of its events."""
        is_root = self.start is not None and self.start.HasField("run_started")
        if not self.parent and not is_root:
            self.parent = event.parent_invocation_id
        if not self.branch:
            self.branch = event.branch
        if not self.author and event.agent not in _NOT_AGENTS:
            self.author = event.agent
        if self.first_time is None:
            self.first_time = events.time_of(event)
        if not self.trace[0] and event.trace_id:
            self.trace = (event.trace_id, event.span_id)
        self.is_known = self.start is not None and bool(self.branch) and (is_root or bool(self.parent))

    def apply_start(self, event: event_pb2.AgentEvent, *, generation: int) -> None:
        """Apply a run_started or sub_agent_started that follows `generation` forks; the first one wins."""
        if self.start is not None:
            self.note(invocation_pb2.ANOMALY_KIND_REPEATED, "It began more than once.")
            return
        self.start, self.start_generation = copy_of(event), generation
        if event.HasField("run_started") or event.parent_invocation_id:
            self.parent = event.parent_invocation_id
        if event.HasField("sub_agent_started"):
            self.call_id = event.sub_agent_started.call_id
        if event.trace_id:
            self.trace = (event.trace_id, event.span_id)
        self.apply_envelope(event)

    def apply_end(self, end: End) -> None:
        """Apply an end; the first one wins."""
        if self.end is None:
            self.end = end
        else:
            self.note(invocation_pb2.ANOMALY_KIND_REPEATED, "It ended more than once.")

    def count_fault(self, failure: event_pb2.LlmRetrying | event_pb2.LlmFailed) -> None:
        """Count the fault that failed an attempt, if one did; a number that no run has is not counted."""
        if failure.HasField("fault_index") and 0 <= failure.fault_index < _MAX_FAULTS:
            self.faults[failure.fault_index] += 1

    def note(self, kind: invocation_pb2.AnomalyKind.ValueType, message: str) -> None:
        """Record an anomaly, once."""
        self.anomalies[message] = kind

    @property
    def usage(self) -> Sums:
        """Usage without its descendants: as its end reports it, else summed from its events."""
        return self.running if self.end is None or self.end.usage is None else self.end.usage

    @property
    def name(self) -> str:
        """Name of the agent: from its start, else the last name of its branch, else its first author."""
        if self.start is not None:
            named = self.start.run_started.agent or self.start.agent
            if named:
                return named
        return next((name for name in reversed(self.branch.split("/")) if name), self.author)

    def state(
        self, open_state: execution_pb2.ExecutionState.ValueType | None
    ) -> execution_pb2.ExecutionState.ValueType:
        """Return its state; `open_state` is the state of an invocation without an end, None if the run has ended.

        Then an invocation without an end has the state of its last error, or an unspecified one if it has no error.
        """
        if self.end is not None:
            return self.end.state
        if open_state is not None:
            return open_state
        if self.error is None:
            return execution_pb2.EXECUTION_STATE_UNSPECIFIED
        return (
            execution_pb2.EXECUTION_STATE_CANCELLED if _is_cancel(self.error) else execution_pb2.EXECUTION_STATE_FAILED
        )

    def _start_time(self) -> timestamp_pb2.Timestamp | None:
        if self.fork_time is not None or self.start is None:
            return self.fork_time or self.first_time
        return events.time_of(self.start) or self.first_time

    def describe(self, open_state: execution_pb2.ExecutionState.ValueType | None) -> invocation_pb2.AgentInvocation:
        """Return the node without its place in the tree, tree usage and revision; `open_state` is as in state()."""
        described = invocation_pb2.AgentInvocation(
            invocation_id=self.invocation_id,
            parent_invocation_id=self.parent,
            name=self.name,
            branch=self.branch,
            call_id=self.call_id,
            state=self.state(open_state),
            start_time=self._start_time(),
            usage=self.usage.usage(),
            step_count=self.step_count,
            trace_id=self.trace[0],
            span_id=self.trace[1],
            anomalies=(anomaly(kind, message, self.invocation_id) for message, kind in self.anomalies.items()),
            settings=self.settings,
            model_faults=(
                invocation_pb2.FaultCount(index=index, count=count) for index, count in sorted(self.faults.items())
            ),
        )
        if self.start is not None:
            _describe_start(described, self.start)
        if self.end is not None:
            described.end_reason, described.cancel_reason = self.end.reason, self.end.cancel_reason
            # MergeFrom a constructor: message fields accept None there, and cannot be assigned.
            described.MergeFrom(
                invocation_pb2.AgentInvocation(error=self.end.error, end_time=self.end.time, output=self.end.output)
            )
        elif open_state is None:
            message = "It has no end, although the run has ended."
            described.anomalies.append(anomaly(invocation_pb2.ANOMALY_KIND_NO_END, message, self.invocation_id))
            if self.error is not None:
                described.error.CopyFrom(self.error)
        return described


def _describe_start(described: invocation_pb2.AgentInvocation, start: event_pb2.AgentEvent) -> None:
    payload: event_pb2.RunStarted | event_pb2.SubAgentStarted
    if start.HasField("run_started"):
        payload = start.run_started
        described.trigger = execution_pb2.INVOCATION_TRIGGER_ROOT
    else:
        payload = start.sub_agent_started
        described.trigger = payload.trigger
        described.from_invocation_id, described.node = payload.from_invocation_id, payload.node
        if payload.HasField("iteration"):
            described.iteration = payload.iteration
        if payload.HasField("mock_index"):
            described.mock_index = payload.mock_index
    described.kind = payload.kind
    described.run_path.extend(payload.run_path)
    if payload.HasField("input"):
        described.input.CopyFrom(payload.input)
