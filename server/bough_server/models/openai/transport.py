"""HTTP endpoint of an OpenAI-compatible provider, and its server-sent events; the only importer of openai.

Requests are sent with the `openai` client and its aiohttp transport, loaded on first use. Answers are read as bytes:
building a typed object for every chunk costs several times the rest of a call. Events follow the event stream format
of the HTML standard, except that the last event needs no empty line after it; event names, ids and retry times are
ignored.
"""

import asyncio
import gc
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

from bough.v1 import step_pb2
from bough_server.errors import ModelError
from bough_server.models.failures import Failures
from bough_server.models.model import Delta
from bough_server.models.openai.annotations import Answer, BadChunk, ReportedError

if TYPE_CHECKING:
    import httpx2
    import openai


OPENAI_BASE_URL: Final = "https://api.openai.com/v1"
_DRAIN_SECONDS: Final = 0.1
_HEADERS: Final = {"Content-Type": "application/json", "Accept": "text/event-stream"}

_MAX_EVENT_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds until an answer begins, and between two events of it. They run only while waiting for bytes."""

    start: float = 60.0
    idle: float = 60.0


class _AnswerTimeout:
    """Timeout of one answer: until its first event, then until each next one. SSE comments do not count as events."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._idle = timeouts.idle
        self._clock = asyncio.get_running_loop().time
        self._left = timeouts.start
        self.bound = timeouts.start
        self.missed = "sent no response"

    def renew(self) -> None:
        """Restart the timeout: an event has arrived."""
        self.bound = self._left = self._idle
        self.missed = "sent nothing more of its response"

    @asynccontextmanager
    async def wait(self) -> AsyncGenerator[None, None]:
        """Limit a wait to the time that is left. Raises TimeoutError."""
        began = self._clock()
        async with asyncio.timeout(self._left):
            yield
        # Only the wait is subtracted: the time that our consumer takes between two reads is not the provider's.
        self._left -= self._clock() - began


