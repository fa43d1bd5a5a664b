"""`bough serve --workers N`: N servers in child processes, on one database and behind one port."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import structlog

from bough_server.cli.child_servers import end_child, watch_stop_signals
from bough_server.cli.exit_codes import ExitCode
from bough_server.cli.options import Target
from bough_server.cli.output import print_line
from bough_server.clock import loop_time
from bough_server.errors import ConfigurationError
from bough_server.observability.worker_metrics import serve_worker_metrics
from bough_server.settings import Settings
from bough_server.store.sqlite.database_path import is_postgres
from bough_server.threads import make_thread

_DELAYS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a worker that has ended is replaced: the longer, the more often in a row it has."""

_STEADY_SECONDS: Final = 60.0
"""A worker that has served for as long begins with the first delay again."""

_SERVING: Final = "SERVING"
_NOT_SERVING: Final = "NOT_SERVING"

_log = structlog.get_logger(__name__)


async def serve_workers(
    target: Target, arguments: Sequence[str], settings: Settings, *, count: int, ready_file: Path | None
) -> ExitCode:
    """Serve by `count` workers until SIGINT or SIGTERM, and replace those that end; a second signal hurries them.

    `arguments` are those of `bough serve`, without --workers and --port. Raises ConfigurationError on SQLite, and if
    the port is taken.
    """
    if not is_postgres(settings.storage.url):
        raise ConfigurationError(
            "--workers needs PostgreSQL, because workers share their database: set storage.url to "
            "postgresql://USER@HOST/DATABASE, or serve without --workers. A SQLite file has one server."
        )
    async with AsyncExitStack() as stack:
        stop, hurry = await stack.enter_async_context(watch_stop_signals())
        server = settings.server
        host, port = stack.enter_context(_hold_port(server.host, server.port, "--port"))
        command = [sys.executable, "-m", "bough_server.cli", *target.arguments, "serve", *arguments]
        command += ["--port", str(port), "--as-worker"]
        if server.mtls is not None:
            _, mtls_port = stack.enter_context(_hold_port(server.host, server.mtls.port, "server.mtls.port"))
            command += ["--mtls-port", str(mtls_port)]
            _log.info("serving clients with certificates", port=mtls_port)
        workers = [_Worker(number, command) for number in range(count)]
        if server.health_port is not None:
            await stack.enter_async_context(_serve_health(server.host, server.health_port, workers))
        section = settings.telemetry
        if section.prometheus_port is not None:
            addresses = [worker.find_metrics for worker in workers]
            metrics = await stack.enter_async_context(
                serve_worker_metrics(section.prometheus_host, section.prometheus_port, addresses)
            )
            _log.info("serving the metrics of all workers", address=metrics)
        tasks: list[asyncio.Task[None]] = []
        try:
            # The first one alone: it upgrades the database, and says what is wrong with the configuration, once.
            for started in (workers[:1], workers[1:]):
                if not any(task.done() for task in tasks):
                    tasks += [asyncio.create_task(worker.keep(stop, hurry)) for worker in started]
                    await _wait_until_all_serve(workers[: len(tasks)], tasks)
            if all(worker.serves.is_set() for worker in workers):
                _announce(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ready_file)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            stop.set()
            await asyncio.wait(tasks)
    # A worker that never served has said why.
    return ExitCode.IMPOSSIBLE if any(task.exception() is not None for task in tasks) else ExitCode.YES


def _announce(address: str, ready_file: Path | None) -> None:
    if ready_file is not None:
        ready_file.write_text(f"{address}\n", encoding="utf-8")
    print_line(f"serving {address}")


@asynccontextmanager
async def _serve_health(host: str, port: int, workers: "Sequence[_Worker]") -> AsyncIterator[None]:
    """Serve the health of all workers: SERVING while one of them is. Raises ConfigurationError."""
    from bough_server.api.health import Health, serve_health

    health, reported = Health(), asyncio.Event()

    async def follow() -> None:
        while True:
            await reported.wait()
            reported.clear()
            await health.set_serving(any(worker.is_serving for worker in workers))

    for worker in workers:
        worker.on_report = reported.set
    async with serve_health(health, host, port) as address:
        _log.info("serving the health of all workers", address=address)
        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait({following})


