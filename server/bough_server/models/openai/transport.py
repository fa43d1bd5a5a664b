"""Connections to OpenAI-compatible providers; the only importer of openai.

The `openai` client, loaded on first use, says once for each path where requests go and what headers they have: the key
and those of an account never change. Calls are then made by aiohttp, which is also the client's own transport, without
the client's objects for every request, answer and chunk.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Final

from bough_server.models.endpoint import Endpoint, ProviderRefusal, Timeouts, freeze_imports
from bough_server.models.failures import Failures
from bough_server.models.forms import encode_body
from bough_server.models.openai.proxy import Proxy, proxy_of

if TYPE_CHECKING:
    import ssl

    import aiohttp
    import openai


OPENAI_BASE_URL: Final = "https://api.openai.com/v1"
_HEADERS: Final = {"Content-Type": "application/json", "Accept": "text/event-stream"}
_MAX_REDIRECTS: Final = 20
_MAX_REFUSAL_BYTES: Final = 1024 * 1024
_LARGE_BODY_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where and how the requests of one path are sent."""

    url: str
    headers: Mapping[str, str]
    proxy: str | None = None
    proxy_headers: Mapping[str, str] | None = None
    """Headers that only the proxy sees, if it opens a tunnel."""

    def __repr__(self) -> str:
        # The dataclass's default would show the key in tracebacks and logs.
        return f"_Target(proxy={self.proxy!r})"


class _Reply:
    """An answer whose head has arrived."""

    def __init__(self, response: "aiohttp.ClientResponse") -> None:
        self._response = response

    def aiter_bytes(self) -> AsyncIterator[bytes]:
        """Return an iterator over what has arrived since its last item."""
        return self._response.content.iter_any()

    async def aclose(self) -> None:
        """Close the connection, or return it to be used again if all was read."""
        await self._response.__aexit__(None, None, None)


class OpenAIConnection:
    """The `openai` client of one address, and the connections to it."""

    def __init__(self, *, base_url: str, key: str = "", keeps_connections: bool = True) -> None:
        """An empty `key` sends no Authorization. `keeps_connections` False: for servers that drop idle connections."""
        self._base_url = base_url
        self._key = key
        self._keeps_connections = keeps_connections
        self._client: openai.AsyncOpenAI | None = None
        self._certificates: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None
        self._targets: dict[str, _Target] = {}

    def load(self) -> tuple[type[Exception], ...]:
        """Load the packages and return what they raise if a connection fails."""
        return transport_errors()

    def open(self) -> None:
        """Create the client, and read the certificates: those of SSL_CERT_FILE or SSL_CERT_DIR, or the system's."""
        import httpx2
        import openai

        self._certificates = httpx2.create_ssl_context()
        self._client = openai.AsyncOpenAI(
            # Without a key the client would read one from the environment. "none" is never sent.
            api_key=self._key or "none",
            base_url=self._base_url,
            # Retries are recorded by the runtime and timeouts are those of the endpoint.
            max_retries=0,
            timeout=None,
            # Its own would read the certificates once more, and the proxies.
            http_client=httpx2.AsyncClient(verify=self._certificates, trust_env=False),
        )

    async def send(self, path: str, body: Mapping[str, object]) -> _Reply:
        """Send a request whose body is JSON."""
        assert self._client is not None
        session = self._session = self._session or self._open_pool()
        target = self._targets.get(path)
        if target is None:
            target = self._targets[path] = self._target(self._client, path)
        response = await session.post(
            target.url,
            data=_wrap_body(encode_body(body)),
            headers=target.headers,
            proxy=target.proxy,
            proxy_headers=target.proxy_headers,
            max_redirects=_MAX_REDIRECTS,
        )
        if response.status >= 300:
            raise await _read_refusal(response)
        return _Reply(response)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        session, self._session = self._session, None
        self._targets.clear()
        if session is not None:
            await session.close()
        if client is not None:
            await client.close()

    def _target(self, client: "openai.AsyncOpenAI", path: str) -> _Target:
        """Return the URL and the headers that the client would send a request with."""
        signed = client.auth_headers if self._key else {}
        named = {**signed, **client.default_headers, **_HEADERS}
        headers = {name: value for name, value in named.items() if isinstance(value, str)}  # others are left out
        if not self._keeps_connections:
            headers["Connection"] = "close"
        base = client.base_url
        url = str(base.copy_with(raw_path=base.raw_path + path.lstrip("/").encode()))
        return _apply_proxy(proxy_of(url), url=url, headers=headers)

    def _open_pool(self) -> "aiohttp.ClientSession":
        """Return a pool with the bounds of the client's own, and without timeouts: they are the endpoint's."""
        import aiohttp
        import openai

        assert self._certificates is not None
        bounds = openai.DEFAULT_CONNECTION_LIMITS
        connector = aiohttp.TCPConnector(
            ssl=self._certificates, limit=bounds.max_connections or 0, keepalive_timeout=bounds.keepalive_expiry
        )
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())


def _apply_proxy(proxy: Proxy | None, *, url: str, headers: Mapping[str, str]) -> _Target:
    """Return a target that is reached through a proxy, or directly."""
    if proxy is None:
        return _Target(url=url, headers=headers)
    signed = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
    if url.startswith("https:"):
        return _Target(url=url, headers=headers, proxy=proxy.url, proxy_headers=signed)
    return _Target(url=url, headers={**headers, **signed}, proxy=proxy.url)


def _wrap_body(data: bytes) -> bytes | BytesIO:
    """Return a body as aiohttp wants it: a large one is sent piece by piece, so that it does not block the loop."""
    return data if len(data) <= _LARGE_BODY_BYTES else BytesIO(data)


async def _read_refusal(response: "aiohttp.ClientResponse") -> ProviderRefusal:
    """Read an answer that is none, 1 MiB at most, and return it as an exception."""
    data = bytearray()
    async with response:
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > _MAX_REFUSAL_BYTES:
                break
    text = data.decode(errors="replace").strip()
    try:
        said: object = json.loads(text)
    except (ValueError, RecursionError):
        said = text
    return ProviderRefusal(response.status, said, response.headers)


def openai_endpoint(
    *, name: str, base_url: str, key: str = "", timeouts: Timeouts, keeps_connections: bool = True
) -> Endpoint:
    """Return the endpoint of a configured model. `keeps_connections` False: for servers that drop idle connections."""
    connection = OpenAIConnection(base_url=base_url, key=key, keeps_connections=keeps_connections)
    return Endpoint(connection, failures=Failures(name=name, secret=key, url=base_url), timeouts=timeouts)


def transport_errors() -> tuple[type[Exception], ...]:
    """Load the client, its HTTP layer and its transport, and return what they raise if a connection fails."""
    with freeze_imports("openai"):
        import aiohttp
        import httpx2
        import openai
    return (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, aiohttp.ClientError, OSError)