class Endpoint:
    """One address and the connections to it."""

    def __init__(
        self, *, name: str, base_url: str, key: str = "", timeouts: Timeouts, keeps_connections: bool = True
    ) -> None:
        """An empty `key` sends no Authorization. `keeps_connections` False: for servers that drop idle connections."""
        self._failures = Failures(name=name, secret=key, url=base_url)
        self._base_url = base_url
        self._timeouts = timeouts
        self._keeps_connections = keeps_connections
        self._client: openai.AsyncOpenAI | None = None
        self._opening = asyncio.Lock()
        self._broken: tuple[type[Exception], ...] = (OSError,)

    async def stream(
        self, path: str, body: Mapping[str, object], answer: Answer, *, provider: str, model: str
    ) -> AsyncGenerator[Delta | step_pb2.LlmResponse, None]:
        """Make one attempt, assembled by `answer`: yield its deltas, then the whole response. Raises ModelError."""
        client, timeout = await self._open(), _AnswerTimeout(self._timeouts)
        response = await self._send(client, path, json.dumps(body, ensure_ascii=False).encode(), timeout)
        try:
            pieces = response.aiter_bytes()
            decoder = EventDecoder()
            while not answer.is_done:
                piece = await self._read(pieces, answer, timeout)
                for data in decoder.feed(piece) if piece else decoder.finish():
                    timeout.renew()
                    for delta in answer.take(data):
                        yield delta
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
            await response.aclose()

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _unusable(self, error: Exception, answer: Answer) -> ModelError:
        if isinstance(error, ReportedError):
            failure = self._failures.reported(error.value)
        else:
            failure = self._failures.bad_response(f"sent an invalid answer: {error}.")
        failure.lost_usage = answer.usage
        return failure

    async def _open(self) -> "openai.AsyncOpenAI":
        async with self._opening:
            if self._client is None:
                self._broken = await asyncio.to_thread(_transport_errors)
                try:
                    self._client = await asyncio.to_thread(self._connect)
                except self._broken as error:
                    detail = self._failures.sentence(error)
                    raise self._failures.unavailable(f"cannot be reached at its base_url: {detail}") from error
            return self._client

    def _connect(self) -> "openai.AsyncOpenAI":
        """Create the client. Runs in a thread: loading the package and the certificates takes a second or two."""
        import openai

        host = urlsplit(self._base_url).hostname or ""
        on_loopback = host in ("localhost", "::1") or host.startswith("127.")
        return openai.AsyncOpenAI(
            # Without a key the client would read one from the environment. "none" is never sent.
            api_key=self._failures.secret or "none",
            base_url=self._base_url,
            # Retries are recorded by the runtime and timeouts are those of _AnswerTimeout.
            max_retries=0,
            timeout=None,
            # A proxy named in the environment cannot reach this machine's loopback.
            http_client=openai.DefaultAioHttpClient(timeout=None, trust_env=not on_loopback),
        )

    async def _send(
        self, client: "openai.AsyncOpenAI", path: str, content: bytes, timeout: _AnswerTimeout
    ) -> "httpx2.Response":
        import httpx2
        import openai

        headers: dict[str, str | openai.Omit] = dict(_HEADERS)
        if not self._failures.secret:
            headers["Authorization"] = openai.Omit()
        if not self._keeps_connections:
            headers["Connection"] = "close"
        try:
            async with timeout.wait():
                # The client's `create` would rebuild and validate the whole request once more.
                response: object = await client.post(
                    path,
                    cast_to=httpx2.Response,
                    content=content,
                    options={"headers": headers},
                    stream=True,
                    stream_cls=openai.AsyncStream[object],
                )
                return cast(httpx2.Response, response)
        except TimeoutError as error:
            raise self._failures.timeout(timeout.missed, timeout.bound) from error
        except openai.APIStatusError as error:
            body = error.body if error.body is not None else error.response.text
            raise self._failures.status(error.status_code, body, error.response.headers) from None
        except self._broken as error:
            raise self._failures.transport(error) from error
        except ValueError as error:  # such as a key beside a password in the address
            raise self._failures.unavailable(f"cannot be called: {self._failures.sentence(error)}") from error

    async def _read(self, pieces: AsyncIterator[bytes], answer: Answer, timeout: _AnswerTimeout) -> bytes:
        """Return the next bytes; none at the end, or if the connection stalls or breaks after a complete answer."""
        try:
            async with timeout.wait():
                return await anext(pieces, b"")
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


def _transport_errors() -> tuple[type[Exception], ...]:
    """Load the client, its HTTP layer and its transport, and return what they raise if a connection fails."""
    is_new = "openai" not in sys.modules
    import aiohttp
    import httpx2
    import openai

    if is_new:
        # Loading leaves sixty thousand objects that live to the end. Every full garbage collection would visit them
        # and stall all calls; frozen ones are skipped.
        gc.freeze()
    return (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, aiohttp.ClientError, OSError)


class EventTooLarge(ValueError):
    """One event is larger than 16 MiB."""


class EventDecoder:
    """Incremental decoder of server-sent events: bytes in, the data of each completed event out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes; several data lines are joined by a line feed.

        Raises EventTooLarge.
        """
        buffer = self._rest + piece if self._rest else piece
        if b"\r" in buffer:
            # A carriage return at the end may be the first half of CR LF: hold it until the next piece.
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        lines = buffer.split(b"\n")
        self._rest = lines.pop() + held
        events: list[bytes] = []
        for line in lines:
            self._line(line, events)
        if len(self._rest) + self._size > _MAX_EVENT_BYTES:
            raise EventTooLarge("A server-sent event is larger than 16 MiB.")
        return events

    def finish(self) -> list[bytes]:
        """Return the data of a last event that the stream ended without an empty line."""
        events: list[bytes] = []
        for line in (self._rest.removesuffix(b"\r"), b""):
            self._line(line, events)
        self._rest = b""
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._size = 0
        elif line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._size += len(value)
        elif line == b"data":
            self._data.append(b"")
