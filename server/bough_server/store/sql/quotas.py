"""Quotas on runs, checked in the transaction that creates a run.

On PostgreSQL the tenant is locked before (see Driver.lock), so that the counts include the runs of all servers.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, bindparam, func, literal_column, select

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
_CONCURRENT: Final = select(func.count()).where(_runs.tenant_id == bindparam("tenant"), _EXECUTING, tables.IS_RUN)
_CONCURRENT_OF_USER: Final = _CONCURRENT.where(_runs.user_id == bindparam("user"))

_STARTED: Final = (
    _usage.tenant_id == bindparam("tenant"),
    _usage.time_ns > bindparam("first"),
    _usage.time_ns <= bindparam("last"),
    IS_START,
)
_START: Final = (
    select(_usage.time_ns)
    .where(*_STARTED)
    .order_by(_usage.time_ns.desc())
    .limit(literal_column("1"))
    .offset(bindparam("before"))
)
_START_OF_USER: Final = _START.where(_usage.user_id == bindparam("user"))
_STARTS: Final = select(func.count(), func.min(_usage.time_ns)).where(*_STARTED)
_STARTS_OF_USER: Final = _STARTS.where(_usage.user_id == bindparam("user"))

MINUTE_NS: Final = 60_000_000_000


def check_quotas(connection: Connection, quotas: Sequence[Quota], *, now_ns: int) -> None:
    """Raise QuotaExceeded if one of these quotas does not allow another run."""
    for quota in quotas:
        most = quota.limits.concurrent_runs
        if most is not None and count_concurrent_runs(connection, quota) >= most:
            raise QuotaExceeded(quota, "concurrent_runs")
        most = quota.limits.runs_per_minute
        if most is None:
            continue
        if (start_ns := find_start(connection, quota, now_ns=now_ns, number=most)) is not None:
            # There is room as soon as this one, and so all before it, have left the minute.
            raise QuotaExceeded(quota, "runs_per_minute", retry_delay=(start_ns + MINUTE_NS - now_ns) / 1e9)


def count_concurrent_runs(connection: Connection, quota: Quota) -> int:
    """Return how many runs of a quota's tenant or user are queued or executed."""
    statement = _CONCURRENT if quota.user_id is None else _CONCURRENT_OF_USER
    return connection.execute(statement, _parameters(quota)).scalar_one()


def find_start(connection: Connection, quota: Quota, *, now_ns: int, number: int) -> int | None:
    """Return the time of the start with this number, counted from the last one, if it was within a minute.

    A start of a server whose clock is ahead counts too, by less than a minute: if a clock was set back by more, what
    started before that does not keep runs from starting now.
    """
    statement = _START if quota.user_id is None else _START_OF_USER
    parameters = {**_parameters(quota), **_window(now_ns), "before": number - 1}
    return connection.execute(statement, parameters).scalar_one_or_none()


class SqlRunCounter:
    """RunCounter on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def count_runs(self, quota: Quota, *, now_ns: int) -> RunCounts:
        """See RunCounter."""
        return await self._readers.run(lambda connection: _count_runs(connection, quota, now_ns))


def _count_runs(connection: Connection, quota: Quota, now_ns: int) -> RunCounts:
    statement = _STARTS if quota.user_id is None else _STARTS_OF_USER
    started, oldest_ns = connection.execute(statement, {**_parameters(quota), **_window(now_ns)}).one()
    return RunCounts(
        concurrent=count_concurrent_runs(connection, quota),
        started=started,
        next_leave_ns=None if oldest_ns is None else oldest_ns + MINUTE_NS,
    )


def _window(now_ns: int) -> dict[str, object]:
    return {"first": now_ns - MINUTE_NS, "last": now_ns + MINUTE_NS}


def _parameters(quota: Quota) -> dict[str, object]:
    return {"tenant": quota.tenant_id} if quota.user_id is None else {"tenant": quota.tenant_id, "user": quota.user_id}
