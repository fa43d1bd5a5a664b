"""Scripted runs: the calls of the AgentService that the fake server answers from them, and their records."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Never, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from bough.position import RUN_ID_KEY
from bough.testing.dispatch import Behavior
from bough.testing.log import ScriptedLog, Until, never
from bough.v1 import (
    agent_service_pb2,
    eval_service_pb2,
    event_pb2,
    follow_pb2,
    invocation_pb2,
    run_pb2,
)

_OfRun: TypeAlias = (
    agent_service_pb2.WatchRunRequest
    | agent_service_pb2.ResumeRunRequest
    | agent_service_pb2.CancelRunRequest
    | agent_service_pb2.GetRunRequest
    | eval_service_pb2.GetInvocationRequest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    run_id: str
    agent: str
    log: ScriptedLog[event_pb2.AgentEvent]
    invocation: invocation_pb2.Invocation | None
    resumed: dict[str, int] = field(default_factory=dict)
    """Length of the log before the answers, by the request id that brought them."""

    def describe(self) -> run_pb2.Run:
        last = self.log.events[-1]
        return run_pb2.Run(
            run_id=self.run_id,
            session_id=last.session_id,
            agent=self.agent,
            state=self.log.state,
            last_sequence=last.sequence,
            open_requests=last.run_interrupted.requests,
        )

    def stream(
        self, after: int, context: grpc.ServicerContext, until: Until[event_pb2.AgentEvent] | None
    ) -> Iterator[follow_pb2.EventBatch]:
        context.send_initial_metadata(((RUN_ID_KEY, self.run_id),))
        for event in self.log.follow(after, context, until):
            yield follow_pb2.EventBatch(events=[event], through_sequence=event.sequence)


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


class ScriptedRuns:
    """Runs by agent, in the order of their scripts."""

    def __init__(self) -> None:
        self._scripts: dict[str, deque[_Run | _Refusal]] = {}
        self._runs: dict[str, _Run] = {}
        self._started: dict[str, _Run] = {}
        self._lock = Lock()
        self.behaviors: Mapping[str, Behavior] = {
            "Run": self._run,
            "WatchRun": self._watch,
            "ResumeRun": self._resume,
            "CancelRun": self._cancel,
            "GetRun": self._get,
            "GetInvocation": self._get_invocation,
        }
        """What answers the RPCs of these names."""

    def add(
        self,
        agent: str,
        events: Iterable[event_pb2.AgentEvent],
        *,
        drops: Sequence[int],
        invocation: invocation_pb2.Invocation | None,
    ) -> str:
        """Script the next run of an agent; return its id. Raises ValueError for events without an end."""
        with self._lock:
            run_id = f"run-{len(self._runs) + 1}"
            ids = event_pb2.AgentEvent(run_id=run_id, session_id=f"session-of-{run_id}")
            log = ScriptedLog(ids, events, drops)
            run = self._runs[run_id] = _Run(run_id=run_id, agent=agent, log=log, invocation=invocation)
            self._scripts.setdefault(agent, deque()).append(run)
        return run_id

    def refuse(self, agent: str, code: grpc.StatusCode, *, reason: str, message: str) -> None:
        """Refuse the next run of an agent with this error."""
        with self._lock:
            refusal = _Refusal(code=code, reason=reason, message=message)
            self._scripts.setdefault(agent, deque()).append(refusal)

    def _run(
        self, request: agent_service_pb2.RunRequest, context: grpc.ServicerContext
    ) -> Iterator[agent_service_pb2.RunResponse]:
        """Start the next scripted run of the agent, unless the request id has started one, and stream it."""
        for batch in self._start(request, context).stream(0, context, _is_interruption):
            yield agent_service_pb2.RunResponse(batch=batch)

    def _watch(
        self, request: agent_service_pb2.WatchRunRequest, context: grpc.ServicerContext
    ) -> Iterator[agent_service_pb2.WatchRunResponse]:
        until: Until[event_pb2.AgentEvent] | None = never
        if request.until == follow_pb2.WATCH_UNTIL_INTERRUPTED:
            until = _is_interruption
        elif request.until == follow_pb2.WATCH_UNTIL_CURRENT:
            until = None
        for batch in self._find(request, context).stream(request.after_sequence, context, until):
            yield agent_service_pb2.WatchRunResponse(batch=batch)

    def _resume(
        self, request: agent_service_pb2.ResumeRunRequest, context: grpc.ServicerContext
    ) -> Iterator[agent_service_pb2.ResumeRunResponse]:
        """Record the answers, unless the request id has brought them, let the run continue, and stream from there."""
        run = self._find(request, context)
        with self._lock:
            if request.request_id not in run.resumed:
                run.resumed[request.request_id] = len(run.log.events)
                received = [event_pb2.InputReceived(answer=answer) for answer in request.answers]
                run.log.proceed(*(event_pb2.AgentEvent(input_received=each) for each in received))
        past = run.resumed[request.request_id]
        after = request.after_sequence if request.HasField("after_sequence") else past

        def is_next_interruption(event: event_pb2.AgentEvent) -> bool:
            return _is_interruption(event) and event.sequence > past

        for batch in run.stream(after, context, is_next_interruption):
            yield agent_service_pb2.ResumeRunResponse(batch=batch)

    def _cancel(
        self, request: agent_service_pb2.CancelRunRequest, context: grpc.ServicerContext
    ) -> agent_service_pb2.CancelRunResponse:
        """End a run that waits for answers; what is scripted after that does not happen."""
        run = self._find(request, context)
        run.log.end(event_pb2.AgentEvent(run_cancelled=event_pb2.RunCancelled()))
        return agent_service_pb2.CancelRunResponse(run=run.describe())

    def _get(
        self, request: agent_service_pb2.GetRunRequest, context: grpc.ServicerContext
    ) -> agent_service_pb2.GetRunResponse:
        run = self._find(request, context)
        last = run.log.events[-1]
        answer = last.run_completed.final_answer if last.HasField("run_completed") else None
        return agent_service_pb2.GetRunResponse(run=run.describe(), final_answer=answer)

    def _get_invocation(
        self, request: eval_service_pb2.GetInvocationRequest, context: grpc.ServicerContext
    ) -> eval_service_pb2.GetInvocationResponse:
        run = self._find(request, context)
        if run.invocation is None:
            how = f"pass invocation=Invocation(...) to FakeServer.add({run.agent!r}, ...)"
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"No record of {run.run_id} is scripted: {how}.")
        found = eval_service_pb2.GetInvocationResponse(invocation=run.invocation)
        found.invocation.run_id = run.run_id
        return found

    def _start(self, request: agent_service_pb2.RunRequest, context: grpc.ServicerContext) -> _Run:
        with self._lock:
            if request.request_id in self._started:
                return self._started[request.request_id]
            scripts = self._scripts.get(request.agent)
            if not scripts:
                how = f"FakeServer.add({request.agent!r}, answer(...)) scripts the next one"
                message = f"No run of the agent {request.agent!r} is scripted: {how}."
                context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
            run = scripts.popleft()
            if isinstance(run, _Refusal):
                run.abort(context)
            run.log.proceed()
            self._started[request.request_id] = run
            return run

    def _find(self, request: _OfRun, context: grpc.ServicerContext) -> _Run:
        run = self._runs.get(request.run_id)
        if run is None or not run.log.events:
            context.abort(grpc.StatusCode.NOT_FOUND, f"There is no run {request.run_id}.")
        return run


def _is_interruption(event: event_pb2.AgentEvent) -> bool:
    return event.HasField("run_interrupted")
