"""Leases of workers, and takeover of runs by a new owner."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection, Delete, Insert, bindparam, delete, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from bough_server.errors import NotFound
from bough_server.store.ports import LogRecord, Record, RunMoved
from bough_server.store.sql import tables
from bough_server.store.sql.append import FirstRecords, is_stored, write_first
from bough_server.store.sql.log_heads import LogHeads, refusal
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue

_runs = tables.runs.c

_ROW: Final = (
    select(_runs.epoch, _runs.owner, _runs.last_sequence, _runs.ended)
    .where(_runs.run_id == bindparam("run"))
    .with_for_update()
)
_TAKE: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"))
    .values(epoch=bindparam("own_epoch"), owner=bindparam("own"), last_sequence=bindparam("last"))
)

_workers = tables.workers.c

_CRASHED: Final = -1
"""The counter of a worker that died without releasing its lease, kept while it owns runs that have not ended."""

_ALL: Final = select(_workers.worker, _workers.counter).where(_workers.counter != _CRASHED)
_RENEW: Final = (
    upsert(tables.workers)
    .values(worker=bindparam("worker"), counter=1)
    .on_conflict_do_update(index_elements=["worker"], set_={"counter": _workers.counter + 1})
)
_RELEASE: Final = delete(tables.workers).where(_workers.worker == bindparam("worker"))


class TakeOver:
    """The transaction of one takeover. If it is run again, it finds out whether it was committed before."""

    def __init__(
        self,
        heads: LogHeads,
        *,
        run_id: str,
        epoch: int,
        owner: str,
        records: Sequence[LogRecord],
        log: Sequence[Record] = (),
    ) -> None:
        self._heads, self._run_id, self._epoch, self._owner, self._records = heads, run_id, epoch, owner, records
        self._log = log
        self._has_written = False

    def __call__(self, connection: Connection) -> None:
        """Take the run over. Raises NotFound, RunMoved, and Fenced if the run has ended."""
        row = connection.execute(_ROW, {"run": self._run_id}).one_or_none()
        if row is None:
            raise NotFound("run", self._run_id)
        epoch, owner, last_sequence, ended = row
        if self._has_written and (epoch, owner) == (self._epoch, self._owner) and self._is_stored(connection):
            self._heads.forget(self._run_id)  # read it from disk again, whatever the earlier attempt left here
            return
        if ended:
            raise refusal(self._run_id)
        expected = self._records[0].sequence - 1 if self._records else last_sequence
        if (epoch, last_sequence) != (self._epoch - 1, expected):
            raise RunMoved
        self._write(connection, last_sequence + len(self._records))
        self._has_written = True

    def _is_stored(self, connection: Connection) -> bool:
        return not self._records or is_stored(connection, run_id=self._run_id, epoch=self._epoch, records=self._records)

    def _write(self, connection: Connection, last_sequence: int) -> None:
        self._heads.change_owner(self._run_id, self._epoch)
        taken = {"run": self._run_id, "own_epoch": self._epoch, "own": self._owner, "last": last_sequence}
        connection.execute(_TAKE, taken)
        if not self._records:
            return
        # The row already counts the new records, but the log on disk, and so the fold, still ends before them.
        head = self._heads.load(connection, self._run_id, self._log)
        projected = head.fold.project(self._records)  # type: ignore[arg-type]  # a log has records of one class
        first = FirstRecords(
            run_id=self._run_id,
            tenant_id=head.address.tenant_id,
            session_id=head.address.session_id,
            records=self._records,
            projected=projected,
        )
        write_first(connection, first)
        if projected.end is not None:
            self._heads.forget(self._run_id)


class SqlLease:
    """Lease on SQL."""

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
    """End the leases of all workers, and return the names of those that died without releasing one.

    Call it only while no other server can use the database: then these workers are dead. A name
    is kept, for servers to come, until all its runs have ended or have another owner: this server may be lost as well
    before it has taken them over.
    """
    connection.execute(update(tables.workers).values(counter=_CRASHED))
    owners = select(_runs.owner).where(~_runs.ended)
    connection.execute(delete(tables.workers).where(_workers.worker.not_in(owners)))
    return frozenset(connection.execute(select(_workers.worker)).scalars())


def _write(connection: Connection, *, statement: Insert | Delete, worker: str) -> None:
    connection.execute(statement, {"worker": worker})
