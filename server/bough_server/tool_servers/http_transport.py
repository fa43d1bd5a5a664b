"""HTTP as the `mcp` package sends its requests: each failure is an answer of its request, and ends no other."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Final

import httpx2

from bough_server.tool_servers.config import ToolServerTlsSection
from bough_server.tool_servers.connection import MAX_MESSAGE_BYTES

NOT_SENT: Final = -32901
"""The code of a JSON-RPC error that stands for a request which did not reach the server."""
BROKEN: Final = -32902
"""The code of one that stands for a request which was sent, and to which no answer came."""
REFUSED: Final = -32903
"""The code of one that stands for a request whose token was refused."""


def build_client(
    headers: Mapping[str, str], tls: ToolServerTlsSection, *, connect_timeout: float
) -> httpx2.AsyncClient:
    """Return the HTTP client of a connection. Raises OSError if the files of TLS cannot be read."""
    transport = httpx2.AsyncHTTPTransport(verify=_build_context(tls), trust_env=False)
    # An answer may take as long as its call: what waits for it has a timeout.
    timeout = httpx2.Timeout(None, connect=connect_timeout, write=connect_timeout)
    return httpx2.AsyncClient(
        transport=_FailuresAsAnswers(transport), headers=dict(headers), timeout=timeout, trust_env=False
    )


def _build_context(tls: ToolServerTlsSection) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.cert_file is not None and tls.key_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context


class _FailuresAsAnswers(httpx2.AsyncBaseTransport):
    """Turns what goes wrong with a request into a JSON-RPC error that answers it.

    The package lets an exception of one request end the whole connection, with all requests in flight.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See AsyncBaseTransport."""
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            return _build_answer(request, NOT_SENT, f"no connection ({type(error).__name__})")
        except httpx2.TransportError as error:
            return _build_answer(request, BROKEN, type(error).__name__)
        if response.status_code in (401, 403):
            await response.aclose()
            return _build_answer(request, REFUSED, f"HTTP status {response.status_code}: check its token")
        if response.status_code >= 500 and "json" not in response.headers.get("content-type", ""):
            await response.aclose()
            return _build_answer(request, BROKEN, f"HTTP status {response.status_code}")
        assert isinstance(response.stream, httpx2.AsyncByteStream), "an asynchronous transport has such streams"
        response.stream = _BoundedStream(response.stream, is_endless="event-stream" in _content_type(response))
        return response

    async def aclose(self) -> None:
        """See AsyncBaseTransport."""
        await self._inner.aclose()


def _content_type(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").lower()


def _build_answer(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    # The package replaces the id by that of the request.
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    headers = {"content-type": "application/json"}
    return httpx2.Response(502, request=request, headers=headers, content=json.dumps(body).encode())


class _BoundedStream(httpx2.AsyncByteStream):
    """The bytes of an answer, up to a bound; a failure is an error that the package takes for one of this answer."""

    def __init__(self, inner: httpx2.AsyncByteStream, *, is_endless: bool) -> None:
        self._inner, self._is_endless = inner, is_endless

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if size > MAX_MESSAGE_BYTES and not self._is_endless:  # of a stream each event has a bound
                    raise httpx2.StreamError(f"it has more than {MAX_MESSAGE_BYTES // 1024**2} MiB")
                yield chunk
        except httpx2.TransportError as error:
            raise httpx2.StreamError(type(error).__name__) from error

    async def aclose(self) -> None:
        """See AsyncByteStream."""
        await self._inner.aclose()
