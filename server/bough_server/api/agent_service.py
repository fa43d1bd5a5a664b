"""AgentService: start, follow, resume, fork, cancel, get and list runs, and answer what they ask."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import agent_service_pb2_grpc, follow_pb2, run_pb2
from bough_server.api.access import find_changeable
from bough_server.api.pagination import page_of, run_filter
from bough_server.api.streaming import StreamPosition, stream_responses
from bough_server.clock import Clock
from bough_server.identity import Caller, Scope
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

    def __init__(self, *, runs: Runs, caller: Callable[[], Caller], clock: Clock) -> None:
        self._runs, self._caller, self._clock = runs, caller, clock

    async def Run(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.RunRequest, context: aio.ServicerContext[pb.RunRequest, pb.RunResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Start a run and follow it to its end."""
        principal = self._caller().principal
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
        caller = self._caller()
        resuming = self._runs.resume(
            caller.principal, request, deadline_time_ns=self._deadline(context.time_remaining()), caller=caller
        )
        resumed = await _run_to_end(resuming)
        after = request.after_sequence if request.HasField("after_sequence") else resumed.since
        follow = copy_of(request.follow)
        del request
        stream = self._follow(
            caller.visible,
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
        caller = self._caller()
        forking = self._runs.fork(
            caller.principal,
            request,
            deadline_time_ns=self._deadline(context.time_remaining()),
            scope=caller.visible,
        )
        record, shared = await _run_to_end(forking)
        follow = copy_of(request.follow)
        del request
        stream = self._follow(
            caller.principal, record.run, follow, context, after=shared, until=follow_pb2.WATCH_UNTIL_INTERRUPTED
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def WatchRun(  # type: ignore[override]  # the responses are serialized already
        self, request: pb.WatchRunRequest, context: aio.ServicerContext[pb.WatchRunRequest, pb.WatchRunResponse]
    ) -> AsyncGenerator[bytes, None]:
        """Follow a run from any sequence."""
        scope = self._caller().visible
        record = await self._runs.get(scope, request.run_id)
        stream = self._follow(
            scope, record.run, request.follow, context, after=request.after_sequence, until=request.until
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def CancelRun(
        self, request: pb.CancelRunRequest, context: aio.ServicerContext[pb.CancelRunRequest, pb.CancelRunResponse]
    ) -> pb.CancelRunResponse:
        """Request that a run stops."""
        caller = self._caller()
        scope = await self._find_changeable(caller, request.run_id)
        record = await self._runs.cancel(caller.principal, request.run_id, note=request.note, scope=scope)
        return pb.CancelRunResponse(run=record.run)

    async def GetRun(
        self, request: pb.GetRunRequest, context: aio.ServicerContext[pb.GetRunRequest, pb.GetRunResponse]
    ) -> pb.GetRunResponse:
        """Return a run."""
        run = (await self._runs.get(self._caller().visible, request.run_id)).run
        return pb.GetRunResponse(run=run, final_answer=await self._runs.final_answer(run))

    async def ListRuns(
        self, request: pb.ListRunsRequest, context: aio.ServicerContext[pb.ListRunsRequest, pb.ListRunsResponse]
    ) -> pb.ListRunsResponse:
        """List runs, newest first."""
        runs, token = await self._runs.list(
            self._caller().visible, run_filter(request.filter), page_of(request.page_size, request.page_token)
        )
        return pb.ListRunsResponse(runs=runs, next_page_token=token)

    async def ListInputRequests(
        self,
        request: pb.ListInputRequestsRequest,
        context: aio.ServicerContext[pb.ListInputRequestsRequest, pb.ListInputRequestsResponse],
    ) -> pb.ListInputRequestsResponse:
        """List the open requests that the caller may answer."""
        page = page_of(request.page_size, request.page_token)
        requests, token = await self._runs.list_open_inputs(self._caller(), page)
        return pb.ListInputRequestsResponse(requests=requests, next_page_token=token)

    async def AnswerInput(
        self,
        request: pb.AnswerInputRequest,
        context: aio.ServicerContext[pb.AnswerInputRequest, pb.AnswerInputResponse],
    ) -> pb.AnswerInputResponse:
        """Answer what a run asks for, without following it."""
        state = await _run_to_end(self._runs.answer_input(self._caller(), request))
        return pb.AnswerInputResponse(run_id=request.run_id, state=state)

    async def _find_changeable(self, caller: Caller, run_id: str) -> Scope:
        async def find_user(scope: Scope) -> str:
            return (await self._runs.get(scope, run_id)).principal.user_id

        return await find_changeable(caller, find_user)

    async def _follow(
        self,
        scope: Scope,
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
        pages = self._runs.follow(scope, run.run_id, after=after, until=until, past=past)
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
