"""The usage ledger: read here, written in the transactions of the events that carry the usage."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Row, bindparam, select

from bough.v1 import message_pb2
from bough_server.store.ports import UsageEntry
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers

_usage = tables.usage_entries.c

_OF_RUN: Final = select(tables.usage_entries).where(_usage.run_id == bindparam("run")).order_by(_usage.sequence)


class SqlUsageLedger:
    """UsageLedger on one SQLite file."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def of_run(self, run_id: str) -> Sequence[UsageEntry]:
        """See UsageLedger."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [_entry(row) for row in rows]


def _entry(row: Row[Any]) -> UsageEntry:
    return UsageEntry(
        run_id=row.run_id,
        sequence=row.sequence,
        tenant_id=row.tenant_id,
        user_id=row.user_id,
        session_id=row.session_id,
        agent=row.agent,
        invocation_id=row.invocation_id,
        model=row.model,
        time_ns=row.time_ns,
        usage=message_pb2.Usage.FromString(row.usage),
    )
