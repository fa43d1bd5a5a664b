"""The transaction that accepts a run: its request id, session, definitions, row and first event, or nothing of them."""

from typing import Final

from sqlalchemy import Connection, bindparam, func, literal_column, select, update
from sqlalchemy.engine.interfaces import DBAPICursor

from bough_server import events
from bough_server.errors import NotFound, SessionBusy
from bough_server.store.accepting import NewRun, RequestIdTaken, SessionMoved
from bough_server.store.derived import LogAddress, Projected
from bough_server.store.ports import Principal, Record
from bough_server.store.projection import RunFold
from bough_server.store.sql import tables
from bough_server.store.sql.heads import Head, Heads
from bough_server.store.sql.new_runs import insert_run, insert_session
from bough_server.store.sql.rows import message_rows, standing_row
from bough_server.store.sql.statements import INSERT_MESSAGES, MOVE_RUN, DriverStatement, insert_events

MAX_WAITING: Final = 64
"""How many runs may wait for one session."""

_runs, _sessions = tables.runs.c, tables.sessions.c

_ACCEPTED: Final = (
    select(_runs.epoch, tables.events.c.data)
    .join_from(tables.runs, tables.events, tables.events.c.run_id == _runs.run_id)
    .where(_runs.run_id == bindparam("run"), tables.events.c.sequence == bindparam("sequence"))
)
_REQUEST: Final = select(_runs.run_id, _runs.request_digest).where(
    _runs.tenant_id == bindparam("tenant"),
    _runs.request_id == bindparam("request"),
    _runs.request_id != "",
)
_SESSION: Final = select(_sessions.current_run_id, _sessions.last_position, _sessions.state_json).where(
    _sessions.session_id == bindparam("session"), _sessions.tenant_id == bindparam("tenant")
)
_HOLD: Final = DriverStatement(
    update(tables.sessions)
    .where(_sessions.session_id == bindparam("session"))
    .values(current_run_id=bindparam("run"), last_position=bindparam("position"), update_time_ns=bindparam("now"))
)
_INSERT_MESSAGE: Final = DriverStatement(INSERT_MESSAGES)
_MOVE_RUN: Final = DriverStatement(MOVE_RUN)
_WAITING: Final = (
    select(func.count())
    .select_from(tables.runs)
    .where(
        _runs.session_id == bindparam("session"),
        _runs.state == literal_column(str(tables.PENDING)),
        _runs.run_id != bindparam("holder"),
    )
)


def accept(connection: Connection, heads: Heads, new_run: NewRun) -> None:
    """Accepts a run. Raises RequestIdTaken, NotFound, SessionBusy, SessionMoved before it writes anything."""
    if is_accepted(connection, new_run.run_id, new_run.first):
        return
    check_request(connection, new_run.principal, new_run.request_id)
    if new_run.queued is not None:
        _check_queue(connection, new_run)
    elif not new_run.new_session:
        _check_session(connection, new_run)
    address = LogAddress(
        run_id=new_run.run_id,
        tenant_id=new_run.principal.tenant_id,
        user_id=new_run.principal.user_id,
        session_id=new_run.session_id,
    )
    fold = RunFold(address)
    records = records_of(new_run)
    projected = fold.project(records)
    _write(connection, new_run, address, projected)
    heads.put(Head(address=address, epoch=1, last_sequence=len(records), is_ended=False, fold=fold))


def records_of(new_run: NewRun) -> list[Record]:
    """The events that a run is accepted with."""
    return [new_run.first] if new_run.queued is None else [new_run.first, new_run.queued]


def check(new_run: NewRun) -> None:
    """Refuses what only a mistake of the caller's can bring, before anything is queued. Raises ValueError."""
    first, started, queued = new_run.first, new_run.first.event.run_started, new_run.queued
    if first.sequence != 1 or first.kind != events.RUN_STARTED:
        raise ValueError("a log begins with run_started, at sequence 1")
    if (started.request_id, started.request_digest) != (new_run.request_id, new_run.request_digest):
        raise ValueError("run_started carries the run's request id and digest, so that its row can be made again")
    if (started.session_cut, started.state_json) != (new_run.session_cut, new_run.state_json):
        raise ValueError("run_started names the session's cut and its state that are checked")
    if queued is not None and (queued.sequence != 2 or queued.kind != events.RUN_QUEUED):
        raise ValueError("a run that waits has run_queued at sequence 2")
    if queued is not None and (new_run.new_session or new_run.session_cut or new_run.state_json):
        raise ValueError("a run that waits goes on with a session, and has no cut of it yet")
    if new_run.new_session and new_run.state_json:
        raise ValueError("a new session has no state")


