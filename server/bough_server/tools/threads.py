"""Threads for tools that are plain functions: a bounded number, made when needed; it never waits for one at exit.

A thread cannot be killed. One that hangs keeps its place, and is left behind when the process ends.
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

T = TypeVar("T")

_IDLE_SECONDS: Final = 10.0


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
