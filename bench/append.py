"""The append case: events a second through the EventLog port, each awaited on disk, beside a bare sqlite3 writer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import Aim, CaseResult, Figure
from bench.long_logs import NOW_NS, deltas, new_run
from bench.sqlite_floor import BareWriter
from bough_server import ids
from bough_server.store.opening import open_store
from bough_server.store.ports.log import EventLog, LogEvent
from bough_server.store.sql.options import Durability
from bough_server.store.sql.writer import CommitHooks

ROUNDS: Final = 7
MANY: Final = 128
EVENTS: Final = {1: 500, MANY: 40 * MANY}
"""How many events a round appends, by the number of runs that append at once."""

FLOOR: Final = "bare sqlite3 thread"
_SYNCHRONOUS: Final[dict[Durability, str]] = {"disk": "FULL", "process": "NORMAL"}

Logs = dict[str, list[LogEvent]]
"""The events to append, by run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round measured; CPU in microseconds, of this process and of the database's, if that has its own."""

    events_per_second: float
    commits_per_event: float
    cpu_per_event: float
    database_cpu_per_event: float


_Run = Callable[[str, Durability, Logs], Awaitable[Round]]


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
        logs = new_logs(runs, EVENTS[runs])
        path = folder / f"{durability}-{runs}-{number}"
        entrants: list[tuple[list[Round], _Run]] = [(ours, store_round), (floor, _bare_round)]
        for rounds, run in entrants if number % 2 else reversed(entrants):
            rounds.append(await run(f"{path}-{'ours' if rounds is ours else 'floor'}.db", durability, logs))
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


def new_logs(runs: int, events: int) -> Logs:
    """Return events of new runs, so many of all of them together."""
    names = [ids.new_uuid7(NOW_NS) for _ in range(runs)]
    return {name: list(deltas(name, events // runs)) for name in names}


def _none() -> float:
    return 0.0


async def store_round(
    url: str, durability: Durability, logs: Logs, *, database_cpu: Callable[[], float] = _none
) -> Round:
    """Append events to a new database through the log's port."""
    commits = 0

    def count() -> None:
        nonlocal commits
        commits += 1

    store = open_store(url, durability=durability, hooks=CommitHooks(after=count))
    log: EventLog = store.log
    try:
        for run_id in logs:
            await log.create(new_run(run_id))
        accepted = commits
        return await timed(
            logs,
            lambda run_id, record: log.append(run_id, epoch=1, log_events=(record,)),
            commits=lambda: commits - accepted,
            database_cpu=database_cpu,
        )
    finally:
        await store.close()


async def _bare_round(path: str, durability: Durability, logs: Logs) -> Round:
    writer = BareWriter(Path(path), synchronous=_SYNCHRONOUS[durability])
    try:
        return await timed(
            logs,
            lambda run_id, record: writer.append((run_id, record.sequence, record.kind, record.data)),
            commits=lambda: writer.commits,
        )
    finally:
        writer.close()


async def timed(
    logs: Logs,
    append: Callable[[str, LogEvent], Awaitable[None]],
    *,
    commits: Callable[[], int],
    database_cpu: Callable[[], float] = _none,
) -> Round:
    """Let every run append its events, each after the one before was committed.

    `commits` returns how many commits there were so far, `database_cpu` the seconds that the database has used.
    """

    async def write(run_id: str, records: Sequence[LogEvent]) -> None:
        for record in records:
            await append(run_id, record)

    database, cpu, start = database_cpu(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(write(run_id, records) for run_id, records in logs.items()))
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    count = sum(map(len, logs.values()))
    return Round(
        events_per_second=count / seconds,
        commits_per_event=commits() / count,
        cpu_per_event=used * 1e6 / count,
        database_cpu_per_event=(database_cpu() - database) * 1e6 / count,
    )
