"""AgentService: start, follow, resume, fork, cancel, get and list runs."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import agent_service_pb2_grpc, follow_pb2, run_pb2
from bough_server.api.pagination import page_of, run_filter
from bough_server.api.streaming import StreamPosition, stream_responses
from bough_server.clock import Clock
from bough_server.identity import Principal
from bough_server.log.events import stamp
from bough_server.log.views import Selection
from bough_server.messages import copy_of
from bough_server.observability.tracing import Parent
from bough_server.runs.runs import Runs

RUN_ID_KEY = "bough-run-id"
"""Initial metadata of every stream: the run, before its first event."""


T = TypeVar("T")


class AgentService(agent_service_pb2_grpc.AgentServiceServicer):
    """Runs agents and streams their events."""

    def __init__(self, *, runs: Runs, principal: Callable[[], Principal], clock: Clock) -> None:
        self._runs, self._principal, self._clock = runs, principal, clock

    async def Run(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.RunRequest, context: aio.ServicerContext[pb.RunRequest, pb.RunResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Start a run and follow it to its end."""
        principal = self._principal()
        starting = self._runs.start(
            principal,
            request,
            # A background run outlives its call, and so the call's deadline.
            deadline_time_ns=None if request.policy.background else self._deadline(context.time_remaining()),
            trace=Parent.current(),
        )
        record = await _run_to_end(starting)
        follow = copy_of(request.follow)
        del request  # and with it the memory of its files, which a part of it would keep as well
        stream = self._follow(principal, record.run, follow, context, until=follow_pb2.WATCH_UNTIL_INTERRUPTED)
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def ResumeRun(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.ResumeRunRequest, context: aio.ServicerContext[pb.ResumeRunRequest, pb.ResumeRunResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Answer a run's open requests and follow it from there."""
        principal = self._principal()
        resuming = self._runs.resume(principal, request, deadline_time_ns=self._deadline(context.time_remaining()))
        resumed = await _run_to_end(resuming)
        after = request.after_sequence if request.HasField("after_sequence") else resumed.since
        follow = copy_of(request.follow)
        del request
        stream = self._follow(
            principal,
            resumed.run_row.run,
            follow,
            context,
            after=after,
            until=follow_pb2.WATCH_UNTIL_INTERRUPTED,
            past=resumed.since,
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def ForkRun(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.ForkRunRequest, context: aio.ServicerContext[pb.ForkRunRequest, pb.ForkRunResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Start a run that shares the beginning of another run's log, and follow it from there."""
        principal = self._principal()
        forking = self._runs.fork(principal, request, deadline_time_ns=self._deadline(context.time_remaining()))
        record, shared = await _run_to_end(forking)
        follow = copy_of(request.follow)
        del request
        stream = self._follow(
            principal, record.run, follow, context, after=shared, until=follow_pb2.WATCH_UNTIL_INTERRUPTED
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def WatchRun(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.WatchRunRequest, context: aio.ServicerContext[pb.WatchRunRequest, pb.WatchRunResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Follow a run from any sequence."""
        principal = self._principal()
        record = await self._runs.get(principal, request.run_id)
        stream = self._follow(
            principal, record.run, request.follow, context, after=request.after_sequence, until=request.until
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def CancelRun(
        self, request: pb.CancelRunRequest, context: aio.ServicerContext[pb.CancelRunRequest, pb.CancelRunResponse]
    ) -> pb.CancelRunResponse:
        """Request that a run stops."""
        record = await self._runs.cancel(self._principal(), request.run_id, note=request.note)
        return pb.CancelRunResponse(run=record.run)

    async def GetRun(
        self, request: pb.GetRunRequest, context: aio.ServicerContext[pb.GetRunRequest, pb.GetRunResponse]
    ) -> pb.GetRunResponse:
        """Return a run."""
        run = (await self._runs.get(self._principal(), request.run_id)).run
        return pb.GetRunResponse(run=run, final_answer=await self._runs.final_answer(run))

    async def ListRuns(
        self, request: pb.ListRunsRequest, context: aio.ServicerContext[pb.ListRunsRequest, pb.ListRunsResponse]
    ) -> pb.ListRunsResponse:
        """List runs, newest first."""
        runs, token = await self._runs.list(
            self._principal(), run_filter(request.filter), page_of(request.page_size, request.page_token)
        )
        return pb.ListRunsResponse(runs=runs, next_page_token=token)

    async def _follow(
        self,
        principal: Principal,
        run: run_pb2.Run,
        options: follow_pb2.FollowOptions,
        context: aio.ServicerContext[Any, Any],
        *,
        until: follow_pb2.WatchUntil.ValueType,
        after: int = 0,
        past: int = 0,
    ) -> AsyncGenerator[bytes, None]:
        # Sent before the first event, so that a client that loses the stream can find its run again.
        await context.send_initial_metadata(((RUN_ID_KEY, run.run_id),))
        position = StreamPosition(
            stamp=stamp(run.run_id, run.session_id),
            selection=Selection(options.view, options.event_names),
            after=after,
        )
        heartbeat = options.heartbeat_interval if options.HasField("heartbeat_interval") else None
        pages = self._runs.follow(principal, run.run_id, after=after, until=until, past=past)
        stream = stream_responses(pages, position, context, clock=self._clock, heartbeat=heartbeat)
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    def _deadline(self, remaining: float | None) -> int | None:
        return None if remaining is None else self._clock.now_ns() + int(remaining * 1e9)


async def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end even if the caller disconnects: an accepted run must not be left unstarted."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # The task is not cancelled with the call; wait for it, so that its exception is retrieved.
        await asyncio.gather(task, return_exceptions=True)
        raise
