"""A TCP proxy on loopback that cuts connections after given numbers of bytes, even in the middle of a frame."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

_PIECE = 64 * 1024


@asynccontextmanager
async def cutting(target: str, cuts: Sequence[int]) -> AsyncIterator[str]:
    """Run a proxy to HOST:PORT and yield its address.

    The n-th connection ends after the n-th number of bytes to the client; later ones are not cut.
    """
    host, _, port = target.rpartition(":")
    left = list(cuts)

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = left.pop(0) if left else None
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        passing = [
            asyncio.create_task(_pass_on(reader, onward_writer, None)),
            asyncio.create_task(_pass_on(onward_reader, writer, budget)),
        ]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for one in (writer, onward_writer):
            one.transport.abort()
        await asyncio.gather(*passing)

    server = await asyncio.start_server(admit, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None) -> None:
    try:
        while piece := await reader.read(_PIECE if budget is None else min(budget, _PIECE)):
            writer.write(piece)
            await writer.drain()
            budget = None if budget is None else budget - len(piece)
    except OSError:
        return
