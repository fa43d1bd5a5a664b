"""A fake server for tests of programs that use this client: runs are scripted, streams drop where a test says so.

    with FakeServer() as server:
        server.add("lead", answer("It works."), drops=[1])
        with Client(server.address) as client:
            assert client.ask("lead", "hi") == "It works."

It keeps the rules that a client sees: sequences from 1, a repeated request id starts nothing twice, streams end at an
interruption, and answers make the run go on. It runs no agents and keeps no trees; for these, `bough_server.testing`
starts a real server with scripted models.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from types import TracebackType
from typing import Final, Never, Self, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from bough.position import RUN_ID_KEY
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    event_pb2,
    execution_pb2,
    follow_pb2,
    input_pb2,
    message_pb2,
    run_pb2,
)


def answer(text: str) -> list[event_pb2.AgentEvent]:
    """Return the events of a run that streams one text and ends with it as its answer."""
    message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text=text)])
    return [
        event_pb2.AgentEvent(run_started=event_pb2.RunStarted()),
        event_pb2.AgentEvent(llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=text)),
        event_pb2.AgentEvent(run_completed=event_pb2.RunCompleted(final_answer=message)),
    ]


def interruption(*requests: input_pb2.InputRequest) -> event_pb2.AgentEvent:
    """Return the event of a run that waits for answers to these requests; what is scripted after it follows them."""
    return event_pb2.AgentEvent(run_interrupted=event_pb2.RunInterrupted(requests=requests))


_OfRun: TypeAlias = (
    agent_service_pb2.WatchRunRequest
    | agent_service_pb2.ResumeRunRequest
    | agent_service_pb2.CancelRunRequest
    | agent_service_pb2.GetRunRequest
)

_STATES: Final[Mapping[str | None, execution_pb2.ExecutionState.ValueType]] = {
    "run_interrupted": execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
    "run_completed": execution_pb2.EXECUTION_STATE_SUCCEEDED,
    "run_failed": execution_pb2.EXECUTION_STATE_FAILED,
    "run_cancelled": execution_pb2.EXECUTION_STATE_CANCELLED,
}


@dataclass(slots=True, kw_only=True)
class _Run:
    """A scripted run: its log so far, what is to happen, and where its next streams drop."""

    run_id: str
    script: deque[event_pb2.AgentEvent]
    drops: deque[int]
    log: list[event_pb2.AgentEvent] = field(default_factory=list)
    resumed: dict[str, int] = field(default_factory=dict)
    """Length of the log before the answers, by the request id that brought them."""

    @property
    def state(self) -> execution_pb2.ExecutionState.ValueType:
        """State that the last event shows."""
        return _STATES.get(self.log[-1].WhichOneof("payload"), execution_pb2.EXECUTION_STATE_RUNNING)

    def proceed(self) -> None:
        """Let happen what is scripted, through the next interruption."""
        while self.script:
            event = self.script.popleft()
            self.append(event)
            if event.HasField("run_interrupted"):
                return

    def append(self, event: event_pb2.AgentEvent) -> None:
        """Add an event with its ids and its sequence."""
        made = event_pb2.AgentEvent(run_id=self.run_id, session_id=f"session-of-{self.run_id}")
        made.MergeFrom(event)
        made.sequence = len(self.log) + 1
        self.log.append(made)

    def stream(self, after: int, context: grpc.ServicerContext) -> Iterator[follow_pb2.EventBatch]:
        """Stream the log after a sequence, an event at a time, up to where this stream drops."""
        context.send_initial_metadata(((RUN_ID_KEY, self.run_id),))
        drop_after = self.drops.popleft() if self.drops else None
        for event in self.log[after:][:drop_after]:
            yield _batch_of(event)
        if drop_after is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection dropped")


def _batch_of(event: event_pb2.AgentEvent) -> follow_pb2.EventBatch:
    return follow_pb2.EventBatch(events=[event], through_sequence=event.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    code: grpc.StatusCode
    reason: str
    message: str

    def abort(self, context: grpc.ServicerContext) -> Never:
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="bough.dev"))
        status = status_pb2.Status(code=self.code.value[0], message=self.message, details=[detail])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(self.code, self.message)


class FakeServer(agent_service_pb2_grpc.AgentServiceServicer):
    """A server on loopback with scripted runs, while the context is open.

    It answers Run, WatchRun, ResumeRun, CancelRun and GetRun; every other call is UNIMPLEMENTED.
    """

    def __init__(self) -> None:
        self.requests: list[Message] = []
        """Every request that arrived, in order."""
        self._scripts: dict[str, deque[_Run | _Refusal]] = {}
        self._runs: dict[str, _Run] = {}
        self._started: dict[str, _Run] = {}
        self._lock = Condition()
        """Notified when a run that waits for answers goes on or ends, and when a stream is left."""
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16), options=(("grpc.so_reuseport", 0),))
        agent_service_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        """Address of the server, for the client under test."""

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    def add(self, agent: str, events: Iterable[event_pb2.AgentEvent], *, drops: Sequence[int] = ()) -> str:
        """Script the next run of an agent; return its id. Unset ids and all sequences of the events are set.

        `drops` has a number for each stream of the run, in order: its connection drops after so many events. The
        streams after those are whole. Raises ValueError for events that neither end the run nor interrupt it: on a
        server it would run for ever.
        """
        script = deque(events)
        if not script or script[-1].WhichOneof("payload") not in _STATES:
            raise ValueError("The last event has to be run_completed, run_failed, run_cancelled or run_interrupted.")
        with self._lock:
            run = _Run(run_id=f"run-{len(self._runs) + 1}", script=script, drops=deque(drops))
            self._runs[run.run_id] = run
            self._scripts.setdefault(agent, deque()).append(run)
        return run.run_id

    def refuse(self, agent: str, code: grpc.StatusCode, *, reason: str = "", message: str = "refused") -> None:
        """Refuse the next run of an agent with this error; `reason` is the name of an ErrorReason without prefix."""
        with self._lock:
            refusal = _Refusal(code=code, reason=reason, message=message)
            self._scripts.setdefault(agent, deque()).append(refusal)

    def Run(
        self, request: agent_service_pb2.RunRequest, context: grpc.ServicerContext
    ) -> Iterator[agent_service_pb2.RunResponse]:
        """Start the next scripted run of the agent, unless the request id has started one, and stream it."""
        run = self._start(request, context)
        return (agent_service_pb2.RunResponse(batch=batch) for batch in run.stream(0, context))

    def WatchRun(
        self, request: agent_service_pb2.WatchRunRequest, context: grpc.ServicerContext
    ) -> Iterator[agent_service_pb2.WatchRunResponse]:
        """Stream what has happened after a sequence, and what will, as far as the request says."""
        run, at = self._find(request, context), request.after_sequence
        for batch in run.stream(at, context):
            at = batch.through_sequence
            yield agent_service_pb2.WatchRunResponse(batch=batch)
        if request.until not in (follow_pb2.WATCH_UNTIL_UNSPECIFIED, follow_pb2.WATCH_UNTIL_TERMINAL):
            return
        while self._is_continued(run, at, context):
            for event in run.log[at:]:
                at = event.sequence
                yield agent_service_pb2.WatchRunResponse(batch=_batch_of(event))

    def ResumeRun(
        self, request: agent_service_pb2.ResumeRunRequest, context: grpc.ServicerContext
    ) -> Iterator[agent_service_pb2.ResumeRunResponse]:
        """Record the answers, unless the request id has brought them, let the run go on, and stream from there."""
        run = self._find(request, context)
        with self._lock:
            if request.request_id not in run.resumed:
                run.resumed[request.request_id] = len(run.log)
                for answer in request.answers:
                    run.append(event_pb2.AgentEvent(input_received=event_pb2.InputReceived(answer=answer)))
                run.proceed()
                self._lock.notify_all()
        after = request.after_sequence if request.HasField("after_sequence") else run.resumed[request.request_id]
        return (agent_service_pb2.ResumeRunResponse(batch=batch) for batch in run.stream(after, context))

    def CancelRun(
        self, request: agent_service_pb2.CancelRunRequest, context: grpc.ServicerContext
    ) -> agent_service_pb2.CancelRunResponse:
        """End a run that waits for answers; what is scripted after that does not happen."""
        run = self._find(request, context)
        with self._lock:
            if run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
                run.script.clear()
                run.append(event_pb2.AgentEvent(run_cancelled=event_pb2.RunCancelled()))
                self._lock.notify_all()
        return agent_service_pb2.CancelRunResponse(run=run_pb2.Run(run_id=run.run_id, state=run.state))

    def GetRun(
        self, request: agent_service_pb2.GetRunRequest, context: grpc.ServicerContext
    ) -> agent_service_pb2.GetRunResponse:
        """Return the state of a run, and its answer if it has one."""
        run = self._find(request, context)
        described = run_pb2.Run(run_id=run.run_id, state=run.state, last_sequence=len(run.log))
        found = agent_service_pb2.GetRunResponse(run=described)
        if run.log[-1].HasField("run_completed"):
            found.final_answer.CopyFrom(run.log[-1].run_completed.final_answer)
        return found

    def _is_continued(self, run: _Run, at: int, context: grpc.ServicerContext) -> bool:
        """Wait until a run has events after a sequence; return False if it has ended there or the caller has left."""

        def wake() -> None:
            with self._lock:
                self._lock.notify_all()

        if not context.add_callback(wake):
            return False  # the call is over already
        waiting = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        with self._lock:
            self._lock.wait_for(lambda: len(run.log) > at or run.state != waiting or not context.is_active())
            return len(run.log) > at and context.is_active()

    def _start(self, request: agent_service_pb2.RunRequest, context: grpc.ServicerContext) -> _Run:
        with self._lock:
            self.requests.append(request)
            if request.request_id in self._started:
                return self._started[request.request_id]
            scripts = self._scripts.get(request.agent)
            if not scripts:
                context.abort(grpc.StatusCode.NOT_FOUND, f"No run of the agent {request.agent!r} is scripted.")
            run = scripts.popleft()
            if isinstance(run, _Refusal):
                run.abort(context)
            run.proceed()
            self._started[request.request_id] = run
            return run

    def _find(self, request: _OfRun, context: grpc.ServicerContext) -> _Run:
        with self._lock:
            self.requests.append(request)
            run = self._runs.get(request.run_id)
            if run is None or not run.log:
                context.abort(grpc.StatusCode.NOT_FOUND, f"There is no run {request.run_id}.")
            return run
