"""One attempt at a provider, from the request to the whole answer.

Answers are read as bytes: building a typed object for every event, as providers' packages do, costs several times the
rest of a call.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from typing import Final, TypeVar

from bough.v1 import step_pb2
from bough_server.clock import loop_time
from bough_server.errors import ModelError
from bough_server.models.answer import Answer, ReportedError
from bough_server.models.failures import Failures
from bough_server.models.http import HttpConnection, ProviderRefusal, Reply
from bough_server.models.model import Delta, Deltas
from bough_server.models.provider_json import BadChunk
from bough_server.models.sse import EventDecoder, EventTooLarge
from bough_server.threads import run_in_thread

_DRAIN_SECONDS: Final = 0.1
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds until an answer begins, and between two events of it. They run only while waiting for bytes."""

    start: float = 60.0
    idle: float = 60.0


class AnswerTimeout:
    """Timeout of one answer: until its first event, then until each next one. SSE comments do not count as events.

    One timer serves all waits: it is set anew when it has passed, not for each read, as asyncio.timeout would do.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._idle = timeouts.idle
        self._clock = loop_time
        self._left = timeouts.start
        self._deadline = inf
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_expired = False
        self.bound = timeouts.start
        self.missed = "sent no response"

    def renew(self) -> None:
        """Restart the timeout: an event has arrived."""
        self.bound = self._left = self._idle
        self.missed = "sent nothing more of its response"

    async def limit(self, wait: Awaitable[_Result]) -> _Result:
        """Await within the time that is left. Raises TimeoutError."""
        began = self._clock()
        task = self._task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        cancelling = task.cancelling()
        self._deadline = began + self._left
        if self._timer is None or self._timer.when() > self._deadline:
            self._set_timer()
        try:
            result = await wait
        except BaseException as error:
            # Taken back whatever the cancellation has become, or the task would count as cancelled for good.
            if self._is_expired and task.uncancel() <= cancelling and isinstance(error, asyncio.CancelledError):
                raise TimeoutError from None
            raise
        finally:
            self._deadline = inf
        # Only the wait is subtracted: the time that our consumer takes between two reads is not the provider's.
        self._left -= self._clock() - began
        return result

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_at(self._deadline, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._deadline == inf:
            return  # nothing is awaited; the next wait sets the timer
        if self._clock() < self._deadline:
            self._set_timer()
        elif self._task is not None:
            self._is_expired = True
            self._task.cancel()


class Endpoint:
    """One address and the connections to it."""

    def __init__(self, connection: HttpConnection, *, failures: Failures, timeouts: Timeouts) -> None:
        self._connection = connection
        self._failures = failures
        self._timeouts = timeouts
        self._opening = asyncio.Lock()
        self._is_open = False
        self._broken: tuple[type[Exception], ...] = (OSError,)

    async def stream(
        self, path: str, body: Mapping[str, object], answer: Answer, *, provider: str, model: str
    ) -> AsyncGenerator[Deltas | step_pb2.LlmResponse, None]:
        """Make one attempt, assembled by `answer`: yield its deltas, those of one read together, then the response.

        Raises ModelError.
        """
        await self._open()
        with closing(AnswerTimeout(self._timeouts)) as timeout:
            response = await self._send(path, body, timeout)
            try:
                pieces = response.pieces()
                decoder = EventDecoder()
                while not answer.is_done:
                    piece = await self._read(pieces, answer, timeout)
                    events = decoder.feed(piece) if piece else decoder.finish()
                    if events:
                        timeout.renew()
                    deltas, error = _apply_events(events, answer)
                    if deltas:
                        yield deltas
                    if error is not None:
                        raise error
                    if not piece:
                        break
                if not answer.is_whole:
                    raise self._failures.bad_response("ended its stream before its answer was complete.")
                await self._drain(pieces)
                yield answer.response(provider=provider, model=model)
            except ModelError as error:
                error.lost_usage = answer.usage
                raise
            except (BadChunk, EventTooLarge, ReportedError) as error:
                raise self._unusable(error, answer) from error
            finally:
                await response.close()

    async def close(self) -> None:
        """Close the connections."""
        self._is_open = False
        await self._connection.close()

    def _unusable(self, error: Exception, answer: Answer) -> ModelError:
        if isinstance(error, ReportedError):
            failure = self._failures.stream_error(error.value)
        else:
            failure = self._failures.bad_response(f"sent an invalid answer: {error}.")
        failure.lost_usage = answer.usage
        return failure

    async def _open(self) -> None:
        async with self._opening:
            if self._is_open:
                return
            try:
                self._broken = await run_in_thread(self._connection.open)
            except (ValueError, OSError) as error:
                detail = self._failures.sentence(error)
                raise self._failures.unavailable(f"cannot be reached at its base_url: {detail}") from error
            self._is_open = True

    async def _send(self, path: str, body: Mapping[str, object], timeout: AnswerTimeout) -> Reply:
        try:
            return await timeout.limit(self._connection.send(path, body))
        except TimeoutError as error:
            raise self._failures.timeout(timeout.missed, timeout.bound) from error
        except ProviderRefusal as error:
            raise self._failures.status(error.status, error.body, error.headers) from None
        except self._broken as error:
            raise self._failures.transport(error) from error
        except ValueError as error:  # such as a key beside a password in the address
            raise self._failures.unavailable(f"cannot be called: {self._failures.sentence(error)}") from error

    async def _read(self, pieces: AsyncIterator[bytes], answer: Answer, timeout: AnswerTimeout) -> bytes:
        """Return the next bytes; none at the end, or if the connection stalls or breaks after a complete answer."""
        try:
            return await timeout.limit(anext(pieces, b""))
        except TimeoutError as error:
            if answer.is_whole:
                return b""
            raise self._failures.timeout(timeout.missed, timeout.bound) from error
        except self._broken as error:
            if answer.is_whole:
                return b""
            raise self._failures.transport(error) from error

    async def _drain(self, pieces: AsyncIterator[bytes]) -> None:
        """Read to the end of the body if it comes within 0.1 s: only then can the next call reuse the connection."""
        with suppress(TimeoutError, *self._broken):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await anext(pieces, b""):
                    pass


def _apply_events(events: Sequence[bytes], answer: Answer) -> tuple[list[Delta], BadChunk | ReportedError | None]:
    """Apply events and return their deltas, up to the event that is an error, and that error."""
    deltas: list[Delta] = []
    try:
        for data in events:
            deltas += answer.apply(data)
    except (BadChunk, ReportedError) as error:
        return deltas, error
    return deltas, None
