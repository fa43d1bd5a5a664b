"""Watch an event loop from a thread: log the stack of one that has not turned for a second, and count it."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import structlog

from bough_server.clock import SystemClock
from bough_server.threads import make_thread

BLOCKED_SECONDS: Final = 1.0
"""How long an event loop may take for one turn before that is logged and counted."""

_INTERVAL: Final = 0.25
"""Seconds between two looks at the loop."""

_log = structlog.get_logger(__name__)


class Watchdog:
    """Watches the running event loop while its context is open; `on_blocked` is called, in a thread, at each block."""

    def __init__(self, on_blocked: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._on_blocked = on_blocked
        self._clock = SystemClock()  # never another one: it is the machine's time that a blocked loop wastes
        self._asked = self._clock.monotonic()
        self._is_asked = self._is_reported = False
        self._closing = threading.Event()
        self._thread = make_thread(self._watch, name="bough-watchdog")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()

    def measure_block(self) -> float:
        """Return for how long the loop has not taken a turn that it was asked for; 0 if it takes its turns."""
        return self._clock.monotonic() - self._asked if self._is_asked else 0.0

    def _watch(self) -> None:
        while not self._closing.wait(_INTERVAL):
            try:
                self._poll()
            except RuntimeError:  # the loop is closed
                return

    def _poll(self) -> None:
        blocked = self.measure_block()
        if not self._is_asked:
            self._asked, self._is_asked = self._clock.monotonic(), True
            self._loop.call_soon_threadsafe(self._turn)
        elif blocked >= BLOCKED_SECONDS and not self._is_reported:
            self._is_reported = True
            _log.error(
                "the event loop is blocked: agents and async tools must not block it, and every run waits meanwhile",
                seconds=round(blocked, 1),
                stack=self._stack(),
            )
            if self._on_blocked is not None:
                self._on_blocked()

    def _turn(self) -> None:
        if self._is_reported:
            _log.warning("the event loop turns again", seconds=round(self.measure_block(), 1))
        self._is_asked = self._is_reported = False

    def _stack(self) -> str:
        """Return the stack of the loop's thread, without the values of variables, which may be secret."""
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
