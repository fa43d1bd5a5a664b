"""The transaction that accepts a run: its request id, session, definitions, row and first event, or nothing of them."""

import json
from typing import Final

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine.interfaces import DBAPICursor

from bough.v1 import event_pb2
from bough_server import events
from bough_server.errors import NotFound, SessionBusy
from bough_server.store.ports import NewRun, RequestIdTaken, SessionMoved
from bough_server.store.projection import LogAddress, Projected, RunFold, RunStart
from bough_server.store.sql import tables
from bough_server.store.sql.heads import Head, Heads
from bough_server.store.sql.statements import INSERT_MESSAGES, DriverStatement, message_rows

_runs, _sessions = tables.runs.c, tables.sessions.c

_ACCEPTED: Final = (
    select(_runs.epoch, tables.events.c.data)
    .join_from(tables.runs, tables.events, tables.events.c.run_id == _runs.run_id)
    .where(_runs.run_id == bindparam("run"), tables.events.c.sequence == 1)
)
_REQUEST: Final = select(_runs.run_id, _runs.request_digest).where(
    _runs.tenant_id == bindparam("tenant"),
    _runs.request_id == bindparam("request"),
    _runs.request_id != "",
)
_SESSION: Final = select(_sessions.current_run_id, _sessions.last_position).where(
    _sessions.session_id == bindparam("session"), _sessions.tenant_id == bindparam("tenant")
)
_HOLD: Final = DriverStatement(
    update(tables.sessions)
    .where(_sessions.session_id == bindparam("session"))
    .values(current_run_id=bindparam("run"), last_position=bindparam("position"), update_time_ns=bindparam("now"))
)
_INSERT_SESSION: Final = DriverStatement(insert(tables.sessions))
_INSERT_RUN: Final = DriverStatement(insert(tables.runs))
_INSERT_EVENT: Final = DriverStatement(insert(tables.events))
_INSERT_MESSAGE: Final = DriverStatement(INSERT_MESSAGES)
_INSERT_RUN_DEFINITION: Final = DriverStatement(insert(tables.run_definitions))
_KEEP_DEFINITION: Final = DriverStatement(upsert(tables.definitions).on_conflict_do_nothing())


def start_values(start: RunStart) -> dict[str, object]:
    """The columns of a run's row that come from its first event, with those of a run that goes on."""
    return {
        "agent": start.agent,
        "state": event_pb2.STATE_RUNNING,
        "labels": labels_text(start.labels),
        "start_time_ns": start.start_time_ns,
        "end_time_ns": None,
        "error": None,
        "tree_usage": None,
        "request_id": start.request_id,
        "request_digest": start.request_digest,
    }


