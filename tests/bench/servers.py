"""The servers that cases talk to, each a process of its own on loopback: Bough's, and the model's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.bench.programs import Program, serving


@asynccontextmanager
async def bough_server(folder: Path, config: Path, *, profile: Path | None = None) -> AsyncIterator[Program]:
    """`bough serve` on any free port. With `profile` it runs under cProfile, which writes there at the server's end."""
    watched = ("-m", "cProfile", "-o", str(profile)) if profile else ()
    arguments = (
        *watched,
        "-m",
        "bough_server.cli",
        "--config",
        str(config),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    )
    async with serving(folder, "bough", arguments) as program:
        yield program


@asynccontextmanager
async def model_server(folder: Path, *, delta_interval_ms: int = 0) -> AsyncIterator[str]:
    """The desk's model; gives its base URL."""
    arguments = ("--scenario", "desk", "--delta-interval-ms", str(delta_interval_ms))
    name = f"model-{delta_interval_ms}"
    async with serving(folder, name, ("-m", "tests.support.model_server", *arguments)) as program:
        yield f"http://{program.address}/v1"


async def calls_answered(base_url: str) -> int:
    """How many calls a model server has answered so far."""
    host, _, port = base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /requests HTTP/1.0\r\nHost: model\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(answer.rpartition('"count": ')[2].partition(",")[0])
