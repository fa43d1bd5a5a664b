"""Position of a stream in a log: the next request, which events are new, and whether the stream has ended."""

from abc import ABC, abstractmethod
from typing import ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from bough.v1 import (
    agent_service_pb2,
    eval_service_pb2,
    evaluation_pb2,
    event_pb2,
    execution_pb2,
    follow_pb2,
    run_pb2,
)

RunStreamRequest: TypeAlias = (
    agent_service_pb2.RunRequest
    | agent_service_pb2.ForkRunRequest
    | agent_service_pb2.ResumeRunRequest
    | agent_service_pb2.WatchRunRequest
)
RunStreamResponse: TypeAlias = (
    agent_service_pb2.RunResponse
    | agent_service_pb2.ForkRunResponse
    | agent_service_pb2.ResumeRunResponse
    | agent_service_pb2.WatchRunResponse
)
EvaluationStreamRequest: TypeAlias = eval_service_pb2.EvaluateRequest | eval_service_pb2.WatchEvaluationRequest
EvaluationStreamResponse: TypeAlias = eval_service_pb2.EvaluateResponse | eval_service_pb2.WatchEvaluationResponse


class _Numbered(Protocol):
    @property
    def sequence(self) -> int: ...


Request = TypeVar("Request")
Response = TypeVar("Response")
Event = TypeVar("Event", bound=_Numbered)

RUN_ID_KEY: Final = "bough-run-id"
"""Initial metadata of every stream of a run: its id, sent before the first event."""

EVALUATION_ID_KEY: Final = "bough-evaluation-id"
"""Initial metadata of every stream of an evaluation: its id, sent before the first event."""

_RUN_ENDS: Final = frozenset({"run_completed", "run_failed", "run_cancelled"})
_EVALUATION_ENDS: Final = frozenset({"evaluation_completed", "evaluation_failed", "evaluation_cancelled"})
_ENDED: Final = frozenset(
    {
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
        execution_pb2.EXECUTION_STATE_FAILED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
    }
)


