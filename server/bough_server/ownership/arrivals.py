"""The logs that this process executes, and those that it is about to execute, by id."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from bough_server.clock import Clock
from bough_server.errors import StorageFailed
from bough_server.ownership.background import Background, retry_later
from bough_server.ownership.worker import Worker

L = TypeVar("L")
"""What executes a log."""

T = TypeVar("T")


class Arrivals(Generic[L]):
    """Live logs by id. Finding one that is just being created or taken over waits for it."""

    def __init__(self, worker: Worker, background: Background, clock: Clock) -> None:
        self._worker, self._background, self._clock = worker, background, clock
        self._live: dict[str, L] = {}
        self._arriving: dict[str, asyncio.Task[Any]] = {}
        self._claimed: set[str] = set()
        """Logs that this worker has claimed, and for which no task has been started yet."""

    def __iter__(self) -> Iterator[L]:
        return iter(list(self._live.values()))  # a copy: logs end while callers iterate

    def put(self, log_id: str, live: L) -> None:
        """Add a live log."""
        self._live[log_id] = live

    def discard(self, log_id: str, live: L) -> None:
        """Remove a log that is no longer live."""
        if self._live.get(log_id) is live:  # it may be live again by now, as another object
            del self._live[log_id]

    def get_live(self, log_id: str) -> L | None:
        """Return the live log with an id, or None, without waiting."""
        return self._live.get(log_id)

    async def find(self, log_id: str) -> L | None:
        """Return the live log with an id, or None, waiting first for one that is being created or taken over."""
        while (work := self._arriving.get(log_id)) is not None:
            await asyncio.wait({work})
            self._forget(log_id, work)  # a task that is done, but whose callback has not run yet, would loop here
        return self._live.get(log_id)

    async def arrive(self, log_id: str, work: Coroutine[Any, Any, T], *, is_retried: bool = False) -> T:
        """Run work that makes a log live, or ends it; it is completed even if the caller is cancelled.

        `is_retried` if the caller tries again later when the storage fails; else the log is offered to any server then.
        """
        try:
            await self._worker.wait_for_lease()
        except BaseException:
            work.close()  # else Python warns that it was never awaited
            raise
        task = asyncio.get_running_loop().create_task(work)
        self._arriving[log_id] = task
        task.add_done_callback(partial(self._on_arrival, log_id, is_retried=is_retried))
        return await asyncio.shield(task)

    def _on_arrival(self, log_id: str, work: "asyncio.Task[Any]", *, is_retried: bool) -> None:
        self._forget(log_id, work)
        # If the caller is gone, this marks an exception as retrieved, so that asyncio does not log it.
        if not work.cancelled() and isinstance(work.exception(), StorageFailed) and not is_retried:
            # It may have been written all the same: then this worker owns the log, and no worker would execute it.
            self.offer_later(log_id)

    def _forget(self, log_id: str, work: "asyncio.Task[Any]") -> None:
        if self._arriving.get(log_id) is work:  # else a later task has replaced it
            del self._arriving[log_id]

    def offer_later(self, log_id: str) -> None:
        """Offer a log to any server, this one too, once the storage works again."""
        self._background.spawn(retry_later(self._clock, partial(self._offer_unless_live, log_id)))

    async def _offer_unless_live(self, log_id: str) -> None:
        """Let any server continue a log if this one owns it, but does not execute it."""
        if await self.find(log_id) is None:
            await self._worker.give_up(log_id)

    def claim(self, log_ids: Iterable[str]) -> None:
        """Register logs that this worker has claimed, and is about to continue."""
        self._claimed.update(log_ids)

    def unclaim(self, log_id: str) -> None:
        """Forget a claim: the log has been continued, or cannot be."""
        self._claimed.discard(log_id)

    def give_up_claims(self) -> None:
        """Let other servers execute the logs that are claimed and neither live nor about to be."""
        claimed, self._claimed = self._claimed, set()
        for log_id in claimed - self._live.keys() - self._arriving.keys():
            self._worker.give_up_soon(log_id)

    def coming(self) -> set[str]:
        """Return the logs that are about to be live, or to be ended."""
        return self._arriving.keys() | self._claimed

    def list_executing(self) -> Collection[str]:
        """Return the logs that take up room: those that are live, and those that are about to be."""
        return self._live.keys() | self.coming()

    async def wait_for_current_arrivals(self) -> None:
        """Wait for the logs that are being created, taken over or ended now, and for none that come after."""
        if self._arriving:
            await asyncio.wait(list(self._arriving.values()))

    async def wait_for_all_arrivals(self) -> None:
        """Wait for all logs that are being created, taken over or ended."""
        while self._arriving:
            await asyncio.wait(self._arriving.values())
