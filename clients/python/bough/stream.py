"""Streams of runs and evaluations that survive dropped connections: every sequence once and in order."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Protocol, Self, TypeVar

from grpc import aio

from bough.calls import Calls
from bough.errors import CallFailed, build_early_end_error, from_rpc_error
from bough.position import (
    EvaluationPosition,
    EvaluationStreamRequest,
    EvaluationStreamResponse,
    Event,
    LogPosition,
    Request,
    Response,
    RunPosition,
    RunStreamRequest,
    RunStreamResponse,
)
from bough.rejoining import RejoinBackoff, Rejoining
from bough.v1 import (
    agent_service_pb2,
    eval_result_pb2,
    eval_service_pb2,
    evaluation_pb2,
    event_pb2,
    run_pb2,
)

if TYPE_CHECKING:
    # Only the generated stub files have these names.
    from bough.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from bough.v1.eval_service_pb2_grpc import EvalServiceAsyncStub

CLOSED_EARLY: Final = (
    "The stream was closed before the end of the evaluation: client.evaluations.result() returns what was found so far."
)

_Received = TypeVar("_Received", covariant=True)


class StreamCall(Protocol[_Received]):
    """A call in flight whose responses are streamed."""

    def __aiter__(self) -> AsyncIterator[_Received]: ...
    async def initial_metadata(self) -> aio.Metadata: ...
    def cancel(self) -> bool: ...


class LogStream(AsyncIterator[Event], Generic[Request, Response, Event]):
    """Events of a run or of an evaluation, as they arrive.

    The call is sent when the first event is awaited, or by `started()`. If the connection drops, the stream rejoins its
    log after its last event, within the original timeout; a call without a response so far is repeated under the same
    request id. The stream ends at the event at which the first call would have ended. Closing it ends the call, and
    neither the run nor the evaluation: use `cancel()` for that.
    """

    def __init__(
        self,
        position: LogPosition[Request, Response, Event],
        *,
        timeout: float | None,
        calls: Calls,
        rejoining: Rejoining | None,
    ) -> None:
        self._timeout = timeout
        self._calls = calls
        self._rejoining = rejoining or Rejoining()
        self._log = position
        self._events: deque[Event] = deque()
        self._backoff: RejoinBackoff | None = None
        self._call: StreamCall[Response] | None = None
        self._responses: AsyncIterator[Response] | None = None
        self._reading = asyncio.Lock()
        # Closed: before its end.
        self._ended = self._closed = False

    @property
    def request_id(self) -> str:
        """Request id of the call, known from the start; a repeated call has no second effect.

        Empty for a watch.
        """
        return self._log.request_id

    @property
    def through_sequence(self) -> int:
        """Sequence to continue after: the caller has every event of its view up to here."""
        return self._events[0].sequence - 1 if self._events else self._log.received

    async def started(self) -> str:
        """Wait until what the call starts is accepted and durable; return the id of the run or of the evaluation.

        Loses no event.
        """
        while not self._log.is_accepted and not self._ended:
            await self._read()
        return self._log.log_id

    async def aclose(self) -> None:
        """End the call; the run or the evaluation continues, a run as its policy says."""
        if not self._ended:
            self._closed = self._ended = True
        self._events.clear()
        self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Event:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            await self._read()
        return self._events.popleft()

    @abstractmethod
    def _begin(self, request: Request, timeout: float | None) -> StreamCall[Response]:
        """Send a request that follows the log."""

    @abstractmethod
    async def _is_at_end(self) -> bool:
        """Ask the server whether the log ends at the stream's position. Raises CallFailed."""

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
            except (aio.AioRpcError, CallFailed) as error:
                self._drop()
                await self._recover(error if isinstance(error, CallFailed) else from_rpc_error(error))
            except asyncio.CancelledError:
                self._drop()
                task = asyncio.current_task()
                # If another task closes the stream, the call under this read is cancelled: that is an end, no error.
                if not self._closed or (task is not None and task.cancelling()):
                    raise

    async def _open(self) -> AsyncIterator[Response] | None:
        """Send the next call and return its responses; end the stream and return None if none can follow."""
        if self._backoff is None:
            self._backoff = RejoinBackoff(
                self._rejoining, timeout=self._timeout, contact=self._calls.contact, subject=self._log.subject
            )
        # Another task may close the stream while this one asks.
        if self._log.is_at_possible_end and (await self._is_at_end() or self._closed):
            self._ended = True
            return None
        # Kept in a local: another task may close the stream, which clears self._call, while this one waits.
        call = self._call = self._begin(self._log.next_request(), self._backoff.remaining())
        log_id = (await call.initial_metadata()).get(self._log.id_key)
        if isinstance(log_id, str):
            self._log.accept(log_id)
            self._backoff.note_answer()
        return aiter(call)

    def _take(self, response: Response) -> None:
        if self._backoff is not None:
            self._backoff.note_progress()
        self._events.extend(self._log.new_events(response))

    async def _end_or_rejoin(self) -> None:
        """End with a call that ended without an error, unless it stopped before what it promised."""
        if self._log.ends_with_call:
            self._ended = True
            return
        if self._log.is_continued:
            return
        try:
            if self._log.log_id and await self._is_at_end():
                self._ended = True
                return
            error: CallFailed = build_early_end_error(self._log.subject)
        except CallFailed as failed:
            error = failed
        await self._recover(error, is_stuck=True)

    async def _recover(self, error: CallFailed, *, is_stuck: bool = False) -> None:
        if self._log.is_over or self._closed:
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


