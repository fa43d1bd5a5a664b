"""The barrier between a log and the world: hands recorded results back in order, then lets effects go; runs no agent.

A recorded result is delivered only while every coroutine of the run rests, one at a time; nothing goes to the world
before all have been delivered. See the replay design, "ReplayBarrier".
"""

import asyncio
from collections.abc import Callable, Sequence

from bough.v1 import event_pb2
from bough_server import events
from bough_server.engine.journal import Journal
from bough_server.engine.scheduler import Scheduler, Waiter
from bough_server.errors import NonDeterministic


class ReplayBarrier:
    """Delivers recorded results while the run is quiet; `lived` is set when there are none left."""

    def __init__(
        self,
        journal: Journal,
        tasks: Scheduler,
        *,
        on_divergence: Callable[[NonDeterministic], None],
        on_cut: Callable[[str], None],
        on_cut_end: Callable[[str], None],
        on_live: Callable[[Sequence[str]], None],
    ) -> None:
        self._journal = journal
        self._tasks = tasks
        self._waiters: dict[str, Waiter[event_pb2.AgentEvent]] = {}
        self._frontier: list[tuple[str, Waiter[None]]] = []
        self._on_divergence = on_divergence
        self._on_cut = on_cut
        self._on_cut_end = on_cut_end
        self._on_live = on_live
        self._is_held = False
        self.live = journal.is_empty
        self.lived = asyncio.Event()
        if self.live:
            self.lived.set()

    @property
    def has_parked(self) -> bool:
        """Whether effects wait to begin."""
        return bool(self._frontier)

    def hold(self) -> None:
        """From now on no effect begins: what asks for one waits."""
        self._is_held = True

    def expect(self, key: str) -> Waiter[event_pb2.AgentEvent]:
        """Where the recorded result of an effect will be handed back."""
        gate = self._waiters[key] = Waiter[event_pb2.AgentEvent](self._tasks)
        return gate

    async def result(self, key: str) -> event_pb2.AgentEvent:
        """Waits for the recorded result of an effect to be handed back."""
        return await self.expect(key).wait()

    async def until_live(self, key: str) -> None:
        """Waits until everything recorded has been handed back; then effects may go to the world."""
        if self.live and not self._is_held:
            return
        gate = Waiter[None](self._tasks)
        self._frontier.append((key, gate))
        await gate.wait()

    def advance(self) -> None:
        """Delivers the next recorded result, or goes live; called while the run is quiet."""
        while not self.live and self._journal.todo:
            event = self._journal.todo.popleft()
            if event.sequence in self._journal.cut_short:
                self._on_cut(event.cancel_requested.effect_scope)
                continue
            if self._journal.ends_cut(event):
                self._on_cut_end(event.effect_key)
                self._tasks.check_soon()
                return
            waiter = self._waiters.pop(event.effect_key, None)
            if self._journal.is_cancelled(event):
                continue
            if waiter is None:
                self._diverge(event)
                return
            if waiter.open(event):
                return
        if not self.live:
            self._go_live()

    def _go_live(self) -> None:
        forgotten = self._journal.forgotten()
        if forgotten is not None:
            self._diverge(forgotten)
            return
        self.live = True
        self._on_live([key for key, _ in self._frontier if not self._journal.is_in_cancelled(key)])
        self.lived.set()
        if self._is_held:
            self._tasks.check_soon()  # where everybody rests nobody wakes any more, and whoever holds it waits for that
        else:
            frontier, self._frontier = self._frontier, []
            for key, gate in frontier:
                if not self._journal.is_in_cancelled(key):  # there whoever cancelled it ends who waits
                    gate.open(None)

    def _diverge(self, event: event_pb2.AgentEvent) -> None:
        asked = sorted({*self._waiters, *(key for key, _ in self._frontier)}) or ["nothing"]
        what = f"{events.name_of(event)} of the effect {event.effect_key}" if event.effect_key else "the run's end"
        self._on_divergence(
            NonDeterministic(
                f"The log holds {what} at sequence {event.sequence}, but the agents asked for {', '.join(asked)}. "
                "Agent code must take the world in by effects only, and a changed agent needs another version."
            )
        )
