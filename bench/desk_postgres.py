"""The desk-postgres case: CPU of a desk turn of a server on PostgreSQL, beside one on SQLite."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk import ALL, ONE, Entrant, Shape, raced
from bench.desk_team import write_project
from bench.desk_turns import PASSTHROUGH, Turns
from bench.figures import Aim, CaseResult, Figure
from bench.postgres import Postgres, postgres
from bench.servers import bough_server, model_server

SQLITE: Final = "SQLite"
POSTGRES: Final = "PostgreSQL"
_EACH_DELTA: Final = ", PASSTHROUGH"


Run = Callable[[int, int], Awaitable[Sequence[str]]]


class Meter:
    """Turns on PostgreSQL, and what each round of them takes of PostgreSQL's CPU, in milliseconds a turn."""

    def __init__(self, run: Run, database: Postgres) -> None:
        self._run, self._database = run, database
        self.rounds: list[float] = []

    async def run(self, count: int, at_once: int) -> Sequence[str]:
        """Run so many turns; return a sentence for each that failed."""
        start = self._database.cpu_seconds()
        failures = await self._run(count, at_once)
        self.rounds.append((self._database.cpu_seconds() - start) * 1000 / count)
        return failures


async def measure(folder: Path, *, shapes: Sequence[Shape] = (ONE, ALL)) -> CaseResult:
    """Runs the case in an empty folder."""
    figures: list[Figure] = []
    failures: list[str] = []
    async with AsyncExitStack() as stack:
        database = stack.enter_context(postgres())
        if database is None:
            return CaseResult(figures=[])
        base_url = await stack.enter_async_context(model_server(folder))
        storages = {SQLITE: "bench.db", POSTGRES: database.new_database()}
        entrants: dict[str, Entrant] = {}
        for name, storage in storages.items():
            place = folder / name
            place.mkdir()
            server = await stack.enter_async_context(
                bough_server(place, write_project(place, base_url=base_url, storage=storage))
            )
            turns = Turns(await stack.enter_async_context(aio.insecure_channel(server.address)))
            entrants[name] = Entrant(server, turns.run)
            entrants[name + _EACH_DELTA] = Entrant(server, partial(turns.run, delta=PASSTHROUGH))
        for shape in shapes:
            meters = {name: Meter(entrants[name].run, database) for name in (POSTGRES, POSTGRES + _EACH_DELTA)}
            metered = {name: Entrant(entrants[name].program, meter.run) for name, meter in meters.items()}
            rounds = await raced(shape, {**entrants, **metered}, base_url, failures)
            databases = {name: meter.rounds[shape.warm_up :] for name, meter in meters.items()}
            figures += [figure for each in ("", _EACH_DELTA) for figure in _figures(shape, each, rounds, databases)]
    return CaseResult(figures=figures, failures=failures)


def _figures(
    shape: Shape, each: str, rounds: Mapping[str, Sequence[float]], databases: Mapping[str, Sequence[float]]
) -> Sequence[Figure]:
    return [
        Figure(
            case="desk-postgres",
            what=f"CPU of a turn, {shape.name}{each}",
            unit="ms",
            rounds=rounds[POSTGRES + each],
            floor=f"the same server on {SQLITE}",
            floor_rounds=rounds[SQLITE + each],
            aim=Aim("at most", 1.3),
        ),
        Figure(
            case="desk-postgres",
            what=f"CPU of {POSTGRES} for a turn, {shape.name}{each}",
            unit="ms",
            rounds=databases[POSTGRES + each],
        ),
    ]
