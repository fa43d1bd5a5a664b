"""A process that imports the whole program once, and forks a process for each command that it is sent.

To import the program takes a second or two, most of what a short command costs. What is forked is a process like any
other, with its own arguments, environment, standard streams, signals and exit code; only the imports are done already.

python -m tests.support.fork_server CONTROL, with the number of a socket to read commands from.
"""

import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from typing import TextIO, TypeAlias

import bough_server.app  # noqa: F401  # what commands import is imported once
import bough_server.cli
from bough.v1 import agent_service_pb2
from bough_server.interceptors.validation import violations
from bough_server.models.http import load_transport
from bough_server.models.openai.client import client_address

PROGRAM = "bough_server.cli"
"""The module that is run as a program if a command names no other."""

Command: TypeAlias = Mapping[str, object]
"""`arguments`, `folder`, `environment`, and `program` if it is another module or a script."""


def main() -> None:
    """Fork a process for each command until the other end of the socket is closed."""
    _import_the_program()
    control = socket.socket(fileno=int(sys.argv[1]))
    command = _serve(control)
    # From here on this is a forked process, or the fork server at its end.
    if command is not None:
        control.close()
        _run(command)


def _run(command: Command) -> None:
    sys.argv[1:] = command["arguments"]  # type: ignore[misc]
    program = str(command.get("program", PROGRAM))
    if program.endswith(".py"):
        sys.path.insert(0, os.path.dirname(program))  # as the interpreter does for a script
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _import_the_program() -> None:
    # `bough_server.app` has imported the server; commands import what they need when they run.
    for module in pkgutil.walk_packages(bough_server.cli.__path__, "bough_server.cli."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    # What a server loads with its first call, and with its first call of a model.
    violations(agent_service_pb2.RunRequest())
    load_transport()
    client_address("http://127.0.0.1", key="")
    # The collector would write into every page that the forked processes share.
    gc.collect()
    gc.freeze()


def _serve(control: socket.socket) -> Command | None:
    """Return a command in the process that is forked for it; None in the fork server at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they end this process by closing the socket
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only a handled signal writes to `wake`
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(statuses)
        if control not in ready:
            continue
        received = _receive(control)
        if received is None:
            return None
        line, (*streams, status) = received
        process_id = os.fork()
        if process_id == 0:
            for descriptor in (woken, wake, status, *statuses.values()):
                os.close(descriptor)
            command = json.loads(line)
            _become(command, streams)
            return command
        for descriptor in streams:
            os.close(descriptor)
        os.write(status, f"{process_id}\n".encode())
        statuses[process_id] = status


def _receive(control: socket.socket) -> tuple[bytes, list[int]] | None:
    """Receive a line with standard input, output and error, and a pipe for the process id and the exit code."""
    line, descriptors, _, _ = socket.recv_fds(control, 65536, 4)
    if not line:
        return None
    while not line.endswith(b"\n"):
        line += control.recv(65536)
    return line, descriptors


def _reap(statuses: dict[int, int]) -> None:
    while statuses:
        process_id, status = os.waitpid(-1, os.WNOHANG)
        if process_id == 0:
            return
        descriptor = statuses.pop(process_id)
        os.write(descriptor, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(descriptor)


def _become(command: Command, streams: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # They remember what the fork server's own were: a file, a terminal or a pipe.
    sys.stdin = sys.__stdin__ = _stream(0, "r", sys.stdin)
    sys.stdout = sys.__stdout__ = _stream(1, "w", sys.stdout)
    sys.stderr = sys.__stderr__ = _stream(2, "w", sys.stderr)
    os.chdir(str(command["folder"]))
    os.environ.clear()
    os.environ.update(command["environment"])  # type: ignore[call-overload]


def _stream(number: int, mode: str, zygotes: TextIO) -> TextIO:
    """The stream of a descriptor as the interpreter opens it when it starts."""
    is_buffered_by_line = number == 2 or os.isatty(number)
    buffering = 1 if is_buffered_by_line else -1
    stream = open(number, mode, buffering, zygotes.encoding, zygotes.errors, closefd=False)  # noqa: SIM115
    assert isinstance(stream, TextIOWrapper)
    return stream


if __name__ == "__main__":
    main()
