"""Streams of logs that survive dropped connections, with an event loop and without one: every sequence once.

The two differ in more than `async`: one may be read and closed by several tasks and is cancelled with them, the other
is read by one thread and closed by any. The streams of runs and of evaluations are written for the first alone, in
bough.stream; those of bough.sync are generated.
"""

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc
from grpc import aio

from bough.calls import Calls, SyncCalls
from bough.errors import CallFailed, build_early_end_error, from_rpc_error
from bough.position import Event, LogPosition, Request, Response
from bough.rejoining import RejoinBackoff, Rejoining

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
        self._ended, self._closing = False, threading.Event()

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

    @property
    def _closed(self) -> bool:
        return self._closing.is_set()

    def started(self) -> str:
        """Wait until what the call starts is accepted and durable; return the id of the run or of the evaluation.

        Loses no event.
        """
        while not (self._log.is_accepted or self._ended or self._closed):
            self._read()
        return self._log.log_id

    def close(self) -> None:
        """End the call, from any thread; the run or the evaluation continues, a run as its policy says."""
        if not self._ended:
            self._closing.set()
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Event:
        while not self._closed:
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
        if self._closed:
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
        if self._log.is_over or self._closed:
            self._ended = True
            return
        try:
            delay = self._backoff.delay_after(error, is_stuck=is_stuck)
        except CallFailed:
            self._ended = True
            raise
        self._closing.wait(delay)

    def _drop(self) -> None:
        call, self._call, self._responses = self._call, None, None
        if call is not None:
            with suppress(grpc.RpcError):
                call.cancel()
