"""The Go client as its users have it: its commands, and its programs, built once for each state of its sources."""

import asyncio
import os
import shutil
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.processes import PATIENCE_SECONDS, Finished, Serving
from tests.support.toolchains import ROOT, built

MODULE: Final = ROOT / "clients" / "go"

_BUILDING_SECONDS: Final = 600.0
"""The first build downloads modules and compiles them; later ones take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of the module and the server that it calls."""

    process: Process
    server: Serving


def go(*arguments: str, folder: Path = MODULE) -> subprocess.CompletedProcess[str]:
    """Run the go command in a module to its end; its exit code is the caller's business."""
    return subprocess.run(
        ["go", *arguments], cwd=folder, env=_environment(), capture_output=True, text=True, timeout=_BUILDING_SECONDS
    )


def gofmt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run gofmt, which comes beside the go command, in the module."""
    beside = Path(go("env", "GOROOT").stdout.strip()) / "bin" / "gofmt"
    return subprocess.run([beside, *arguments], cwd=MODULE, capture_output=True, text=True, timeout=60, check=True)


def has_compiler() -> bool:
    """Whether there is a C compiler, which the race detector needs."""
    return shutil.which("gcc") is not None or shutil.which("clang") is not None


def programs() -> Path:
    """Return the folder of the built examples, `run`, `approve`, `rejoin` and `eval`, and of the `driver`."""
    return built("go", [MODULE], _build)


def _build(folder: Path) -> None:
    finished = go("build", "-o", f"{folder}/", "./examples/...", "./internal/driver")
    assert finished.returncode == 0, finished.stderr


def _environment() -> Mapping[str, str]:
    return {**os.environ, "GOFLAGS": "-buildvcs=false -mod=readonly"}


@asynccontextmanager
async def running(program: str, *arguments: str) -> AsyncIterator[Process]:
    """A program of the module, killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        programs() / program, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=16 * 1024 * 1024
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def finished(program: str, *arguments: str, lines: Sequence[str] = ()) -> Finished:
    """Run a program of the module to its end, with these lines on its standard input."""
    async with running(program, *arguments) as process, asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate("".join(f"{line}\n" for line in lines).encode())
        return Finished(code=process.returncode, out=out.decode(), err=err.decode())
