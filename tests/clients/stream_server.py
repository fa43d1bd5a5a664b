"""A server on loopback that streams given events and drops calls as configured: the wire is real, the runs are not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc import aio

from bough import AsyncClient, Rejoining
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    error_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    event_pb2,
    execution_pb2,
    run_pb2,
)
from bough_server.tree.fold import fold
from tests.clients.run_events import RUN_ID, batch_of

AT_ONCE = Rejoining(first_delay=0.0, longest_delay=0.0, timeout=20.0)
NO_TRANSPARENT_RETRIES = (("grpc.enable_retries", 0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one call goes: the number of events before it drops, None for all; `silent` drops before metadata."""

    events: int | None = None
    silent: bool = False
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    batch: int = 1
    overlap: int = 0
    """Events before the requested position that are sent again."""
    hold: bool = False
    """Whether it stays open after its events, until the call or its run is cancelled."""


class LoopbackService(agent_service_pb2_grpc.AgentServiceServicer):
    """Streams one run's events; the n-th stream goes as the n-th call says, later ones send everything."""

    def __init__(
        self,
        events: Sequence[event_pb2.AgentEvent],
        calls: Sequence[Call] = (),
        *,
        runs: Sequence[str] = tuple(f"run-{number}" for number in range(5)),
    ) -> None:
        self.events, self.calls, self.runs = list(events), list(calls), list(runs)
        self.asked: list[agent_service_pb2.RunRequest | agent_service_pb2.WatchRunRequest] = []
        self.cancelled_runs: list[str] = []
        self.notes: list[str] = []
        self.listed: list[agent_service_pb2.ListRunsRequest] = []
        self.ignores_cancel, self.cancel_asked = False, asyncio.Event()
        self.held, self.left, self.stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def events_of(self, run_id: str) -> Sequence[event_pb2.AgentEvent]:
        """Return a run's log so far; there is one run."""
        return self.events

    async def Run(self, request, context):
        async for response in self._stream(request, 0, context):
            yield agent_service_pb2.RunResponse(batch=batch_of(response))

    async def WatchRun(self, request, context):
        async for response in self._stream(request, request.after_sequence, context):
            yield agent_service_pb2.WatchRunResponse(batch=batch_of(response))

    async def _stream(self, request, after, context):
        call = self.calls[len(self.asked)] if len(self.asked) < len(self.calls) else Call(batch=4)
        self.asked.append(request)
        if call.silent:
            await context.abort(call.code, "silent")
        await context.send_initial_metadata((("bough-run-id", RUN_ID),))
        given = [event for event in self.events if event.sequence > after - call.overlap]
        given = given if call.events is None else given[: call.events]
        for start in range(0, len(given), call.batch):
            yield given[start : start + call.batch]
        if call.hold:
            try:
                self.held.set()
                await self.stopped.wait()
            finally:
                self.left.set()
            yield self.events[-1:]
            return
        if call.events is not None:
            await context.abort(call.code, "dropped")

    async def CancelRun(self, request, context):
        self.cancelled_runs.append(request.run_id)
        self.notes.append(request.note)
        self.cancel_asked.set()
        if self.ignores_cancel:
            return agent_service_pb2.CancelRunResponse(run=run_pb2.Run(run_id=request.run_id))
        cancelled = event_pb2.RunCancelled(error=error_pb2.AgentError(message="It was cancelled."))
        last = event_pb2.AgentEvent(sequence=len(self.events) + 1, invocation_id="id-of-lead", run_cancelled=cancelled)
        self.events.append(last)
        self.stopped.set()
        run = run_pb2.Run(run_id=request.run_id, state=execution_pb2.EXECUTION_STATE_RUNNING)
        return agent_service_pb2.CancelRunResponse(run=run)

    async def GetRun(self, request, context):
        answered = next((event for event in self.events if event.HasField("run_completed")), None)
        return agent_service_pb2.GetRunResponse(
            run=run_pb2.Run(
                run_id=request.run_id,
                state=execution_pb2.EXECUTION_STATE_FAILED,
                last_sequence=len(self.events),
            ),
            final_answer=answered.run_completed.final_answer if answered is not None else None,
        )

    async def ListRuns(self, request, context):
        self.listed.append(request)
        start = int(request.page_token or "0")
        end = min(start + request.page_size, len(self.runs))
        return agent_service_pb2.ListRunsResponse(
            runs=[run_pb2.Run(run_id=run_id) for run_id in self.runs[start:end]],
            next_page_token=str(end) if end < len(self.runs) else "",
        )


class LoopbackTrees(eval_service_pb2_grpc.EvalServiceServicer):
    """Serves the agent tree of that run."""

    def __init__(self, service: LoopbackService) -> None:
        self._service = service

    async def GetInvocation(self, request, context):
        return eval_service_pb2.GetInvocationResponse(
            invocation=fold(self._service.events_of(request.run_id), request.options)
        )

    async def AggregateEvents(self, request_iterator, context):
        return eval_service_pb2.AggregateEventsResponse()


@asynccontextmanager
async def listening(service: LoopbackService, *, port: int = 0) -> AsyncIterator[int]:
    """Run a server on loopback with that service; yield its port."""
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(service, server)
    eval_service_pb2_grpc.add_EvalServiceServicer_to_server(LoopbackTrees(service), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(service: LoopbackService, rejoining: Rejoining = AT_ONCE) -> AsyncIterator[AsyncClient]:
    """A client of a server on loopback with that service."""
    async with listening(service) as port, client_of(port, rejoining) as client:
        yield client


def client_of(port: int, rejoining: Rejoining = AT_ONCE) -> AsyncClient:
    """Return a client that rejoins at once, on a channel without transparent retries."""
    return AsyncClient(
        f"127.0.0.1:{port}", timeout=20, call_timeout=10, rejoining=rejoining, options=NO_TRANSPARENT_RETRIES
    )


def rich_status(code: grpc.StatusCode, message: str, *details: object) -> bytes:
    """Return the value of grpc-status-details-bin, as a server sends it."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status.SerializeToString()
