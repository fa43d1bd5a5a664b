"""The `bough` command as a process of its own, as somebody at a shell runs it."""

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a command left behind."""

    code: int | None
    out: str
    err: str


async def started(
    *arguments: str,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: int = asyncio.subprocess.PIPE,
    stdout: int | None = None,
    stderr: int = asyncio.subprocess.PIPE,
) -> asyncio.subprocess.Process:
    """A command that runs; with a port it speaks to the server there."""
    address = () if port is None else ("--address", f"127.0.0.1:{port}")
    known = {key: value for key, value in os.environ.items() if not key.startswith("BOUGH_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bough_server.cli",
        *address,
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE if stdout is None else stdout,
        stderr=stderr,
        env={**known, "COLUMNS": "80", **(environment or {})},
    )


async def bough(
    *arguments: str, port: int | None = None, said: str = "", environment: Mapping[str, str] | None = None
) -> Finished:
    """Runs a command to its end."""
    process = await started(*arguments, port=port, environment=environment)
    out, err = await process.communicate(said.encode())
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())
