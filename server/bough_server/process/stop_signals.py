"""SIGINT and SIGTERM as requests to stop, which also reach a server whose event loop is blocked."""

import asyncio
import faulthandler
import os
import select
import signal
import socket
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

import structlog

from bough_server.process.loop import SurvivingLoop
from bough_server.process.watchdog import BLOCKED_SECONDS
from bough_server.threads import make_thread

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_INTERVAL: Final = 0.25
_BUFFER: Final = 1024

_log = structlog.get_logger(__name__)


class StopSignals:
    """Receives signals while its context is open; only the main thread may open it.

    asyncio handles a signal on the event loop, so a loop that is blocked would never see it. Here a signal is counted
    twice: by a handler of the main thread, which runs between two instructions of Python and in many calls of C, and by
    a thread that reads the interpreter's wakeup descriptor, which is written to whatever the main thread does. From the
    second signal on, the process exits without further ado once the loop has been blocked for a second. It exits as if
    killed by the signal, so its runs are recovered as after a crash.
    """

    def __init__(self, blocked_seconds: Callable[[], float]) -> None:
        self._blocked_seconds = blocked_seconds
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[None] = asyncio.Queue()
        self._handled = self._read = self._delivered = 0
        self._number = int(signal.SIGTERM)
        self._closing = self._is_advised = self._is_exiting = False
        self._reader, self._writer = socket.socketpair()
        self._thread = make_thread(self._follow, name="bough-signals")
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        self._take_wakeup()
        if isinstance(self._loop, SurvivingLoop):
            self._loop.on_restart = self._take_wakeup  # uvloop sets its own whenever it begins to run
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._loop, SurvivingLoop):
            self._loop.on_restart = None
        signal.set_wakeup_fd(self._wakeup)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._closing = True
        self._writer.send(b"\0")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _take_wakeup(self) -> None:
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != self._writer.fileno():
            self._wakeup = before

    async def wait(self) -> None:
        """Wait for the next signal."""
        await self._received.get()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._handled += 1
        self._notify()

    def _follow(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._reader], [], [], _INTERVAL if self._count() else None)
            if ready:
                numbers = [number for number in self._reader.recv(_BUFFER) if number in STOP_SIGNALS]
                self._number = numbers[-1] if numbers else self._number
                self._read += len(numbers)
            if self._count():
                self._notify()
                self._advise()

    def _count(self) -> int:
        return max(self._handled, self._read)

    def _notify(self) -> None:
        if self._delivered < self._count():
            self._loop.call_soon_threadsafe(self._deliver)
        blocked = self._blocked_seconds()
        if self._count() > 1 and blocked >= BLOCKED_SECONDS and not self._is_exiting:
            self._is_exiting = True
            # Not print(): a signal handler may interrupt a write to the same stream.
            os.write(2, f"The event loop has been blocked for {blocked:.1f} s: exiting at once.\n".encode())
            faulthandler.dump_traceback(all_threads=True)
            os._exit(128 + self._number)

    def _advise(self) -> None:
        if not self._is_advised and self._count() == 1 and self._blocked_seconds() >= BLOCKED_SECONDS:
            self._is_advised = True
            _log.warning("the event loop is blocked and cannot stop the server: send the signal again to exit at once")

    def _deliver(self) -> None:
        while self._delivered < self._count():
            self._delivered += 1
            self._received.put_nowait(None)
