"""Last sequence, epoch and fold of each log that is being written; kept by the writer thread, rebuilt from the log."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from bough_server import events
from bough_server.errors import Fenced
from bough_server.store.ports import Record
from bough_server.store.projected import LogAddress
from bough_server.store.projection import RunFold
from bough_server.store.sql import tables
from bough_server.store.sql.jobs import Append
from bough_server.store.sql.readers import NO_END

_ROW = select(
    tables.runs.c.tenant_id,
    tables.runs.c.user_id,
    tables.runs.c.session_id,
    tables.runs.c.epoch,
    tables.runs.c.last_sequence,
    tables.runs.c.ended,
).where(tables.runs.c.run_id == bindparam("run"))

_LOG = (
    select(tables.events.c.sequence, tables.events.c.kind, tables.events.c.data)
    .where(
        tables.events.c.run_id == bindparam("run"),
        tables.events.c.sequence <= bindparam("through"),
        tables.events.c.kind.not_in(sorted(events.DELTA_KINDS)),
    )
    .order_by(tables.events.c.sequence)
)


@dataclass(slots=True, kw_only=True)
class Head:
    """A log's end: what the next append has to match."""

    address: LogAddress
    epoch: int
    last_sequence: int
    is_ended: bool
    fold: RunFold


def stored_records(connection: Connection, run_id: str, *, through: int = NO_END) -> Iterator[Record]:
    """A log's events up to a sequence but its deltas, parsed, in order."""
    for sequence, kind, data in connection.execute(_LOG, {"run": run_id, "through": through}):
        yield Record(sequence=sequence, kind=kind, data=data, event=events.parse(data))


class LogHeads:
    """The heads of the logs that this process writes; a refusal forgets a head, so that the next is read again.

    What was refused once is poisoned: nothing later of that run is taken from its owner of then.
    """

    def __init__(self) -> None:
        self._heads: dict[str, Head] = {}
        self._poisoned: dict[tuple[str, int], Exception] = {}

    def put(self, head: Head) -> None:
        """Begins a new log."""
        self._heads[head.address.run_id] = head

    def forget(self, run_id: str) -> None:
        """Lets the next append read the log's end from the disk."""
        self._heads.pop(run_id, None)

    def prepare(self, connection: Connection, append: Append) -> None:
        """Checks an append against its log's end and derives what goes with it, once. Raises Fenced."""
        if append.projected is not None:
            return
        head = self._heads.get(append.run_id) or self.load(connection, append.run_id)
        if head.epoch != append.epoch or head.last_sequence != append.records[0].sequence - 1 or head.is_ended:
            raise refusal(append.run_id)
        append.tenant_id, append.session_id = head.address.tenant_id, head.address.session_id
        projected = head.fold.project(append.records)
        head.last_sequence = append.records[-1].sequence
        if projected.end is not None:
            head.is_ended = True
        append.projected = projected

    def committed(self, append: Append) -> None:
        """Forgets the head of a log that has ended."""
        if append.projected is not None and append.projected.end is not None:
            self._heads.pop(append.run_id, None)

    def poison(self, append: Append, error: Exception) -> Exception:
        """Refuses every later append of a run under this one's epoch, with the same error, which it gives back."""
        self.forget(append.run_id)
        self._poisoned[append.run_id, append.epoch] = error
        return error

    def poison_of(self, append: Append) -> Exception | None:
        """Why an append is refused unseen; None where it is not."""
        return self._poisoned.get((append.run_id, append.epoch)) if self._poisoned else None

    def change_owner(self, run_id: str, epoch: int) -> None:
        """Forgets what is of a log's owners before this epoch: no failure of theirs concerns the next."""
        self.forget(run_id)
        for one in (epoch - 1, epoch):
            self._poisoned.pop((run_id, one), None)

    def load(self, connection: Connection, run_id: str) -> Head:
        """Reads a log's end from the disk, and keeps it. Raises Fenced where there is no such log."""
        row = connection.execute(_ROW, {"run": run_id}).one_or_none()
        if row is None:
            raise refusal(run_id)
        tenant_id, user_id, session_id, epoch, last_sequence, ended = row
        address = LogAddress(run_id=run_id, tenant_id=tenant_id, user_id=user_id, session_id=session_id)
        fold = RunFold(address)
        if not ended:
            fold.project(stored_records(connection, run_id))
        head = Head(address=address, epoch=epoch, last_sequence=last_sequence, is_ended=ended, fold=fold)
        self._heads[run_id] = head
        return head


def refusal(run_id: str) -> Fenced:
    """The error of an append that does not continue its log."""
    return Fenced(f"The log of run {run_id} has moved on: it has ended, or another owner writes it now.")
