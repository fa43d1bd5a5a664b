"""Questions on a terminal: what is shown goes to standard error, what is typed is a line; it knows no requests."""

import asyncio
import os
import sys
from collections.abc import Iterable
from typing import Protocol

_MOST_BYTES = 65536


class Dialog(Protocol):
    """Somebody to ask."""

    def show(self, lines: Iterable[str]) -> None:
        """Shows lines."""
        ...

    async def ask(self, prompt: str) -> str | None:
        """A line, without its end and the space around it; None where nobody types any more."""
        ...


class TerminalDialog:
    """Whoever sits at this process's terminal. Standard output is left to what the command gives."""

    def show(self, lines: Iterable[str]) -> None:
        """Shows lines on standard error."""
        for line in lines:
            print(line, file=sys.stderr)

    async def ask(self, prompt: str) -> str | None:
        """A line that is typed; Ctrl-C is heard while it waits."""
        print(f"{prompt} ", end="", file=sys.stderr, flush=True)
        descriptor = sys.stdin.fileno()
        await _readable(descriptor)
        # A terminal gives one line at a time, and all of it.
        typed = os.read(descriptor, _MOST_BYTES)
        if not typed:
            print(file=sys.stderr)
            return None
        return typed.decode(errors="replace").strip()


def is_terminal() -> bool:
    """Whether somebody can be asked: standard input and standard error are both a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
