"""Quotas on runs, checked in the transaction that creates a run.

On PostgreSQL the tenant is locked before (see Driver.lock), so that the counts include the runs of all servers.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ColumnElement, Connection, Select, bindparam, case, func, literal_column, select

from bough.v1 import execution_pb2
from bough_server.quotas import Quota, QuotaExceeded
from bough_server.store.ports.usage import RunCounts
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.usage import IS_START

_runs, _usage = tables.runs.c, tables.usage_entries.c

_EXECUTING: Final = _runs.state.in_(
    [
        literal_column(str(state))
        for state in (execution_pb2.EXECUTION_STATE_PENDING, execution_pb2.EXECUTION_STATE_RUNNING)
    ]
)
_IS_OF_USER: Final = case((_runs.user_id == bindparam("user"), literal_column("1")), else_=literal_column("0"))
_CONCURRENT: Final = select(func.count(), func.coalesce(func.sum(_IS_OF_USER), 0)).where(
    _runs.tenant_id == bindparam("tenant"), _EXECUTING, tables.IS_RUN
)
"""Runs of a tenant, and those of them that are of one user."""


def _starts(end: str) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on the starts of a tenant's runs in a minute; `end` is the name of its end."""
    return (
        _usage.tenant_id == bindparam("tenant"),
        _usage.time_ns > bindparam("begin"),
        _usage.time_ns <= bindparam(end),
        IS_START,
    )


def _select_start(end: str, before: str) -> Select[tuple[int]]:
    statement = select(_usage.time_ns).where(*_starts(end)).order_by(_usage.time_ns.desc())
    return statement.limit(literal_column("1")).offset(bindparam(before))


_LAST_STARTS: Final = select(
    _select_start("tenant_end", "tenant_before").scalar_subquery(),
    _select_start("user_end", "user_before").where(_usage.user_id == bindparam("user")).scalar_subquery(),
)
"""The time of the start of a tenant's run before which there were so many others, and the same of a user."""
_STARTS: Final = select(func.count(), func.min(_usage.time_ns)).where(*_starts("end"))
_STARTS_OF_USER: Final = _STARTS.where(_usage.user_id == bindparam("user"))

_RESERVED: Final = select(func.coalesce(func.sum(_runs.reserved_nanos), 0)).where(
    _runs.tenant_id == bindparam("tenant"),
    _runs.reserved_nanos != literal_column("0"),  # the condition of the partial index
    _runs.owner != bindparam("worker"),
)
_RESERVED_OF_USER: Final = _RESERVED.where(_runs.user_id == bindparam("user"))

MINUTE_NS: Final = 60_000_000_000


def check_quotas(connection: Connection, quotas: Sequence[Quota], *, now_ns: int) -> None:
    """Raise QuotaExceeded if one of these quotas, of one tenant and one user, does not allow another run."""
    if any(quota.limits.concurrent_runs is not None for quota in quotas):
        _check_concurrent_runs(connection, quotas)
    if any(quota.limits.runs_per_minute is not None for quota in quotas):
        _check_starts(connection, quotas, now_ns)


def _check_concurrent_runs(connection: Connection, quotas: Sequence[Quota]) -> None:
    of_tenant, of_user = connection.execute(_CONCURRENT, _subjects(quotas)).one()
    for quota in quotas:
        most, running = quota.limits.concurrent_runs, of_tenant if quota.user_id is None else of_user
        if most is not None and running >= most:
            raise QuotaExceeded(quota, "concurrent_runs")


def _check_starts(connection: Connection, quotas: Sequence[Quota], now_ns: int) -> None:
    """Check that the last start but so many was not within a minute.

    A start of a server whose clock is ahead counts too, by less than a minute: if a clock was set back by more, what
    started before that does not keep runs from starting now.
    """
    begin_ns, end_ns = now_ns - MINUTE_NS, now_ns + MINUTE_NS
    # Where there is no quota, no time is within the minute.
    asked = {**_subjects(quotas), "begin": begin_ns, "tenant_end": 0, "user_end": 0}
    asked |= {"tenant_before": 0, "user_before": 0}
    for quota in quotas:
        if (most := quota.limits.runs_per_minute) is not None:
            subject = "tenant" if quota.user_id is None else "user"
            asked |= {f"{subject}_end": end_ns, f"{subject}_before": most - 1}
    of_tenant, of_user = connection.execute(_LAST_STARTS, asked).one()
    for quota in quotas:
        start_ns = of_tenant if quota.user_id is None else of_user
        if start_ns is not None:
            # There is room as soon as this one, and so all before it, have left the minute.
            raise QuotaExceeded(quota, "runs_per_minute", retry_delay=(start_ns - begin_ns) / 1e9)


class SqlRunCounter:
    """RunCounter on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def count_runs(self, quota: Quota, *, now_ns: int) -> RunCounts:
        """See RunCounter."""
        return await self._readers.run(lambda connection: _count_runs(connection, quota, now_ns))

    async def sum_reservations(self, quota: Quota, *, but_worker: str) -> int:
        """See RunCounter."""
        statement = _RESERVED if quota.user_id is None else _RESERVED_OF_USER
        parameters = {**_subjects([quota]), "worker": but_worker}
        return await self._readers.run(lambda connection: int(connection.execute(statement, parameters).scalar_one()))


def _count_runs(connection: Connection, quota: Quota, now_ns: int) -> RunCounts:
    asked = {**_subjects([quota]), "begin": now_ns - MINUTE_NS, "end": now_ns + MINUTE_NS}
    started, oldest_ns = connection.execute(_STARTS if quota.user_id is None else _STARTS_OF_USER, asked).one()
    of_tenant, of_user = connection.execute(_CONCURRENT, asked).one()
    return RunCounts(
        concurrent=of_tenant if quota.user_id is None else of_user,
        started=started,
        next_leave_ns=None if oldest_ns is None else oldest_ns + MINUTE_NS,
    )


def _subjects(quotas: Sequence[Quota]) -> dict[str, object]:
    """Return the tenant and the user of quotas, as parameters."""
    user_id = next((quota.user_id for quota in quotas if quota.user_id is not None), "")
    return {"tenant": quotas[0].tenant_id, "user": user_id}
