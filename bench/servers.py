"""The servers that cases talk to, each a process on loopback: Bough's, and the model's."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bench.programs import Program, serving

_PATIENCE: Final = 60.0


@asynccontextmanager
async def bough_server(
    folder: Path, config: Path, *, name: str = "bough", profile: Path | None = None
) -> AsyncIterator[Program]:
    """`bough serve` on any free port; several of one folder need different names.

    With `profile` it runs under cProfile, which writes there at the server's end.
    """
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
    async with serving(folder, name, arguments) as program:
        yield program


@asynccontextmanager
async def model_server(
    folder: Path, *, scenario: str = "desk", delta_interval_ms: int = 0, delay_ms: int = 0
) -> AsyncIterator[str]:
    """A model, the desk's unless another scenario is named; gives its base URL."""
    arguments = ("--scenario", scenario, "--delta-interval-ms", str(delta_interval_ms), "--delay-ms", str(delay_ms))
    name = f"model-{scenario}-{delta_interval_ms}"
    async with serving(folder, name, ("-m", "tests.support.model_server", *arguments)) as program:
        yield f"http://{program.address}/v1"


async def calls_answered(base_url: str) -> int:
    """How many calls have come to a model server so far."""
    return (await _calls(base_url))["count"]


async def until_open(base_url: str, count: int) -> None:
    """Waits until so many calls wait at a model server."""
    async with asyncio.timeout(_PATIENCE):
        while (await _calls(base_url))["open"] != count:  # noqa: ASYNC110 - the calls are those of another process
            await asyncio.sleep(0.05)


async def _calls(base_url: str) -> Mapping[str, int]:
    host, _, port = base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /requests HTTP/1.0\r\nHost: model\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    told: dict[str, int] = json.loads(answer.partition("\r\n\r\n")[2])
    return told
