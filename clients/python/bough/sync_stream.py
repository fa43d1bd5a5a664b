"""Streams of runs and evaluations for programs without an event loop; they survive drops as the others do."""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc

from bough.calls import SyncCalls
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
from bough.stream import CLOSED_EARLY
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    eval_result_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    evaluation_pb2,
    event_pb2,
    run_pb2,
)

_Received = TypeVar("_Received", covariant=True)


class SyncStreamCall(Protocol[_Received]):
    """A call in flight whose responses are streamed, for threads."""

    def __next__(self) -> _Received: ...
    def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...
    def cancel(self) -> object: ...


class SyncLogStream(Iterator[Event], Generic[Request, Response, Event]):
    """Events of a run or of an evaluation, as they arrive, for one thread; any other thread may close the stream.

    The call is sent at once. If the connection drops, the stream rejoins its log as LogStream does.
    """

    def __init__(
        self,
        position: LogPosition[Request, Response, Event],
        *,
        timeout: float | None,
        calls: SyncCalls,
        rejoining: Rejoining | None,
    ) -> None:
        self._calls = calls
        self._log = position
        self._backoff = RejoinBackoff(
            rejoining or Rejoining(), timeout=timeout, contact=calls.contact, subject=position.subject
        )
        self._events: deque[Event] = deque()
        self._call: SyncStreamCall[Response] | None = None
        if not position.is_at_possible_end:
            self._call = self._begin(position.next_request(), timeout)
        self._responses: SyncStreamCall[Response] | None = None
        # Closed: before its end.
        self._ended, self._closed = False, threading.Event()

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

    def started(self) -> str:
        """Wait until what the call starts is accepted and durable; return the id of the run or of the evaluation.

        Loses no event.
        """
        while not (self._log.is_accepted or self._ended or self._closed.is_set()):
            self._read()
        return self._log.log_id

    def close(self) -> None:
        """End the call, from any thread; the run or the evaluation continues, a run as its policy says."""
        if not self._ended:
            self._closed.set()
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Event:
        while not self._closed.is_set():
            if self._events:
                return self._events.popleft()
            if self._ended:
                break
            self._read()
        raise StopIteration

    @abstractmethod
    def _begin(self, request: Request, timeout: float | None) -> SyncStreamCall[Response]:
        """Send a request that follows the log."""

    @abstractmethod
    def _is_at_end(self) -> bool:
        """Ask the server whether the log ends at the stream's position. Raises CallFailed."""

    def _read(self) -> None:
        try:
            if self._responses is None:
                self._responses = self._open()
            else:
                self._take(next(self._responses))
        except StopIteration:
            self._drop()
            self._end_or_rejoin()
        except (grpc.RpcError, CallFailed) as error:
            self._drop()
            self._recover(error if isinstance(error, CallFailed) else from_rpc_error(error))

    def _open(self) -> SyncStreamCall[Response] | None:
        """Send the next call and return its responses; end the stream and return None if none can follow."""
        if self._call is None and self._log.is_at_possible_end and self._is_at_end():
            self._ended = True
            return None
        if self._call is None:
            self._call = self._begin(self._log.next_request(), self._backoff.remaining())
        if self._closed.is_set():
            # close() in another thread may have run before this call was assigned, and so did not cancel it.
            self._call.cancel()
        log_id = dict(self._call.initial_metadata()).get(self._log.id_key)
        if isinstance(log_id, str):
            self._log.accept(log_id)
            self._backoff.note_answer()
        return self._call

    def _take(self, response: Response) -> None:
        self._backoff.note_progress()
        self._events.extend(self._log.new_events(response))

    def _end_or_rejoin(self) -> None:
        """End with a call that ended without an error, unless it stopped before what it promised."""
        if self._log.ends_with_call:
            self._ended = True
            return
        if self._log.is_continued:
            return
        try:
            if self._log.log_id and self._is_at_end():
                self._ended = True
                return
            error: CallFailed = build_early_end_error(self._log.subject)
        except CallFailed as failed:
            error = failed
        self._recover(error, is_stuck=True)

    def _recover(self, error: CallFailed, *, is_stuck: bool = False) -> None:
        if self._log.is_over or self._closed.is_set():
            self._ended = True
            return
        try:
            delay = self._backoff.delay_after(error, is_stuck=is_stuck)
        except CallFailed:
            self._ended = True
            raise
        self._closed.wait(delay)

    def _drop(self) -> None:
        call, self._call, self._responses = self._call, None, None
        if call is not None:
            with suppress(grpc.RpcError):
                call.cancel()


