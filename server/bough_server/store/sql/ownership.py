"""Leases of workers, and takeover of runs by a new owner."""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, delete, func, literal_column, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from bough_server.errors import NotFound
from bough_server.store.ports.log import AnyLogEvent, LogEvent, RunMoved
from bough_server.store.ports.runs import RunRow
from bough_server.store.ports.workers import Topic
from bough_server.store.sql import tables
from bough_server.store.sql.append import FirstEvents, is_stored, write_first
from bough_server.store.sql.driver import Reach, build_lock_name
from bough_server.store.sql.log_heads import LogHeads, refusal
from bough_server.store.sql.notifications import Notifier
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.runs import to_run_row
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

_COUNTS_OF_LEASE: Final = 1 << 40
"""More than the counts of any lease. Each lease of a worker has other counts than those before: another server that has
not seen the end of a lease would take an equal count for one that does not change."""

_CRASHED: Final = -1
"""The counter of a worker that crashed without releasing its lease, kept while it owns runs that have not ended."""

_ALIVE: Final = select(_workers.worker, _workers.counter).where(_workers.counter != _CRASHED)
_IS_ALIVE: Final = _ALIVE.where(_workers.worker == bindparam("worker"))
_CRASHED_WORKERS: Final = select(_workers.worker).where(_workers.counter == _CRASHED)
_executed = (~_runs.ended, _runs.state != literal_column(str(tables.INPUT_REQUIRED)))
"""The condition of the partial index by owner: with it, each owner below takes one lookup in the index."""
_owners = select(func.min(_runs.owner).label("owner")).where(*_executed).cte("owners", recursive=True)
_owners = _owners.union_all(
    select(select(func.min(_runs.owner)).where(*_executed, _runs.owner > _owners.c.owner).scalar_subquery()).where(
        _owners.c.owner.is_not(None)
    )
)
_FREE_OWNERS: Final = select(_owners.c.owner).where(
    _owners.c.owner.is_not(None), _owners.c.owner.not_in(select(_workers.worker).where(_workers.counter != _CRASHED))
)
"""The owners of runs to be executed that have no lease: the empty name, and workers that crashed or were declared dead.

A worker that was declared dead may already be forgotten, if it owned no run then and has created one since.
"""
_BEGIN: Final = (
    upsert(tables.workers)
    .values(worker=bindparam("worker"), counter=bindparam("first"))
    .on_conflict_do_update(index_elements=["worker"], set_={"counter": bindparam("first")})
)
_RENEW: Final = (
    update(tables.workers)
    .where(_workers.worker == bindparam("own"), _workers.counter != _CRASHED)
    .values(counter=_workers.counter + 1)
)
_EXPIRE: Final = (
    update(tables.workers)
    .where(_workers.worker == bindparam("lost"), _workers.counter == bindparam("seen"))
    .values(counter=_CRASHED)
)
_END: Final = delete(tables.workers).where(_workers.worker == bindparam("worker"))
_FORGET_CRASHED: Final = delete(tables.workers).where(
    _workers.counter == _CRASHED, _workers.worker.not_in(select(_runs.owner).where(~_runs.ended))
)

_GIVE_UP: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"), _runs.owner == bindparam("own"), ~_runs.ended)
    .values(owner=literal_column("''"))
)
_GIVE_UP_ALL: Final = (
    update(tables.runs).where(_runs.owner == bindparam("own"), ~_runs.ended).values(owner=literal_column("''"))
)
_FREE_UNKNOWN: Final = (
    update(tables.runs)
    .where(~_runs.ended, _runs.owner.not_in(select(_workers.worker)))
    .values(owner=literal_column("''"))
)
"""Lets any worker take the runs of those without a lease, such as runs that a rebuild found open again."""

_FREE: Final = (
    select(tables.runs)
    .where(
        *_executed,
        # Literally, so that the query planner knows how few runs these have, and takes the index.
        _runs.owner.in_(bindparam("owners", expanding=True, literal_execute=True)),
        _runs.run_id.not_in(bindparam("but", expanding=True)),
        tables.IS_RUN,
    )
    .order_by(_runs.create_time_ns, _runs.run_id)
    .limit(bindparam("most"))
    .with_for_update(of=tables.runs, skip_locked=True)
)
_CLAIM: Final = (
    update(tables.runs).where(_runs.run_id.in_(bindparam("claimed", expanding=True))).values(owner=bindparam("own"))
)
_CLAIMED: Final = select(_runs.run_id).where(
    _runs.run_id.in_(bindparam("claimed", expanding=True)), _runs.owner == bindparam("own"), ~_runs.ended
)

