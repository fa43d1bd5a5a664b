"""State of an open run, folded from its log: execution state, start, deadline and open input requests.

The run's row, its tree and a worker that takes it over read the same fold.
"""

from collections.abc import Iterable, KeysView
from dataclasses import dataclass
from typing import Final, TypeAlias

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, execution_pb2, input_pb2
from bough_server.log import events
from bough_server.messages import copy_of

CallKey: TypeAlias = tuple[str, str]
"""An invocation's id and the id of one of its calls; the call's id is empty for the invocation itself."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRequest:
    call: CallKey
    request: input_pb2.InputRequest
    time: timestamp_pb2.Timestamp
    """When it was made; a zero if it is not known."""


class OpenRequests:
    """Open input requests of a run, each with the call or invocation that waits for it."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenRequest] = {}
        """By id, in the order in which they were made."""
        self._ids_of: dict[CallKey, dict[str, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def calls(self) -> KeysView[CallKey]:
        """The calls, and invocations, that wait."""
        return self._ids_of.keys()

    def invocations(self) -> frozenset[str]:
        """Return the invocations that wait, with one of their calls or themselves."""
        return frozenset(invocation_id for invocation_id, _ in self._ids_of)

    def serialize(self) -> bytes | None:
        """Return all requests as a serialized RunInterrupted, with their times; None if there are none."""
        found = self._open.values()
        asked = event_pb2.RunInterrupted(
            requests=(each.request for each in found), request_times=(each.time for each in found)
        )
        return asked.SerializeToString(deterministic=True) if self else None

    def first_expiry_ns(self) -> int | None:
        """Return the time at which the first request expires; None if none does."""
        expiring = (each.request.expire_time for each in self._open.values() if each.request.HasField("expire_time"))
        return min((time.ToNanoseconds() for time in expiring), default=None)

    def ask(
        self, request: input_pb2.InputRequest, invocation_id: str, time: timestamp_pb2.Timestamp | None = None
    ) -> None:
        """Open a request of an invocation that was made at a time, if that is known."""
        self.answer(request.input_id)
        call = (invocation_id, request.call_id)
        self._open[request.input_id] = _OpenRequest(
            call=call, request=copy_of(request), time=copy_of(time) if time is not None else timestamp_pb2.Timestamp()
        )
        self._ids_of.setdefault(call, {})[request.input_id] = None

    def answer(self, input_id: str) -> bool:
        """Close a request that was answered; return False if it is not open."""
        if input_id not in self._open:
            return False
        call = self._open.pop(input_id).call
        del self._ids_of[call][input_id]
        if not self._ids_of[call]:
            del self._ids_of[call]
        return True

    def end(self, call: CallKey) -> bool:
        """Close the requests of a call that has ended; return False if it has none."""
        ended = self._ids_of.pop(call, {})
        for input_id in ended:
            del self._open[input_id]
        return bool(ended)

    def end_invocation(self, invocation_id: str) -> bool:
        """Close the requests of an invocation that has ended, and of its calls; return False if there are none."""
        ended = [call for call in self._ids_of if call[0] == invocation_id]
        for call in ended:
            self.end(call)
        return bool(ended)

    def replace(self, requests: Iterable[input_pb2.InputRequest]) -> None:
        """Replace all open requests by those of a run_interrupted, which lists every open one.

        Requests of an abandoned part of the run, such as the loser of a race, are closed by no event.
        """
        times = {input_id: each.time for input_id, each in self._open.items()}
        self._open, self._ids_of = {}, {}
        for request in requests:
            self.ask(request, request.invocation_id, times.get(request.input_id))


class RunStateFold:
    """Fold of the events that change a run's state."""

    def __init__(self) -> None:
        self.state: execution_pb2.ExecutionState.ValueType = execution_pb2.EXECUTION_STATE_UNSPECIFIED
        """State after the last event, as long as the run has no end; unspecified if no event implies one."""
        self.start_time: timestamp_pb2.Timestamp | None = None
        """When the run began, if its events say so: when a queued run was dequeued, when a fork was forked."""
        self.was_queued = False
        self._deadline: timestamp_pb2.Timestamp | None = None
        """It lapses at an interruption, and the call that answers sets its own."""
        self.requests = OpenRequests()
        self._is_changed = False

    @property
    def deadline_ns(self) -> int | None:
        """The caller's deadline in force; None if there is none."""
        return _ns(self._deadline)

    def apply(self, event: event_pb2.AgentEvent) -> None:
        """Apply an event; kinds that do not change the state are ignored."""
        fold = _FOLDS.get(events.kind_of(event))
        if fold is not None:
            fold(self, event)

    def change(self) -> RunState | None:
        """Return the state of the run if it has changed since the last call, else None.

        The start of the run is no change: a row begins with the state that it implies.
        """
        if not self._is_changed:
            return None
        self._is_changed = False
        is_waiting = self.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        return RunState(
            state=self.state,
            start_time_ns=_ns(self.start_time),
            open_requests=self.requests.serialize(),
            next_expire_time_ns=self.requests.first_expiry_ns() if is_waiting else None,
            deadline_time_ns=self.deadline_ns,
        )

    def _move(self, state: execution_pb2.ExecutionState.ValueType) -> None:
        self.state, self._is_changed = state, True

    def _on_run_started(self, event: event_pb2.AgentEvent) -> None:
        self.state = self.state or execution_pb2.EXECUTION_STATE_RUNNING
        if not self.was_queued:
            self.start_time = events.time_of(event)
        self._deadline = _deadline_of(event.run_started)

    def _on_run_queued(self, _: event_pb2.AgentEvent) -> None:
        self.was_queued, self.start_time = True, None
        self._move(execution_pb2.EXECUTION_STATE_PENDING)

    def _on_run_dequeued(self, event: event_pb2.AgentEvent) -> None:
        if self.was_queued and self.start_time is None:
            self.start_time = events.time_of(event) or self.start_time
        self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _on_run_forked(self, event: event_pb2.AgentEvent) -> None:
        """Begin at the fork, with the deadline of its caller; those of its origin are not the fork's."""
        self._deadline = _deadline_of(event.run_forked)
        self.start_time = events.time_of(event) or self.start_time
        self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _on_run_resumed(self, event: event_pb2.AgentEvent) -> None:
        if event.run_resumed.HasField("deadline_time"):
            self._deadline = _deadline_of(event.run_resumed)
        # A run that waits for its session still waits for it after another worker took it over.
        if self.state != execution_pb2.EXECUTION_STATE_PENDING:
            self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _on_run_interrupted(self, event: event_pb2.AgentEvent) -> None:
        self._deadline = None
        self.requests.replace(event.run_interrupted.requests)
        self._move(execution_pb2.EXECUTION_STATE_INPUT_REQUIRED)

    def _on_cancel_requested(self, event: event_pb2.AgentEvent) -> None:
        """Move a waiting run to RUNNING: a cancelled run waits for no input, and recovery will end it."""
        if not event.cancel_requested.effect_scope and self.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            self._move(execution_pb2.EXECUTION_STATE_RUNNING)

    def _on_input_requested(self, event: event_pb2.AgentEvent) -> None:
        self.requests.ask(event.input_requested.request, event.invocation_id, events.time_of(event))
        self._is_changed = True

    def _on_input_received(self, event: event_pb2.AgentEvent) -> None:
        self._is_changed |= self.requests.answer(event.input_received.answer.input_id)

    def _on_tool_ended(self, event: event_pb2.AgentEvent) -> None:
        if self.requests:
            self._is_changed |= self.requests.end((event.invocation_id, events.tool_result_of(event).call.call_id))

    def _on_sub_agent_ended(self, event: event_pb2.AgentEvent) -> None:
        self._is_changed |= self.requests.end_invocation(event.invocation_id)


def fold_run_state(log: Iterable[event_pb2.AgentEvent]) -> RunStateFold:
    """Return the state of a run after its log."""
    fold = RunStateFold()
    for event in log:
        fold.apply(event)
    return fold


def _deadline_of(
    begun: event_pb2.RunStarted | event_pb2.RunForked | event_pb2.RunResumed,
) -> timestamp_pb2.Timestamp | None:
    return copy_of(begun.deadline_time) if begun.HasField("deadline_time") else None


# Converted only when it is read: events from any source may hold a time that cannot be converted.
def _ns(time: timestamp_pb2.Timestamp | None) -> int | None:
    return time.ToNanoseconds() if time is not None else None


_FOLDS: Final = {
    events.RUN_STARTED: RunStateFold._on_run_started,
    events.RUN_QUEUED: RunStateFold._on_run_queued,
    events.RUN_DEQUEUED: RunStateFold._on_run_dequeued,
    events.RUN_FORKED: RunStateFold._on_run_forked,
    events.RUN_RESUMED: RunStateFold._on_run_resumed,
    events.RUN_INTERRUPTED: RunStateFold._on_run_interrupted,
    events.CANCEL_REQUESTED: RunStateFold._on_cancel_requested,
    events.INPUT_REQUESTED: RunStateFold._on_input_requested,
    events.INPUT_RECEIVED: RunStateFold._on_input_received,
    events.TOOL_COMPLETED: RunStateFold._on_tool_ended,
    events.TOOL_FAILED: RunStateFold._on_tool_ended,
    events.SUB_AGENT_COMPLETED: RunStateFold._on_sub_agent_ended,
    events.SUB_AGENT_FAILED: RunStateFold._on_sub_agent_ended,
}
