"""Dialogs of `bough chat`: lines from a pipe, and questions that Ctrl-C ends instead of the command."""

import asyncio
import os
import sys
from collections.abc import Iterable
from contextlib import suppress

from bough_server.cli.loop import on_interrupt
from bough_server.cli.prompts import Dialog, wait_until_readable

_MAX_PIECE_BYTES = 65536


class PipedDialog:
    """Lines of standard input that is no terminal: a pipe or a file. Prompts are not shown."""

    is_interrupted = False
    """Ctrl-C ends the command."""

    def __init__(self) -> None:
        self._buffer = b""
        self._has_ended = False

    def show(self, lines: Iterable[str]) -> None:
        """Show lines on standard error."""
        for line in lines:
            print(line, file=sys.stderr)

    async def ask(self, prompt: str) -> str | None:
        """Return the next line without surrounding white space; None at the end of input."""
        while b"\n" not in self._buffer and not self._has_ended:
            self._has_ended = not await self._read()
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").strip()

    async def _read(self) -> bool:
        descriptor = sys.stdin.fileno()
        # epoll refuses regular files, which are always readable.
        with suppress(PermissionError):
            await wait_until_readable(descriptor)
        piece = os.read(descriptor, _MAX_PIECE_BYTES)
        self._buffer += piece
        return bool(piece)


class InterruptibleDialog:
    """A dialog in which Ctrl-C ends the question, as the end of input does, and is remembered."""

    def __init__(self, dialog: Dialog) -> None:
        self._dialog = dialog
        self.is_interrupted = False
        """Whether Ctrl-C ended the last question."""

    def show(self, lines: Iterable[str]) -> None:
        """Show lines."""
        self._dialog.show(lines)

    async def ask(self, prompt: str) -> str | None:
        """Ask for a line; None at the end of input and after Ctrl-C."""
        self.is_interrupted = False
        asking = asyncio.ensure_future(self._dialog.ask(prompt))

        def interrupt() -> None:
            self.is_interrupted = True
            asking.cancel()

        try:
            with on_interrupt(interrupt):
                await asyncio.wait({asking})
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        return None if asking.cancelled() else asking.result()
