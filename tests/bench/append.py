"""The append case: events a second through the EventLog port, each awaited on disk, beside a bare sqlite3 writer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bough_server import ids
from bough_server.store.opening import open_store
from bough_server.store.ports import EventLog, Record
from bough_server.store.sql.options import Durability
from bough_server.store.sql.writer import CommitHooks
from tests.bench.figures import Aim, CaseResult, Figure
from tests.bench.long_logs import NOW_NS, deltas, new_run
from tests.bench.sqlite_floor import BareWriter

ROUNDS: Final = 7
MANY: Final = 128
EVENTS: Final = {1: 500, MANY: 40 * MANY}
"""How many events a round appends, by the number of runs that append at once."""

FLOOR: Final = "bare sqlite3 thread"
_SYNCHRONOUS: Final[dict[Durability, str]] = {"disk": "FULL", "process": "NORMAL"}

Logs = dict[str, list[Record]]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round measured."""

    events_per_second: float
    commits_per_event: float


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    figures: list[Figure] = []
    for durability in _SYNCHRONOUS:
        for runs in EVENTS:
            figures += await _compared(folder, durability, runs)
    return CaseResult(figures=figures)


async def _compared(folder: Path, durability: Durability, runs: int) -> Sequence[Figure]:
    ours: list[Round] = []
    floor: list[Round] = []
    for number in range(ROUNDS + 1):
        logs = _logs(runs)
        path = folder / f"{durability}-{runs}-{number}"
        entrants = [(ours, _store_round), (floor, _bare_round)]
        for rounds, run in entrants if number % 2 else reversed(entrants):
            rounds.append(await run(path.with_name(f"{path.name}-{run.__name__}.db"), durability, logs))
    return _figures(_SYNCHRONOUS[durability], runs, ours[1:], floor[1:])


def _figures(synchronous: str, runs: int, ours: Sequence[Round], floor: Sequence[Round]) -> Sequence[Figure]:
    who = f"{runs} runs" if runs > 1 else "1 run"
    speed = Figure(
        case="append",
        what=f"awaited appends, {who}, {synchronous}",
        unit="events/s",
        rounds=[one.events_per_second for one in ours],
        floor=FLOOR,
        floor_rounds=[one.events_per_second for one in floor],
        aim=Aim("more than", 0.5),
    )
    if runs == 1:
        return [speed]
    commits = Figure(
        case="append",
        what=f"commits of an event, {who}, {synchronous}",
        unit="commits",
        rounds=[one.commits_per_event for one in ours],
        aim=Aim("under", 1 / 16, "median"),
    )
    return [speed, commits]


def _logs(runs: int) -> Logs:
    names = [ids.new_uuid7(NOW_NS) for _ in range(runs)]
    return {name: list(deltas(name, EVENTS[runs] // runs)) for name in names}


async def _store_round(path: Path, durability: Durability, logs: Logs) -> Round:
    commits = 0

    def count() -> None:
        nonlocal commits
        commits += 1

    store = open_store(str(path), durability=durability, hooks=CommitHooks(after=count))
    log: EventLog = store.log
    try:
        for run_id in logs:
            await log.create(new_run(run_id))
        accepted = commits
        seconds = await _timed(logs, lambda run_id, record: log.append(run_id, epoch=1, records=(record,)))
    finally:
        await store.close()
    return _round(logs, seconds, commits - accepted)


async def _bare_round(path: Path, durability: Durability, logs: Logs) -> Round:
    writer = BareWriter(path, synchronous=_SYNCHRONOUS[durability])
    try:
        seconds = await _timed(
            logs, lambda run_id, record: writer.append((run_id, record.sequence, record.kind, record.data))
        )
    finally:
        writer.close()
    return _round(logs, seconds, writer.commits)


async def _timed(logs: Logs, append: Callable[[str, Record], Awaitable[None]]) -> float:
    """Seconds until every run has appended its events, each after the one before was committed."""

    async def write(run_id: str, records: Sequence[Record]) -> None:
        for record in records:
            await append(run_id, record)

    start = time.perf_counter()
    await asyncio.gather(*(write(run_id, records) for run_id, records in logs.items()))
    return time.perf_counter() - start


def _round(logs: Logs, seconds: float, commits: int) -> Round:
    count = sum(map(len, logs.values()))
    return Round(count / seconds, commits / count)
