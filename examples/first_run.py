"""The program of `make run`: serve the desk, execute one run with its tree, and keep serving until a signal.

It uses only Bough's commands, as any script can.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeAlias

HERE = Path(__file__).resolve().parent
BOUGH = [sys.executable, "-m", "bough_server.cli"]
QUESTION = "Why do leaves turn red?"
INTERRUPTED = 130
CANCEL_SECONDS = 5
DRAIN_SECONDS = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTES = {
    "asked": "note: the scripted model answers, from examples/desk/scripts/desk.yaml. MODEL=local uses a real one.",
    "fallback": "note: the embedded model could not be installed here, so the scripted model answers instead.",
}


Child: TypeAlias = "subprocess.Popen[bytes]"


class Stopped(Exception):
    """The user pressed Ctrl-C, or a signal asked the program to stop."""


def main() -> int:
    """Serve, execute one run, and return the exit code."""
    flags = _flags()
    for number in SIGNALS:
        signal.signal(number, _stop)
    if flags.model == "scripted":
        print(NOTES["fallback" if flags.fallback else "asked"], flush=True)
    desk = {"BOUGH_CONFIG": str(HERE / "desk" / "bough.yaml"), "BOUGH_DEFAULT_MODEL": flags.model}
    environment = os.environ | desk
    environment.setdefault("BOUGH_LOG_LEVEL", "warning")
    code = INTERRUPTED
    try:
        with _server(flags, environment) as (server, address):
            if not address:
                return server.wait()
            print(f'$ bough run lead "{QUESTION}"', flush=True)
            # The live view shows the answer as it arrives.
            command = [*BOUGH, "--address", address, "run", "lead", QUESTION, "--no-input"]
            with _child(command, environment, grace_seconds=CANCEL_SECONDS) as run:
                code = run.wait()
            if not flags.once:
                print(f"\nserving {address}\nCtrl-C stops it.", flush=True)
                code = server.wait()
    except Stopped:
        return 0 if code != INTERRUPTED and not flags.once else code
    return code


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="50051")
    parser.add_argument("--model", choices=("local", "scripted", "openai"), default="local")
    parser.add_argument("--fallback", action="store_true", help="say that the scripted model replaces the embedded one")
    parser.add_argument("--once", action="store_true", help="stop after the run, with its exit code")
    return parser.parse_args()


def _stop(*_: object) -> NoReturn:
    raise Stopped


@contextmanager
def _server(flags: argparse.Namespace, environment: dict[str, str]) -> Iterator[tuple[Child, str]]:
    """Start a server; yield it with its address, which is empty if the server ended before it was ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [*BOUGH, "serve", "--host", flags.host, "--port", flags.port, "--ready-file", str(ready)]
        # The server's "serving" line is dropped: this program prints it after the run. In a separate process group the
        # server gets no Ctrl-C, so it outlives the cancelled run, which still has to show its tree.
        with _child(command, environment, stdout=subprocess.DEVNULL, process_group=0) as server:
            while not ready.exists() and server.poll() is None:
                time.sleep(0.05)
            yield server, ready.read_text(encoding="utf-8").strip() if ready.exists() else ""


@contextmanager
def _child(
    command: list[str],
    environment: dict[str, str],
    *,
    stdout: int | None = None,
    process_group: int | None = None,
    grace_seconds: float = 0,
) -> Iterator[Child]:
    """Start a process that has ended when the context is left, whatever happens.

    After a Ctrl-C that reaches it as well, it has `grace_seconds` seconds to end by itself.
    """
    child = subprocess.Popen(command, env=environment, stdout=stdout, process_group=process_group)
    try:
        yield child
    except Stopped:
        # A second signal must not interrupt the cleanup and leave processes behind.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _waited(child, grace_seconds)
        raise
    finally:
        child.terminate()
        if not _waited(child, DRAIN_SECONDS):
            child.kill()
            child.wait()


def _waited(child: Child, seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
