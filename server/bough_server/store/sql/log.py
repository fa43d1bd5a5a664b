"""The event log on SQL: appends go to the writer thread, readers are served from the window and from disk behind it."""

from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, select, update

from bough_server import events
from bough_server.errors import NotFound
from bough_server.store.ports import NewRun, Record, StoredEvent
from bough_server.store.sql import tables
from bough_server.store.sql.acceptance import accept, check
from bough_server.store.sql.heads import Heads, refusal
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue
from bough_server.store.window import PAGE_BYTES, PAGE_EVENTS, Windows

_events, _runs = tables.events.c, tables.runs.c

_PAGE: Final = (
    select(_events.sequence, _events.kind, _events.data)
    .where(
        _events.run_id == bindparam("run"),
        _events.sequence > bindparam("after"),
        _events.sequence <= bindparam("through"),
    )
    .order_by(_events.sequence)
    .limit(PAGE_EVENTS)
)
_PAGE_WITHOUT_DELTAS: Final = _PAGE.where(_events.kind.not_in(sorted(events.DELTA_KINDS)))
_END: Final = select(_runs.last_sequence, _runs.ended).where(_runs.run_id == bindparam("run"))
_TAKE_OVER: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"), ~_runs.ended)
    .values(epoch=_runs.epoch + 1)
    .returning(_runs.epoch, _runs.last_sequence)
)
_NO_END: Final = 2**63 - 1


class SqlEventLog:
    """EventLog on one SQLite file."""

    def __init__(self, queue: WriteQueue, readers: Readers, windows: Windows) -> None:
        self._queue, self._readers, self._windows = queue, readers, windows

    async def create(self, new_run: NewRun) -> None:
        """See EventLog. A caller who is cancelled meanwhile does not know whether the run was accepted."""
        check(new_run)
        await self._queue.execute(partial(accept, heads=self._queue.heads, new_run=new_run))
        self._windows.add(new_run.run_id, [new_run.first])

    def append(self, run_id: str, *, epoch: int, records: Sequence[Record]) -> Awaitable[None]:
        """See EventLog."""
        _check_row(records)
        return self._queue.append(run_id, epoch, records)

    def pending_bytes(self) -> int:
        """See EventLog."""
        return self._queue.pending_bytes

    async def take_over(self, run_id: str) -> tuple[int, int]:
        """See EventLog."""
        taken = await self._queue.execute(partial(_take_over, heads=self._queue.heads, run_id=run_id))
        self._windows.resume(run_id)
        return taken

    async def read(
        self, run_id: str, *, after: int = 0, through: int | None = None, deltas: bool = True
    ) -> Sequence[StoredEvent]:
        """See EventLog."""
        last = _NO_END if through is None else through
        return await self._readers.run(partial(_read_page, run_id=run_id, after=after, through=last, deltas=deltas))

    async def tail(self, run_id: str, *, after: int = 0) -> AsyncIterator[Sequence[StoredEvent]]:
        """See EventLog. Raises NotFound, and what stopped the log, after what is committed, where it cannot go on."""
        window = self._windows.of(run_id)
        while True:
            changed = window.changed
            page = window.page(after)
            if not page and not window.is_known_through(after):
                page, last_sequence, is_ended = await self._readers.run(partial(_look, run_id=run_id, after=after))
                window.learn(last_sequence, is_ended=is_ended)
            if page:
                yield page
                after = page[-1].sequence
            elif window.is_ended and window.head <= after:
                return
            elif window.failure is not None and window.head <= after:
                raise window.failure
            elif window.head <= after:
                await changed.wait()

    async def last_sequence(self, run_id: str) -> int:
        """See EventLog."""
        last_sequence, _ = await self._readers.run(partial(_end_of, run_id=run_id))
        return last_sequence


def _check_row(records: Sequence[Record]) -> None:
    """Refuses what only a mistake of the caller's can bring. Raises ValueError."""
    if not records:
        raise ValueError("an append has at least one event")
    for sequence, record in enumerate(records, records[0].sequence):
        if record.sequence != sequence:
            raise ValueError("the sequences of an append have no gap")
        if record.kind in events.TERMINAL_KINDS and record is not records[-1]:
            raise ValueError("a run's terminal event is its last")


def _take_over(connection: Connection, *, heads: Heads, run_id: str) -> tuple[int, int]:
    row = connection.execute(_TAKE_OVER, {"run": run_id}).one_or_none()
    if row is None:
        _end_of(connection, run_id=run_id)
        raise refusal(run_id)
    heads.forget(run_id)
    epoch, last_sequence = row
    return epoch, last_sequence


def _end_of(connection: Connection, *, run_id: str) -> tuple[int, bool]:
    row = connection.execute(_END, {"run": run_id}).one_or_none()
    if row is None:
        raise NotFound("run", run_id)
    last_sequence, is_ended = row
    return last_sequence, is_ended


def _look(connection: Connection, *, run_id: str, after: int) -> tuple[Sequence[StoredEvent], int, bool]:
    """A page of a log, and where the log ends; the end is read last, so that it is never behind the page."""
    page = _read_page(connection, run_id=run_id, after=after, through=_NO_END, deltas=True)
    last_sequence, is_ended = _end_of(connection, run_id=run_id)
    return page, last_sequence, is_ended


def _read_page(connection: Connection, *, run_id: str, after: int, through: int, deltas: bool) -> Sequence[StoredEvent]:
    statement = _PAGE if deltas else _PAGE_WITHOUT_DELTAS
    page: list[StoredEvent] = []
    size = 0
    with connection.execute(statement, {"run": run_id, "after": after, "through": through}) as result:
        for row in result:
            event = StoredEvent(*row)
            size += len(event.data)
            if size > PAGE_BYTES and page:
                break
            page.append(event)
    return page
