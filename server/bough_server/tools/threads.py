"""Run blocking tools in threads: a bounded pool, and streaming from generators.

Threads are started on demand and not joined at exit. A thread cannot be killed: one that hangs keeps its slot, and is
abandoned when the process exits.
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

from bough_server.threads import make_thread
from bough_server.tools.output import Excerpt

T = TypeVar("T")

_IDLE_SECONDS: Final = 10.0

_AHEAD: Final = 16
"""The most pieces that a generator may be ahead of its consumer."""


@dataclass(frozen=True, slots=True)
class ThreadResult(Generic[T]):
    """The end of a function in its thread, as a value: a future refuses some exceptions, such as StopIteration."""

    value: T | None = None
    error: BaseException | None = None

    def result(self) -> T:
        """Return what the function returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


class NoThread(TimeoutError):
    """No thread was free in time: the function was not called."""


@dataclass(slots=True)
class _Job(Generic[T]):
    function: Callable[[], T]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[ThreadResult[T]]"
    is_started: bool = False
    is_ended: bool = False
    is_replaced: bool = False
    """Whether its thread no longer counts: it hangs, and another may be started in its place."""

    def work(self) -> None:
        """Run the function."""
        try:
            result = ThreadResult(value=self.function())
        except BaseException as error:  # also SystemExit: the caller handles what a tool raises, not the thread
            result = ThreadResult(error=error)
        try:
            self.loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:
            return  # the loop was closed while the tool ran: its late result is dropped

    def _settle(self, result: ThreadResult[T]) -> None:
        if not self.future.done():
            self.future.set_result(result)


class ThreadLimit:
    """Thread pool: runs functions in at most `limit` daemon threads; further ones wait.

    Of threads that hang in `run_within`, up to `spare` are replaced.
    """

    def __init__(self, limit: int, *, spare: int = 0) -> None:
        self._limit, self._spare = limit, spare
        self._jobs: deque[_Job[Any]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function in a thread and return its result. Cancellation ends the wait at once; see `submit`."""
        return (await self.submit(function)).result()

    async def run_within(self, function: Callable[[], T], seconds: float) -> T:
        """Like `run`, for at most so many seconds.

        Raises NoThread if it was not called within them, and TimeoutError if it has not returned: it cannot be stopped,
        and its thread is replaced.
        """
        job = self._submit(function)
        try:
            result = await asyncio.wait_for(job.future, seconds)
        except TimeoutError:
            if not self._replace(job):
                raise NoThread from None
            raise
        return result.result()

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[ThreadResult[T]]":
        """Call a function in a thread, with a copy of the caller's context variables.

        Cancelling the future keeps a function that waits from starting; one that has started continues, and its result
        is dropped.
        """
        return self._submit(function).future

    def _submit(self, function: Callable[[], T]) -> _Job[T]:
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        job = _Job(lambda: context.run(function), loop, loop.create_future())
        with self._changed:
            self._jobs.append(job)
            # A notified thread stays idle until it takes its job, so there must be one for each job in the queue.
            if self._idle >= len(self._jobs):
                self._changed.notify()
            else:
                self._add_thread()
        return job

    def _add_thread(self) -> None:
        if self._threads < self._limit:
            self._threads += 1
            make_thread(self._work, name="bough-tool").start()

    def _replace(self, job: _Job[T]) -> bool:
        """Let another thread take the place of the one that a job hangs in; return False if it has not started."""
        with self._changed:
            if job.is_started and not job.is_ended and self._spare:
                job.is_replaced = True
                self._spare -= 1
                self._limit += 1
                if self._jobs:
                    self._add_thread()
            return job.is_started

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
                job.is_started = not job.future.cancelled()
            if job.is_started:
                job.work()
            with self._changed:
                job.is_ended = True
                if job.is_replaced:
                    self._spare += 1
                    self._limit -= 1
                    if self._threads > self._limit:
                        self._threads -= 1
                        return
            del job  # an idle thread must not keep a tool's values alive


async def pull(
    generator: Generator[object, None, Any], emit: Callable[[str], Awaitable[None]], threads: ThreadLimit
) -> tuple[Excerpt, Any]:
    """Run a generator in a thread: pass each piece to `emit`, in order, and return the text and its return value.

    The whole generator runs in one thread, because it may hold resources that are bound to it. If the caller is
    cancelled, or `emit` raises, the generator is closed in that thread as soon as it yields again.
    """
    channel = _Channel(generator)
    work = threads.submit(channel.drive)
    # The loop runs callbacks from a thread in their order, so this end mark follows the last piece.
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
    """Pieces on their way from a generator's thread to the event loop."""

    def __init__(self, generator: Generator[object, None, Any]) -> None:
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self.room = threading.Semaphore(_AHEAD)
        self._generator = generator
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False

    def stop(self) -> None:
        """Make the thread close the generator at its next piece."""
        self._is_stopped = True
        self.room.release()  # wakes the thread if it waits for room

    def drive(self) -> Any:
        """Run the generator, in the thread: send each piece when there is room, and return what it returns."""
        try:
            while True:
                try:
                    piece = next(self._generator)
                except StopIteration as stop:
                    return stop.value
                if not isinstance(piece, str):
                    raise TypeError(f"a streaming tool must yield str, and this one yielded a {type(piece).__name__}")
                self.room.acquire()
                if self._is_stopped:
                    return None
                self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        finally:
            self._generator.close()
