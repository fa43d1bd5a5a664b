"""Live clients of servers that are killed again and again; each takes turn after turn and judges only what it sees."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

from grpc import aio

from bough import AsyncClient, Rejoining
from bough.channel import async_channel
from bough.collection import collect_sync
from bough.v1 import event_pb2, execution_pb2
from tests.durability.torture_team import KINDS, answer_to, expected

TURN_SECONDS: Final = 120.0
"""How long a turn may take, kills included, before it counts as stuck."""

READ_SECONDS: Final = 60.0
"""How long it may take to read all runs once more, when nothing happens any more."""

_WATCHED_EVERY: Final = 4

REJOINING: Final = Rejoining(first_delay=0.02, longest_delay=0.5, timeout=TURN_SECONDS, connect_timeout=TURN_SECONDS)

Events = list[event_pb2.AgentEvent]


@dataclass(slots=True)
class Faults:
    """What went wrong, by how it counts, and in words."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        """Counts a fault: `duplicates`, `lost`, `stuck`, `unfinished`, `overcharged` or `uncharged`."""
        self.counts[kind] += 1
        self.said.append(f"{kind}: {what}")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a client has seen of a turn."""

    told: str
    events: Events = field(default_factory=list)
    watched: list[Events] = field(default_factory=list)
    """What others have seen: a second client while the turn ran, and one at each server at the end."""
    seconds: float = 0.0


class _ChangingChannel:
    """A channel to several servers, as far as clients use one: each call goes to the next one of an order."""

    def __init__(self, channels: Mapping[str, aio.Channel], order: Iterator[int], made: list[str]) -> None:
        self._channels, self._addresses, self._order, self._made = channels, [*channels], order, made

    def unary_unary(self, method: str, **options: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._any(method, {each: one.unary_unary(method, **options) for each, one in self._channels.items()})

    def unary_stream(self, method: str, **options: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._any(method, {each: one.unary_stream(method, **options) for each, one in self._channels.items()})

    def stream_unary(self, method: str, **options: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._any(method, {each: one.stream_unary(method, **options) for each, one in self._channels.items()})

    def _any(self, method: str, calls: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            address = self._addresses[next(self._order)]
            self._made.append(f"{time.strftime('%H:%M:%S')} {method.rpartition('/')[2]} at {address}")
            return calls[address](*arguments, **options)

        return call


@asynccontextmanager
async def changing_client(
    addresses: Sequence[str], order: Iterator[int], made: list[str] | None = None
) -> AsyncIterator[AsyncClient]:
    """A client whose calls, those that rejoin among them, go to the servers in an order of their numbers.

    They are added to `made`.
    """
    async with AsyncExitStack() as stack:
        channels = {each: await stack.enter_async_context(async_channel(each, None, ())) for each in addresses}
        channel = cast(aio.Channel, _ChangingChannel(channels, order, [] if made is None else made))
        yield AsyncClient(timeout=TURN_SECONDS, rejoining=REJOINING, channel=channel)


def other_servers(count: int, seed: str) -> Iterator[int]:
    """Numbers below a count at random, each another than the one before."""
    chance = random.Random(seed)
    last = chance.randrange(count)
    while True:
        yield last
        last = chance.choice([number for number in range(count) if number != last] or [last])


class Client:
    """One caller with a separate session, who answers every request; now and then a second client watches.

    Where there are several servers it always does, through another one.
    """

    def __init__(self, addresses: Sequence[str], number: int, faults: Faults, *, seed: int) -> None:
        self._addresses, self._number, self._faults = addresses, number, faults
        self._order = other_servers(len(addresses), f"{seed} {number}")
        self._session_id = ""
        self._made: list[str] = []
        self.turns: list[Seen] = []

    async def take_turns(self, over: asyncio.Event, *, at_least: int = 1) -> None:
        """Takes one turn after the other until it is over."""
        async with changing_client(self._addresses, self._order, self._made) as client:
            while not over.is_set() or len(self.turns) < at_least:
                number = len(self.turns)
                kind = KINDS[(self._number + number) % len(KINDS)]
                turn = Seen(told=f"c{self._number}t{number}")
                is_watched = len(self._addresses) > 1 or number % _WATCHED_EVERY == 0
                self.turns.append(turn)
                began = time.monotonic()
                try:
                    async with asyncio.timeout(TURN_SECONDS):
                        await self._turn(client, kind, turn, is_watched=is_watched)
                except TimeoutError:
                    self._faults.add("stuck", f"{kind} {turn.told} {_where(turn)}; last calls: {self._made[-4:]}")
                    self._session_id = ""
                except Exception as error:
                    self._faults.add("lost", f"{kind} {turn.told} {_where(turn)}: {error!r}")
                    self._session_id = ""
                finally:
                    turn.seconds = time.monotonic() - began

    async def _turn(self, client: AsyncClient, kind: str, turn: Seen, *, is_watched: bool) -> None:
        stream = client.run(kind, turn.told, session_id=self._session_id)
        async with asyncio.TaskGroup() as group:
            run_id = await stream.started()
            if is_watched:
                turn.watched.append([])
                group.create_task(_read(client.watch(run_id), turn.watched[-1]))
            await _read(stream, turn.events)
            while (run := collect_sync(turn.events)).state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
                answers = [answer_to(request) for request in run.open_requests]
                await _read(client.resume(run_id, answers, after_sequence=turn.events[-1].sequence), turn.events)
        self._session_id = run.session_id
        if run.answer != expected(kind, turn.told):
            said = run.answer or execution_pb2.ExecutionState.Name(run.state) + (
                f": {run.error.message}" if run.error else ""
            )
            self._faults.add("lost", f"{kind} {turn.told} {run_id}: the answer is {said!r}")


async def read_everywhere(addresses: Sequence[str], turns: Sequence[Seen], faults: Faults) -> None:
    """Reads the run of each turn once more, at each server."""
    async with AsyncExitStack() as stack:
        # Rejoining, because a server may be starting still: the others have finished its clients' turns.
        made = [AsyncClient(address, timeout=READ_SECONDS, rejoining=REJOINING) for address in addresses]
        clients = [await stack.enter_async_context(client) for client in made]
        begun = [turn for turn in turns if turn.events]
        await asyncio.gather(*(_read_again(client, turn, faults) for client in clients for turn in begun))


async def _read_again(client: AsyncClient, turn: Seen, faults: Faults) -> None:
    read: Events = []
    turn.watched.append(read)
    try:
        await _read(client.watch(turn.events[0].run_id), read)
    except Exception as error:
        faults.add("lost", f"{turn.events[0].run_id} cannot be read at {client.address}: {error!r}")


async def _read(stream: AsyncIterator[event_pb2.AgentEvent], into: Events) -> None:
    async for event in stream:
        into.append(event)


def _where(turn: Seen) -> str:
    if not turn.events:
        return "before its first event"
    last = turn.events[-1]
    return f"{last.run_id} at {last.WhichOneof('payload')}, {last.sequence}"
