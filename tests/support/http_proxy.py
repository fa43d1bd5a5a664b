"""An HTTP proxy on loopback: whatever host a request names, it goes to one target."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

_PIECE = 64 * 1024


class HttpProxy:
    """Passes requests on to a target and keeps their first lines."""

    def __init__(self, target: str, *, refuses: bool = False) -> None:
        """`target` is HOST:PORT. `refuses` answers every request with 407."""
        self.address = ""
        """HOST:PORT of the proxy."""
        self.lines: list[str] = []
        self.credentials: list[str] = []
        """Proxy-Authorization of the requests that have it."""
        self._target = target
        self._refuses = refuses

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.split("\r\n")
        self.lines.append(line)
        name = "proxy-authorization: "
        self.credentials += [field[len(name) :] for field in fields if field.lower().startswith(name)]
        if self._refuses:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = self._target.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        method, place, version = line.split(" ")
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            onward_writer.write("\r\n".join([f"{method} {urlsplit(place).path} {version}", *fields]).encode())
        try:
            await asyncio.gather(_pass_on(reader, onward_writer), _pass_on(onward_reader, writer))
        finally:
            onward_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxying_http(base_url: str, *, refuses: bool = False) -> AsyncIterator[HttpProxy]:
    """Run a proxy to the host and port of a URL."""
    proxy = HttpProxy(urlsplit(base_url).netloc, refuses=refuses)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        proxy.address = f"{host}:{port}"
        yield proxy
