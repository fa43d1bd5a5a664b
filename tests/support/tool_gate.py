"""A place on loopback where a tool of another process waits until the test opens the gate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Where tools wait; see `wait_at` in projects.py."""

    def __init__(self) -> None:
        self.port = 0
        self.arrived = asyncio.Event()
        """Set when a tool waits."""
        self.left = asyncio.Event()
        """Set when a tool has gone before it was let."""
        self._is_open = asyncio.Event()

    def open(self) -> None:
        """Admits all visitors, now and later."""
        self._is_open.set()

    async def opened(self) -> None:
        """Wait until it is open."""
        await self._is_open.wait()

    def shut(self) -> None:
        """Keep visitors from now on, until it is opened again."""
        self.arrived.clear()
        self.left.clear()
        self._is_open.clear()

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps one visitor until the gate is open or the visitor has gone."""
        self.arrived.set()
        opened, gone = asyncio.ensure_future(self._is_open.wait()), asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                writer.write(b"The gate is open.")
            else:
                self.left.set()
        finally:
            for waiting in (opened, gone):
                waiting.cancel()
            await asyncio.gather(opened, gone, return_exceptions=True)
            writer.close()


@asynccontextmanager
async def standing_gate() -> AsyncIterator[Gate]:
    """A closed gate on any free port."""
    gate = Gate()
    server = await asyncio.start_server(gate.admit, "127.0.0.1", 0)
    gate.port = server.sockets[0].getsockname()[1]
    try:
        yield gate
    finally:
        gate.open()
        server.close()
        await server.wait_closed()
