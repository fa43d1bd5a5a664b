"""Servers in child processes: the signals that stop their parent, and how they end."""

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@asynccontextmanager
async def watch_stop_signals() -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield an event that the first signal to stop sets, and one that the second sets."""
    loop, stop, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, hurry
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def end_child(child: Process, hurry: asyncio.Event) -> None:
    """Stop a child and wait for its end; `hurry` ends the time that its runs have."""
    ended = asyncio.create_task(child.wait())
    hurried = asyncio.create_task(hurry.wait())
    if child.returncode is None:
        child.terminate()
    await asyncio.wait({ended, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if child.returncode is None:
        child.terminate()
    hurried.cancel()
    await asyncio.wait({ended, hurried})
