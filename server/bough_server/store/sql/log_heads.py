"""Last sequence, epoch and fold of each log that is being written, kept by the writer thread and rebuilt from disk."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from bough_server.errors import Fenced
from bough_server.log import evaluation_events, events
from bough_server.store.evaluation_projection import EvaluationFold
from bough_server.store.ports.log import EvaluationLogEvent, LogEvent
from bough_server.store.projected import LogAddress
from bough_server.store.projection import RunFold
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Session
from bough_server.store.sql.jobs import Append
from bough_server.store.sql.readers import IN_PIECES, NO_END

_ROW = select(
    tables.runs.c.tenant_id,
    tables.runs.c.user_id,
    tables.runs.c.session_id,
    tables.runs.c.epoch,
    tables.runs.c.last_sequence,
    tables.runs.c.ended,
    tables.runs.c.kind,
    tables.runs.c.totals,
).where(tables.runs.c.run_id == bindparam("run"))

_SESSION = select(tables.runs.c.tenant_id, tables.runs.c.session_id).where(tables.runs.c.run_id == bindparam("run"))

_LOG = (
    select(tables.events.c.sequence, tables.events.c.kind, tables.events.c.data)
    .where(
        tables.events.c.run_id == bindparam("run"),
        tables.events.c.sequence <= bindparam("through"),
        tables.events.c.kind.not_in(sorted(events.DELTA_KINDS)),
    )
    .order_by(tables.events.c.sequence)
    .execution_options(**IN_PIECES)
)


@dataclass(slots=True, kw_only=True)
class Head:
    """A log's end, which the next append has to match."""

    address: LogAddress
    epoch: int
    last_sequence: int
    is_ended: bool
    fold: RunFold | EvaluationFold


def iter_log(connection: Connection, run_id: str, *, through: int = NO_END) -> Generator[LogEvent, None, None]:
    """Yield a log's events up to a sequence, parsed and in order, without deltas."""
    with connection.execute(_LOG, {"run": run_id, "through": through}) as rows:
        for sequence, kind, data in rows:
            yield LogEvent(sequence=sequence, kind=kind, data=data, event=events.parse(data))


def iter_evaluation_log(connection: Connection, evaluation_id: str) -> Iterator[EvaluationLogEvent]:
    """Yield the events of an evaluation's log, parsed and in order."""
    with connection.execute(_LOG, {"run": evaluation_id, "through": NO_END}) as rows:
        for sequence, kind, data in rows:
            event = evaluation_events.parse(data)
            yield EvaluationLogEvent(sequence=sequence, kind=kind, data=data, event=event)


class LogHeads:
    """The heads of the logs that this process writes.

    After an append of the owner is refused, its head is read from disk again. The run is fenced: later appends under
    the same epoch are refused too. The owner sent them in the belief that the refused one would be committed.
    """

    def __init__(self) -> None:
        self._heads: dict[str, Head] = {}
        self._fences: dict[tuple[str, int], Exception] = {}

    def put(self, head: Head) -> None:
        """Add the head of a new log."""
        self._heads[head.address.run_id] = head

    def session_of(self, connection: Connection, run_id: str) -> Session | None:
        """Return a run's tenant and session; None if it is not there yet, and for an evaluation."""
        if head := self._heads.get(run_id):
            found = head.address.tenant_id, head.address.session_id
        elif row := connection.execute(_SESSION, {"run": run_id}).one_or_none():
            found = row.tenant_id, row.session_id
        else:
            return None
        return found if found[1] else None

    def forget(self, run_id: str) -> None:
        """Drop a head, so that the next append reads it from disk."""
        self._heads.pop(run_id, None)

    def clear(self) -> None:
        """Drop all heads and fences. An append that a fence would have refused does not continue its log either."""
        self._heads.clear()
        self._fences.clear()

    def prepare(self, connection: Connection, append: Append) -> None:
        """Check an append against its log's head and project its records, once. Raises Fenced."""
        if append.projected is not None:  # a second attempt: the head has already moved past this append
            return
        head = self._heads.get(append.run_id) or self.load(connection, append.run_id)
        if head.epoch != append.epoch or head.last_sequence != append.log_events[0].sequence - 1 or head.is_ended:
            raise refusal(append.run_id)
        append.tenant_id, append.session_id = head.address.tenant_id, head.address.session_id
        projected = head.fold.project(append.log_events)  # type: ignore[arg-type]  # a log has records of one class
        # Before the commit, because later appends of the same group continue from here; a failure drops the head.
        head.last_sequence = append.log_events[-1].sequence
        if projected.end is not None:
            head.is_ended = True
        append.projected = projected

    def on_commit(self, append: Append) -> None:
        """Drop the head of a log that has ended, or whose run may wait for input for months."""
        is_ended = append.projected is not None and append.projected.end is not None
        if is_ended or append.log_events[-1].kind == events.RUN_INTERRUPTED:
            self.forget(append.run_id)

    def fence(self, append: Append, error: Exception) -> Exception:
        """Refuse every later append of a run under this one's epoch with `error`; return `error`."""
        head = self._heads.get(append.run_id)
        # The head stays if this append is a former owner's: the owner's appends of the same group are not on disk yet.
        if head is not None and head.epoch == append.epoch:
            self.forget(append.run_id)
        self._fences[append.run_id, append.epoch] = error
        return error

    def fence_of(self, append: Append) -> Exception | None:
        """Return the error that an append's run and epoch are fenced with, or None."""
        return self._fences.get((append.run_id, append.epoch)) if self._fences else None

    def change_owner(self, run_id: str, epoch: int) -> None:
        """Drop the head and the fences of earlier epochs: failures of an earlier owner do not concern the new one."""
        self.forget(run_id)
        # A fence of `epoch` itself can only come from appends before this takeover, which it must not outlive.
        for one in (epoch - 1, epoch):
            self._fences.pop((run_id, one), None)

    def load(self, connection: Connection, run_id: str, log: Sequence[LogEvent] = ()) -> Head:
        """Read a log's head from disk and keep it; `log` is the whole log, without deltas, if it has been read already.

        An evaluation's log, whose results can be large, is not read: the row has what its fold needs. Raises Fenced if
        there is no such log.
        """
        row = connection.execute(_ROW, {"run": run_id}).one_or_none()
        if row is None:
            raise refusal(run_id)
        tenant_id, user_id, session_id, epoch, last_sequence, ended, kind, totals = row
        address = LogAddress(run_id=run_id, tenant_id=tenant_id, user_id=user_id, session_id=session_id)
        fold: RunFold | EvaluationFold
        if kind == tables.EVALUATION:
            fold = EvaluationFold(totals or b"")
        else:
            fold = RunFold(address)
            if not ended:  # an ended log takes no appends, so its fold is never used
                fold.project(log or iter_log(connection, run_id))
        head = Head(address=address, epoch=epoch, last_sequence=last_sequence, is_ended=ended, fold=fold)
        self._heads[run_id] = head
        return head


def refusal(run_id: str) -> Fenced:
    """Return the error of an append that does not continue its log."""
    return Fenced(f"The log of run {run_id} cannot be continued here: the run has ended, or has another owner now.")
