"""The starts case: runs of one tenant that start at once, with quotas on runs beside the same without."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from bench.figures import Aim, CaseResult, Figure
from bench.long_logs import NOW_NS, PRINCIPAL, new_run
from bench.postgres import postgres
from bough_server import ids
from bough_server.quotas import QuotaLimits, Quotas, TenantQuotas
from bough_server.store.opening import open_store

ROUNDS: Final = 7
MANY: Final = 128
WARM_UP: Final = 16
"""How many runs have started in a database before those that are timed."""

LIMITS: Final = QuotaLimits(concurrent_runs=10_000, runs_per_minute=10_000)
QUOTAS: Final = Quotas(tenants={"*": TenantQuotas(of_tenant=LIMITS, of_user=LIMITS)})
FLOOR: Final = "without quotas"


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    numbers = count()
    figures = [await _compare("SQLite", lambda: f"sqlite:///{folder / f'starts-{next(numbers)}.db'}")]
    with postgres() as server:
        if server is not None:
            figures.append(await _compare("PostgreSQL", server.new_database))
    return CaseResult(figures=figures)


async def _compare(name: str, new_database: Callable[[], str]) -> Figure:
    """Each round begins with the other one; the first of each is not counted."""
    ours: list[float] = []
    floor: list[float] = []
    for number in range(ROUNDS + 1):
        entrants = [(ours, QUOTAS), (floor, Quotas())]
        for rounds, quotas in entrants if number % 2 else reversed(entrants):
            rounds.append(await _start_many(new_database(), quotas))
    return Figure(
        case="starts",
        what=f"{MANY} starts at once of one tenant with quotas, {name}",
        unit="starts/s",
        rounds=ours[1:],
        floor=FLOOR,
        floor_rounds=floor[1:],
        aim=Aim("more than", 0.5),
    )


async def _start_many(url: str, quotas: Quotas) -> float:
    """Return the starts a second of many at once in a new database."""
    found = quotas.find_on_starts(PRINCIPAL)
    async with open_store(url, durability="disk") as store:
        runs = [replace(new_run(ids.new_uuid7(NOW_NS)), quotas=found) for _ in range(WARM_UP + MANY)]
        await asyncio.gather(*(store.log.create(run) for run in runs[:WARM_UP]))
        start = time.perf_counter()
        await asyncio.gather(*(store.log.create(run) for run in runs[WARM_UP:]))
        return MANY / (time.perf_counter() - start)
