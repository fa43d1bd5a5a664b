"""Requests to model providers, sent by aiohttp: addresses, headers, proxies, certificates, and the bytes of answers.

There are no timeouts and no retries: those are the endpoint's and the runtime's. Nothing is read from `~/.netrc`.
"""

import gc
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from bough_server.distribution import DISTRIBUTION, version
from bough_server.models.model import encode_body
from bough_server.models.proxy import Proxy, proxy_of

if TYPE_CHECKING:
    import ssl

    import aiohttp

_HEADERS: Final = {"Content-Type": "application/json", "Accept": "text/event-stream"}
_IDLE_SECONDS: Final = 5.0
"""How long an idle connection is kept: a server that closes one first makes the next request fail."""
_MOST_REDIRECTS: Final = 20
_MAX_REFUSAL_BYTES: Final = 1024 * 1024
_LARGE_BODY_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a provider's requests go, and what they have in common."""

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # one of them is the key
    follows_redirects: bool = False
    """Only for a key in `Authorization`, which is not sent to another host; any other header would be."""
    keeps_connections: bool = True
    """False: for servers that drop idle connections."""


class ProviderRefusal(Exception):
    """The provider answered with a status that is a failure; `body` is its JSON or its text."""

    def __init__(self, status: int, body: object, headers: Mapping[str, str]) -> None:
        super().__init__(f"The provider refused with status {status}.")
        self.status = status
        self.body = body
        self.headers = headers
        """Must ignore the case of names."""


class Reply:
    """An answer whose head has arrived."""

    def __init__(self, response: "aiohttp.ClientResponse") -> None:
        self._response = response

    def pieces(self) -> AsyncIterator[bytes]:
        """Return an iterator over the bytes of the body, each item what has arrived since the last one."""
        return self._response.content.iter_any()

    async def close(self) -> None:
        """Close the connection, or return it to be used again if all was read."""
        await self._response.__aexit__(None, None, None)


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


class HttpConnection:
    """The connections to one address."""

    def __init__(self, find_address: Callable[[], Address]) -> None:
        """`find_address` runs in a thread, because it may load a provider's package. It may raise ValueError."""
        self._find_address = find_address
        self._address = Address(base_url="")
        self._certificates: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None
        self._targets: dict[str, _Target] = {}

    def open(self) -> tuple[type[Exception], ...]:
        """Load the packages and return what they raise if a connection fails. Runs in a thread, may take seconds.

        Reads the certificates: those of SSL_CERT_FILE or SSL_CERT_DIR, or the system's. Raises OSError if it cannot,
        and ValueError for an address that is none.
        """
        errors = load_transport()
        import httpx2

        self._address = self._find_address()
        _ = urlsplit(self._address.base_url).port  # raises ValueError
        self._certificates = httpx2.create_ssl_context()
        return errors

    async def send(self, path: str, body: Mapping[str, object]) -> Reply:
        """Send a request whose body is this JSON. Raises ProviderRefusal, ValueError or what `open` returned."""
        session = self._session = self._session or self._connect()
        target = self._targets.get(path)
        if target is None:
            target = self._targets[path] = self._target(path)
        response = await session.post(
            target.url,
            data=_wrap_body(encode_body(body)),
            headers=target.headers,
            proxy=target.proxy,
            proxy_headers=target.proxy_headers,
            allow_redirects=self._address.follows_redirects,
            max_redirects=_MOST_REDIRECTS,
        )
        if response.status >= 300:
            raise await _read_refusal(response)
        return Reply(response)

    async def close(self) -> None:
        """Close the connections, if there are any."""
        session, self._session = self._session, None
        self._targets.clear()
        if session is not None:
            await session.close()

    def _connect(self) -> "aiohttp.ClientSession":
        import aiohttp

        assert self._certificates is not None
        # No limit: max_concurrency is one, and waits where the timeout of an answer does not run.
        connector = aiohttp.TCPConnector(ssl=self._certificates, limit=0, keepalive_timeout=_IDLE_SECONDS)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())

    def _target(self, path: str) -> _Target:
        headers = {"User-Agent": f"{DISTRIBUTION}/{version()}", **self._address.headers, **_HEADERS}
        if not self._address.keeps_connections:
            headers["Connection"] = "close"
        url = self._address.base_url.rstrip("/") + path
        return _apply_proxy(proxy_of(url), url=url, headers=headers)


def load_transport() -> tuple[type[Exception], ...]:
    """Load the packages that send requests and return what they raise if a connection fails."""
    with freeze_imports("aiohttp"):
        import aiohttp
        import httpx2  # noqa: F401 - loaded here, used by open()
    return (aiohttp.ClientError, OSError)


@contextmanager
def freeze_imports(package: str) -> Iterator[None]:
    """Keep what is loaded inside of it out of garbage collections, if `package` was not loaded before.

    A provider's package leaves tens of thousands of objects that live to the end. Every full collection would visit
    them and stall all calls; frozen ones are skipped.
    """
    is_new = package not in sys.modules
    yield
    if is_new:
        gc.freeze()


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
