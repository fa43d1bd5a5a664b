"""A run as a stream of events that survives drops: every sequence once and in order; it folds nothing."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from grpc import aio

from bough.calls import Calls
from bough.errors import CallFailed, from_rpc_error
from bough.rejoining import Comeback, Rejoining
from bough.v1 import agent_service_pb2, event_pb2

if TYPE_CHECKING:
    # Only stub files have it.
    from bough.v1.agent_service_pb2_grpc import AgentServiceAsyncStub

Response = agent_service_pb2.RunResponse | agent_service_pb2.WatchRunResponse
_Call = (
    aio.UnaryStreamCall[agent_service_pb2.RunRequest, agent_service_pb2.RunResponse]
    | aio.UnaryStreamCall[agent_service_pb2.WatchRunRequest, agent_service_pb2.WatchRunResponse]
)

_RUN_ID_KEY = "bough-run-id"
_TERMINAL = frozenset({"run_completed", "run_failed", "run_cancelled"})


class RunStream(AsyncIterator[event_pb2.AgentEvent]):
    """The events of a run, as they come.

    Nothing is sent before the first event is asked for, or `started()`. When the connection drops, the stream joins the
    run again where it was; a Run whose id is not known yet is sent again under the same request id. Closing the stream
    ends the call, not the run: `cancel()` does that.
    """

    def __init__(
        self,
        stub: "AgentServiceAsyncStub",
        request: agent_service_pb2.RunRequest | agent_service_pb2.WatchRunRequest,
        *,
        timeout: float | None,
        calls: Calls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub = stub
        self._request = request
        self._timeout = timeout
        self._calls = calls
        self._rejoining = rejoining or Rejoining()
        self._run_id, self._session_id, self._received = "", "", 0
        if isinstance(request, agent_service_pb2.WatchRunRequest):
            self._run_id, self._received = request.run_id, request.after_sequence
        self._events: deque[event_pb2.AgentEvent] = deque()
        self._comeback: Comeback | None = None
        self._call: _Call | None = None
        self._responses: AsyncIterator[Response] | None = None
        self._reading = asyncio.Lock()
        self._saw_end = self._ended = self._closed = False

    @property
    def run_id(self) -> str:
        """The run; empty until the server has accepted it."""
        return self._run_id

    @property
    def session_id(self) -> str:
        """The run's session; empty until the first event."""
        return self._session_id

    @property
    def through_sequence(self) -> int:
        """Everything up to here has been given to the caller or is not in its view: go on after it."""
        return self._events[0].sequence - 1 if self._events else self._received

    async def started(self) -> str:
        """Waits until the run is accepted and durable; gives its id. Loses no event."""
        while not self._run_id and not self._ended:
            await self._read()
        return self._run_id

    async def cancel(self) -> agent_service_pb2.Run:
        """Asks the run to stop; its end still comes through the stream. May be called while another task reads."""
        request = agent_service_pb2.CancelRunRequest(run_id=await self.started())
        return (await self._calls.one(self._stub.CancelRun, request)).run

    async def aclose(self) -> None:
        """Ends the call; the run goes on as its policy says."""
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
                self._take(await anext(self._responses))
            except StopAsyncIteration:
                self._ended = True
            except aio.AioRpcError as error:
                self._drop()
                await self._recover(from_rpc_error(error))
            except asyncio.CancelledError:
                self._drop()
                task = asyncio.current_task()
                # Closing by another task cancels the call under this one, which then simply has no more events.
                if not self._closed or (task is not None and task.cancelling()):
                    raise

    async def _open(self) -> AsyncIterator[Response]:
        if self._comeback is None:
            self._comeback = Comeback(self._rejoining, timeout=self._timeout)
        timeout = self._comeback.remaining()
        if isinstance(self._request, agent_service_pb2.RunRequest) and not self._run_id:
            self._call = self._stub.Run(self._request, timeout=timeout, wait_for_ready=self._calls.wait_for_ready)
        else:
            self._call = self._stub.WatchRun(self._rejoin(), timeout=timeout, wait_for_ready=self._calls.wait_for_ready)
        metadata = await self._call.initial_metadata()
        run_id = metadata.get(_RUN_ID_KEY)
        if isinstance(run_id, str):
            self._run_id = run_id
            self._comeback.answered()
        return aiter(self._call)

    def _rejoin(self) -> agent_service_pb2.WatchRunRequest:
        request = agent_service_pb2.WatchRunRequest(run_id=self._run_id, after_sequence=self._received)
        if isinstance(self._request, agent_service_pb2.WatchRunRequest):
            request.until = self._request.until
        if self._request.HasField("follow"):
            request.follow.CopyFrom(self._request.follow)
        return request

    def _take(self, response: Response) -> None:
        if self._comeback is not None:
            self._comeback.progressed()
        for event in response.events:
            if event.sequence <= self._received:
                continue
            self._received = event.sequence
            self._run_id = self._run_id or event.run_id
            self._session_id = self._session_id or event.session_id
            self._saw_end = self._saw_end or event.WhichOneof("payload") in _TERMINAL
            self._events.append(event)
        self._received = max(self._received, response.through_sequence)

    async def _recover(self, error: CallFailed) -> None:
        if self._saw_end:
            self._ended = True
            return
        assert self._comeback is not None, "a call was made"
        try:
            delay = self._comeback.delay_after(error)
        except CallFailed:
            self._ended = True
            raise
        await asyncio.sleep(delay)

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._responses = None
