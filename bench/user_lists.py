"""The lists of one user among 100,000 runs and sessions of its tenant, for the callers case."""

import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from bench.figures import Aim, Figure
from bough_server.identity import Principal
from bough_server.store.ports.runs import Page, RunFilter
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import llm, open_team, script

ROWS: Final = 100_000
USERS: Final = 500
ROUNDS: Final = 7
AIM: Final = Aim("under", 2, "median")

_LISTED: Final = 50
"""How many lists a round makes, each of another user."""


async def measure_lists(folder: Path) -> Sequence[Figure]:
    """Measure the milliseconds of CPU of a first page of 50, in an empty folder."""
    async with open_team(folder, script(clerk=["Yes."]), llm("clerk")) as harness:
        await harness.turn("clerk")
    _copy_rows(folder / "bough.db")
    async with open_team(folder, script(), llm("clerk")) as harness:
        lists = _lists_of(harness)
        rounds: dict[str, list[float]] = {name: [] for name in lists}
        for number in range(ROUNDS + 1):
            for name, read in lists.items():
                start = time.process_time()
                for place in range(_LISTED):
                    await read(Principal(tenant_id=ME.tenant_id, user_id=f"user-{(place * 37 + number) % USERS}"))
                if number:  # the first round reads the file
                    rounds[name].append((time.process_time() - start) * 1000 / _LISTED)
    return [
        Figure(
            case="callers",
            what=f"CPU of a page of 50 {name} of one user among {ROWS:,}",
            unit="ms",
            rounds=found,
            aim=AIM,
        )
        for name, found in rounds.items()
    ]


def _lists_of(harness: RunHarness) -> Mapping[str, Callable[[Principal], Awaitable[None]]]:
    async def runs(user: Principal) -> None:
        found, _ = await harness.store.runs.list(user, RunFilter(), Page(size=50))
        assert len(found) == 50

    async def sessions(user: Principal) -> None:
        found, _ = await harness.store.sessions.list(user, labels={}, page=Page(size=50))
        assert len(found) == 50

    return {"runs": runs, "sessions": sessions}


def _copy_rows(path: Path) -> None:
    """Copy the one run and its session as those of many users, one after the other."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {ROWS})"
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, name in (("sessions", "session_id"), ("runs", "run_id")):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            changed = {
                name: "printf('01a00000-0000-7000-8000-%012d', i)",
                "user_id": f"printf('user-%d', i % {USERS})",
                "create_time_ns": "create_time_ns + i",
            }
            values = ", ".join(changed.get(column, column) for column in columns)
            connection.execute(
                f"{numbers} INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table}, n LIMIT {ROWS}"
            )