def is_accepted(connection: Connection, run_id: str, first: Record) -> bool:
    """Whether an earlier attempt of this very transaction has been committed after all."""
    row = connection.execute(_ACCEPTED, {"run": run_id, "sequence": first.sequence}).one_or_none()
    return row is not None and tuple(row) == (1, first.data)


def check_request(connection: Connection, principal: Principal, request_id: str) -> None:
    """Refuses a request id that the tenant has used. Raises RequestIdTaken."""
    if not request_id:
        return
    taken = connection.execute(_REQUEST, {"tenant": principal.tenant_id, "request": request_id}).one_or_none()
    if taken is not None:
        raise RequestIdTaken(*taken)


def _check_session(connection: Connection, new_run: NewRun) -> None:
    current_run_id, *cut = _session(connection, new_run)
    if current_run_id:
        raise session_busy(new_run.session_id, current_run_id)
    if cut != [new_run.session_cut, new_run.state_json]:
        raise SessionMoved


def _check_queue(connection: Connection, new_run: NewRun) -> None:
    current_run_id, *_ = _session(connection, new_run)
    details = {"session_id": new_run.session_id, "run_id": current_run_id}
    if not current_run_id:
        raise SessionBusy(
            f"No run holds the session {new_run.session_id!r}: there is nothing to wait for.", details=details
        )
    waiting = connection.execute(_WAITING, {"session": new_run.session_id, "holder": current_run_id}).scalar_one()
    if waiting >= MAX_WAITING:
        raise SessionBusy(
            f"{waiting} runs wait for the session {new_run.session_id!r} already: wait for some of them to end.",
            details=details,
        )


def _session(connection: Connection, new_run: NewRun) -> tuple[str, int, str]:
    """Which run holds the session, empty for none, the position of its last message, and its state."""
    parameters = {"session": new_run.session_id, "tenant": new_run.principal.tenant_id}
    session = connection.execute(_SESSION, parameters).one_or_none()
    if session is None:
        raise NotFound("session", new_run.session_id)
    current_run_id, last_position, state_json = session
    return current_run_id, last_position, state_json


def session_busy(session_id: str, run_id: str) -> SessionBusy:
    """The error of a call that a session's run stands in the way of."""
    return SessionBusy(
        f"The session {session_id!r} is held by the run {run_id!r}: wait for its end, or cancel it.",
        details={"session_id": session_id, "run_id": run_id},
    )


def _write(connection: Connection, new_run: NewRun, address: LogAddress, projected: Projected) -> None:
    assert projected.start is not None, "the first event starts the run"
    records = records_of(new_run)
    cursor = connection.connection.cursor()
    try:
        if new_run.queued is None:
            _hold_session(cursor, new_run, address, projected)
        insert_run(
            cursor,
            address,
            projected.start,
            create_time_ns=new_run.create_time_ns,
            owner=new_run.owner,
            last_sequence=len(records),
            definitions=new_run.definitions,
        )
        insert_events(cursor, new_run.run_id, records)
        if projected.standing is not None:
            _MOVE_RUN.write(cursor, [standing_row(new_run.run_id, projected.standing)])
    finally:
        cursor.close()


def _hold_session(cursor: DBAPICursor, new_run: NewRun, address: LogAddress, projected: Projected) -> None:
    run_id, now = new_run.run_id, new_run.create_time_ns
    position = projected.messages[-1].message.position if projected.messages else new_run.session_cut
    if new_run.new_session:
        insert_session(cursor, address, now_ns=now, position=position)
    else:
        _HOLD.write(cursor, [{"session": new_run.session_id, "run": run_id, "position": position, "now": now}])
    _INSERT_MESSAGE.write(cursor, message_rows(new_run.session_id, address.tenant_id, projected))
