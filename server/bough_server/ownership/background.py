"""Background tasks of those that execute logs, and how they wait: for the storage, and for an event."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from bough_server.clock import Clock
from bough_server.errors import ServerStopping, StorageFailed

INITIAL_BACKOFF: Final = 1.0
MAX_BACKOFF: Final = 60.0
"""Bounds of the seconds between two tries."""

POLL_SECONDS: Final = 2.0
"""Seconds between two polls for what other servers may have left, if no notification comes."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Background:
    """Background tasks; `close` ends them all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine in a background task, which `close` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        while self._tasks:  # a task may spawn another while it is being cancelled
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


async def poll(clock: Clock, work: Callable[[], Awaitable[object]], offered: asyncio.Event, *, is_shared: bool) -> None:
    """Call `work` now and whenever `offered` is set, beside other servers also every POLL_SECONDS, until cancelled.

    While the storage fails, it is retried with backoff.
    """
    # What other servers have left must not wait for a minute because the database was away.
    longest = POLL_SECONDS if is_shared else MAX_BACKOFF
    while True:
        offered.clear()  # before the work: an offer after it has begun must wake the wait below
        await retry_until_stored(clock, work, longest=longest)
        await wait_at_most(clock, offered, POLL_SECONDS if is_shared else None)


async def wait_at_most(clock: Clock, event: asyncio.Event, seconds: float | None) -> None:
    """Wait until an event is set, or for some seconds."""
    if seconds is None:
        await event.wait()
        return
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({sleeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeping.cancel()
        waiting.cancel()
        await asyncio.wait({sleeping, waiting})


async def retry_until_stored(
    clock: Clock, work: Callable[[], Awaitable[object]], *, longest: float = MAX_BACKOFF
) -> None:
    """Call `work` with backoff until it no longer raises StorageFailed; return too if it raises ServerStopping.

    `longest` is the most seconds between two tries.
    """
    backoff = INITIAL_BACKOFF
    while True:
        try:
            await work()
            break
        except ServerStopping:
            break
        except StorageFailed as error:
            if backoff == INITIAL_BACKOFF:  # the store's log says how long it lasts
                _log.warning("storage failed; retrying", error=error.message)
        await clock.sleep(backoff)
        backoff = min(longest, backoff * 2)


async def retry_later(clock: Clock, work: Callable[[], Awaitable[object]]) -> None:
    """Call `work` as retry_until_stored does, for the first time after INITIAL_BACKOFF."""
    await clock.sleep(INITIAL_BACKOFF)
    await retry_until_stored(clock, work)
