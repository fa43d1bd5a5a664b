"""The desk case: CPU of a whole turn in the server's process, beside bare loops that make the same model calls."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk_team import write_project
from bench.desk_turns import MODEL_CALLS, PASSTHROUGH, Turns
from bench.figures import Aim, CaseResult, Figure
from bench.programs import Program, asked
from bench.servers import bough_server, calls_answered, model_server

PACE_MS: Final = 10
MANY: Final = 32

OURS: Final = "bough"
EACH_DELTA: Final = "bough, PASSTHROUGH"
TYPED: Final = "(a) openai, typed chunks"
RAW: Final = "(b) openai, raw stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the turns of a round run; `warm_up` rounds before the first are not counted."""

    name: str
    turns: int
    at_once: int
    rounds: int
    warm_up: int = 1


ONE: Final = Shape(name="1 at a time", turns=16, at_once=1, rounds=7)
ALL: Final = Shape(name=f"{MANY} at once", turns=MANY, at_once=MANY, rounds=7)
PACED: Final = Shape(name=f"{MANY} at once, {PACE_MS} ms a delta", turns=MANY, at_once=MANY, rounds=3)

AIMS: Final[Mapping[tuple[str, str], Aim]] = {
    (ONE.name, TYPED): Aim("at most", 0.5),
    (ONE.name, RAW): Aim("at most", 1.3),
    (ALL.name, TYPED): Aim("at most", 0.5),
    (ALL.name, RAW): Aim("at most", 2.0),
}


@dataclass(frozen=True, slots=True)
class Entrant:
    """A system that can run turns, and the process whose CPU time they take.

    `run` takes how many and how many at once; it gives a sentence for each that failed.
    """

    program: Program
    run: Callable[[int, int], Awaitable[Sequence[str]]]


Entrants = Mapping[str, Entrant]
Rounds = Mapping[str, Sequence[float]]


async def measure(folder: Path, *, profile: Path | None = None) -> CaseResult:
    """Runs the case in an empty folder. With `profile` the server writes its cProfile there; figures mean little."""
    failures: list[str] = []
    figures: list[Figure] = []
    async with model_server(folder) as base_url, model_server(folder, delta_interval_ms=PACE_MS) as paced_base_url:
        config = write_project(folder, base_url=base_url, paced_base_url=paced_base_url)
        async with bough_server(folder, config, profile=profile) as server:
            async with _entrants(folder, server, base_url) as entrants:
                for shape in (ONE, ALL):
                    figures += _figures(shape, await raced(shape, entrants, base_url, failures))
                peak, bare_peak = server.peak_megabytes(), entrants[RAW].program.peak_megabytes()
            async with _entrants(folder, server, paced_base_url, lead="paced_lead") as entrants:
                figures += _figures(PACED, await raced(PACED, entrants, paced_base_url, failures))
    figures += [
        Figure(case="desk", what="failed turns", unit="turns", rounds=[len(failures)], aim=Aim("at most", 0, "median")),
        Figure(
            case="desk",
            what="peak memory",
            unit="MB",
            rounds=[peak],
            floor=RAW,
            floor_rounds=[bare_peak],
            aim=Aim("under", 140, "median"),
        ),
    ]
    return CaseResult(figures=figures, failures=failures)


@asynccontextmanager
async def _entrants(folder: Path, server: Program, base_url: str, *, lead: str = "lead") -> AsyncIterator[Entrants]:
    async with AsyncExitStack() as stack:
        turns = Turns(await stack.enter_async_context(aio.insecure_channel(server.address)))
        entrants = {
            OURS: Entrant(server, partial(turns.run, agent=lead)),
            EACH_DELTA: Entrant(server, partial(turns.run, agent=lead, delta=PASSTHROUGH)),
        }
        for name, kind in ((TYPED, "typed"), (RAW, "raw")):
            program = await stack.enter_async_context(asked(folder, "desk_floor", kind, base_url))
            entrants[name] = Entrant(program, partial(_loop, program))
        yield entrants


async def _loop(program: Program, count: int, at_once: int) -> Sequence[str]:
    failed = 0
    for _ in range(count // at_once):
        failed += int((await program.ask(at_once))["failed"])
    return ["A turn of a bare loop gave another answer."] * failed


async def raced(shape: Shape, entrants: Entrants, base_url: str, failures: list[str]) -> Rounds:
    """Return CPU milliseconds of a turn, by entrant and round; each round begins with another entrant."""
    rounds: dict[str, list[float]] = {name: [] for name in entrants}
    before = await calls_answered(base_url)
    names = list(entrants)
    for number in range(shape.warm_up + shape.rounds):
        names.append(names.pop(0))
        for name in names:
            entrant = entrants[name]
            start = entrant.program.cpu_seconds()
            failures += await entrant.run(shape.turns, shape.at_once)
            if number >= shape.warm_up:
                rounds[name].append((entrant.program.cpu_seconds() - start) * 1000 / shape.turns)
    turns = shape.turns * (shape.warm_up + shape.rounds) * len(entrants)
    calls = await calls_answered(base_url) - before
    if calls != turns * MODEL_CALLS:
        failures.append(f"{turns} turns took {calls} model calls instead of {turns * MODEL_CALLS}.")
    return rounds


def _figures(shape: Shape, rounds: Rounds) -> list[Figure]:
    return [
        Figure(
            case="desk",
            what=f"CPU of a turn, {shape.name}{'' if ours == OURS else ', PASSTHROUGH'}",
            unit="ms",
            rounds=rounds[ours],
            floor=floor,
            floor_rounds=rounds[floor],
            aim=AIMS.get((shape.name, floor)) if ours == OURS else None,
        )
        for ours in (OURS, EACH_DELTA)
        for floor in (TYPED, RAW)
    ]