class _NeverServed(Exception):
    """A worker ended before it served for the first time."""


class _Worker:
    """One of the servers, which is replaced when it has ended."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self._number, self._command = number, command
        self.serves = asyncio.Event()
        """Whether it has served once."""
        self.is_serving = False
        """Whether its health is SERVING."""
        self.on_report: Callable[[], None] = lambda: None
        """Is called when it has reported its health, and when it has ended."""
        self._metrics = ""

    def find_metrics(self) -> tuple[str, str]:
        """Return the worker's number, and HOST:PORT of its metrics; empty while it has none."""
        return str(self._number), self._metrics

    async def keep(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Run servers one after the other until `stop` is set. Raises _NeverServed."""
        failures = 0
        while not stop.is_set():
            ours, its = socket.socketpair()
            with its:
                # In a separate process group it gets signals from here only.
                child = await asyncio.create_subprocess_exec(*self._command, process_group=0, stdin=its.fileno())
            _log.info("worker started", worker=self._number, process=child.pid)
            began = loop_time()
            following = asyncio.create_task(self._follow(ours))
            try:
                await _wait_for_any(child.wait(), stop.wait())
                if stop.is_set():
                    await end_child(child, hurry)
                    return
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
                await following  # its last reports are read, so that none follows this
                self._metrics, self.is_serving = "", False
                self.on_report()
            if not self.serves.is_set():
                raise _NeverServed
            failures = 0 if loop_time() - began > _STEADY_SECONDS else failures + 1
            delay = _DELAYS[min(failures, len(_DELAYS)) - 1] if failures else 0.0
            _log.error("worker ended: starting another", worker=self._number, code=child.returncode, delay=delay)
            await _wait_for_any(asyncio.sleep(delay), stop.wait())

    async def _follow(self, channel: socket.socket) -> None:
        """Read what a worker reports, until its end; it ends when this end of the channel does."""
        reader, writer = await asyncio.open_connection(sock=channel)
        try:
            async for line in reader:
                state, _, self._metrics = line.decode().strip().partition(" ")
                self.is_serving = state == _SERVING
                self.serves.set()
                self.on_report()
        finally:
            writer.close()


async def _wait_for_any(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _wait_until_all_serve(workers: Sequence[_Worker], tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until every worker has served, or one has ended for good."""

    async def wait() -> None:
        for worker in workers:
            await worker.serves.wait()

    serving = asyncio.create_task(wait())
    await asyncio.wait([serving, *tasks], return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()


@contextmanager
def _hold_port(host: str, port: int, setting: str) -> Iterator[tuple[str, int]]:
    """Keep a port for the workers, which share it; yield the host and the port. Raises ConfigurationError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as alone:  # fails if another program listens
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            held = socket.socket(family)
    except OSError as error:
        raise ConfigurationError(
            f"Port {port} of {host} cannot be bound: {error.strerror}. If another program has it, choose another with "
            f"{setting}, or 0 for any free one."
        ) from error
    with held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
        yield host, held.getsockname()[1]


def end_with_parent() -> None:
    """Stop this process, a worker, when its parent has ended: then its standard input, a socket, does."""

    def wait() -> None:
        # Reset instead of ended, if the parent has not read all that was reported to it.
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    make_thread(wait, name="bough-parent").start()


def report_to_parent(metrics_address: str, is_serving: bool) -> None:
    """Report, from a worker, its health and where its metrics are; what tools print goes to the standard output."""
    with suppress(OSError):  # the parent has ended, which `end_with_parent` notices
        os.write(0, f"{_SERVING if is_serving else _NOT_SERVING} {metrics_address}\n".encode())
