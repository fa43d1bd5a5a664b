"""The recover case: a new process goes on with open runs until all are live, beside reading and parsing their logs."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import Aim, CaseResult, Figure
from bench.programs import asked

RUNS: Final = 1_000
ROUNDS: Final = 3
FLOOR: Final = "reading and parsing"

Told = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Left:
    """What was left open: runs, all their events, and those that a recovery reads, which are no deltas."""

    runs: int
    events: int
    replayed: int


async def measure(folder: Path, *, runs: int = RUNS, rounds: int = ROUNDS) -> CaseResult:
    """Runs the case in an empty folder."""
    left = await _left(folder / "left", runs)
    ours: list[Told] = []
    floor: list[Told] = []
    for number in range(rounds):
        # Recovery writes, so each round has a separate copy.
        copy = folder / "copy"
        shutil.copytree(folder / "left", copy)
        floor.append(await _once(folder, "reads", copy, runs))
        ours.append(await _once(folder, "goes-on", copy, runs))
        if number + 1 < rounds:
            shutil.rmtree(copy)
    return CaseResult(figures=_figures(left, ours, floor))


async def _left(folder: Path, runs: int) -> Left:
    told = await _once(folder.parent, "leaves", _made(folder), runs)
    return Left(runs, int(told["events"]), int(told["events"] - told["deltas"]))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def _once(folder: Path, kind: str, database: Path, runs: int) -> Told:
    async with asked(folder, "recoverer", kind) as program:
        return await program.ask(str(database), runs)


def _figures(left: Left, ours: Sequence[Told], floor: Sequence[Told]) -> Sequence[Figure]:
    each = left.events // left.runs
    what = f"{left.runs:,} runs of {each} events"

    def figure(name: str, unit: str, key: str, *, factor: float = 1.0, aim: Aim | None = None) -> Figure:
        return Figure(
            case="recover",
            what=name,
            unit=unit,
            rounds=[told[key] * factor for told in ours],
            floor=FLOOR,
            floor_rounds=[told[key] * factor for told in floor],
            aim=aim,
        )

    a_replayed = 1e6 / left.replayed
    return [
        figure(f"going on with {what}", "s", "seconds"),
        figure("time of a replayed event", "us", "seconds", factor=a_replayed, aim=Aim("under", 50, "median")),
        figure("CPU of a replayed event", "us", "cpu_seconds", factor=a_replayed),
        figure("CPU of an event, deltas among them", "us", "cpu_seconds", factor=1e6 / left.events),
        figure(f"peak memory, {left.runs:,} runs live", "MB", "megabytes"),
    ]
