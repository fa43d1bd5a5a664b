"""Write appends: their events, and the rows derived from them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Table,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)

from bough_server.store.ports.log import AnyLogEvent
from bough_server.store.projected import NOTHING, Projected
from bough_server.store.sql import tables
from bough_server.store.sql.blobs import write_blobs
from bough_server.store.sql.driver import Driver, EventTuple, LogMove, Reach
from bough_server.store.sql.jobs import Append
from bough_server.store.sql.rows import (
    Row,
    call_rows,
    end_row,
    evaluation_row,
    message_rows,
    run_state_row,
    state_row,
    usage_row,
)
from bough_server.store.sql.statements import DriverCursor, DriverStatement, greatest
from bough_server.store.sql.usage_rows import usage_rows


def run_time(moved: BindParameter[int]) -> ColumnElement[int]:
    """Return a session's last_run_time_ns after a run has started or ended; it never goes back, though clocks may."""
    return greatest(func.coalesce(tables.sessions.c.last_run_time_ns, moved), moved)


_runs = tables.runs.c


_INSERT_EVENTS: Final = DriverStatement(insert(tables.events))


INSERT_MESSAGES: Final = insert(tables.messages)


INSERT_CALLS: Final = insert(tables.calls)


INSERT_USAGE: Final = insert(tables.usage_entries)


END_RUN: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"))
    .values(
        ended=True,
        state=bindparam("end_state"),
        end_time_ns=bindparam("end_time"),
        error=bindparam("end_error"),
        tree_usage=bindparam("end_usage"),
        reserved_nanos=0,
        open_requests=null(),
        next_expire_time_ns=null(),
    )
)


MOVE_RUN: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"))
    .values(
        state=bindparam("new_state"),
        start_time_ns=bindparam("start_time"),
        open_requests=bindparam("requests"),
        next_expire_time_ns=bindparam("expire_time"),
        deadline_time_ns=bindparam("deadline_time"),
    )
)


SPEND: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"))
    .values(tree_usage=bindparam("used"), reserved_nanos=bindparam("reserved"))
)


SET_EVALUATION: Final = (
    update(tables.runs)
    .where(_runs.run_id == bindparam("run"))
    .values(totals=bindparam("new_totals"), verdict=bindparam("new_verdict"))
)


_DROP_COMMANDS: Final = delete(tables.run_commands).where(tables.run_commands.c.run_id == bindparam("run"))


_sessions = tables.sessions.c
_THIS_SESSION: Final = (_sessions.tenant_id == bindparam("tenant"), _sessions.session_id == bindparam("session"))


_waiting = tables.runs.alias("waiting")


_FIRST_WAITING: Final = (
    select(_waiting.c.run_id)
    .where(
        _waiting.c.tenant_id == bindparam("tenant"),
        _waiting.c.session_id == bindparam("session"),
        _waiting.c.state == literal_column(str(tables.PENDING)),  # literally, for the partial index
    )
    .order_by(_waiting.c.create_time_ns, _waiting.c.run_id)
    .limit(literal_column("1"))
    .scalar_subquery()
)


_RELEASE_SESSION: Final = (
    update(tables.sessions)
    .where(*_THIS_SESSION, _sessions.current_run_id == bindparam("run"))
    .values(current_run_id=func.coalesce(_FIRST_WAITING, literal_column("''")))
)


_EXTEND_SESSION: Final = update(tables.sessions).where(*_THIS_SESSION).values(last_position=bindparam("position"))


_TIME_SESSION: Final = (
    update(tables.sessions).where(*_THIS_SESSION).values(last_run_time_ns=run_time(bindparam("moved")))
)


SET_STATE: Final = (
    update(tables.sessions).where(*_THIS_SESSION).values(state_json=bindparam("state"), state_run_id=bindparam("run"))
)


