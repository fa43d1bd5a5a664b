"""The append-postgres case: fenced events a second through the EventLog port on PostgreSQL, beside bare asyncpg."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.append import MANY, Logs, Round, new_logs, store_round, timed
from bench.asyncpg_floor import AsyncpgWriter
from bench.figures import Aim, CaseResult, Figure
from bench.postgres import Postgres, postgres

ROUNDS: Final = 7
EVENTS: Final = {1: 500, MANY: 160 * MANY}
"""How many events a round appends, by the number of runs that append at once."""

FLOOR: Final = "bare asyncpg"
FAST: Final = 10_000
"""The events a second that many runs are to append together."""


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    with postgres() as server:
        if server is None:
            return CaseResult(figures=[])
        return CaseResult(figures=[figure for runs in EVENTS for figure in await _compared(server, runs)])


async def _compared(server: Postgres, runs: int) -> Sequence[Figure]:
    """Each round begins with the other one; the first of each is not counted."""
    ours: list[Round] = []
    floor: list[Round] = []
    for number in range(ROUNDS + 1):
        logs = new_logs(runs, EVENTS[runs])
        entrants = [(ours, _our_round), (floor, _bare_round)]
        for rounds, run in entrants if number % 2 else reversed(entrants):
            rounds.append(await run(server, logs))
    return _figures("1 run" if runs == 1 else f"{runs} runs", ours[1:], floor[1:])


async def _our_round(server: Postgres, logs: Logs) -> Round:
    return await store_round(server.new_database(), "disk", logs, database_cpu=server.cpu_seconds)


async def _bare_round(server: Postgres, logs: Logs) -> Round:
    writer = await AsyncpgWriter.open(server.new_database(), logs)
    try:
        return await timed(
            logs,
            lambda run_id, record: writer.append((run_id, record.sequence, record.kind, record.data)),
            commits=lambda: writer.commits,
            database_cpu=server.cpu_seconds,
        )
    finally:
        await writer.close()


def _figures(who: str, ours: Sequence[Round], floor: Sequence[Round]) -> Sequence[Figure]:
    def figure(what: str, unit: str, value: Callable[[Round], float], aim: Aim | None = None) -> Figure:
        return Figure(
            case="append-postgres",
            what=f"{what}, {who}",
            unit=unit,
            rounds=[value(one) for one in ours],
            floor=FLOOR,
            floor_rounds=[value(one) for one in floor],
            aim=aim,
        )

    figures = [
        figure("awaited appends", "events/s", lambda one: one.events_per_second, Aim("more than", 0.5)),
        figure("CPU of an event", "us", lambda one: one.cpu_per_event),
        figure("CPU of an event, PostgreSQL's", "us", lambda one: one.database_cpu_per_event),
        figure("commits of an event", "commits", lambda one: one.commits_per_event),
    ]
    if who != "1 run":
        figures.append(replace(figures[0], floor="", floor_rounds=(), aim=Aim("more than", FAST, "median")))
    return figures
