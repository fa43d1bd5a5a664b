"""Rounds of the desk on every contestant in turn: CPU and time of a turn, peak memory, failed turns."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypedDict

from bench.desk import MANY, Shape
from bench.desk_turns import MODEL_CALLS
from bench.machine import machine, versions
from bench.peers import environments
from bench.peers.contestants import Contestant, Ground, Runner
from bench.peers.environments import EnvironmentFailed
from bench.programs import ProgramFailed
from bench.servers import calls_answered, model_server

ROUNDS: Final = 5


class Laps(TypedDict):
    """What one contestant took in one shape, round by round: milliseconds of a turn; and how many turns failed."""

    cpu: list[float]
    p50: list[float]
    first: list[float]
    turns: int
    failed: int


class Result(TypedDict):
    """What one contestant took."""

    name: str
    version: str
    kept: str
    durable: str
    tree: str
    is_peer: bool
    is_streamed: bool
    laps: dict[str, Laps]
    peak: float
    """MB of 1,000,000 bytes."""


class PeersReport(TypedDict):
    """`bench-peers.json`."""

    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    rounds: int
    results: list[Result]
    failures: list[str]
    """What went wrong, each sentence once; the first of them, if many turns failed alike."""
    left_out: list[str]
    """Which peers did not run, and why."""


def shapes(rounds: int, *, at_once: int = MANY) -> Sequence[Shape]:
    """Return turns one after the other, and some at once."""
    return (
        Shape(name="1 at a time", turns=max(at_once // 2, 1), at_once=1, rounds=rounds),
        Shape(name=f"{at_once} at once", turns=at_once, at_once=at_once, rounds=rounds),
    )


async def race(folder: Path, contestants: Sequence[Contestant], kinds: Sequence[Shape]) -> PeersReport:
    """Run the contestants in an empty folder."""
    report = PeersReport(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        versions=versions(),
        rounds=kinds[0].rounds,
        results=[],
        failures=[],
        left_out=[],
    )
    pythons = _pythons(contestants, report)
    async with model_server(folder) as base_url, AsyncExitStack() as stack:
        runners: dict[str, Runner] = {}
        for number, one in enumerate(contestants):
            if one.environment not in pythons:
                continue
            place = folder / f"contestant-{number}"
            place.mkdir()
            ground = Ground(folder=place, base_url=base_url, python=pythons[one.environment])
            try:
                runners[one.name] = await stack.enter_async_context(one.start(ground))
            except (ProgramFailed, TimeoutError) as error:
                _leave_out(f"{one.name}: {str(error) or 'it did not start in time'}", report)
        report["results"] = [_empty(one, kinds) for one in contestants if one.name in runners]
        for kind in kinds:
            await _run_rounds(kind, runners, base_url, report)
        for result in report["results"]:
            result["peak"] = runners[result["name"]].program.peak_megabytes()
    return report


def _pythons(contestants: Sequence[Contestant], report: PeersReport) -> Mapping[str, str]:
    """The interpreters of those environments that are there, or could be made."""
    pythons = {"": sys.executable}
    for name in dict.fromkeys(one.environment for one in contestants if one.environment):
        try:
            pythons[name] = environments.python_of(name)
        except EnvironmentFailed as error:
            _leave_out(f"{name} could not be installed. {error}", report)
    return pythons


def _leave_out(why: str, report: PeersReport) -> None:
    print(f"LEFT OUT: {why}", file=sys.stderr, flush=True)
    report["left_out"].append(why)


def _empty(one: Contestant, kinds: Sequence[Shape]) -> Result:
    return Result(
        name=one.name,
        version=(environments.pins(one.environment) if one.environment else versions()).get(one.package, ""),
        kept=one.kept,
        durable=one.durable,
        tree=one.tree,
        is_peer=one.is_peer,
        is_streamed=one.is_streamed,
        laps={kind.name: Laps(cpu=[], p50=[], first=[], turns=0, failed=0) for kind in kinds},
        peak=0.0,
    )


async def _run_rounds(kind: Shape, runners: Mapping[str, Runner], base_url: str, report: PeersReport) -> None:
    """Run every round of a shape; each begins with another contestant, and the first ones are warm-ups."""
    for number in range(kind.warm_up + kind.rounds):
        print(f"{kind.name}, round {number} of {kind.rounds}", file=sys.stderr, flush=True)
        for result in _rotated(report["results"], number):
            try:
                laps, failures = await _lap(kind, runners[result["name"]], base_url)
            except (ProgramFailed, ProcessLookupError, TimeoutError) as error:
                _leave_out(
                    f"{result['name']} stopped, {kind.name}: {str(error) or 'it did not answer in time'}", report
                )
                report["results"].remove(result)
                continue
            told = [f"{result['name']}, {kind.name}: {failure}" for failure in failures]
            report["failures"] = list(dict.fromkeys([*report["failures"], *told]))
            if number >= kind.warm_up:
                _add(laps, result["laps"][kind.name])


async def _lap(kind: Shape, runner: Runner, base_url: str) -> tuple[Laps, Sequence[str]]:
    """Run one round of one contestant; return what it took and why turns failed."""
    calls, start = await calls_answered(base_url), runner.program.cpu_seconds()
    lap = await runner.run(kind.turns, kind.at_once)
    cpu = (runner.program.cpu_seconds() - start) * 1000 / kind.turns
    made = await calls_answered(base_url) - calls
    failures = list(lap.failures)
    if made != kind.turns * MODEL_CALLS and not failures:
        failures.append(f"{kind.turns} turns took {made} model calls instead of {kind.turns * MODEL_CALLS}.")
    has_times = len(lap.failures) < kind.turns
    return Laps(
        cpu=[cpu],
        p50=[lap.p50 * 1000] if has_times else [],
        first=[lap.first_p50 * 1000] if has_times else [],
        turns=kind.turns,
        failed=len(failures),
    ), failures


def _rotated(results: Sequence[Result], number: int) -> list[Result]:
    first = number % max(len(results), 1)
    return [*results[first:], *results[:first]]


def _add(laps: Laps, to: Laps) -> None:
    to["cpu"] += laps["cpu"]
    to["p50"] += laps["p50"]
    to["first"] += laps["first"]
    to["turns"] += laps["turns"]
    to["failed"] += laps["failed"]
