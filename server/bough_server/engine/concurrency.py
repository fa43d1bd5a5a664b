"""Who may run at once in the subtrees of a run: further model calls and tools wait, first come, first served.

A place is taken in all the bounds above in one step or in none, so nobody holds one while waiting for another. Whoever
leaves a bound leaves all above it as well, so the first to wait is not passed over for ever. Only what is in flight
holds a place: it ends by itself, or is ended, and what only waits keeps no run awake.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from bough.v1 import event_pb2
from bough_server import events
from bough_server.engine.limits import Budget
from bough_server.engine.scheduler import Scheduler, Waiter


class ConcurrencyLimiter:
    """The places of one run."""

    def __init__(self, tasks: Scheduler) -> None:
        self._tasks = tasks
        self._running: dict[Budget, int] = {}
        self._holders: dict[str, Sequence[Budget]] = {}
        self._waiting: dict[str, tuple[Sequence[Budget], Waiter[None]]] = {}
        self._is_held = False

    @property
    def has_waiting(self) -> bool:
        """Whether effects wait for a place."""
        return bool(self._waiting)

    def hold(self) -> None:
        """From now on nobody gets a place any more."""
        self._is_held = True

    @asynccontextmanager
    async def place(self, key: str, budget: Budget) -> AsyncIterator[None]:
        """Holds a place for an effect, once there is one. Where there never is, the effect has to be refused."""
        bounds = [each for each in budget.chain() if each.concurrency is not None]
        if bounds and all(each.concurrency for each in bounds):
            await self._take(key, bounds)
        try:
            yield
        finally:
            self._leave(key)

    def ended(self, batch: Iterable[event_pb2.AgentEvent]) -> None:
        """Takes back the places of effects that end, whatever their code still does."""
        if self._holders:
            for event in batch:
                if event.effect_key in self._holders and events.kind_of(event) in _ENDS:
                    self._leave(event.effect_key)

    async def _take(self, key: str, bounds: Sequence[Budget]) -> None:
        if self._has_room(bounds) and not self._is_held:
            self._enter(key, bounds)
            return
        gate = Waiter[None](self._tasks)
        self._waiting[key] = (bounds, gate)
        try:
            await gate.wait()
        except BaseException:
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
        for waiting, (bounds, gate) in list(self._waiting.items()):
            if self._has_room(bounds):
                del self._waiting[waiting]
                self._enter(waiting, bounds)
                gate.open(None)


_ENDS = frozenset({events.LLM_COMPLETED, events.LLM_FAILED, *events.TOOL_END_KINDS})
