"""The log read as what has already been done, and the pump that hands it back in order; it runs no agent.

The rules are those of the replay design: an effect whose result is in the journal gets it back and touches nothing; a
recorded result is delivered only while every coroutine of the run is parked, in log order, one at a time; nothing
goes to the world before all have been delivered.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bough.v1 import event_pb2
from bough_server import events
from bough_server.errors import NonDeterministic
from bough_server.runtime import keys

_RESULTS = frozenset(
    {events.LLM_COMPLETED, events.LLM_FAILED, events.TOOL_COMPLETED, events.TOOL_FAILED, events.VALUE_RECORDED}
)
_STARTS = frozenset({events.LLM_STARTED, events.TOOL_STARTED, events.SUB_AGENT_STARTED, events.RUN_STARTED})
_ENDS = frozenset({events.SUB_AGENT_COMPLETED, events.SUB_AGENT_FAILED, *events.TERMINAL_KINDS})
_STEP_ENDS = frozenset({events.STEP_COMPLETED, events.STEP_FAILED})

Identity = tuple[str, int, int]
"""Effect key, payload kind and attempt: what makes an event the same event on both sides of a replay."""


def identity_of(event: event_pb2.AgentEvent) -> Identity:
    """What an event is in its run, whenever it is made."""
    return event.effect_key, events.kind_of(event), event.attempt


class Journal:
    """What a log says has been done."""

    def __init__(self, log: Iterable[event_pb2.AgentEvent] = ()) -> None:
        self.recorded: dict[Identity, event_pb2.AgentEvent] = {}
        self.of_effect: dict[str, list[event_pb2.AgentEvent]] = {}
        self.started: dict[str, event_pb2.AgentEvent] = {}
        self.results: dict[str, event_pb2.AgentEvent] = {}
        self.dispatched: set[str] = set()
        self.ends: dict[str, event_pb2.AgentEvent] = {}
        """Scope of an invocation to its end."""
        self.cancelled: dict[str, int] = {}
        self.cut_short: dict[int, event_pb2.AgentEvent] = {}
        """Cancellations after which a caller went on: of a sub-agent whose own time was up."""
        self.todo: deque[event_pb2.AgentEvent] = deque()
        for event in log:
            self._read(event)
        results = [event for event in self.results.values() if event.effect_key not in self.dispatched]
        # Ends have their turn too: whether a sub-agent or a cancellation came first is told by their order alone.
        handed = [*results, *self.cut_short.values(), *self.ends.values()]
        self.todo.extend(sorted(handed, key=lambda event: event.sequence))

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the start of the run is recorded."""
        return len(self.recorded) <= 1

    def _read(self, event: event_pb2.AgentEvent) -> None:
        kind = events.kind_of(event)
        if kind in events.DELTA_KINDS or not kind:
            return
        key = event.effect_key
        self.recorded.setdefault(identity_of(event), event)
        self.of_effect.setdefault(key, []).append(event)
        if kind in _STARTS:
            self.started.setdefault(key, event)
        if kind == events.SUB_AGENT_STARTED:
            self.dispatched.add(key)
        if kind in _ENDS:
            self.ends[key] = event
        if kind in _RESULTS:
            self.results[key] = event
        elif kind == events.CANCEL_REQUESTED:
            self.cancelled.setdefault(event.cancel_requested.scope, event.sequence)
            if event.cancel_requested.reason == event_pb2.CANCEL_REASON_LIMIT and event.cancel_requested.scope:
                self.cut_short[event.sequence] = event

    def is_cut_short(self, scope: str) -> bool:
        """Whether a sub-agent was ended because its own time was up."""
        return any(event.cancel_requested.scope == scope for event in self.cut_short.values())

    def is_step_cut_off(self, key: str) -> bool:
        """Whether a step was ended by a cancellation, whatever results it had."""
        ends = (event for event in self.of_effect.get(key, ()) if events.kind_of(event) in _STEP_ENDS)
        return any(self.is_cancelled(event) for event in ends)

    def is_cancelled(self, event: event_pb2.AgentEvent) -> bool:
        """Whether an event came after its scope was cancelled: nobody was there to take it any more."""
        return any(
            event.sequence > sequence and keys.covers(scope, event.effect_key)
            for scope, sequence in self.cancelled.items()
        )

    def check(self, key: str, digest: str) -> None:
        """Refuses an effect that asks for something else than the log holds under its key."""
        recorded = self.started.get(key) or self.results.get(key)
        if recorded is not None and recorded.effect_digest and recorded.effect_digest != digest:
            raise NonDeterministic(
                f"The effect {key} asked for something else than the log holds ({events.name_of(recorded)} at sequence "
                f"{recorded.sequence}). Agent code must take the world in by effects only."
            )


class Pump:
    """Counts the coroutines that are not parked, and delivers recorded results while there are none."""

    def __init__(
        self,
        journal: Journal,
        *,
        on_divergence: Callable[[NonDeterministic], None],
        on_cut: Callable[[str], None],
        on_live: Callable[[Sequence[str]], None],
    ) -> None:
        self._journal = journal
        self._todo = journal.todo
        self._waiters: dict[str, asyncio.Future[event_pb2.AgentEvent]] = {}
        self._frontier: list[tuple[str, asyncio.Future[None]]] = []
        self._active = 1
        self._on_divergence = on_divergence
        self._on_cut = on_cut
        self._on_live = on_live
        self.live = journal.is_empty

    def fork(self, lanes: int) -> None:
        """One coroutine becomes `lanes` of them."""
        self._active += lanes - 1

    def park(self) -> None:
        """A coroutine waits for something that only the pump or nobody gives."""
        self._active -= 1
        if self._active == 0:
            self._advance()

    async def result(self, key: str) -> event_pb2.AgentEvent:
        """Waits for the recorded result of an effect to be handed back."""
        waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        self.park()
        event: event_pb2.AgentEvent = await waiter
        return event

    async def never(self) -> None:
        """Parks a coroutine for good: it was cancelled at this point."""
        self.park()
        await asyncio.get_running_loop().create_future()

    async def until_live(self, key: str) -> None:
        """Waits until everything recorded has been handed back; then effects may go to the world."""
        if self.live:
            return
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._frontier.append((key, gate))
        self.park()
        await gate

    def _advance(self) -> None:
        while not self.live and self._todo:
            event = self._todo.popleft()
            if event.sequence in self._journal.cut_short:
                self._active += 1
                self._on_cut(event.cancel_requested.scope)
                return
            waiter = self._waiters.pop(event.effect_key, None)
            if self._journal.is_cancelled(event):
                continue
            if waiter is None:
                self._diverge(event)
                return
            self._active += 1
            waiter.set_result(event)
            return
        if not self.live:
            self._go_live()

    def _go_live(self) -> None:
        self.live = True
        frontier, self._frontier = self._frontier, []
        self._on_live([key for key, _ in frontier])
        self._active += len(frontier)
        for _, gate in frontier:
            if not gate.done():
                gate.set_result(None)

    def _diverge(self, event: event_pb2.AgentEvent) -> None:
        asked = sorted({*self._waiters, *(key for key, _ in self._frontier)}) or ["nothing"]
        what = f"{events.name_of(event)} of the effect {event.effect_key}" if event.effect_key else "the run's end"
        self._on_divergence(
            NonDeterministic(
                f"The log holds {what} at sequence {event.sequence}, but the agents asked for {', '.join(asked)}."
            )
        )
