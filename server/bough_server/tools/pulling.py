"""Drives a plain generator in one thread while its text is consumed in the event loop; at most a few pieces ahead."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from bough_server.tools.output import Excerpt
from bough_server.tools.threads import ThreadLimit

_AHEAD: Final = 16
"""How many pieces a generator may be ahead of its consumer."""


async def pull(
    generator: Generator[object, None, Any], emit: Callable[[str], Awaitable[None]], threads: ThreadLimit
) -> tuple[Excerpt, Any]:
    """The text that a generator yielded and what it returned; each piece goes to `emit` in order.

    The whole generator runs in one thread, so that what it holds may be bound to its thread. When the caller is
    cancelled, or `emit` raises, the generator is closed in that thread as soon as it yields again.
    """
    channel = _Channel(generator)
    work = threads.submit(channel.drive)
    work.add_done_callback(lambda _: channel.pieces.put_nowait(None))
    streamed = Excerpt()
    try:
        while (piece := await channel.pieces.get()) is not None:
            streamed.add(piece)
            await emit(piece)
            channel.room.release()
        return streamed, (await work).result()
    finally:
        channel.stop()
        work.cancel()


class _Channel:
    """What passes between a generator's thread and the loop."""

    def __init__(self, generator: Generator[object, None, Any]) -> None:
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self.room = threading.Semaphore(_AHEAD)
        self._generator = generator
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False

    def stop(self) -> None:
        """Makes the thread close the generator at its next piece."""
        self._is_stopped = True
        self.room.release()

    def drive(self) -> Any:
        """In the thread: hands over piece after piece, waiting for room, and gives what the generator returns."""
        try:
            while True:
                try:
                    piece = next(self._generator)
                except StopIteration as stop:
                    return stop.value
                if not isinstance(piece, str):
                    raise TypeError(f"a tool streams text, and this one yielded a {type(piece).__name__}")
                self.room.acquire()
                if self._is_stopped:
                    return None
                self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        finally:
            self._generator.close()
