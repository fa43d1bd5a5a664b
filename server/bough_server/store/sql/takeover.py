"""The transaction that gives a run another owner; whether the one before is gone is its caller's to know."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, bindparam, select, update

from bough_server.errors import NotFound
from bough_server.store.accepting import RunMoved
from bough_server.store.ports import Record
from bough_server.store.sql import tables
from bough_server.store.sql.heads import Heads, refusal
from bough_server.store.sql.statements import FirstRecords, is_stored, write_first

_runs = tables.runs.c

_ROW: Final = select(_runs.epoch, _runs.owner, _runs.last_sequence, _runs.ended).where(_runs.run_id == bindparam("run"))
_TAKE: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"))
    .values(epoch=bindparam("own_epoch"), owner=bindparam("own"), last_sequence=bindparam("last"))
)


class TakeOver:
    """One take-over. It may be run again, and then knows whether it was committed after all."""

    def __init__(self, heads: Heads, *, run_id: str, epoch: int, owner: str, records: Sequence[Record]) -> None:
        self._heads, self._run_id, self._epoch, self._owner, self._records = heads, run_id, epoch, owner, records
        self._has_written = False

    def __call__(self, connection: Connection) -> None:
        """Takes the run over. Raises NotFound, RunMoved, and Fenced where the run has ended."""
        row = connection.execute(_ROW, {"run": self._run_id}).one_or_none()
        if row is None:
            raise NotFound("run", self._run_id)
        epoch, owner, last_sequence, ended = row
        if self._has_written and (epoch, owner) == (self._epoch, self._owner) and self._is_stored(connection):
            self._heads.forget(self._run_id)
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
        head = self._heads.load(connection, self._run_id)
        projected = head.fold.project(self._records)
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
