"""`bough` as a process of its own: started, heard, told to stop and killed; what it serves is the test's business."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 60.0
"""How long a process may take to serve or to end, before the test that waits for it fails."""

_OURS = ("BOUGH_", "OTEL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a command left behind."""

    code: int | None
    out: str
    err: str


class Serving:
    """A `bough serve`."""

    def __init__(self, process: Process, errors: Path) -> None:
        self._process, self._errors = process, errors
        self.address = ""
        """HOST:PORT, once it serves."""

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self._errors.read_text(encoding="utf-8")

    async def serves(self) -> None:
        """Waits until it serves, which it says on its standard output; its ready file is there by then."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = (await self._process.stdout.readline()).decode()
        assert line.startswith("serving "), f"it ended before it served: {self.said}"
        self.address = line.removeprefix("serving ").strip()

    def resident_bytes(self) -> int:
        """Its memory now; Linux only."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """The most memory that it ever had; Linux only."""
        return self._status("VmHWM")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    async def end(self) -> int:
        """Waits for its end; gives the exit code, or the signal's number below zero."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._process.wait()

    async def kill(self) -> None:
        """Ends it as a power cut would."""
        self.send(signal.SIGKILL)
        assert await self.end() == -signal.SIGKILL

    async def stop(self) -> None:
        """Ends it by SIGTERM, or as it can be ended; nothing where it has ended."""
        if self._process.returncode is not None:
            return
        self.send(signal.SIGTERM)
        try:
            await self.end()
        except TimeoutError:
            await self.kill()
            raise

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


@asynccontextmanager
async def serving(
    config: Path, *, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[Serving]:
    """`bough serve` on any free port, or where the arguments say; stopped at the end where it still runs."""
    async with starting(config, arguments=arguments, environment=environment) as server:
        await server.serves()
        yield server


@asynccontextmanager
async def starting(
    config: Path, *, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[Serving]:
    """As `serving`, from the moment that the process is there."""
    # Further servers on one folder add to the same file.
    errors = config.parent / "serve.stderr"
    ready = config.parent / "serve.ready"
    port = () if "--port" in arguments else ("--port", "0")
    with errors.open("ab") as file:
        process = await _start(
            ("--config", str(config), "serve", *port, "--ready-file", str(ready), *arguments),
            environment,
            file.fileno(),
        )
    server = Serving(process, errors)
    try:
        yield server
    finally:
        await server.stop()


async def finished(*arguments: str, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs a command to its end."""
    process = await _start(arguments, environment, PIPE)
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate()
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())


async def _start(arguments: Sequence[str], environment: Mapping[str, str] | None, stderr: int) -> Process:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bough_server.cli",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=stderr,
        env={**inherited, **(environment or {})},
    )
