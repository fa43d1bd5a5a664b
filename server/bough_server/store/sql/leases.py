"""Leases on SQL: a counter for each worker; who is dead is for those to judge who watch the counters."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from sqlalchemy import Connection, Delete, Insert, bindparam, delete, select
from sqlalchemy.dialects.sqlite import insert as upsert

from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue

_workers = tables.workers.c

_ALL: Final = select(_workers.worker, _workers.counter)
_RENEW: Final = (
    upsert(tables.workers)
    .values(worker=bindparam("worker"), counter=1)
    .on_conflict_do_update(index_elements=["worker"], set_={"counter": _workers.counter + 1})
)
_RELEASE: Final = delete(tables.workers).where(_workers.worker == bindparam("worker"))


class SqlLease:
    """Lease on one SQLite file."""

    def __init__(self, queue: WriteQueue, readers: Readers, crashed: frozenset[str]) -> None:
        self._queue, self._readers, self._crashed = queue, readers, crashed

    def crashed(self, worker: str) -> bool:
        """See Lease."""
        return worker in self._crashed

    async def renew(self, worker: str) -> None:
        """See Lease."""
        await self._queue.execute(partial(_write, statement=_RENEW, worker=worker))

    async def counters(self) -> Mapping[str, int]:
        """See Lease."""
        rows = await self._readers.run(lambda connection: connection.execute(_ALL).all())
        return {row.worker: row.counter for row in rows}

    async def release(self, worker: str) -> None:
        """See Lease."""
        await self._queue.execute(partial(_write, statement=_RELEASE, worker=worker))


def end_leases(connection: Connection) -> frozenset[str]:
    """Ends the leases of all workers, and names them: whoever holds the file's lock knows that they are dead."""
    return frozenset(connection.execute(delete(tables.workers).returning(_workers.worker)).scalars())


def _write(connection: Connection, *, statement: Insert | Delete, worker: str) -> None:
    connection.execute(statement, {"worker": worker})
