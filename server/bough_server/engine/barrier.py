"""Replay barrier: delivers recorded results in log order and holds new effects until all are delivered.

Results are delivered one at a time, each while every coroutine of the run is parked, so a replay takes the same path
through the agents' code whatever the event loop does.
"""

import asyncio
from collections.abc import Callable, Sequence

from bough.v1 import event_pb2
from bough_server.engine.journal import Journal
from bough_server.engine.scheduler import Scheduler, Waiter
from bough_server.errors import NonDeterministic
from bough_server.log import events


class ReplayBarrier:
    """Delivers recorded results while the run is quiet; `lived` is set once all have been delivered."""

    def __init__(
        self,
        journal: Journal,
        scheduler: Scheduler,
        *,
        on_divergence: Callable[[NonDeterministic], None],
        on_timeout: Callable[[str], None],
        on_timeout_end: Callable[[str], None],
        on_live: Callable[[Sequence[str]], None],
    ) -> None:
        self._journal = journal
        self._scheduler = scheduler
        self._waiters: dict[str, Waiter[event_pb2.AgentEvent]] = {}
        self._frontier: list[tuple[str, Waiter[None]]] = []
        self._on_divergence = on_divergence
        self._on_timeout = on_timeout
        self._on_timeout_end = on_timeout_end
        self._on_live = on_live
        self._is_held = False
        self.live = journal.is_empty
        self.lived = asyncio.Event()
        if self.live:
            self.lived.set()

    @property
    def has_parked(self) -> bool:
        """True if effects are parked: until the run is live, or for good after `hold`."""
        return bool(self._frontier)

    def hold(self) -> None:
        """Park every effect that is about to begin, from now on."""
        self._is_held = True

    def expect(self, key: str) -> Waiter[event_pb2.AgentEvent]:
        """Return the waiter to which the recorded result of an effect will be delivered."""
        # Not Waiter[...](): calling a subscripted class takes longer than the rest of this, for each replayed result.
        waiter: Waiter[event_pb2.AgentEvent] = Waiter(self._scheduler)
        self._waiters[key] = waiter
        return waiter

    async def wait_for_result(self, key: str) -> event_pb2.AgentEvent:
        """Wait for the recorded result of an effect."""
        return await self.expect(key).wait()

    async def wait_until_live(self, key: str) -> None:
        """Wait until every recorded result has been delivered; then the effect may touch the world."""
        if self.live and not self._is_held:
            return
        waiter = Waiter[None](self._scheduler)
        self._frontier.append((key, waiter))
        await waiter.wait()

    def advance(self) -> None:
        """Deliver the next recorded result, or go live if there is none left; called while the run is quiet."""
        while not self.live and self._journal.todo:
            event = self._journal.todo.popleft()
            if event.sequence in self._journal.timeouts:
                self._on_timeout(event.cancel_requested.effect_scope)
                continue
            if self._journal.is_timeout_end(event):
                self._on_timeout_end(event.effect_key)
                # The end resolves a future, which wakes its waiter, if any, one loop iteration later: check after that.
                self._scheduler.check_soon()
                return
            waiter = self._waiters.pop(event.effect_key, None)
            # Recorded after its scope was cancelled: the coroutine that asked was stopped and never saw this result.
            if self._journal.is_cancelled(event):
                continue
            if waiter is None:
                self._report_divergence(event)
                return
            # One delivery per quiet moment: code must react to a result before the next, as it did the first time.
            # A waiter that has not begun to wait, or no longer does, woke no coroutine, so the next result is due.
            if waiter.resolve(event):
                return
        if not self.live:
            self._go_live()

    def _go_live(self) -> None:
        unclaimed = self._journal.find_skipped_effect()
        if unclaimed is not None:
            self._report_divergence(unclaimed)
            return
        self.live = True
        self._on_live([key for key, _ in self._frontier if not self._journal.is_in_cancelled(key)])
        self.lived.set()
        if self._is_held:
            # All coroutines are parked and none will be woken, but a drain or a cancellation waits for quiescence.
            self._scheduler.check_soon()
        else:
            frontier, self._frontier = self._frontier, []
            for key, waiter in frontier:
                # An effect in a cancelled scope stays parked: the cancellation cancels its task.
                if not self._journal.is_in_cancelled(key):
                    waiter.resolve(None)

    def _report_divergence(self, event: event_pb2.AgentEvent) -> None:
        keys = {*self._waiters, *(key for key, _ in self._frontier)}
        asked = sorted(key or "the run's end" for key in keys) or ["nothing"]
        found = f"{events.name_of(event)} of the effect {event.effect_key}" if event.effect_key else "the run's end"
        self._on_divergence(
            NonDeterministic(
                f"The log holds {found} at sequence {event.sequence}, but the agents asked for {', '.join(asked)}. "
                "Agent code must touch the world through effects only, and a changed agent needs a new version."
            )
        )
