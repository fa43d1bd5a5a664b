"""The usage case: sums over a ledger of a million lines, and a balance, on SQLite and on PostgreSQL."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, insert

from bench.figures import Aim, CaseResult, Figure
from bench.postgres import postgres
from bough.v1 import usage_pb2
from bough_server.identity import Principal, Scope, WholeTenant
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.accounts import AccountKey, StoredAdjustment
from bough_server.store.ports.runs import Page
from bough_server.store.ports.usage import UsageFilter
from bough_server.store.sql.tables import usage_entries

LINES: Final = 1_000_000
TENANTS: Final = 20
USERS: Final = 400
DAYS: Final = 90
DAY_NS: Final = 86_400 * 10**9
BEGIN_NS: Final = 1_700_000_000_000_000_000
MONTH_NS: Final = BEGIN_NS + (DAYS - 30) * DAY_NS
"""Where the last month begins."""

ROUNDS: Final = 7
_BATCH: Final = 10_000

_USER: Final = Principal(tenant_id="tenant-3", user_id="user-3")
_TENANT: Final = WholeTenant(tenant_id="tenant-3")
_KEY: Final = AccountKey(tenant_id="tenant-3", user_id="user-3", currency_code="USD")


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    figures = await _measure("SQLite", f"sqlite:///{folder / 'usage.db'}")
    with postgres() as server:
        if server is not None:
            figures += await _measure("PostgreSQL", server.new_database())
    return CaseResult(figures=figures)


async def _measure(name: str, url: str) -> list[Figure]:
    async with open_store(url, durability="process") as store:
        for batch in _batches():
            await store.write(partial(_insert, batch))
        if name == "PostgreSQL":  # as its own daemon does within a minute
            await store.write(lambda connection: connection.exec_driver_sql("ANALYZE usage_entries"))
        adjustment = StoredAdjustment(
            request_id="p", amount_nanos=10**12, currency_code="USD", note="", time_ns=BEGIN_NS, made_by=""
        )
        await store.accounts.adjust(_KEY, adjustment)
        by_both = [usage_pb2.USAGE_DIMENSION_USER, usage_pb2.USAGE_DIMENSION_MODEL]
        return [
            await _time(name, "usage of a user's month", 10, partial(_sum, store, _USER, [])),
            await _time(name, "usage of a tenant's month", 20, partial(_sum, store, _TENANT, [])),
            await _time(
                name, "usage of a tenant's month by user and model", 200, partial(_sum, store, _TENANT, by_both)
            ),
            await _time(name, "a balance after 90 days without a snapshot", None, partial(_read_balance, store)),
        ]


async def _time(name: str, what: str, most: float | None, call: Callable[[], object]) -> Figure:
    rounds: list[float] = []
    for number in range(ROUNDS + 1):
        begun = time.perf_counter()
        await call()  # type: ignore[misc]
        if number:
            rounds.append((time.perf_counter() - begun) * 1000)
    aim = None if most is None else Aim("under", most, "median")
    return Figure(case="usage", what=f"{what}, {LINES:,} lines, {name}", unit="ms", rounds=rounds, aim=aim)


async def _sum(store: Store, scope: Scope, group_by: list[usage_pb2.UsageDimension.ValueType]) -> None:
    groups, _ = await store.usage.list_groups(scope, UsageFilter(from_ns=MONTH_NS), group_by, Page(size=1000))
    assert sum(group.usage.model_calls for group in groups) > 0


async def _read_balance(store: Store) -> None:
    (sums,) = await store.accounts.read_sums([_KEY])
    assert 0 < sums.balance_nanos < 10**12


def _insert(batch: list[Mapping[str, object]], connection: Connection) -> None:
    connection.execute(insert(usage_entries), batch)


def _batches() -> Iterator[list[Mapping[str, object]]]:
    """Yield the lines in the order of their times, a start of a run before every nineteen attempts."""
    chance = random.Random(7)
    for first in range(0, LINES, _BATCH):
        yield [_line(number, chance) for number in range(first, first + _BATCH)]


def _line(number: int, chance: random.Random) -> Mapping[str, object]:
    user, is_start = chance.randrange(USERS), number % 20 == 0
    used: Mapping[str, object] = {
        "input_tokens": 1_000,
        "output_tokens": 200,
        "total_tokens": 1_200,
        "cost_nanos": 9_000,
    }
    return {
        "run_id": f"{number // 20:036d}",
        "sequence": number % 20,
        "tenant_id": f"tenant-{user % TENANTS}",
        "user_id": f"user-{user}",
        "session_id": f"{number // 100:036d}",
        "agent": f"agent-{chance.randrange(5)}",
        "invocation_id": f"{number // 5:036d}",
        "model": "" if is_start else f"model-{chance.randrange(4)}",
        "time_ns": BEGIN_NS + number * DAYS * DAY_NS // LINES,
        "model_calls": 0 if is_start else 1,
        "model_calls_without_usage": 0,
        "currency_code": "" if is_start else "USD",
        "kind": int(is_start),
        "charge_nanos": 0 if is_start else 9_000,
        **({} if is_start else used),
        **(dict.fromkeys(used) if is_start else {}),
    }
