"""State of a run while it is open: its state, its start, and the requests that wait for an answer.

It knows no end of a run, and judges no answers.
"""

from dataclasses import dataclass
from typing import Final

from bough.v1 import event_pb2, input_pb2
from bough_server import events


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStanding:
    """What the run's row says of it while it goes on; each replaces the one before, whole."""

    state: int
    start_time_ns: int | None
    """None while it waits for its session."""
    open_requests: bytes | None
    """A serialized RunInterrupted with every request that is open, in the order of asking; None for none."""
    next_expire_time_ns: int | None
    """When the first of them expires; None where the run does not wait for them, or none ever expires."""


class StandingFold:
    """The fold of what changes where a run stands."""

    def __init__(self) -> None:
        self._state: event_pb2.State.ValueType = event_pb2.STATE_RUNNING
        self._start_time_ns: int | None = None
        self._open: dict[str, input_pb2.InputRequest] = {}
        self._is_changed = False

    @property
    def asks(self) -> bool:
        """Whether a request is open."""
        return bool(self._open)

    def begin(self, event: event_pb2.AgentEvent) -> None:
        """Takes in the run_started; a run that has only that is going, which is no change."""
        self._start_time_ns = event.time.ToNanoseconds()

    def take(self, event: event_pb2.AgentEvent) -> None:
        """Takes in an event that moves the run, asks, or ends who asks."""
        _FOLDS[events.kind_of(event)](self, event)

    def change(self) -> RunStanding | None:
        """Where the run stands, if that is another than when this was last called."""
        if not self._is_changed:
            return None
        self._is_changed = False
        asked = event_pb2.RunInterrupted(requests=self._open.values())
        return RunStanding(
            state=self._state,
            start_time_ns=self._start_time_ns,
            open_requests=asked.SerializeToString(deterministic=True) if self._open else None,
            next_expire_time_ns=self._first_expiry() if self._state == event_pb2.STATE_INPUT_REQUIRED else None,
        )

    def _first_expiry(self) -> int | None:
        times = (one.expire_time.ToNanoseconds() for one in self._open.values() if one.HasField("expire_time"))
        return min(times, default=None)

    def _move(self, state: event_pb2.State.ValueType) -> None:
        self._state, self._is_changed = state, True

    def _run_queued(self, _: event_pb2.AgentEvent) -> None:
        self._start_time_ns = None
        self._move(event_pb2.STATE_PENDING)

    def _run_begins(self, event: event_pb2.AgentEvent) -> None:
        if self._start_time_ns is None:
            self._start_time_ns = event.time.ToNanoseconds()
        self._move(event_pb2.STATE_RUNNING)

    def _run_resumed(self, _: event_pb2.AgentEvent) -> None:
        if self._state != event_pb2.STATE_PENDING:  # a new owner gives a run that waits no session
            self._move(event_pb2.STATE_RUNNING)

    def _run_interrupted(self, event: event_pb2.AgentEvent) -> None:
        self._open = {}
        for request in event.run_interrupted.requests:
            self._ask(request)
        self._move(event_pb2.STATE_INPUT_REQUIRED)

    def _cancel_requested(self, event: event_pb2.AgentEvent) -> None:
        """A run that is to end waits for nobody any more: whoever finds it so ends it."""
        if not event.cancel_requested.scope and self._state == event_pb2.STATE_INPUT_REQUIRED:
            self._move(event_pb2.STATE_RUNNING)

    def _input_requested(self, event: event_pb2.AgentEvent) -> None:
        self._ask(event.input_requested.request)

    def _ask(self, request: input_pb2.InputRequest) -> None:
        kept = input_pb2.InputRequest()
        kept.CopyFrom(request)
        self._open[kept.request_id] = kept
        self._is_changed = True

    def _input_received(self, event: event_pb2.AgentEvent) -> None:
        if self._open.pop(event.input_received.answer.request_id, None) is not None:
            self._is_changed = True

    def _call_ended(self, event: event_pb2.AgentEvent) -> None:
        self._close(event.invocation_id, events.tool_result_of(event).call.call_id)

    def _invocation_ended(self, event: event_pb2.AgentEvent) -> None:
        self._close(event.invocation_id)

    def _close(self, invocation_id: str, call_id: str | None = None) -> None:
        """Closes what an invocation asks, or only what it asks about one call."""
        for request_id, request in list(self._open.items()):
            if request.invocation_id == invocation_id and call_id in (None, request.call_id):
                del self._open[request_id]
                self._is_changed = True


_FOLDS: Final = {
    events.RUN_QUEUED: StandingFold._run_queued,
    events.RUN_DEQUEUED: StandingFold._run_begins,
    events.RUN_FORKED: StandingFold._run_begins,
    events.RUN_RESUMED: StandingFold._run_resumed,
    events.RUN_INTERRUPTED: StandingFold._run_interrupted,
    events.CANCEL_REQUESTED: StandingFold._cancel_requested,
    events.INPUT_REQUESTED: StandingFold._input_requested,
    events.INPUT_RECEIVED: StandingFold._input_received,
    events.TOOL_COMPLETED: StandingFold._call_ended,
    events.TOOL_FAILED: StandingFold._call_ended,
    events.SUB_AGENT_COMPLETED: StandingFold._invocation_ended,
    events.SUB_AGENT_FAILED: StandingFold._invocation_ended,
}
