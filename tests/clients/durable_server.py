"""A server on loopback whose logs outlive it: runs with questions, answers and forks, and drops at chosen moments.

The calls follow the contract strictly: a client that follows from a wrong position waits for ever.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

import grpc
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import agent_service_pb2_grpc, event_pb2, execution_pb2, follow_pb2, run_pb2
from tests.clients.run_events import RUN_ID

FORK_ID = RUN_ID[:-4] + "f0f0"
_ENDS = frozenset({"run_completed", "run_failed", "run_cancelled"})

Asked: TypeAlias = pb.RunRequest | pb.ForkRunRequest | pb.ResumeRunRequest | pb.WatchRunRequest
Page: TypeAlias = tuple[list[event_pb2.AgentEvent], int]


class Moment(Enum):
    """When a call breaks."""

    UNHEARD = auto()
    """Before anything is done."""
    UNANSWERED = auto()
    """After the request has taken effect, before the client receives anything."""
    ACCEPTED = auto()
    """After the run's id was sent."""
    STREAMING = auto()
    """After some events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """How a call breaks: its moment, the events before it, and whether the whole server goes down and comes back."""

    moment: Moment = Moment.STREAMING
    events: int = 0
    restarts: bool = False
    is_silent: bool = False
    """Whether the call ends without an error after its events."""


@dataclass(slots=True, kw_only=True)
class Logs:
    """What outlives servers: the logs so far, the segments still to come, and the requests received.

    A run records its first segment when it starts, and the next one after each ResumeRun. `fork` is a whole log, whose
    first `shared` events are another run's.
    """

    segments: list[list[event_pb2.AgentEvent]] = field(default_factory=list)
    fork: list[event_pb2.AgentEvent] = field(default_factory=list)
    shared: int = 0
    by_run: dict[str, list[event_pb2.AgentEvent]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    """By the request id of each call that extended a log: the last sequence before it."""
    asked: list[tuple[Asked, float | None]] = field(default_factory=list)
    """Every request, with the seconds left until its deadline."""
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server has to go down."""

    def begin(self, request_id: str, run_id: str) -> int:
        """Extend a log, once for each request id; return the last sequence before."""
        if request_id not in self.known:
            if run_id == FORK_ID:
                self.known[request_id], self.by_run[run_id] = self.shared, self.fork
            else:
                log = self.by_run.setdefault(run_id, [])
                self.known[request_id] = len(log)
                log.extend(self.segments.pop(0))
        return self.known[request_id]


class EnduringService(agent_service_pb2_grpc.AgentServiceServicer):
    """Serves the logs; the n-th call breaks as the n-th drop says, later calls do not."""

    def __init__(self, logs: Logs, drops: Sequence[Drop | None] = (), *, batch: int = 3) -> None:
        self._logs, self._drops, self._batch = logs, drops, batch

    async def Run(self, request, context):
        async for events, through in self._serve(request, context, RUN_ID):
            yield pb.RunResponse(batch=follow_pb2.EventBatch(events=events, through_sequence=through))

    async def ForkRun(self, request, context):
        async for events, through in self._serve(request, context, FORK_ID):
            yield pb.ForkRunResponse(batch=follow_pb2.EventBatch(events=events, through_sequence=through))

    async def ResumeRun(self, request, context):
        async for events, through in self._serve(request, context, request.run_id):
            yield pb.ResumeRunResponse(batch=follow_pb2.EventBatch(events=events, through_sequence=through))

    async def WatchRun(self, request, context):
        async for events, through in self._serve(request, context, request.run_id):
            yield pb.WatchRunResponse(batch=follow_pb2.EventBatch(events=events, through_sequence=through))

    async def GetRun(self, request, context):
        log = self._logs.by_run[request.run_id]
        last = str(log[-1].WhichOneof("payload"))
        states = dict.fromkeys(_ENDS, execution_pb2.EXECUTION_STATE_SUCCEEDED)
        states["run_interrupted"] = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        state = states.get(last, execution_pb2.EXECUTION_STATE_RUNNING)
        return pb.GetRunResponse(run=run_pb2.Run(run_id=request.run_id, state=state, last_sequence=len(log)))

    async def _serve(self, request: Asked, context, run_id: str) -> AsyncGenerator[Page, None]:
        number = len(self._logs.asked)
        drop = self._drops[number] if number < len(self._drops) else None
        self._logs.asked.append((request, context.time_remaining()))
        await self._break(context, drop, Moment.UNHEARD)
        start = None if isinstance(request, pb.WatchRunRequest) else self._logs.begin(request.request_id, run_id)
        await self._break(context, drop, Moment.UNANSWERED)
        await context.send_initial_metadata((("bough-run-id", run_id),))
        await self._break(context, drop, Moment.ACCEPTED)
        events, is_whole = _given(self._logs.by_run[run_id], request, start)
        # A drop in the middle of a page leaves its first half.
        events = events[: drop.events] if drop is not None else events
        for at in range(0, len(events), self._batch):
            page = events[at : at + self._batch]
            yield _shown(page, request), page[-1].sequence
        if drop is not None and drop.is_silent and drop.moment is Moment.STREAMING:
            return
        await self._break(context, drop, Moment.STREAMING)
        if not is_whole:
            await asyncio.Event().wait()

    async def _break(self, context, drop: Drop | None, moment: Moment) -> None:
        if drop is None or drop.moment is not moment:
            return
        if drop.restarts:
            self._logs.broken.set()
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")


def _given(
    log: Sequence[event_pb2.AgentEvent], request: Asked, start: int | None
) -> tuple[list[event_pb2.AgentEvent], bool]:
    """Return the events that a call streams, and whether they reach the event at which its stream ends."""
    after, stops_after = start or 0, start
    if isinstance(request, pb.WatchRunRequest):
        after = request.after_sequence
        stops_after = after if request.until == follow_pb2.WATCH_UNTIL_INTERRUPTED else None
    elif isinstance(request, pb.ResumeRunRequest) and request.HasField("after_sequence"):
        after = request.after_sequence
    given = []
    for event in log[after:]:
        given.append(event)
        kind = event.WhichOneof("payload")
        if kind in _ENDS or (kind == "run_interrupted" and stops_after is not None and event.sequence > stops_after):
            return given, True
    return given, False


def _shown(page: Sequence[event_pb2.AgentEvent], request: Asked) -> list[event_pb2.AgentEvent]:
    """Return the events of a page that the call's mask shows; any mask here leaves the events of the run alone."""
    masked = bool(request.follow.event_names)
    return [event for event in page if not masked or str(event.WhichOneof("payload")).startswith("run_")]


@asynccontextmanager
async def durable_server(logs: Logs, drops: Sequence[Drop | None] = ()) -> AsyncIterator[str]:
    """Serve the logs at one address, with a new server whenever one goes down; yield the address."""
    server, port = await _serving(logs, drops, 0)

    async def come_back() -> None:
        nonlocal server
        while True:
            await logs.broken.wait()
            logs.broken.clear()
            await server.stop(0)
            server, _ = await _serving(logs, drops, port)

    keeper = asyncio.create_task(come_back())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await server.stop(0)


async def _serving(logs: Logs, drops: Sequence[Drop | None], port: int) -> tuple[aio.Server, int]:
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(EnduringService(logs, drops), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port
