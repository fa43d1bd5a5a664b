"""Stream of a run's events that survives dropped connections: every sequence once and in order."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from grpc import aio

from bough.calls import Calls
from bough.errors import CallFailed, ended_early, from_rpc_error
from bough.position import RUN_ID_KEY, Position, Request, Response
from bough.rejoining import RejoinBackoff, Rejoining
from bough.v1 import agent_service_pb2, event_pb2, run_pb2

if TYPE_CHECKING:
    # Only the generated stub files have this name.
    from bough.v1.agent_service_pb2_grpc import AgentServiceAsyncStub

_Call: TypeAlias = (
    aio.UnaryStreamCall[agent_service_pb2.RunRequest, agent_service_pb2.RunResponse]
    | aio.UnaryStreamCall[agent_service_pb2.ForkRunRequest, agent_service_pb2.ForkRunResponse]
    | aio.UnaryStreamCall[agent_service_pb2.ResumeRunRequest, agent_service_pb2.ResumeRunResponse]
    | aio.UnaryStreamCall[agent_service_pb2.WatchRunRequest, agent_service_pb2.WatchRunResponse]
)


class RunStream(AsyncIterator[event_pb2.AgentEvent]):
    """Events of a run, as they arrive.

    The call is sent when the first event is awaited, or by `started()`. If the connection drops, the stream rejoins the
    run after its last event, within the original timeout; a call without a response so far is repeated under the same
    request id. The stream ends at the event at which the first call would have ended. Closing it ends the call, not the
    run: use `cancel()` for that.
    """

    def __init__(
        self,
        stub: "AgentServiceAsyncStub",
        request: Request,
        *,
        timeout: float | None,
        calls: Calls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub = stub
        self._timeout = timeout
        self._calls = calls
        self._rejoining = rejoining or Rejoining()
        self._position = Position(request)
        self._events: deque[event_pb2.AgentEvent] = deque()
        self._backoff: RejoinBackoff | None = None
        self._call: _Call | None = None
        self._responses: AsyncIterator[Response] | None = None
        self._reading = asyncio.Lock()
        self._ended = self._closed = False

    @property
    def run_id(self) -> str:
        """Id of the run; empty until the server has accepted the run, unless the caller named it."""
        return self._position.run_id

    @property
    def request_id(self) -> str:
        """Request id of the call, known from the start; a repeated call has no second effect.

        Empty for a watch.
        """
        return self._position.request_id

    @property
    def session_id(self) -> str:
        """Id of the run's session; empty until the first event."""
        return self._position.session_id

    @property
    def through_sequence(self) -> int:
        """Sequence to continue after: the caller has every event of its view up to here."""
        return self._events[0].sequence - 1 if self._events else self._position.received

    async def started(self) -> str:
        """Wait until the run, or the answers to it, are accepted and durable; return the run id. Loses no event."""
        while not self._position.is_accepted and not self._ended:
            await self._read()
        return self.run_id

    async def cancel(self) -> run_pb2.Run:
        """Request cancellation of the run; its end is still streamed. Safe while another task reads."""
        request = agent_service_pb2.CancelRunRequest(run_id=await self.started())
        return (await self._calls.call(self._stub.CancelRun, request)).run

    async def aclose(self) -> None:
        """End the call; the run continues as its policy says."""
        self._closed = self._ended = True
        self._events.clear()
        self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> event_pb2.AgentEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            await self._read()
        return self._events.popleft()

    async def _read(self) -> None:
        async with self._reading:
            if self._ended or self._events:
                return
            try:
                if self._responses is None:
                    self._responses = await self._open()
                else:
                    self._take(await anext(self._responses))
            except StopAsyncIteration:
                self._drop()
                await self._end_or_rejoin()
            except aio.AioRpcError as error:
                self._drop()
                await self._recover(from_rpc_error(error))
            except asyncio.CancelledError:
                self._drop()
                task = asyncio.current_task()
                # If another task closes the stream, the call under this read is cancelled: that is an end, no error.
                if not self._closed or (task is not None and task.cancelling()):
                    raise

    async def _open(self) -> AsyncIterator[Response]:
        if self._backoff is None:
            self._backoff = RejoinBackoff(self._rejoining, timeout=self._timeout, contact=self._calls.contact)
        # Kept in a local: another task may close the stream, which clears self._call, while this one waits.
        call = self._call = self._begin(self._position.next_request(), self._backoff.remaining())
        metadata = await call.initial_metadata()
        run_id = metadata.get(RUN_ID_KEY)
        if isinstance(run_id, str):
            self._position.accept(run_id)
            self._backoff.answered()
        return aiter(call)

    def _begin(self, request: Request, timeout: float | None) -> _Call:
        options = self._calls.options(timeout)
        match request:
            case agent_service_pb2.RunRequest():
                return self._stub.Run(request, **options)
            case agent_service_pb2.ForkRunRequest():
                return self._stub.ForkRun(request, **options)
            case agent_service_pb2.ResumeRunRequest():
                return self._stub.ResumeRun(request, **options)
            case _:
                return self._stub.WatchRun(request, **options)

    def _take(self, response: Response) -> None:
        if self._backoff is not None:
            self._backoff.progressed()
        self._events.extend(self._position.new_events(response))

    async def _end_or_rejoin(self) -> None:
        """End with a call that ended without an error, unless it stopped before what it promised."""
        if self._position.ends_with_call:
            self._ended = True
            return
        try:
            if self.run_id:
                request = agent_service_pb2.GetRunRequest(run_id=self.run_id)
                if self._position.is_at_end_of((await self._calls.call(self._stub.GetRun, request)).run):
                    self._ended = True
                    return
            error: CallFailed = ended_early("run")
        except CallFailed as failed:
            error = failed
        await self._recover(error, is_stuck=True)

    async def _recover(self, error: CallFailed, *, is_stuck: bool = False) -> None:
        if self._position.is_over or self._closed:
            self._ended = True
            return
        assert self._backoff is not None, "a call was made"
        try:
            delay = self._backoff.delay_after(error, is_stuck=is_stuck)
        except CallFailed:
            self._ended = True
            raise
        await asyncio.sleep(delay)

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._responses = None