class RunStream(LogStream[RunStreamRequest, RunStreamResponse, event_pb2.AgentEvent]):
    """Events of a run, as they arrive.

    `LogStream` says when its call is sent, and how it survives dropped connections.

    A call that ends without an error after an event of a kind that this version does not know, such as a pause of a
    later one, ends the stream too: the run has not ended then, and `answer_of` raises RunNotAnswered.
    """

    def __init__(
        self,
        stub: "AgentServiceAsyncStub",
        request: RunStreamRequest,
        *,
        timeout: float | None,
        calls: Calls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub, self._position = stub, RunPosition(request)
        super().__init__(self._position, timeout=timeout, calls=calls, rejoining=rejoining)

    @property
    def run_id(self) -> str:
        """Id of the run; empty until the server has accepted the run, unless the caller named it."""
        return self._position.log_id

    @property
    def session_id(self) -> str:
        """Id of the run's session; empty until the first event."""
        return self._position.session_id

    async def cancel(self) -> run_pb2.Run:
        """Request cancellation of the run; its end is still streamed. Safe while another task reads."""
        request = agent_service_pb2.CancelRunRequest(run_id=await self.started())
        return (await self._calls.call(self._stub.CancelRun, request)).run

    def _begin(self, request: RunStreamRequest, timeout: float | None) -> StreamCall[RunStreamResponse]:
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

    async def _is_at_end(self) -> bool:
        request = agent_service_pb2.GetRunRequest(run_id=self.run_id)
        return self._position.is_at_end_of((await self._calls.call(self._stub.GetRun, request)).run)


class EvaluationStream(LogStream[EvaluationStreamRequest, EvaluationStreamResponse, evaluation_pb2.EvaluationEvent]):
    """Events of an evaluation, as they arrive.

    `LogStream` says when its call is sent, and how it survives dropped connections.
    """

    def __init__(
        self,
        stub: "EvalServiceAsyncStub",
        request: EvaluationStreamRequest,
        *,
        read_result: Callable[[str], Awaitable[eval_result_pb2.EvalResult]],
        timeout: float | None,
        calls: Calls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub, self._read_result, self._position = stub, read_result, EvaluationPosition(request)
        super().__init__(self._position, timeout=timeout, calls=calls, rejoining=rejoining)

    @property
    def evaluation_id(self) -> str:
        """Id of the evaluation; empty until the server has accepted it, unless the caller named it."""
        return self._position.log_id

    async def cancel(self) -> evaluation_pb2.Evaluation:
        """Request cancellation of the evaluation; its end is still streamed. Safe while another task reads."""
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=await self.started())
        return (await self._calls.call(self._stub.CancelEvaluation, request)).evaluation

    async def result(self) -> eval_result_pb2.EvalResult:
        """Follow the evaluation to its end, skipping the events that are left, and return its result with all cases.

        Raises ValueError if the stream was closed before the end.
        """
        async for _ in self:
            pass
        if self._closed:
            raise ValueError(CLOSED_EARLY)
        return await self._read_result(self.evaluation_id)

    def _begin(self, request: EvaluationStreamRequest, timeout: float | None) -> StreamCall[EvaluationStreamResponse]:
        options = self._calls.options(timeout)
        if isinstance(request, eval_service_pb2.EvaluateRequest):
            return self._stub.Evaluate(request, **options)
        return self._stub.WatchEvaluation(request, **options)

    async def _is_at_end(self) -> bool:
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=self.evaluation_id)
        response = await self._calls.call(self._stub.GetEvaluation, request)
        return self._position.is_at_end_of(response.evaluation)