class LogPosition(ABC, Generic[Request, Response, Event]):
    """Position of one stream in a log, over as many calls as it takes.

    The first call is repeated under its request id until the position is known. From then on the log is watched from
    the position to the event at which the first call would have ended.
    """

    subject: ClassVar[str]
    """What the log records, in sentences."""
    id_key: ClassVar[str]
    """Initial metadata that has the id of the run or of the evaluation."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id
        """Request id under which the call is repeated; empty for a watch, which needs none."""
        self.log_id = ""
        """Id of the run or of the evaluation; empty until it is known."""
        self.received = 0
        """Sequence that the stream has reached."""
        self.is_accepted = False
        """Whether what the call starts is durable; true of a watch, which starts nothing."""
        self.is_over = False
        """Whether the last event ends the stream: an error after it is ignored."""

    @property
    def ends_with_call(self) -> bool:
        """True if a call that ends without an error here ends the stream: nothing else was promised, or it has come."""
        return self.is_over

    @property
    def is_at_possible_end(self) -> bool:
        """True if the log may have no more events for the stream, and a call would wait for them: ask first."""
        return False

    @property
    def is_continued(self) -> bool:
        """True if a call that ends without an error here did what it promised, and the stream needs another one."""
        return False

    @abstractmethod
    def next_request(self) -> Request:
        """Return the request that continues from this position."""

    @abstractmethod
    def new_events(self, response: Response) -> list[Event]:
        """Return the events of a response that are new, in order."""

    def accept(self, log_id: str) -> None:
        """Record that the server has accepted the call for this run or evaluation."""
        self.log_id, self.is_accepted = log_id, True

    def is_at_end_of(self, resource: run_pb2.Run | evaluation_pb2.Evaluation) -> bool:
        """Return whether a run or an evaluation has ended at or before this position."""
        return resource.state in _ENDED and resource.last_sequence <= self.received


class RunPosition(LogPosition[RunStreamRequest, RunStreamResponse, event_pb2.AgentEvent]):
    """Position of one stream in a run's log."""

    subject, id_key = "run", RUN_ID_KEY

    def __init__(self, request: RunStreamRequest) -> None:
        super().__init__("" if isinstance(request, agent_service_pb2.WatchRunRequest) else request.request_id)
        self._request = request
        self.session_id = ""
        # Of the requests that a ResumeRun answers: those that may still be open at this position, and those that an
        # interruption has named.
        self._open: set[str] = set()
        self._asked: set[str] = set()
        # The sequence of the last run_interrupted received; of a watch until an interruption, where it began.
        self._interruption: int | None = None
        self._repeats_interruption = False
        # Whether the payload of the last event is of a kind that this version does not know.
        self._is_unknown = False
        # The sequence that the last request begins after.
        self._after = 0
        # Whether the stream ends when the run waits for answers, and not at each interruption.
        self._is_until_waiting = False
        match request:
            case agent_service_pb2.WatchRunRequest():
                self.log_id, self.received, self.is_accepted = request.run_id, request.after_sequence, True
                self._interruption = request.after_sequence or None
                self._is_until_waiting = request.until == follow_pb2.WATCH_UNTIL_INTERRUPTED
            case agent_service_pb2.ResumeRunRequest():
                self.log_id, self.received = request.run_id, request.after_sequence
                self._open = {answer.input_id for answer in request.answers}

    @property
    def ends_with_call(self) -> bool:
        """True if a call that ends without an error here ends the stream."""
        if self.is_over or self._is_unknown:
            # A later version may end streams at events that are not known yet, such as a pause.
            return True
        match self._request:
            case agent_service_pb2.WatchRunRequest():
                return self._request.until == follow_pb2.WATCH_UNTIL_CURRENT
            case agent_service_pb2.ResumeRunRequest():
                # The server alone may know that this is the interruption after the answers: it said so if it ended the
                # call that asked for just that event again.
                return self._repeats_interruption
        return False

    @property
    def is_at_possible_end(self) -> bool:
        """True if this may be the interruption at which the run waits: the server would wait for the next one."""
        return self._is_until_waiting and self.received == self._interruption

    @property
    def is_continued(self) -> bool:
        """True if the call ended at an interruption: it ends the stream only if the run still waits."""
        return self.is_at_possible_end and self.received > self._after

    def is_at_end_of(self, resource: run_pb2.Run | evaluation_pb2.Evaluation) -> bool:
        """Return whether a run has ended at or before this position, or waits here if the stream ends with that."""
        if not self._is_until_waiting:
            return super().is_at_end_of(resource)
        # A position beyond the log is no end: the server refuses to follow from there.
        states = {*_ENDED, execution_pb2.EXECUTION_STATE_INPUT_REQUIRED}
        return resource.state in states and resource.last_sequence == self.received

    def next_request(self) -> RunStreamRequest:
        """Return the request that continues from this position."""
        self._after = self.received
        match self._request:
            case agent_service_pb2.WatchRunRequest():
                return self._watch(self._request.until)
            case agent_service_pb2.ResumeRunRequest() if self._open:
                return self._repeat_request(self._request)
            case agent_service_pb2.RunRequest() if not self.log_id:
                return self._request
            case agent_service_pb2.ForkRunRequest() if not self.received:
                # Its stream begins at the fork, whose sequence only its events show.
                return self._request
        return self._watch(follow_pb2.WATCH_UNTIL_INTERRUPTED)

    def new_events(self, response: RunStreamResponse) -> list[event_pb2.AgentEvent]:
        """Return the events of a response that are new, in order."""
        self.is_accepted = True
        if response.batch.events or response.batch.through_sequence:
            self._settle()
        new = []
        for event in response.batch.events:
            if event.sequence <= self.received:
                continue
            self.received = event.sequence
            self.log_id = self.log_id or event.run_id
            self.session_id = self.session_id or event.session_id
            self.is_over, self._repeats_interruption = self._ends(event), False
            new.append(event)
        self.received = max(self.received, response.batch.through_sequence)
        return new

    def _watch(self, until: follow_pb2.WatchUntil.ValueType) -> agent_service_pb2.WatchRunRequest:
        follow = self._request.follow if self._request.HasField("follow") else None
        return agent_service_pb2.WatchRunRequest(
            run_id=self.log_id, after_sequence=self.received, until=until, follow=follow
        )

    def _repeat_request(self, request: agent_service_pb2.ResumeRunRequest) -> agent_service_pb2.ResumeRunRequest:
        """Return the call with the same answers, which have no second effect.

        The run cannot be watched instead: only the server knows which interruption is the first after the answers.
        """
        again = agent_service_pb2.ResumeRunRequest()
        again.CopyFrom(request)
        if request.HasField("after_sequence"):
            # If the last event is an interruption, it may be the end of the stream: a mask can hide the input_received
            # that would show it. The server ends the call with that event, and past it would wait for the next one.
            is_last = self._repeats_interruption = self.received == self._interruption
            again.after_sequence = self.received - 1 if is_last else self.received
        return again

    def _settle(self) -> None:
        """Mark the answers as received: without `after_sequence` a ResumeRun begins behind them."""
        request = self._request
        if isinstance(request, agent_service_pb2.ResumeRunRequest) and not request.HasField("after_sequence"):
            self._open.clear()

    def _ends(self, event: event_pb2.AgentEvent) -> bool:
        kind = event.WhichOneof("payload")
        self._is_unknown = kind is None
        if kind == "input_received":
            self._open.discard(event.input_received.answer.input_id)
        if kind != "run_interrupted":
            return kind in _RUN_ENDS
        self._interruption = event.sequence
        if isinstance(self._request, agent_service_pb2.WatchRunRequest):
            return False
        # An interruption names every open request: one that an earlier interruption named and this one does not has
        # been answered. One that none has named may not have been made yet.
        named = {request.input_id for request in event.run_interrupted.requests}
        self._open -= self._asked - named
        self._asked |= named
        return not self._open


