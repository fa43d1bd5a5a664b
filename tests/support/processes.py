"""`bough` as a process: started, followed, stopped and killed; what it serves is the test's business."""

import asyncio
import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
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


class Forked:
    """A process that the fork server forked; like asyncio.subprocess.Process, as far as tests use that."""

    def __init__(
        self,
        pid: int,
        status: asyncio.StreamReader,
        stdout: asyncio.StreamReader | None,
        stderr: asyncio.StreamReader | None,
    ) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._ended = asyncio.create_task(status.read())

    @property
    def returncode(self) -> int | None:
        """The exit code, or the signal's number below zero; None while it runs."""
        return int(self._ended.result()) if self._ended.done() else None

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""
        return int(await asyncio.shield(self._ended))

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError if it has ended."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if it has ended."""
        self.send_signal(signal.SIGKILL)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Wait for its end and return what it wrote to its pipes."""
        out, err, _ = await asyncio.gather(_rest(self.stdout), _rest(self.stderr), self.wait())
        return out, err


async def _rest(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read()


@functools.cache
def fork_server() -> socket.socket:
    """The socket of the process that forks; it is started when the first command needs it."""
    ours, its = socket.socketpair()
    with its:
        command = (sys.executable, "-m", "tests.support.fork_server", str(its.fileno()))
        # `bough` sets this before it loads gRPC, and the fork server loads gRPC before there is a `bough`.
        environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
        fork_server = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env=environment,
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        fork_server.wait()

    atexit.register(end)
    return ours


async def start(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int = PIPE,
    stderr: int = PIPE,
) -> Forked:
    """Start `bough` with these arguments and nothing of our own environment that is meant for it or for tracing.

    The streams are descriptors or PIPE; by default standard input is empty.
    """
    command = {"arguments": arguments, "folder": str(Path.cwd()), "environment": _environment(environment)}
    return await _forked(command, stdin=stdin, stdout=stdout, stderr=stderr)


async def run_program(program: str, *arguments: str, folder: Path) -> Finished:
    """Run another module of ours, or a Python script, to its end, in a folder."""
    command = {"program": program, "arguments": arguments, "folder": str(folder), "environment": _environment(None)}
    process = await _forked(command)
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate()
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())


async def _forked(
    command: Mapping[str, object], *, stdin: int | None = None, stdout: int = PIPE, stderr: int = PIPE
) -> Forked:
    given = os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin)
    out, its_out = _ends(stdout)
    err, its_err = _ends(stderr)
    status, its_status = os.pipe()
    descriptors = [given, its_out, its_err, its_status]
    try:
        socket.send_fds(fork_server(), [json.dumps(command).encode() + b"\n"], descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    reports = await _reader(status)
    stdout_reader = None if out is None else await _reader(out)
    stderr_reader = None if err is None else await _reader(err)
    return Forked(int(await reports.readline()), reports, stdout_reader, stderr_reader)


async def start_cold(
    *arguments: str, environment: Mapping[str, str] | None = None, stdout: int = PIPE, stderr: int = PIPE
) -> Process:
    """Start `bough` as `start` does, from nothing, as a shell does: for tests of what happens before it is imported."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bough_server.cli"),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=_environment(environment),
    )


def _environment(further: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**inherited, **(further or {})}


def _ends(descriptor: int) -> tuple[int | None, int]:
    """Our end of a stream, if it is a pipe, and that of the process."""
    return os.pipe() if descriptor == PIPE else (None, os.dup(descriptor))


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


class EndedBeforeServing(Exception):
    """A server that has ended before it served; the message is its standard error."""


class Serving:
    """A `bough serve`."""

    def __init__(self, process: Forked | Process, errors: Path) -> None:
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

    async def read_output(self, count: int) -> str:
        """Read so many characters of what it prints after it has said that it serves."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            return (await self._process.stdout.readexactly(count)).decode()

    async def serves(self) -> None:
        """Waits until it serves, which it says on its standard output; its ready file is there by then.

        Raises EndedBeforeServing.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = (await self._process.stdout.readline()).decode()
        if not line.startswith("serving "):
            raise EndedBeforeServing(self.said)
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

    async def until_said(self, text: str) -> None:
        """Waits until its standard error has a text."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while text not in self.said:  # noqa: ASYNC110 # the file of another process has no event to wait for
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """Ends it as a power cut would."""
        self.send(signal.SIGKILL)
        assert await self.end() == -signal.SIGKILL

    async def stop(self) -> None:
        """Ends it by SIGTERM, or as it can be ended; nothing where it has ended."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):  # it has ended, and its end is about to be noticed
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
    config: Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    is_cold: bool = False,
    name: str = "serve",
) -> AsyncIterator[Serving]:
    """`bough serve` on any free port, or where the arguments say; stopped at the end where it still runs."""
    async with starting(config, arguments=arguments, environment=environment, is_cold=is_cold, name=name) as server:
        await server.serves()
        yield server


@asynccontextmanager
async def starting(
    config: Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    is_cold: bool = False,
    name: str = "serve",
) -> AsyncIterator[Serving]:
    """As `serving`, from the moment that the process is there; a cold one has to import the program first.

    Its standard error is added to the file `NAME.stderr` beside the configuration, to that of the servers before.
    """
    errors = config.parent / f"{name}.stderr"
    ready = config.parent / f"{name}.ready"
    port = () if "--port" in arguments else ("--port", "0")
    with errors.open("ab") as file:
        process = await (start_cold if is_cold else start)(
            *("--config", str(config), "serve", *port, "--ready-file", str(ready), *arguments),
            environment=environment,
            stderr=file.fileno(),
        )
    server = Serving(process, errors)
    try:
        yield server
    finally:
        await server.stop()


async def finished(*arguments: str, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs a command to its end."""
    process = await start(*arguments, environment=environment)
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate()
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())
