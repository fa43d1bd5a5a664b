"""Live clients of a server that is killed again and again; each takes turn after turn and judges only what it sees."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from bough import AsyncClient, Rejoining
from bough.collection import collect_sync
from bough.v1 import event_pb2, execution_pb2
from tests.durability.torture_team import KINDS, answer_to, expected

TURN_SECONDS: Final = 120.0
"""How long a turn may take, kills included, before it counts as stuck."""

_WATCHED_EVERY: Final = 4

REJOINING: Final = Rejoining(first_delay=0.02, longest_delay=0.5, timeout=TURN_SECONDS, connect_timeout=TURN_SECONDS)

Events = list[event_pb2.AgentEvent]


@dataclass(slots=True)
class Faults:
    """What went wrong, by how it counts, and in words."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        """Counts a fault: `duplicates`, `lost` or `stuck`."""
        self.counts[kind] += 1
        self.said.append(f"{kind}: {what}")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a client has seen of a turn."""

    told: str
    events: Events = field(default_factory=list)


class Client:
    """One caller with a separate session, who answers every request; now and then a second client watches."""

    def __init__(self, address: str, number: int, faults: Faults) -> None:
        self._address, self._number, self._faults = address, number, faults
        self._session_id = ""
        self.turns: list[Seen] = []

    async def take_turns(self, over: asyncio.Event, *, at_least: int = 1) -> None:
        """Takes one turn after the other until it is over."""
        async with AsyncClient(self._address, timeout=TURN_SECONDS, rejoining=REJOINING) as client:
            while not over.is_set() or len(self.turns) < at_least:
                number = len(self.turns)
                kind = KINDS[(self._number + number) % len(KINDS)]
                turn = Seen(told=f"c{self._number}t{number}")
                self.turns.append(turn)
                try:
                    async with asyncio.timeout(TURN_SECONDS):
                        await self._turn(client, kind, turn, is_watched=number % _WATCHED_EVERY == 0)
                except TimeoutError:
                    self._faults.add("stuck", f"{kind} {turn.told} {_where(turn)}")
                    self._session_id = ""
                except Exception as error:
                    self._faults.add("lost", f"{kind} {turn.told} {_where(turn)}: {error!r}")
                    self._session_id = ""

    async def _turn(self, client: AsyncClient, kind: str, turn: Seen, *, is_watched: bool) -> None:
        stream = client.run(kind, turn.told, session_id=self._session_id)
        watched: Events = []
        async with asyncio.TaskGroup() as group:
            run_id = await stream.started()
            if is_watched:
                group.create_task(_read(client.watch(run_id), watched))
            await _read(stream, turn.events)
            while (run := collect_sync(turn.events)).state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
                answers = [answer_to(request) for request in run.open_requests]
                await _read(client.resume(run_id, answers, after_sequence=turn.events[-1].sequence), turn.events)
        self._session_id = run.session_id
        if is_watched and watched != turn.events:
            self._faults.add("lost", f"{kind} {turn.told} {run_id}: a watcher saw another run than its caller")
        if run.answer != expected(kind, turn.told):
            said = run.answer or execution_pb2.ExecutionState.Name(run.state) + (
                f": {run.error.message}" if run.error else ""
            )
            self._faults.add("lost", f"{kind} {turn.told} {run_id}: the answer is {said!r}")


async def _read(stream: AsyncIterator[event_pb2.AgentEvent], into: Events) -> None:
    async for event in stream:
        into.append(event)


def _where(turn: Seen) -> str:
    if not turn.events:
        return "before its first event"
    last = turn.events[-1]
    return f"{last.run_id} at {last.WhichOneof('payload')}, {last.sequence}"