class EvaluationPosition(
    LogPosition[EvaluationStreamRequest, EvaluationStreamResponse, evaluation_pb2.EvaluationEvent]
):
    """Position of one stream in the log of an evaluation."""

    subject, id_key = "evaluation", EVALUATION_ID_KEY

    def __init__(self, request: EvaluationStreamRequest) -> None:
        self._request = request
        if isinstance(request, eval_service_pb2.EvaluateRequest):
            super().__init__(request.request_id)
        else:
            super().__init__()
            self.log_id, self.received, self.is_accepted = request.evaluation_id, request.after_sequence, True

    def next_request(self) -> EvaluationStreamRequest:
        """Return the request that continues from this position."""
        if not self.log_id:
            return self._request
        follow = self._request.follow if self._request.HasField("follow") else None
        return eval_service_pb2.WatchEvaluationRequest(
            evaluation_id=self.log_id, after_sequence=self.received, follow=follow
        )

    @property
    def ends_with_call(self) -> bool:
        """True after the last event, and of a stream of the events that there are now."""
        return self.is_over or self._request.follow.until == follow_pb2.WATCH_UNTIL_CURRENT

    def new_events(self, response: EvaluationStreamResponse) -> list[evaluation_pb2.EvaluationEvent]:
        """Return the events of a response that are new, in order."""
        self.is_accepted = True
        new = [event for event in response.batch.events if event.sequence > self.received]
        for event in new:
            self.received, self.log_id = event.sequence, self.log_id or event.evaluation_id
            self.is_over = event.WhichOneof("payload") in _EVALUATION_ENDS
        self.received = max(self.received, response.batch.through_sequence)
        return new