_MESSAGES: Final = DriverStatement(INSERT_MESSAGES)
_CALLS: Final = DriverStatement(INSERT_CALLS)
_USAGE: Final = DriverStatement(INSERT_USAGE)
_POSITION: Final = DriverStatement(_EXTEND_SESSION)
_RUN_STATE: Final = DriverStatement(MOVE_RUN)
_TREE_USAGE: Final = DriverStatement(SPEND)
_EVALUATION: Final = DriverStatement(SET_EVALUATION)
_END: Final = DriverStatement(END_RUN)
_RELEASE: Final = DriverStatement(_RELEASE_SESSION)
_RUN_TIME: Final = DriverStatement(_TIME_SESSION)
_DROP: Final = DriverStatement(_DROP_COMMANDS)
_SESSION_STATE: Final = DriverStatement(SET_STATE)


_STORED: Final = (
    select(tables.runs.c.epoch, tables.events.c.sequence, tables.events.c.data)
    .join_from(tables.runs, tables.events, tables.events.c.run_id == tables.runs.c.run_id)
    .where(tables.runs.c.run_id == bindparam("run"), tables.events.c.sequence.between(bindparam("a"), bindparam("b")))
    .order_by(tables.events.c.sequence)
)


def write_appends(connection: Connection, driver: Driver, appends: Sequence[Append]) -> Collection[str]:
    """Write prepared appends of any logs, each with the rows derived from it.

    Return the runs whose logs do not end where their appends begin: nothing of these is written. Raises Refused.
    """
    # One move per log: from the sequence before its first append here to that of its last.
    moves: dict[str, LogMove] = {}
    rows: list[EventTuple] = []
    for append in appends:
        run_id = append.run_id
        before = moves.get(run_id)
        expected = append.log_events[0].sequence - 1 if before is None else before.expected
        moves[run_id] = LogMove(append.log_events[-1].sequence, run_id, append.epoch, expected)
        rows += [(run_id, record.sequence, record.kind, record.data) for record in append.log_events]
    is_alone = not any(append.has_blobs or append.projected is not NOTHING for append in appends)
    with DriverCursor(connection, is_pipeline=not is_alone) as cursor:
        if driver.lock is not None and not is_alone:
            sessions = {(append.tenant_id, append.session_id) for append in appends if append.changes_session}
            driver.lock(
                cursor,
                Reach.union([Reach(sessions=sessions), *(append.reach for append in appends if append.has_blobs)]),
            )
        refused = driver.append_events(cursor, moves, rows)
        written = [append for append in appends if append.run_id not in refused] if refused else appends
        for append in written:
            if append.has_blobs:
                _write_blobs(cursor, append)
        if derived := [append for append in written if append.projected is not NOTHING]:
            _write_derived_rows(cursor, derived, driver)
    return refused


