"""Where a stream of a run stands: what to ask for next, what of it is new, whether it is over; it makes no call."""

from typing import Final, TypeAlias

from bough.v1 import agent_service_pb2, event_pb2, follow_pb2

Request: TypeAlias = (
    agent_service_pb2.RunRequest
    | agent_service_pb2.ForkRunRequest
    | agent_service_pb2.ResumeRunRequest
    | agent_service_pb2.WatchRunRequest
)
Response: TypeAlias = (
    agent_service_pb2.RunResponse
    | agent_service_pb2.ForkRunResponse
    | agent_service_pb2.ResumeRunResponse
    | agent_service_pb2.WatchRunResponse
)

RUN_ID_KEY: Final = "bough-run-id"
"""Initial metadata of every stream: the run, before its first event."""

_TERMINAL: Final = frozenset({"run_completed", "run_failed", "run_cancelled"})


class Position:
    """One stream's place in a run's log, over as many calls as it takes.

    A call is repeated as it was, under its request id, for as long as the place is not known; then the run is watched
    from there, to where the first call would have ended.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.session_id = ""
        self.run_id, self.received, self.is_accepted = "", 0, False
        self._is_over = False
        # Of the requests that a ResumeRun answers: those that may still be open here, and those seen open.
        self._open: set[str] = set()
        self._asked: set[str] = set()
        match request:
            case agent_service_pb2.WatchRunRequest():
                self.run_id, self.received, self.is_accepted = request.run_id, request.after_sequence, True
            case agent_service_pb2.ResumeRunRequest():
                self.run_id, self.received = request.run_id, request.after_sequence
                self._open = {answer.input_id for answer in request.answers}

    @property
    def request_id(self) -> str:
        """The name under which the call may be repeated; empty for watching, which needs none."""
        return "" if isinstance(self._request, agent_service_pb2.WatchRunRequest) else self._request.request_id

    @property
    def is_over(self) -> bool:
        """Whether the last event is one that ends such a stream: what breaks after it is no drop."""
        return self._is_over

    def next_request(self) -> Request:
        """The call that goes on from here."""
        match self._request:
            case agent_service_pb2.WatchRunRequest():
                return self._watch(self._request.until)
            case agent_service_pb2.ResumeRunRequest() if self._open:
                return self._repeated(self._request)
            case agent_service_pb2.RunRequest() if not self.run_id:
                return self._request
            case agent_service_pb2.ForkRunRequest() if not self.received:
                # Its stream begins at the fork, and where that is only its events say.
                return self._request
        return self._watch(follow_pb2.WATCH_UNTIL_INTERRUPTED)

    def accept(self, run_id: str) -> None:
        """Takes the server's word that the run is there."""
        self.run_id, self.is_accepted = run_id, True

    def take(self, response: Response) -> list[event_pb2.AgentEvent]:
        """What a response brings that was not there before, in order."""
        self.is_accepted = True
        if response.batch.events or response.batch.through_sequence:
            self._settle()
        new = []
        for event in response.batch.events:
            if event.sequence <= self.received:
                continue
            self.received = event.sequence
            self.run_id = self.run_id or event.run_id
            self.session_id = self.session_id or event.session_id
            self._is_over = self._ends(event)
            new.append(event)
        self.received = max(self.received, response.batch.through_sequence)
        return new

    def _watch(self, until: follow_pb2.WatchUntil.ValueType) -> agent_service_pb2.WatchRunRequest:
        follow = self._request.follow if self._request.HasField("follow") else None
        return agent_service_pb2.WatchRunRequest(
            run_id=self.run_id, after_sequence=self.received, until=until, follow=follow
        )

    def _repeated(self, request: agent_service_pb2.ResumeRunRequest) -> agent_service_pb2.ResumeRunRequest:
        """The same answers, which change nothing twice: only the server knows which interruption comes after them."""
        again = agent_service_pb2.ResumeRunRequest()
        again.CopyFrom(request)
        if request.HasField("after_sequence"):
            again.after_sequence = self.received
        return again

    def _settle(self) -> None:
        """A ResumeRun that was told no place begins behind its answers."""
        request = self._request
        if isinstance(request, agent_service_pb2.ResumeRunRequest) and not request.HasField("after_sequence"):
            self._open.clear()

    def _ends(self, event: event_pb2.AgentEvent) -> bool:
        kind = event.WhichOneof("payload")
        if kind == "input_received":
            self._open.discard(event.input_received.answer.input_id)
        if kind != "run_interrupted":
            return kind in _TERMINAL
        if isinstance(self._request, agent_service_pb2.WatchRunRequest):
            return self._request.until == follow_pb2.WATCH_UNTIL_INTERRUPTED
        # An interruption names every request that is open: one that is named no more has been answered.
        named = {request.input_id for request in event.run_interrupted.requests}
        self._open -= self._asked - named
        self._asked |= named
        return not self._open
