"""Stream of a run's events for programs without an event loop; survives drops as the asynchronous one does."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

import grpc

from bough.calls import SyncCalls
from bough.errors import CallFailed, ended_early, from_rpc_error
from bough.position import RUN_ID_KEY, Position, Request, Response
from bough.rejoining import RejoinBackoff, Rejoining
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, run_pb2


class _Call(Protocol):
    def __next__(self) -> Response: ...
    def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...
    def cancel(self) -> object: ...


class SyncRunStream(Iterator[event_pb2.AgentEvent]):
    """Events of a run, as they arrive, for one thread; any other thread may close the stream.

    The call is sent at once. If the connection drops, the stream rejoins the run as RunStream does.
    """

    def __init__(
        self,
        stub: agent_service_pb2_grpc.AgentServiceStub,
        request: Request,
        *,
        timeout: float | None,
        calls: SyncCalls,
        rejoining: Rejoining | None = None,
    ) -> None:
        self._stub, self._calls = stub, calls
        self._position = Position(request)
        self._backoff = RejoinBackoff(rejoining or Rejoining(), timeout=timeout, contact=calls.contact)
        self._events: deque[event_pb2.AgentEvent] = deque()
        self._call: _Call | None = self._begin(request, timeout)
        self._responses: _Call | None = None
        self._ended, self._closed = False, threading.Event()

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

    def started(self) -> str:
        """Wait until the run, or the answers to it, are accepted and durable; return the run id. Loses no event."""
        while not (self._position.is_accepted or self._ended or self._closed.is_set()):
            self._read()
        return self.run_id

    def cancel(self) -> run_pb2.Run:
        """Request cancellation of the run; its end is still streamed.

        Safe from a thread other than the reader's once `run_id` is known.
        """
        request = agent_service_pb2.CancelRunRequest(run_id=self.started())
        return self._calls.call(self._stub.CancelRun, request).run

    def close(self) -> None:
        """End the call, from any thread; the run continues as its policy says."""
        self._closed.set()
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> event_pb2.AgentEvent:
        while not self._closed.is_set():
            if self._events:
                return self._events.popleft()
            if self._ended:
                break
            self._read()
        raise StopIteration

    def _read(self) -> None:
        try:
            if self._responses is None:
                self._responses = self._open()
            else:
                self._take(next(self._responses))
        except StopIteration:
            self._drop()
            self._end_or_rejoin()
        except grpc.RpcError as error:
            self._drop()
            self._recover(from_rpc_error(error))

    def _open(self) -> _Call:
        if self._call is None:
            self._call = self._begin(self._position.next_request(), self._backoff.remaining())
        if self._closed.is_set():
            # close() in another thread may have run before this call was assigned, and so did not cancel it.
            self._call.cancel()
        run_id = dict(self._call.initial_metadata()).get(RUN_ID_KEY)
        if isinstance(run_id, str):
            self._position.accept(run_id)
            self._backoff.answered()
        return self._call

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
        self._backoff.progressed()
        self._events.extend(self._position.new_events(response))

    def _end_or_rejoin(self) -> None:
        """End with a call that ended without an error, unless it stopped before what it promised."""
        if self._position.ends_with_call:
            self._ended = True
            return
        try:
            if self.run_id:
                request = agent_service_pb2.GetRunRequest(run_id=self.run_id)
                if self._position.is_at_end_of(self._calls.call(self._stub.GetRun, request).run):
                    self._ended = True
                    return
            error: CallFailed = ended_early("run")
        except CallFailed as failed:
            error = failed
        self._recover(error, is_stuck=True)

    def _recover(self, error: CallFailed, *, is_stuck: bool = False) -> None:
        if self._position.is_over or self._closed.is_set():
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