class Prepared(Protocol):
    """Records of a log with the values derived from them."""

    @property
    def run_id(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def log_events(self) -> Sequence[AnyLogEvent]: ...
    @property
    def projected(self) -> Projected | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEvents:
    """The first records of an owner, with the values derived from them."""

    run_id: str
    tenant_id: str
    session_id: str
    log_events: Sequence[AnyLogEvent]
    projected: Projected


def write_first(connection: Connection, first: FirstEvents) -> None:
    """Write the first records of an owner and the rows derived from them; the run's row must be up to date."""
    with DriverCursor(connection) as cursor:
        insert_events(cursor, first.run_id, first.log_events)
        _write_blobs(cursor, first)
        _write_derived_rows(cursor, [first])


def _write_blobs(cursor: DriverCursor, append: "Append | FirstEvents") -> None:
    write_blobs(
        cursor,
        tenant_id=append.tenant_id,
        session_id=append.session_id,
        run_id=append.run_id,
        log_events=append.log_events,
    )


def insert_events(cursor: DriverCursor, run_id: str, log_events: Sequence[AnyLogEvent]) -> None:
    """Insert events into a log whose row already counts them."""
    _INSERT_EVENTS.write(
        cursor,
        [
            {"run_id": run_id, "sequence": record.sequence, "kind": record.kind, "data": record.data}
            for record in log_events
        ],
    )


Insert = Callable[[DriverCursor, Table, Sequence[Row]], None]

_MANY: Final = 4
"""From how many rows on one statement costs PostgreSQL less than a pipeline of one for each: 64 take a third."""


class _Derived:
    """Rows for every statement on derived tables, collected over the appends of a batch."""

    def __init__(self) -> None:
        self._messages: list[Row] = []
        self._calls: list[Row] = []
        self._usage: list[Row] = []
        self._positions: list[Row] = []
        self._run_states: list[Row] = []
        self._tree_usage: dict[str, Row] = {}
        self._ended: list[Row] = []
        self._released: list[Row] = []
        self._run_times: list[Row] = []
        self._session_states: dict[tuple[str, str], Row] = {}
        self._evaluations: dict[str, Row] = {}

    def add(self, append: Prepared, projected: Projected) -> None:
        """Add the rows derived from the records of one append."""
        run_id, session = append.run_id, {"tenant": append.tenant_id, "session": append.session_id}
        self._usage += usage_rows(projected.usage)
        if projected.messages:
            self._messages += message_rows(append.tenant_id, append.session_id, projected.messages)
            self._positions.append({**session, "position": projected.messages[-1].message.position})
        if projected.calls:
            self._calls += call_rows(append.tenant_id, append.session_id, projected.calls)
        if projected.run_state is not None:
            self._run_states.append(run_state_row(run_id, projected.run_state))
        if projected.begin_time_ns is not None:
            self._run_times.append({**session, "moved": projected.begin_time_ns})
        if projected.tree_usage is not None:
            self._tree_usage[run_id] = usage_row(run_id, projected.tree_usage, projected.reserved_nanos)
        if projected.state_json is not None:
            state = state_row(append.tenant_id, append.session_id, run_id, projected.state_json)
            self._session_states[append.tenant_id, append.session_id] = state
        if (end := projected.end) is not None:
            self._ended.append(end_row(run_id, end))
            if append.session_id:  # an evaluation has no session
                self._run_times.append({**session, "moved": end.end_time_ns})
                self._released.append({**session, "run": run_id})
        if projected.evaluation is not None:
            self._evaluations[run_id] = evaluation_row(run_id, projected.evaluation)

    def write(self, cursor: DriverCursor, insert_at_once: Insert | None) -> None:
        """Write all rows.

        A run's end is written after the other changes of its row, which it supersedes, and before its session passes to
        the next run in the queue, which must not be one that ends in the same batch.
        """
        if insert_at_once is not None and len(self._messages) >= _MANY:
            insert_at_once(cursor, tables.messages, self._messages)
        else:
            _MESSAGES.write(cursor, self._messages)
        _CALLS.write(cursor, self._calls)
        _USAGE.write(cursor, self._usage)
        _POSITION.write(cursor, self._positions)
        _RUN_STATE.write(cursor, self._run_states)
        _TREE_USAGE.write(cursor, list(self._tree_usage.values()))
        _EVALUATION.write(cursor, list(self._evaluations.values()))
        _END.write(cursor, self._ended)
        _SESSION_STATE.write(cursor, list(self._session_states.values()))
        _RELEASE.write(cursor, self._released)
        _RUN_TIME.write(cursor, self._run_times)
        _DROP.write(cursor, [{"run": row["run"]} for row in self._ended])


def _write_derived_rows(cursor: DriverCursor, prepared: Sequence[Prepared], driver: Driver | None = None) -> None:
    """Write the messages, usage entries, session states and row changes derived from some records."""
    derived = _Derived()
    for one in prepared:
        assert one.projected is not None, "an append is prepared before it is written"
        derived.add(one, one.projected)
    derived.write(cursor, None if driver is None else driver.insert_at_once)


def is_stored(connection: Connection, *, run_id: str, epoch: int, log_events: Sequence[AnyLogEvent]) -> bool:
    """Return True if a log holds exactly these records and its run's epoch is `epoch`."""
    stored = connection.execute(
        _STORED, {"run": run_id, "a": log_events[0].sequence, "b": log_events[-1].sequence}
    ).all()
    return [tuple(row) for row in stored] == [(epoch, record.sequence, record.data) for record in log_events]