_LEASES: Final = build_lock_name("leases")
"""Locked by a transaction that may change the lease of another worker; one that only renews its own has no need to."""


class TakeOver:
    """The transaction of one takeover. If it is run again, it finds out whether it was committed before."""

    def __init__(
        self,
        heads: LogHeads,
        *,
        run_id: str,
        epoch: int,
        owner: str,
        log_events: Sequence[AnyLogEvent],
        log: Sequence[LogEvent] = (),
    ) -> None:
        self._heads, self._run_id, self._epoch, self._owner, self._log_events = heads, run_id, epoch, owner, log_events
        self._log = log
        self._has_written = False

    def __call__(self, connection: Connection) -> None:
        """Take the run over. Raises NotFound, RunMoved, and Fenced if the run has ended."""
        row = connection.execute(_ROW, {"run": self._run_id}).one_or_none()
        if row is None:
            raise NotFound("run", self._run_id)
        epoch, owner, last_sequence, ended = row
        if self._has_written and epoch == self._epoch and self._is_own(owner) and self._is_stored(connection):
            self._heads.forget(self._run_id)  # read it from disk again, whatever the earlier attempt left here
            if owner != self._owner:
                self._own(connection, last_sequence)
            return
        if ended:
            raise refusal(self._run_id)
        expected = self._log_events[0].sequence - 1 if self._log_events else last_sequence
        if (epoch, last_sequence) != (self._epoch - 1, expected):
            raise RunMoved
        self._write(connection, last_sequence + len(self._log_events))
        self._has_written = True

    def _is_own(self, owner: str) -> bool:
        """Return True if an earlier attempt can have left this owner.

        A lease of the worker that begins or ends in the same transaction gives the run up when it is repeated. Without
        events nothing tells whose the epoch is then.
        """
        return owner == self._owner or (not owner and bool(self._log_events))

    def _own(self, connection: Connection, last_sequence: int) -> None:
        taken = {"run": self._run_id, "own_epoch": self._epoch, "own": self._owner, "last": last_sequence}
        connection.execute(_TAKE, taken)

    def _is_stored(self, connection: Connection) -> bool:
        return not self._log_events or is_stored(
            connection, run_id=self._run_id, epoch=self._epoch, log_events=self._log_events
        )

    def _write(self, connection: Connection, last_sequence: int) -> None:
        self._heads.change_owner(self._run_id, self._epoch)
        self._own(connection, last_sequence)
        if not self._log_events:
            return
        # The row already counts the new records, but the log on disk, and so the fold, still ends before them.
        head = self._heads.load(connection, self._run_id, self._log)
        projected = head.fold.project(self._log_events)  # type: ignore[arg-type]  # a log has records of one class
        first = FirstEvents(
            run_id=self._run_id,
            tenant_id=head.address.tenant_id,
            session_id=head.address.session_id,
            log_events=self._log_events,
            projected=projected,
        )
        write_first(connection, first)
        if projected.end is not None:
            self._heads.forget(self._run_id)


