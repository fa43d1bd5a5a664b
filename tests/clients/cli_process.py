"""The `bough` command as a process, as a user at a shell runs it."""

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

from tests.support.processes import Finished, Forked, start, start_cold

__all__ = ["Finished", "bough", "bough_cold", "server_of", "started"]


async def started(
    *arguments: str,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int = PIPE,
    stderr: int = PIPE,
) -> Forked:
    """Start a command as a process; with a port it uses the server there."""
    address = () if port is None else ("--address", f"127.0.0.1:{port}")
    known = {"COLUMNS": "80", **(environment or {})}
    return await start(*address, *arguments, environment=known, stdin=stdin, stdout=stdout, stderr=stderr)


async def bough(
    *arguments: str, port: int | None = None, said: str = "", environment: Mapping[str, str] | None = None
) -> Finished:
    """Run a command to its end; its standard input must be short enough for the buffer of a pipe."""
    read, write = os.pipe()
    try:
        os.write(write, said.encode())
        os.close(write)
        process = await started(*arguments, port=port, environment=environment, stdin=read)
    finally:
        os.close(read)
    out, err = await process.communicate()
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())


async def bough_cold(*arguments: str, environment: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end in a new interpreter, as a shell starts it."""
    process = await start_cold(*arguments, environment={"COLUMNS": "80", **(environment or {})})
    out, err = await process.communicate()
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())


@asynccontextmanager
async def server_of(config: Path, *, environment: Mapping[str, str] | None = None) -> AsyncIterator[int]:
    """Run `bough serve` with a configuration for several tests; yield its port. It has to stop cleanly."""
    server = await started("--config", str(config), "serve", "--port", "0", environment=environment)
    assert server.stdout is not None
    line = (await server.stdout.readline()).decode()
    assert line.startswith("serving "), f"it ended before it served: {(await server.communicate())[1].decode()}"
    try:
        yield int(line.strip().rpartition(":")[2])
    finally:
        server.send_signal(signal.SIGTERM)
        _, err = await server.communicate()
    assert (server.returncode, "Traceback" in err.decode()) == (0, False), err.decode()
