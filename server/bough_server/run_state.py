"""State of a run while it is open: its state, its start, its deadline, and the requests that wait for an answer."""

from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, execution_pb2, input_pb2
from bough_server import events


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What the run's row says of it while it goes on; each replaces the one before, whole."""

    state: int
    start_time_ns: int | None
    """None while it waits for its session."""
    open_requests: bytes | None
    """A serialized RunInterrupted with every request that is open, in the order of asking; None for none."""
    next_expire_time_ns: int | None
    """When the first of them expires; None where the run does not wait for them, or none ever expires."""
    deadline_time_ns: int | None
    """When the caller's deadline passes; None if there is none, and while the run waits for input."""


def deadline_after(event: event_pb2.AgentEvent, deadline_ns: int | None) -> int | None:
    """The caller's deadline in force after an event; `deadline_ns` is the one before it.

    It lapses at an interruption, and the call that answers brings its own. A fork has its caller's, not its origin's.
    """
    kind = events.kind_of(event)
    if kind == events.RUN_STARTED:
        return _deadline_of(event.run_started)
    if kind == events.RUN_FORKED:
        return _deadline_of(event.run_forked)
    if kind == events.RUN_INTERRUPTED:
        return None
    if kind == events.RUN_RESUMED and event.run_resumed.HasField("deadline_time"):
        return _deadline_of(event.run_resumed)
    return deadline_ns


def _deadline_of(begun: event_pb2.RunStarted | event_pb2.RunForked | event_pb2.RunResumed) -> int | None:
    return begun.deadline_time.ToNanoseconds() if begun.HasField("deadline_time") else None


class RunStateFold:
    """The fold of what changes where a run stands."""

    def __init__(self) -> None:
        self._state: execution_pb2.ExecutionState.ValueType = execution_pb2.EXECUTION_STATE_RUNNING
        self._start_time_ns: int | None = None
        self._deadline_time_ns: int | None = None
        self._open: dict[str, input_pb2.InputRequest] = {}
        self._is_changed = False

    @property
    def asks(self) -> bool:
        """Whether a request is open."""
        return bool(self._open)

    def begin(self, event: event_pb2.AgentEvent) -> None:
        """Takes in the run_started; a run that has only that is going, which is no change."""
        self._start_time_ns = event.record_time.ToNanoseconds()
        self._deadline_time_ns = deadline_after(event, None)

    def take(self, event: event_pb2.AgentEvent) -> None:
        """Takes in an event that moves the run, asks, or ends who asks."""
        self._deadline_time_ns = deadline_after(event, self._deadline_time_ns)
        _FOLDS[events.kind_of(event)](self, event)

    def change(self) -> RunState | None:
        """Where the run stands, if that is another than when this was last called."""
        if not self._is_changed:
            return None
        self._is_changed = False
        asked = event_pb2.RunInterrupted(requests=self._open.values())
        return RunState(
            state=self._state,
            start_time_ns=self._start_time_ns,
            open_requests=asked.SerializeToString(deterministic=True) if self._open else None,
            next_expire_time_ns=self._first_expiry()
            if self._state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
            else None,
            deadline_time_ns=self._deadline_time_ns,
        )

    def _first_expiry(self) -> int | None:
        times = (one.expire_time.ToNanoseconds() for one in self._open.values() if one.HasField("expire_time"))
        return min(times, default=None)

    def _move(self, state: execution_pb2.ExecutionState.ValueType) -> None:
        self._state, self._is_changed = state, True

    def _run_queued(self, _: event_pb2.AgentEvent) -> None:
        self._start_time_ns = None
        self._move(execution_pb2.EXECUTION_STATE_PENDING)

    def _run_begins(self, event: event_pb2.AgentEvent) -> None:
        if self._start_time_ns is None:
            self._start_time_ns = event.record_time.ToNanoseconds()
        self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _run_resumed(self, _: event_pb2.AgentEvent) -> None:
        if self._state != execution_pb2.EXECUTION_STATE_PENDING:  # a new owner gives a run that waits no session
            self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _run_interrupted(self, event: event_pb2.AgentEvent) -> None:
        self._open = {}
        for request in event.run_interrupted.requests:
            self._ask(request)
        self._move(execution_pb2.EXECUTION_STATE_INPUT_REQUIRED)

    def _cancel_requested(self, event: event_pb2.AgentEvent) -> None:
        """A run that is to end waits for nobody any more: whoever finds it so ends it."""
        if not event.cancel_requested.effect_scope and self._state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _input_requested(self, event: event_pb2.AgentEvent) -> None:
        self._ask(event.input_requested.request)

    def _ask(self, request: input_pb2.InputRequest) -> None:
        kept = input_pb2.InputRequest()
        kept.CopyFrom(request)
        self._open[kept.input_id] = kept
        self._is_changed = True

    def _input_received(self, event: event_pb2.AgentEvent) -> None:
        if self._open.pop(event.input_received.answer.input_id, None) is not None:
            self._is_changed = True

    def _call_ended(self, event: event_pb2.AgentEvent) -> None:
        self._close(event.invocation_id, events.tool_result_of(event).call.call_id)

    def _invocation_ended(self, event: event_pb2.AgentEvent) -> None:
        self._close(event.invocation_id)

    def _close(self, invocation_id: str, call_id: str | None = None) -> None:
        """Closes what an invocation asks, or only what it asks about one call."""
        for input_id, request in list(self._open.items()):
            if request.invocation_id == invocation_id and call_id in (None, request.call_id):
                del self._open[input_id]
                self._is_changed = True


_FOLDS: Final = {
    events.RUN_QUEUED: RunStateFold._run_queued,
    events.RUN_DEQUEUED: RunStateFold._run_begins,
    events.RUN_FORKED: RunStateFold._run_begins,
    events.RUN_RESUMED: RunStateFold._run_resumed,
    events.RUN_INTERRUPTED: RunStateFold._run_interrupted,
    events.CANCEL_REQUESTED: RunStateFold._cancel_requested,
    events.INPUT_REQUESTED: RunStateFold._input_requested,
    events.INPUT_RECEIVED: RunStateFold._input_received,
    events.TOOL_COMPLETED: RunStateFold._call_ended,
    events.TOOL_FAILED: RunStateFold._call_ended,
    events.SUB_AGENT_COMPLETED: RunStateFold._invocation_ended,
    events.SUB_AGENT_FAILED: RunStateFold._invocation_ended,
}
