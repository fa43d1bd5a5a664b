"""Concurrency limits of the subtrees of a run: model calls and tools over a limit wait, first come, first served.

An effect takes a slot in all the limits above it at once or in none, so none holds a slot while waiting for another:
there is no deadlock. A slot is released in all of them at once too, so the first in the queue is not overtaken forever.
Only effects in flight hold slots; waiting effects are parked.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from bough.v1 import event_pb2
from bough_server.engine.limits import Budget
from bough_server.engine.scheduler import Scheduler, Waiter
from bough_server.log import events


class ConcurrencyLimiter:
    """The slots of one run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._running: dict[Budget, int] = {}
        self._holders: dict[str, Sequence[Budget]] = {}
        self._waiting: dict[str, tuple[Sequence[Budget], Waiter[None]]] = {}
        self._is_held = False

    @property
    def has_waiting(self) -> bool:
        """True if effects wait for a slot."""
        return bool(self._waiting)

    def hold(self) -> None:
        """Admit no further effect from now on; those that wait keep waiting."""
        self._is_held = True

    @asynccontextmanager
    async def hold_slot(self, key: str, budget: Budget) -> AsyncIterator[None]:
        """Wait for a slot and hold it for an effect.

        Takes none if a limit is 0: no slot would ever be free, and the caller refuses the effect.
        """
        bounds = [each for each in budget.chain() if each.concurrency is not None]
        if bounds and all(each.concurrency for each in bounds):
            await self._take(key, bounds)
        try:
            yield
        finally:
            self._leave(key)

    def release_slots(self, batch: Iterable[event_pb2.AgentEvent]) -> None:
        """Release the slots of effects whose end is recorded, even if their coroutines have not finished yet."""
        if self._holders:
            for event in batch:
                if event.effect_key in self._holders and events.kind_of(event) in _ENDS:
                    self._leave(event.effect_key)

    async def _take(self, key: str, bounds: Sequence[Budget]) -> None:
        if self._has_room(bounds) and not self._is_held:
            self._enter(key, bounds)
            return
        waiter = Waiter[None](self._scheduler)
        self._waiting[key] = (bounds, waiter)
        try:
            await waiter.wait()
        except BaseException:
            # Cancelled after _leave had admitted it but before it ran: the slot is taken and has to be released.
            if self._waiting.pop(key, None) is None:
                self._leave(key)
            raise

    def _has_room(self, bounds: Sequence[Budget]) -> bool:
        return all(self._running.get(bound, 0) < (bound.concurrency or 0) for bound in bounds)

    def _enter(self, key: str, bounds: Sequence[Budget]) -> None:
        self._holders[key] = bounds
        for bound in bounds:
            self._running[bound] = self._running.get(bound, 0) + 1

    def _leave(self, key: str) -> None:
        for bound in self._holders.pop(key, ()):
            self._running[bound] -= 1
            if not self._running[bound]:
                del self._running[bound]
        if self._is_held:
            return
        for waiting, (bounds, waiter) in list(self._waiting.items()):
            if self._has_room(bounds):
                del self._waiting[waiting]
                # Taken here and not when the waiter runs: until then another effect could take the slot.
                self._enter(waiting, bounds)
                waiter.resolve(None)


_ENDS = frozenset({events.LLM_COMPLETED, events.LLM_FAILED, *events.TOOL_END_KINDS})
