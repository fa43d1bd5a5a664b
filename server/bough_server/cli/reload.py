"""`bough serve --reload`: a server in a child process, replaced when a file of its configuration has changed."""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from bough_server.agents.loading import definition_files
from bough_server.cli.child_servers import end_child, watch_stop_signals
from bough_server.cli.exit_codes import ExitCode, print_stderr
from bough_server.cli.options import Target
from bough_server.errors import ConfigurationError
from bough_server.settings import Settings

_POLL_SECONDS: Final = 0.5
_SUFFIXES: Final = (".yaml", ".yml", ".json", ".py")

Files: TypeAlias = Mapping[Path, tuple[int, int]]
"""Files with their modification times in nanoseconds and their sizes."""


async def serve_reloading(target: Target, arguments: Sequence[str], ready_file: Path | None) -> ExitCode:
    """Serve in a child process until SIGINT or SIGTERM, with a new child whenever a file has changed.

    `arguments` are those of `bough serve`, without --reload. The first child chooses the port for all. What has changed
    is loaded by another process first: if it cannot be, that says why, and the child goes on with what was right.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = ready_file or Path(folder) / "ready"
        command = [sys.executable, "-m", "bough_server.cli", *target.arguments, "serve", *arguments]
        check = [*command, "--check"]
        command += ["--ready-file", str(ready)]
        port: list[str] = []
        async with watch_stop_signals() as (stop, hurry):
            while not stop.is_set():
                ready.unlink(missing_ok=True)
                before = files_of(target)
                # In a separate process group the child gets signals from here only, and each once.
                child = await asyncio.create_subprocess_exec(*command, *port, process_group=0)
                changed = await _wait_for_change(target, before, child, stop)
                while changed is not None:
                    before = files_of(target)
                    checking = await asyncio.create_subprocess_exec(*check, process_group=0)
                    if await checking.wait() == ExitCode.YES:
                        print_stderr(f"{changed} has changed: starting again.")
                        break
                    if child.returncode is None:
                        print_stderr(f"{changed} has changed and cannot be loaded: serving what was loaded before.")
                    changed = await _wait_for_change(target, before, child, stop)
                await end_child(child, hurry)
                if ready.exists():
                    port = ["--port", _port_of(ready)]  # of two options the last one counts
    return ExitCode.YES


async def _wait_for_change(target: Target, before: Files, child: Process, stop: asyncio.Event) -> Path | None:
    """Wait until a file has changed and return it; None if the server is to stop."""
    is_running = True
    while not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await stop.wait()
        after = files_of(target)
        if changed := [path for path in after.keys() | before.keys() if after.get(path) != before.get(path)]:
            return min(changed)
        if is_running and child.returncode is not None:
            is_running = False
            print_stderr(f"The server ended with exit code {child.returncode}; it starts again when a file changes.")
    return None


def _port_of(ready: Path) -> str:
    return ready.read_text(encoding="utf-8").strip().rpartition(":")[2]


def files_of(target: Target) -> Files:
    """Return the files that a server of this configuration reads, and the Python files beside it."""
    return {path: (status.st_mtime_ns, status.st_size) for path in _paths(target) if (status := _status(path))}


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _paths(target: Target) -> Iterator[Path]:
    try:
        settings = Settings.load(target.config)
    except ConfigurationError:
        # What is named by a file that cannot be read is unknown until that file has changed.
        folder = target.config.parent if target.config is not None else Path.cwd()
        yield from _find_files_beside(folder)
        return
    yield from _find_files_beside(settings.folder)
    for name in settings.python:
        yield from (settings.folder / name.partition(".")[0]).rglob("*.py")
    yield from (model.script for model in settings.models.values() if model.script is not None)
    for pattern in settings.agents:
        try:
            yield from definition_files([pattern], settings.folder)
        except ConfigurationError:
            continue  # it matches no file yet


def _find_files_beside(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.suffix in _SUFFIXES)