class SqlLease:
    """Lease on SQL."""

    def __init__(
        self, queue: WriteQueue, readers: Readers, notifier: Notifier, *, crashed: frozenset[str], is_shared: bool
    ) -> None:
        self._queue, self._readers, self._notifier = queue, readers, notifier
        self._crashed = set(crashed)
        self._is_shared = is_shared
        self._begun: Counter[str] = Counter()
        """How many leases each worker has begun here."""
        self._claiming = asyncio.Lock()
        self._unknown: dict[str, _Claim] = {}
        """By worker, its last claim if the outcome is not known."""

    @property
    def is_shared(self) -> bool:
        """See Lease."""
        return self._is_shared

    def has_crashed(self, worker: str) -> bool:
        """See Lease."""
        return worker in self._crashed

    async def begin(self, worker: str) -> None:
        """See Lease."""
        first = 1 + self._begun[worker] * _COUNTS_OF_LEASE
        self._begun[worker] += 1
        beginning = partial(_begin, worker=worker, first=first, heads=self._queue.heads)
        await self._queue.execute(beginning, reach=_reach(worker), then=self._offer)
        self._crashed.discard(worker)

    async def renew(self, worker: str) -> bool:
        """See Lease."""
        return await self._queue.execute(partial(_renew, worker=worker))

    async def counters(self) -> Mapping[str, int]:
        """See Lease."""
        rows = await self._readers.run(lambda connection: connection.execute(_ALIVE).all())
        return {row.worker: row.counter for row in rows}

    async def expire(self, worker: str, counter: int) -> None:
        """See Lease."""
        expiring = partial(_expire, worker=worker, counter=counter)
        await self._queue.execute(expiring, reach=Reach(names=[_LEASES]), then=self._offer)

    async def release(self, worker: str) -> None:
        """See Lease."""
        await self._queue.execute(partial(_release, worker=worker), reach=_reach(worker), then=self._offer)

    async def give_up(self, worker: str, run_id: str) -> None:
        """See Lease."""
        giving_up = partial(_give_up, worker=worker, run_id=run_id)
        await self._queue.execute(giving_up, reach=Reach(runs=[run_id]), then=self._offer)

    async def claim(self, worker: str, *, most: int, but: Collection[str] = ()) -> Sequence[RunRow]:
        """See Lease."""
        async with self._claiming:
            # A claim that may have been committed is looked up by the next one, or its runs would never be taken over.
            claim = self._unknown.setdefault(worker, _Claim(worker))
            claim.most, claim.but = most, but
            found, lost = await self._queue.execute(claim)
            del self._unknown[worker]
        self._crashed.update(lost)
        return found

    def _offer(self) -> None:
        self._notifier.publish(Topic.UNOWNED)


def _reach(worker: str) -> Reach:
    """Return the reach of the beginning or the end of a worker's lease, which frees its runs."""
    return Reach(names=[_LEASES], runs_of_owners=[worker])


def end_leases(connection: Connection) -> frozenset[str]:
    """End the leases of all workers, and return the names of those that died without releasing one.

    Call it only while no other server can use the database: then these workers are dead. A name is kept until all its
    runs have ended or have another owner, because this server may crash too before it has taken them over.
    """
    connection.execute(update(tables.workers).values(counter=_CRASHED))
    connection.execute(_FORGET_CRASHED)
    connection.execute(_FREE_UNKNOWN)
    return frozenset(connection.execute(_CRASHED_WORKERS).scalars())


def _begin(connection: Connection, *, worker: str, first: int, heads: LogHeads) -> None:
    heads.clear()  # others write the logs that this process wrote so far
    connection.execute(_GIVE_UP_ALL, {"own": worker})
    connection.execute(_BEGIN, {"worker": worker, "first": first})


def _renew(connection: Connection, *, worker: str) -> bool:
    return connection.execute(_RENEW, {"own": worker}).rowcount == 1


def _expire(connection: Connection, *, worker: str, counter: int) -> None:
    connection.execute(_EXPIRE, {"lost": worker, "seen": counter})
    connection.execute(_FORGET_CRASHED)


def _release(connection: Connection, *, worker: str) -> None:
    connection.execute(_GIVE_UP_ALL, {"own": worker})
    connection.execute(_END, {"worker": worker})


def _give_up(connection: Connection, *, worker: str, run_id: str) -> None:
    connection.execute(_GIVE_UP, {"own": worker, "run": run_id})


class _Claim:
    """The transaction of a claim. If it is run again, it finds out whether it was committed before."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._found: Sequence[RunRow] = ()
        self.most = 0
        self.but: Collection[str] = ()

    def __call__(self, connection: Connection) -> tuple[Sequence[RunRow], Collection[str]]:
        """Claim runs; return them, and the workers that crashed or were declared dead."""
        lost = connection.execute(_CRASHED_WORKERS).scalars().all()
        if connection.execute(_IS_ALIVE, {"worker": self._worker}).one_or_none() is None:
            return (), lost  # it was taken for lost itself
        if self._found:
            own = {"own": self._worker, "claimed": [record.run.run_id for record in self._found]}
            claimed = set(connection.execute(_CLAIMED, own).scalars())
            if claimed:
                return [record for record in self._found if record.run.run_id in claimed], lost
        owners = connection.execute(_FREE_OWNERS).scalars().all()
        free = {"owners": owners, "but": list(self.but), "most": self.most}
        self._found = [to_run_row(row) for row in connection.execute(_FREE, free)]
        if self._found:
            claimed_ids = [record.run.run_id for record in self._found]
            connection.execute(_CLAIM, {"claimed": claimed_ids, "own": self._worker})
        if lost:
            connection.execute(_FORGET_CRASHED)
        return self._found, lost
