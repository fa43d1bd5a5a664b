"""Programs that a case starts: their address or their lines, the CPU and memory they used, their end; Linux only."""

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

START_SECONDS = 60.0
STOP_SECONDS = 20.0
ANSWER_SECONDS = 300.0


class ProgramFailed(Exception):
    """A program ended, or did not do in time what it was asked; says what it wrote to its standard error."""


class Program:
    """A running child process."""

    def __init__(self, process: Process, errors: Path) -> None:
        self._process, self._errors = process, errors
        self.address = ""
        """HOST:PORT, of a program that serves."""

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far, those that ended included."""
        return cpu_seconds_of(self._process.pid)

    def peak_megabytes(self) -> float:
        """The most memory that it had resident (VmHWM), in MB of 1,000,000 bytes."""
        return memory_megabytes(self._process.pid, "VmHWM")

    def resident_megabytes(self) -> float:
        """The memory that it has resident now (VmRSS), in MB of 1,000,000 bytes."""
        return memory_megabytes(self._process.pid, "VmRSS")

    async def ask(self, *words: str | int) -> dict[str, Any]:
        """Sends a line to a program of `lines.py` and gives its answer. Raises ProgramFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise self.failed("ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def failed(self, what: str) -> ProgramFailed:
        """The error that says what happened to it."""
        return ProgramFailed(f"A program {what}: {self._errors.read_text(errors='replace')[-2000:]}")

    async def wait_for(self, ready_file: Path) -> None:
        """Waits until its ready file is there, which has its address. Raises ProgramFailed."""
        async with asyncio.timeout(START_SECONDS):
            while not (address := _text_of(ready_file)):
                if self._process.returncode is not None:
                    raise self.failed("ended before it served")
                await asyncio.sleep(0.02)
        self.address = address

    async def wait_for_port(self, port: int, *, seconds: float) -> None:
        """Wait until it accepts connections on a port of loopback. Raises ProgramFailed and TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                if self._process.returncode is not None:
                    raise self.failed("ended before it served")
                with suppress(ConnectionError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        self.address = f"127.0.0.1:{port}"

    async def kill(self) -> None:
        """Ends it by SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """Ends it by SIGTERM, or by SIGKILL where it does not listen."""
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def cpu_seconds_of(process: int) -> float:
    """User and system time of all threads of a process so far, those that ended included."""
    # Linux's number of the CPU clock of another process: see clock_getcpuclockid(3) and posix-timers.h.
    return time.clock_gettime(~process << 3 | 2)


def memory_megabytes(process: int | Literal["self"], field: Literal["VmHWM", "VmRSS"]) -> float:
    """A process's memory of a kind, in MB of 1,000,000 bytes; see proc_pid_status(5)."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e6


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


@asynccontextmanager
async def asked(folder: Path, name: str, *arguments: str) -> AsyncIterator[Program]:
    """A module of this package that answers lines; see `lines.py`."""
    async with running(folder, name, ("-m", f"bench.{name}", *arguments), takes_lines=True) as program:
        yield program


@asynccontextmanager
async def serving(folder: Path, name: str, arguments: Sequence[str]) -> AsyncIterator[Program]:
    """A program that serves: the interpreter's arguments, to which a ready file is added."""
    ready_file = folder / f"{name}.ready"
    ready_file.unlink(missing_ok=True)
    async with running(folder, name, (*arguments, "--ready-file", str(ready_file))) as program:
        await program.wait_for(ready_file)
        yield program


@asynccontextmanager
async def running(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    takes_lines: bool = False,
) -> AsyncIterator[Program]:
    """A program of an interpreter, stopped at the end; `environment` is added to this process's."""
    errors = folder / f"{name}.stderr"
    with errors.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            python,
            *arguments,
            stdin=PIPE if takes_lines else DEVNULL,
            stdout=PIPE if takes_lines else DEVNULL,
            stderr=file,
            env={**os.environ, **(environment or {})},
        )
    program = Program(process, errors)
    try:
        yield program
    finally:
        await program.stop()
