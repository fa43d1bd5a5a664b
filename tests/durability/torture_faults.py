"""What is done to tortured servers and to their database: when each is ended, stopped or restarted, and by what."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Final, Literal

from tests.durability.torture_clients import Faults
from tests.support.postgres import Cluster
from tests.support.processes import EndedBeforeServing, Serving

_WHILE_STARTING: Final = 0.2
"""How many of the kills hit a server that does not serve yet."""

_TOLD_TO_STOP: Final = 0.1
"""How many servers more are told to stop by SIGTERM, for each that is killed."""

_STOPPED: Final = 0.3
"""How many of several servers are stopped by SIGSTOP in their lives."""

_LONGEST_START: Final = 1.5
_SHORTEST_LIFE: Final = 0.3
_LONGEST_LIFE: Final = 2.5
_LONGEST_LIFE_OF_SEVERAL: Final = 15.0
"""Of several servers some have to live longer than it takes to notice that another one is lost."""

_SHORTEST_STOP: Final = 8.0
_LONGEST_STOP: Final = 20.0
_SHORTEST_USE: Final = 3.0
_LONGEST_USE: Final = 20.0
_LONGEST_OUTAGE: Final = 8.0

_NO_DATABASE: Final = 2
"""The exit code of a server that cannot use its database when it starts."""

_STARTS: Final = 60
"""How often a server that finds no database is started again."""

Start = Callable[[], AbstractAsyncContextManager[Serving]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When and how a server is ended: so many seconds after it began to start, or to serve."""

    while_starting: bool = False
    seconds: float
    stopped: float = 0.0
    """For so long it is stopped by SIGSTOP then, and lives for `seconds` once more; 0: it is not."""
    signal: Signals = SIGKILL


def moments(seed: int, kills: int, *, servers: int = 1) -> Iterator[Moment]:
    """Random moments. After a server that never served comes one that does: a run has to get on now and then."""
    chance, could_serve = random.Random(seed), True
    longest_life = _LONGEST_LIFE if servers == 1 else _LONGEST_LIFE_OF_SEVERAL
    for _ in range(kills):
        if chance.random() < _TOLD_TO_STOP:
            could_serve = True
            yield Moment(seconds=chance.uniform(_SHORTEST_LIFE, longest_life), signal=SIGTERM)
        if could_serve and chance.random() < _WHILE_STARTING:
            could_serve = False
            yield Moment(while_starting=True, seconds=chance.uniform(0, _LONGEST_START))
        else:
            could_serve = True
            is_stopped = servers > 1 and chance.random() < _STOPPED
            yield Moment(
                seconds=chance.uniform(_SHORTEST_LIFE, longest_life),
                stopped=chance.uniform(_SHORTEST_STOP, _LONGEST_STOP) if is_stopped else 0.0,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """When and how the database is restarted: so many seconds after it started last; `immediate` is a crash."""

    seconds: float
    mode: Literal["immediate", "fast"]
    outage: float
    """Seconds until it is started again."""


def restarts(seed: int) -> Iterator[Restart]:
    """Random restarts, without end."""
    chance = random.Random(seed)
    while True:
        yield Restart(
            seconds=chance.uniform(_SHORTEST_USE, _LONGEST_USE),
            mode=chance.choice(("immediate", "fast")),
            outage=chance.choice((0.0, chance.uniform(0, _LONGEST_OUTAGE))),
        )


async def restart_database(database: Cluster, when: Iterable[Restart], over: asyncio.Event) -> int:
    """Restarts a database until it is over; gives how often."""
    count = 0
    for restart in when:
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), restart.seconds)
        if over.is_set():
            break
        await asyncio.to_thread(database.stop, restart.mode)
        await asyncio.sleep(restart.outage)
        await asyncio.to_thread(database.start)
        count += 1
    return count


async def end_server(start: Start, moment: Moment, faults: Faults) -> None:
    """Starts a server and ends it at a moment."""
    async with start() if moment.while_starting else serving_again(start) as server:
        await asyncio.sleep(moment.seconds)
        if moment.stopped:
            server.send(SIGSTOP)
            await asyncio.sleep(moment.stopped)
            server.send(SIGCONT)
            await asyncio.sleep(moment.seconds)
        with suppress(ProcessLookupError):
            server.send(moment.signal)
        code = await server.end()
    usual = {-SIGKILL if moment.signal == SIGKILL else 0, *([_NO_DATABASE] if moment.while_starting else [])}
    if code not in usual:
        faults.add("lost", f"a server ended with {code}")


@asynccontextmanager
async def serving_again(start: Start) -> AsyncIterator[Serving]:
    """A server that serves; one that finds no database ends, and is started again, as an orchestrator does."""
    for _ in range(_STARTS):
        async with start() as server:
            try:
                await server.serves()
            except EndedBeforeServing:
                if await server.end() != _NO_DATABASE or "postgresql" not in server.said:
                    raise
                continue
            yield server
            return
    raise AssertionError(f"no server finds the database: {server.said[-2000:]}")


def stops(when: Sequence[Moment]) -> tuple[int, int]:
    """How many servers are told to stop, and how many are stopped for a while."""
    return sum(one.signal == SIGTERM for one in when), sum(one.stopped > 0 for one in when)