def labels_text(labels: dict[str, str]) -> str:
    """Labels as the JSON object that a column holds."""
    return json.dumps(labels, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def accept(connection: Connection, heads: Heads, new_run: NewRun) -> None:
    """Accepts a run. Raises RequestIdTaken, NotFound, SessionBusy, SessionMoved before it writes anything."""
    if _is_accepted(connection, new_run):
        return
    _check_request(connection, new_run)
    if not new_run.new_session:
        _check_session(connection, new_run)
    address = LogAddress(
        run_id=new_run.run_id,
        tenant_id=new_run.principal.tenant_id,
        user_id=new_run.principal.user_id,
        session_id=new_run.session_id,
    )
    fold = RunFold(address)
    projected = fold.project([new_run.first])
    _write(connection, new_run, projected)
    heads.put(Head(address=address, epoch=1, last_sequence=1, is_ended=False, fold=fold))


def check(new_run: NewRun) -> None:
    """Refuses what only a mistake of the caller's can bring, before anything is queued. Raises ValueError."""
    first, started = new_run.first, new_run.first.event.run_started
    if first.sequence != 1 or first.kind != events.RUN_STARTED:
        raise ValueError("a log begins with run_started, at sequence 1")
    if (started.request_id, started.request_digest) != (new_run.request_id, new_run.request_digest):
        raise ValueError("run_started carries the run's request id and digest, so that its row can be made again")
    if started.session_cut != new_run.session_cut:
        raise ValueError("run_started names the session cut that is checked")


def _is_accepted(connection: Connection, new_run: NewRun) -> bool:
    """Whether an earlier attempt of this very transaction has been committed after all."""
    row = connection.execute(_ACCEPTED, {"run": new_run.run_id}).one_or_none()
    return row is not None and tuple(row) == (1, new_run.first.data)


def _check_request(connection: Connection, new_run: NewRun) -> None:
    if not new_run.request_id:
        return
    parameters = {"tenant": new_run.principal.tenant_id, "request": new_run.request_id}
    taken = connection.execute(_REQUEST, parameters).one_or_none()
    if taken is not None:
        raise RequestIdTaken(*taken)


def _check_session(connection: Connection, new_run: NewRun) -> None:
    parameters = {"session": new_run.session_id, "tenant": new_run.principal.tenant_id}
    session = connection.execute(_SESSION, parameters).one_or_none()
    if session is None:
        raise NotFound("session", new_run.session_id)
    current_run_id, last_position = session
    if current_run_id:
        raise session_busy(new_run.session_id, current_run_id)
    if last_position != new_run.session_cut:
        raise SessionMoved


def session_busy(session_id: str, run_id: str) -> SessionBusy:
    """The error of a call that a session's run stands in the way of."""
    return SessionBusy(
        f"The session {session_id!r} is held by the run {run_id!r}: wait for its end, or cancel it.",
        details={"session_id": session_id, "run_id": run_id},
    )


def _write(connection: Connection, new_run: NewRun, projected: Projected) -> None:
    cursor = connection.connection.cursor()
    try:
        _hold_session(cursor, new_run, projected)
        _write_run(cursor, new_run, projected)
    finally:
        cursor.close()


def _hold_session(cursor: DBAPICursor, new_run: NewRun, projected: Projected) -> None:
    run_id, now = new_run.run_id, new_run.create_time_ns
    position = projected.messages[-1].message.position if projected.messages else new_run.session_cut
    if new_run.new_session:
        row = {"session_id": new_run.session_id, **_owner(new_run), "labels": "{}"}
        row |= {"create_time_ns": now, "update_time_ns": now, "current_run_id": run_id, "last_position": position}
        _INSERT_SESSION.write(cursor, [row])
    else:
        _HOLD.write(cursor, [{"session": new_run.session_id, "run": run_id, "position": position, "now": now}])
    _INSERT_MESSAGE.write(cursor, message_rows(new_run.session_id, new_run.principal.tenant_id, projected))


def _write_run(cursor: DBAPICursor, new_run: NewRun, projected: Projected) -> None:
    start, run_id, first = projected.start, new_run.run_id, new_run.first
    assert start is not None, "the first event starts the run"
    row = {"run_id": run_id, **_owner(new_run), "session_id": new_run.session_id}
    row |= {"create_time_ns": new_run.create_time_ns, "epoch": 1, "last_sequence": 1, "ended": False}
    _INSERT_RUN.write(cursor, [{**row, **start_values(start)}])
    event = {"run_id": run_id, "sequence": first.sequence, "kind": first.kind, "data": first.data}
    _INSERT_EVENT.write(cursor, [event])
    kept = [
        {"revision": one.revision, "name": one.name, "data": one.SerializeToString(deterministic=True)}
        for one in new_run.definitions
    ]
    _KEEP_DEFINITION.write(cursor, kept)
    _INSERT_RUN_DEFINITION.write(cursor, [{"run_id": run_id, "revision": revision} for revision in start.revisions])


def _owner(new_run: NewRun) -> dict[str, object]:
    return {"tenant_id": new_run.principal.tenant_id, "user_id": new_run.principal.user_id}
