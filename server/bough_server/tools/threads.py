"""Run blocking tools in threads: a bounded pool, and streaming of generators.

Threads are made when needed and never awaited at exit. A thread cannot be killed: one that hangs keeps its place, and
is left behind when the process ends.
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

from bough_server.tools.output import Excerpt

T = TypeVar("T")

_IDLE_SECONDS: Final = 10.0

_AHEAD: Final = 16
"""How many pieces a generator may be ahead of its consumer."""


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """How a function ended in its thread. It travels as a value: some exceptions cannot be put into a future."""

    value: T | None = None
    error: BaseException | None = None

    def result(self) -> T:
        """What the function returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    function: Callable[[], T]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Ended[T]]"

    def work(self) -> None:
        """Runs the function, unless nobody waits for it any more."""
        if self.future.cancelled():
            return
        try:
            ended = Ended(value=self.function())
        except BaseException as error:  # whatever a tool raises is its caller's to judge
            ended = Ended(error=error)
        try:
            self.loop.call_soon_threadsafe(self._settle, ended)
        except RuntimeError:
            return  # the loop was closed while the tool ran: its late result is dropped

    def _settle(self, ended: Ended[T]) -> None:
        if not self.future.done():
            self.future.set_result(ended)


class ThreadLimit:
    """Runs functions in at most `limit` daemon threads; the others wait their turn."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: deque[_Job[Any]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    async def run(self, function: Callable[[], T]) -> T:
        """What the function returns or raises. Cancelling stops the waiting at once, as with `submit`."""
        return (await self.submit(function)).result()

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[Ended[T]]":
        """Calls the function in a thread, with a copy of the caller's context variables.

        Cancelling the future keeps a waiting function from starting; one that has begun goes on, its result is dropped.
        """
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        job = _Job(lambda: context.run(function), loop, loop.create_future())
        self._enqueue(job)
        return job.future

    def _enqueue(self, job: _Job[T]) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
            elif self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name="bough-tool", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                has_job = self._changed.wait_for(lambda: bool(self._jobs), _IDLE_SECONDS)
                self._idle -= 1
                if not has_job:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            job.work()
            del job  # so that an idle thread keeps no tool's values alive


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
