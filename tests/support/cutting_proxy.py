"""A TCP proxy on loopback whose connections a test can cut; it reads nothing of what it passes on."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE = 64 * 1024


class Proxy:
    """Passes bytes on to a target, which may change between connections."""

    def __init__(self, target: str) -> None:
        self.target = target
        """HOST:PORT of whom new connections are for."""
        self.address = ""
        self.connections = 0
        """How many there were so far."""
        self._open: set[asyncio.StreamWriter] = set()
        self._cuts: deque[int] = deque()

    def cut(self) -> None:
        """Tears every connection down, as a network that fails does: neither side says goodbye."""
        for writer in self._open:
            writer.transport.abort()

    def cut_after(self, *counts: int) -> None:
        """Cut after so many bytes to clients from now on, then after so many more, even in the middle of a frame.

        What was set before is forgotten; without counts there are no cuts.
        """
        self._cuts = deque(counts)

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection to its end."""
        host, _, port = self.target.rpartition(":")
        try:
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        both = {writer, onward_writer}
        self._open |= both
        try:
            await asyncio.gather(_pass_on(reader, onward_writer), self._pass_back(onward_reader, writer))
        finally:
            self._open -= both
            for one in both:
                one.transport.abort()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on to a client, up to the next cut."""
        try:
            while piece := await reader.read(_PIECE):
                left = self._cuts[0] if self._cuts else len(piece) + 1
                writer.write(piece[:left])
                await writer.drain()
                if len(piece) >= left:
                    self._cuts.popleft()
                    self.cut()
                    return
                if self._cuts:
                    self._cuts[0] = left - len(piece)
            writer.write_eof()
        except OSError:
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


@asynccontextmanager
async def proxying(target: str) -> AsyncIterator[Proxy]:
    """A proxy on any free port."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.admit, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await server.wait_closed()
