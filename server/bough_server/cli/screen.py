"""The live view on standard output: finished lines stay, what is going on is redrawn below them on a terminal."""

import asyncio
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live

from bough.v1 import event_pb2
from bough_server.cli.printing import terminal
from bough_server.cli.render.live import LiveView

_REDRAW_SECONDS = 0.1


class Screen:
    """Shows events as they come, for as long as it is open. In a pipe there are only the finished lines."""

    def __init__(self) -> None:
        self._console = terminal()
        self._view = LiveView(self._console.width)
        self._live: Live | None = None
        self._redrawing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Words on standard error are woven in where they would land on the same screen, and nowhere else.
            is_shared = sys.stderr.isatty()
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=is_shared)
            self._live.start()
            self._redrawing = asyncio.create_task(self._redraw(self._live))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._redrawing is not None:
            self._redrawing.cancel()
            await asyncio.wait({self._redrawing})
        if self._live is not None:
            self._live.update(Group())
            self._live.stop()

    def show(self, event: event_pb2.AgentEvent) -> None:
        """Shows what an event adds."""
        for line in self._view.feed(event, time.monotonic()):
            self._console.print(line, no_wrap=True, overflow="ignore", crop=False)
        self._console.file.flush()

    async def _redraw(self, live: Live) -> None:
        while True:
            live.update(Group(*self._view.status(time.monotonic())), refresh=True)
            await asyncio.sleep(_REDRAW_SECONDS)
