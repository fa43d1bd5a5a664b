"""State of an open run: its execution state, start, deadline and open input requests."""

from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, execution_pb2, input_pb2
from bough_server import events
from bough_server.messages import copy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of an open run, as its row stores it; each one replaces the previous one completely."""

    state: int
    start_time_ns: int | None
    """None while the run waits for its session."""
    open_requests: bytes | None
    """A serialized RunInterrupted with every open request, in the order in which they were made; None if there are
    none."""
    next_expire_time_ns: int | None
    """Time at which the first request expires; None if the run is not INPUT_REQUIRED or no request expires."""
    deadline_time_ns: int | None
    """The caller's deadline; None if there is none, and while the run waits for input."""


def deadline_after(event: event_pb2.AgentEvent, deadline_ns: int | None) -> int | None:
    """Return the caller's deadline after an event; `deadline_ns` is the one before it.

    The deadline lapses at an interruption, and the call that answers sets its own. A fork has its caller's, not its
    origin's.
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
    """Fold of the events that change a run's state."""

    def __init__(self) -> None:
        self._state: execution_pb2.ExecutionState.ValueType = execution_pb2.EXECUTION_STATE_RUNNING
        self._start_time_ns: int | None = None
        self._deadline_time_ns: int | None = None
        self._open: dict[str, input_pb2.InputRequest] = {}
        self._is_changed = False

    @property
    def asks(self) -> bool:
        """True if a request is open."""
        return bool(self._open)

    def begin(self, event: event_pb2.AgentEvent) -> None:
        """Apply the run_started event. It counts as no change: a run without further events has the initial state."""
        self._start_time_ns = event.record_time.ToNanoseconds()
        self._deadline_time_ns = deadline_after(event, None)

    def take(self, event: event_pb2.AgentEvent) -> None:
        """Apply an event that moves the run, makes a request, or ends the requester."""
        self._deadline_time_ns = deadline_after(event, self._deadline_time_ns)
        _FOLDS[events.kind_of(event)](self, event)

    def change(self) -> RunState | None:
        """Return the state of the run if it has changed since the last call, else None."""
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
        # A run that waits for its session still waits for it after another worker took it over.
        if self._state != execution_pb2.EXECUTION_STATE_PENDING:
            self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _run_interrupted(self, event: event_pb2.AgentEvent) -> None:
        # The event lists every open request, so it replaces the collected ones.
        self._open = {}
        for request in event.run_interrupted.requests:
            self._ask(request)
        self._move(execution_pb2.EXECUTION_STATE_INPUT_REQUIRED)

    def _cancel_requested(self, event: event_pb2.AgentEvent) -> None:
        """Move a waiting run to RUNNING: a cancelled run waits for no input, and recovery will end it."""
        if not event.cancel_requested.effect_scope and self._state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _input_requested(self, event: event_pb2.AgentEvent) -> None:
        self._ask(event.input_requested.request)

    def _ask(self, request: input_pb2.InputRequest) -> None:
        kept = copy_of(request)
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
        """Close the requests of an invocation, or only those about one of its calls."""
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
