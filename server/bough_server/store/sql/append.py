"""Statements and rows of an append."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy import (
    Connection,
    Delete,
    Insert,
    Update,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.sql.compiler import SQLCompiler

from bough_server.run_state import RunStanding
from bough_server.store.ports import Record
from bough_server.store.projected import NOTHING, Projected, RunEnd
from bough_server.store.sql import tables
from bough_server.store.sql.jobs import Append

Row = Mapping[str, object]


def message_rows(session_id: str, tenant_id: str, projected: Projected) -> list[Row]:
    """Rows of the messages table."""
    return [
        {
            "session_id": session_id,
            "position": stored.message.position,
            "tenant_id": tenant_id,
            "run_id": stored.run_id,
            "agent": stored.agent,
            "chain": stored.chain,
            "data": stored.message.SerializeToString(deterministic=True),
        }
        for stored in projected.messages
    ]


def usage_rows(projected: Projected) -> list[Row]:
    """Rows of the usage table."""
    return [
        {
            "run_id": entry.run_id,
            "sequence": entry.sequence,
            "tenant_id": entry.tenant_id,
            "user_id": entry.user_id,
            "session_id": entry.session_id,
            "agent": entry.agent,
            "invocation_id": entry.invocation_id,
            "model": entry.model,
            "time_ns": entry.time_ns,
            "usage": entry.usage.SerializeToString(deterministic=True),
        }
        for entry in projected.usage
    ]


def end_row(run_id: str, end: RunEnd) -> Row:
    """What END_RUN takes."""
    return {
        "run": run_id,
        "end_state": end.state,
        "end_time": end.end_time_ns,
        "end_error": end.error,
        "end_usage": end.tree_usage,
    }


def standing_row(run_id: str, standing: RunStanding) -> Row:
    """What MOVE_RUN takes."""
    return {
        "run": run_id,
        "new_state": standing.state,
        "start_time": standing.start_time_ns,
        "requests": standing.open_requests,
        "expire_time": standing.next_expire_time_ns,
    }


def state_row(session_id: str, run_id: str, state_json: str) -> Row:
    """What SET_STATE takes; an empty run where no log makes the state."""
    return {"session": session_id, "state": state_json, "run": run_id}


def _text(statement: Update | Insert, *order: str) -> str:
    """A statement as the driver takes it, for rows in this order.

    The statements of appends go past SQLAlchemy's execution, which costs as much as SQLite itself.
    """
    compiled = statement.compile(dialect=sqlite.dialect())
    assert isinstance(compiled, SQLCompiler)
    assert tuple(compiled.positiontup or ()) == order, f"the parameters are {compiled.positiontup}"
    return str(compiled)


_runs = tables.runs.c


_COMPARE_AND_SET: Final = _text(
    update(tables.runs)
    .where(
        _runs.run_id == bindparam("run"),
        _runs.epoch == bindparam("own_epoch"),
        _runs.last_sequence == bindparam("expected"),
        ~_runs.ended,
    )
    .values(last_sequence=bindparam("last")),
    *("last", "run", "own_epoch", "expected"),
)


_INSERT_EVENTS: Final = _text(insert(tables.events), "run_id", "sequence", "kind", "data")


INSERT_MESSAGES: Final = insert(tables.messages)


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
    )
)


_DROP_LETTERS: Final = delete(tables.letters).where(tables.letters.c.run_id == bindparam("run"))


_waiting = tables.runs.alias("waiting")


_FIRST_WAITING: Final = (
    select(_waiting.c.run_id)
    .where(_waiting.c.session_id == bindparam("session"), _waiting.c.state == literal_column(str(tables.PENDING)))
    .order_by(_waiting.c.create_time_ns, _waiting.c.run_id)
    .limit(literal_column("1"))
    .scalar_subquery()
)


_RELEASE_SESSION: Final = (
    update(tables.sessions)
    .where(tables.sessions.c.session_id == bindparam("session"), tables.sessions.c.current_run_id == bindparam("run"))
    .values(current_run_id=func.coalesce(_FIRST_WAITING, literal_column("''")), update_time_ns=bindparam("end_time"))
)


_EXTEND_SESSION: Final = (
    update(tables.sessions)
    .where(tables.sessions.c.session_id == bindparam("session"))
    .values(last_position=bindparam("position"), update_time_ns=bindparam("said"))
)


SET_STATE: Final = (
    update(tables.sessions)
    .where(tables.sessions.c.session_id == bindparam("session"))
    .values(state_json=bindparam("state"), state_run_id=bindparam("run"))
)


class DriverStatement:
    """A write as the driver takes it, compiled once, for rows with names."""

    def __init__(self, statement: Update | Insert | Delete) -> None:
        compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"))
        self._text = str(compiled)
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}

    def write(self, cursor: DBAPICursor, rows: Sequence[Row]) -> None:
        """Writes the rows, if there are any."""
        if rows:
            cursor.executemany(self._text, [{**self._fixed, **row} for row in rows] if self._fixed else rows)


_SAY, _CHARGE, _EXTEND, _MOVE, _END, _RELEASE, _DROP, _SET_STATE = (
    DriverStatement(each)
    for each in (
        INSERT_MESSAGES,
        INSERT_USAGE,
        _EXTEND_SESSION,
        MOVE_RUN,
        END_RUN,
        _RELEASE_SESSION,
        _DROP_LETTERS,
        SET_STATE,
    )
)


_STORED: Final = (
    select(tables.runs.c.epoch, tables.events.c.sequence, tables.events.c.data)
    .join_from(tables.runs, tables.events, tables.events.c.run_id == tables.runs.c.run_id)
    .where(tables.runs.c.run_id == bindparam("run"), tables.events.c.sequence.between(bindparam("a"), bindparam("b")))
    .order_by(tables.events.c.sequence)
)


class Refused(Exception):
    """Some log of a batch does not end where its append begins; nothing of the batch may stay."""


def write_appends(connection: Connection, appends: Sequence[Append]) -> None:
    """Writes prepared appends of any logs, each with what is derived from it. Raises Refused."""
    ends: dict[str, tuple[int, str, int, int]] = {}
    rows: list[tuple[str, int, int, bytes]] = []
    derived: list[Append] = []
    for append in appends:
        run_id = append.run_id
        before = ends.get(run_id)
        expected = append.records[0].sequence - 1 if before is None else before[-1]
        ends[run_id] = (append.records[-1].sequence, run_id, append.epoch, expected)
        rows += [(run_id, record.sequence, record.kind, record.data) for record in append.records]
        if append.projected is not NOTHING:
            derived.append(append)
    cursor = connection.connection.cursor()
    try:
        cursor.executemany(_COMPARE_AND_SET, tuple(ends.values()))
        if cursor.rowcount != len(ends):
            raise Refused
        cursor.executemany(_INSERT_EVENTS, rows)
    finally:
        cursor.close()
    if derived:
        write_derived(connection, derived)


class Prepared(Protocol):
    """Records of a log with what is derived from them."""

    @property
    def run_id(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def projected(self) -> Projected | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRecords:
    """The first records of an owner."""

    run_id: str
    tenant_id: str
    session_id: str
    records: Sequence[Record]
    projected: Projected


def write_first(connection: Connection, first: FirstRecords) -> None:
    """Writes the first records of an owner, whose row is written already, with what is derived from them."""
    cursor = connection.connection.cursor()
    try:
        insert_events(cursor, first.run_id, first.records)
    finally:
        cursor.close()
    write_derived(connection, [first])


def insert_events(cursor: DBAPICursor, run_id: str, records: Sequence[Record]) -> None:
    """Writes events into a log whose row says already that it has them."""
    cursor.executemany(_INSERT_EVENTS, [(run_id, record.sequence, record.kind, record.data) for record in records])


def write_derived(connection: Connection, prepared: Sequence[Prepared]) -> None:
    """Writes the messages, the usage entries, the states and the changes of rows that go with some records."""
    said: list[Row] = []
    charged: list[Row] = []
    extended: list[Row] = []
    moved: list[Row] = []
    ended: list[Row] = []
    released: list[Row] = []
    states: dict[str, Row] = {}
    for one in prepared:
        projected = one.projected
        assert projected is not None, "an append is prepared before it is written"
        said += message_rows(one.session_id, one.tenant_id, projected)
        charged += usage_rows(projected)
        if projected.messages:
            newest = projected.messages[-1].message
            time_ns = one.records[-1].event.time.ToNanoseconds()
            extended.append({"session": one.session_id, "position": newest.position, "said": time_ns})
        if projected.standing is not None:
            moved.append(standing_row(one.run_id, projected.standing))
        if projected.state_json is not None:
            states[one.session_id] = state_row(one.session_id, one.run_id, projected.state_json)
        if (end := projected.end) is not None:
            ended.append(end_row(one.run_id, end))
            released.append({"session": one.session_id, "run": one.run_id, "end_time": end.end_time_ns})
    cursor = connection.connection.cursor()
    try:
        for statement, rows in ((_SAY, said), (_CHARGE, charged), (_EXTEND, extended), (_MOVE, moved), (_END, ended)):
            statement.write(cursor, rows)
        _SET_STATE.write(cursor, list(states.values()))
        _RELEASE.write(cursor, released)
        _DROP.write(cursor, [{"run": row["run"]} for row in released])
    finally:
        cursor.close()


def is_stored(connection: Connection, *, run_id: str, epoch: int, records: Sequence[Record]) -> bool:
    """Whether a log holds exactly these records, and its run's epoch is theirs."""
    stored = connection.execute(_STORED, {"run": run_id, "a": records[0].sequence, "b": records[-1].sequence}).all()
    return [tuple(row) for row in stored] == [(epoch, record.sequence, record.data) for record in records]