class SyncRunStream(SyncLogStream[RunStreamRequest, RunStreamResponse, event_pb2.AgentEvent]):
    """Events of a run, as they arrive, for one thread; any other thread may close the stream.

    `SyncLogStream` says when its call is sent, and how it survives dropped connections.

    A call that ends without an error after an event of a kind that this version does not know, such as a pause of a
    later one, ends the stream too: the run has not ended then, and `answer_of` raises RunNotAnswered.
    """

    def __init__(
        self,
        stub: agent_service_pb2_grpc.AgentServiceStub,
        request: RunStreamRequest,
        *,
        timeout: float | None,
        calls: SyncCalls,
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

    def cancel(self) -> run_pb2.Run:
        """Request cancellation of the run; its end is still streamed.

        Safe from a thread other than the reader's once `run_id` is known.
        """
        request = agent_service_pb2.CancelRunRequest(run_id=self.started())
        return self._calls.call(self._stub.CancelRun, request).run

    def _begin(self, request: RunStreamRequest, timeout: float | None) -> SyncStreamCall[RunStreamResponse]:
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

    def _is_at_end(self) -> bool:
        request = agent_service_pb2.GetRunRequest(run_id=self.run_id)
        return self._position.is_at_end_of(self._calls.call(self._stub.GetRun, request).run)


class SyncEvaluationStream(
    SyncLogStream[EvaluationStreamRequest, EvaluationStreamResponse, evaluation_pb2.EvaluationEvent]
):
    """Events of an evaluation, as they arrive, for one thread; any other thread may close the stream.

    `SyncLogStream` says when its call is sent, and how it survives dropped connections.
    """

    def __init__(
        self,
        stub: eval_service_pb2_grpc.EvalServiceStub,
        request: EvaluationStreamRequest,
        *,
        read_result: Callable[[str], eval_result_pb2.EvalResult],
        timeout: float | None,
        calls: SyncCalls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub, self._read_result, self._position = stub, read_result, EvaluationPosition(request)
        super().__init__(self._position, timeout=timeout, calls=calls, rejoining=rejoining)

    @property
    def evaluation_id(self) -> str:
        """Id of the evaluation; empty until the server has accepted it, unless the caller named it."""
        return self._position.log_id

    def cancel(self) -> evaluation_pb2.Evaluation:
        """Request cancellation of the evaluation; its end is still streamed.

        Safe from a thread other than the reader's once `evaluation_id` is known.
        """
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=self.started())
        return self._calls.call(self._stub.CancelEvaluation, request).evaluation

    def result(self) -> eval_result_pb2.EvalResult:
        """Follow the evaluation to its end, skipping the events that are left, and return its result with all cases.

        Raises ValueError if the stream was closed before the end.
        """
        for _ in self:
            pass
        if self._closed.is_set():
            raise ValueError(CLOSED_EARLY)
        return self._read_result(self.evaluation_id)

    def _begin(
        self, request: EvaluationStreamRequest, timeout: float | None
    ) -> SyncStreamCall[EvaluationStreamResponse]:
        options = self._calls.options(timeout)
        if isinstance(request, eval_service_pb2.EvaluateRequest):
            return self._stub.Evaluate(request, **options)
        return self._stub.WatchEvaluation(request, **options)

    def _is_at_end(self) -> bool:
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=self.evaluation_id)
        return self._position.is_at_end_of(self._calls.call(self._stub.GetEvaluation, request).evaluation)
