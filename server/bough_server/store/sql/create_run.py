"""Create a run or an evaluation in one transaction: its row, session, request id, definitions and first events."""

import json
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, func, insert, literal_column, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from bough.v1 import agent_pb2, execution_pb2, tool_pb2
from bough.v1.evaluation_ref_pb2 import EvaluationRef
from bough_server.errors import NotFound, SessionBusy, SessionExists, SessionQueueFull
from bough_server.identity import Principal
from bough_server.log import evaluation_events, events
from bough_server.store.evaluation_projection import EvaluationFold
from bough_server.store.ports.log import AnyLogEvent, LogEvent, NewEvaluation, NewRun, RequestIdTaken, SessionMoved
from bough_server.store.projected import LogAddress, Projected, RunStart
from bough_server.store.projection import RunFold
from bough_server.store.sql import tables
from bough_server.store.sql.append import (
    INSERT_MESSAGES,
    INSERT_USAGE,
    MOVE_RUN,
    SET_EVALUATION,
    insert_events,
    run_time,
)
from bough_server.store.sql.blobs import check_blobs, write_blobs
from bough_server.store.sql.log_heads import Head, LogHeads
from bough_server.store.sql.quotas import check_quotas
from bough_server.store.sql.rows import evaluation_row, message_rows, run_state_row, strip_nul
from bough_server.store.sql.statements import DriverCursor, DriverStatement, for_update
from bough_server.store.sql.usage_rows import usage_rows

MAX_WAITING: Final = 64
"""The most runs that may wait in the queue of one session."""

_runs, _sessions = tables.runs.c, tables.sessions.c

_ACCEPTED: Final = (
    select(_runs.epoch, tables.events.c.data)
    .join_from(tables.runs, tables.events, tables.events.c.run_id == _runs.run_id)
    .where(_runs.run_id == bindparam("run"), tables.events.c.sequence == bindparam("sequence"))
)
_REQUEST: Final = select(_runs.run_id, _runs.request_digest).where(
    _runs.tenant_id == bindparam("tenant"),
    _runs.user_id == bindparam("user"),
    _runs.kind == bindparam("kind"),
    _runs.request_id == bindparam("request"),
    _runs.request_id != literal_column("''"),  # the condition of the partial index, literally, or it is not used
)
_SESSION: Final = for_update(
    select(_sessions.user_id, _sessions.current_run_id, _sessions.last_position, _sessions.state_json).where(
        _sessions.session_id == bindparam("session"), _sessions.tenant_id == bindparam("tenant")
    )
)
_HOLD: Final = DriverStatement(
    update(tables.sessions)
    .where(_sessions.session_id == bindparam("session"), _sessions.tenant_id == bindparam("tenant"))
    .values(
        current_run_id=bindparam("run"),
        last_position=bindparam("position"),
        last_run_time_ns=run_time(bindparam("now")),
    )
)
_SET_EVALUATION: Final = DriverStatement(SET_EVALUATION)
_INSERT_MESSAGE: Final = DriverStatement(INSERT_MESSAGES)
_INSERT_USAGE: Final = DriverStatement(INSERT_USAGE)
_MOVE_RUN: Final = DriverStatement(MOVE_RUN)
_WAITING: Final = select(func.count()).select_from(
    select(_runs.run_id)
    .where(
        _runs.tenant_id == bindparam("tenant"),
        _runs.session_id == bindparam("session"),
        _runs.state == literal_column(str(tables.PENDING)),  # literally, for the partial index
        _runs.run_id != bindparam("holder"),
    )
    .order_by(_runs.create_time_ns, _runs.run_id)
    .limit(literal_column(str(MAX_WAITING)))
    .subquery()
)

_INSERT_SESSION: Final = DriverStatement(insert(tables.sessions))
_INSERT_RUN: Final = DriverStatement(insert(tables.runs))
_INSERT_RUN_DEFINITION: Final = DriverStatement(insert(tables.run_definitions))
_KEEP_DEFINITION: Final = DriverStatement(upsert(tables.definitions).on_conflict_do_nothing())


def accept(connection: Connection, heads: LogHeads, new_run: NewRun) -> None:
    """Create a run.

    Raises RequestIdTaken, QuotaExceeded, NotFound, SessionExists, SessionBusy, SessionMoved and InvalidRequest, all
    before it writes anything.
    """
    if is_accepted(connection, new_run.run_id, new_run.first):
        return
    check_request(connection, new_run.principal, new_run.request_id)
    # Before the session: a run that is refused must not replace another one that waits for input there.
    check_quotas(connection, new_run.quotas, now_ns=new_run.create_time_ns)
    if new_run.queued is not None:
        _check_queue(connection, new_run)
    is_first = new_run.new_session or (new_run.queued is None and not _check_session(connection, new_run))
    tenant_id, session_id = new_run.principal.tenant_id, new_run.session_id
    check_blobs(connection, tenant_id=tenant_id, session_id=session_id, log_events=[new_run.first])
    address = LogAddress(
        run_id=new_run.run_id,
        tenant_id=new_run.principal.tenant_id,
        user_id=new_run.principal.user_id,
        session_id=new_run.session_id,
    )
    fold = RunFold(address)
    records = first_events(new_run)
    projected = fold.project(records)
    _write(connection, new_run, address, projected, is_first=is_first)
    heads.put(Head(address=address, epoch=1, last_sequence=len(records), is_ended=False, fold=fold))


def first_events(new_run: NewRun) -> list[LogEvent]:
    """Return the events that a run is created with."""
    return [new_run.first] if new_run.queued is None else [new_run.first, new_run.queued]


def check_run(new_run: NewRun) -> None:
    """Raise ValueError if a new run is inconsistent: a defect of the caller."""
    first, started, queued = new_run.first, new_run.first.event.run_started, new_run.queued
    if first.sequence != 1 or first.kind != events.RUN_STARTED:
        raise ValueError("a log must begin with run_started, at sequence 1")
    if (started.request_id, started.request_digest) != (new_run.request_id, new_run.request_digest):
        raise ValueError("run_started must hold the run's request id and digest: a rebuild restores them from it")
    if (started.session_cut, started.state_json) != (new_run.session_position, new_run.state_json):
        raise ValueError("run_started must name the session cut and the session state of the NewRun")
    if queued is not None and (queued.sequence != 2 or queued.kind != events.RUN_QUEUED):
        raise ValueError("a queued run must have run_queued at sequence 2")
    if queued is not None and (new_run.new_session or new_run.session_position or new_run.state_json):
        raise ValueError("a queued run must name an existing session, without a session cut or state")
    if queued is not None and new_run.create_session:
        raise ValueError("a queued run cannot create its session")
    if new_run.new_session and new_run.state_json:
        raise ValueError("a new session cannot have a state")


def is_accepted(connection: Connection, run_id: str, first: AnyLogEvent) -> bool:
    """Return True if an earlier attempt of this transaction was committed although its commit reported an error."""
    row = connection.execute(_ACCEPTED, {"run": run_id, "sequence": first.sequence}).one_or_none()
    return row is not None and tuple(row) == (1, first.data)


def check_request(connection: Connection, principal: Principal, request_id: str, *, kind: int = tables.RUN) -> None:
    """Raise RequestIdTaken if the user has already used a request id for a row of this kind."""
    if not request_id:
        return
    asked = {"tenant": principal.tenant_id, "user": principal.user_id, "kind": kind, "request": request_id}
    taken = connection.execute(_REQUEST, asked).one_or_none()
    if taken is not None:
        raise RequestIdTaken(*taken)


def _check_session(connection: Connection, new_run: NewRun) -> bool:
    """Return True if the session exists, and False if the run is to create it.

    Raises NotFound, SessionExists if it is to be created and another user has it, SessionBusy, and SessionMoved if the
    session has changed since the caller read it.
    """
    session = _session(connection, new_run)
    if session is None and not new_run.create_session:
        raise NotFound("session", new_run.session_id)
    _, current_run_id, position, state_json = session or ("", "", 0, "")
    if current_run_id:
        raise build_busy_error(new_run.session_id, current_run_id)
    if (position, state_json) != (new_run.session_position, new_run.state_json):
        raise SessionMoved
    return session is not None


def _check_queue(connection: Connection, new_run: NewRun) -> None:
    session = _session(connection, new_run)
    if session is None:
        raise NotFound("session", new_run.session_id)
    _, current_run_id, *_ = session
    details = {"session_id": new_run.session_id, "run_id": current_run_id}
    if not current_run_id:
        raise SessionBusy(
            f"No run holds the session {new_run.session_id!r}: start the run without queueing.", details=details
        )
    waiting = connection.execute(_WAITING, {**_session_parameters(new_run), "holder": current_run_id}).scalar_one()
    if waiting >= MAX_WAITING:
        raise SessionQueueFull(
            f"{waiting} runs already wait for the session {new_run.session_id!r}: try again when some have ended.",
            details=details,
        )


def _session_parameters(new_run: NewRun) -> dict[str, object]:
    return {"tenant": new_run.principal.tenant_id, "session": new_run.session_id}


def _session(connection: Connection, new_run: NewRun) -> tuple[str, str, int, str] | None:
    """Return the session's user, the run that holds it (empty for none), the last position and the state.

    None if the user has no such session. Raises SessionExists if the run is to create it and another user has it.
    """
    row = connection.execute(_SESSION, _session_parameters(new_run)).one_or_none()
    if row is None or row.user_id == new_run.principal.user_id:
        return None if row is None else row._tuple()
    if new_run.create_session:
        raise build_exists_error(new_run.session_id)
    return None


def build_exists_error(session_id: str) -> SessionExists:
    """Return the error of a call that creates a session whose id the tenant has already."""
    return SessionExists(
        f"The session {session_id!r} already exists. Use it, or choose another id.", details={"session_id": session_id}
    )


def build_busy_error(session_id: str, run_id: str) -> SessionBusy:
    """Return the error of a call that needs a session which a run holds."""
    return SessionBusy(
        f"The session {session_id!r} is held by the run {run_id!r}: wait until the run ends, or cancel it.",
        details={"session_id": session_id, "run_id": run_id},
    )


def _write(
    connection: Connection, new_run: NewRun, address: LogAddress, projected: Projected, *, is_first: bool
) -> None:
    assert projected.start is not None, "the first event starts the run"
    records = first_events(new_run)
    with DriverCursor(connection) as cursor:
        if new_run.queued is None:
            _hold_session(cursor, new_run, address, projected, is_first=is_first)
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
        _INSERT_USAGE.write(cursor, usage_rows(projected.usage))
        tenant_id, session_id = address.tenant_id, address.session_id
        write_blobs(cursor, tenant_id=tenant_id, session_id=session_id, run_id=new_run.run_id, log_events=records)
        if projected.run_state is not None:
            _MOVE_RUN.write(cursor, [run_state_row(new_run.run_id, projected.run_state)])


def _hold_session(
    cursor: DriverCursor, new_run: NewRun, address: LogAddress, projected: Projected, *, is_first: bool
) -> None:
    assert projected.start is not None, "the first event starts the run"
    now = projected.start.start_time_ns
    position = projected.messages[-1].message.position if projected.messages else new_run.session_position
    if is_first:
        insert_session(cursor, address, create_time_ns=new_run.create_time_ns, run_time_ns=now, position=position)
    else:
        _HOLD.write(cursor, [{**_session_parameters(new_run), "run": new_run.run_id, "position": position, "now": now}])
    _INSERT_MESSAGE.write(cursor, message_rows(address.tenant_id, new_run.session_id, projected.messages))


def start_values(start: RunStart) -> dict[str, object]:
    """Return the columns of a row that come from the first event of its log, the others as they are while it runs."""
    return {
        "agent": strip_nul(start.agent),
        "state": execution_pb2.EXECUTION_STATE_RUNNING,
        "labels": labels_text(start.labels),
        "input_excerpt": start.input_excerpt,
        "start_time_ns": start.start_time_ns,
        "end_time_ns": None,
        "deadline_time_ns": start.deadline_time_ns,
        "error": None,
        "tree_usage": b"",
        "reserved_nanos": 0,
        "request_id": start.request_id,
        "request_digest": start.request_digest,
        "open_requests": None,
        "next_expire_time_ns": None,
        "origin_run_id": start.origin_run_id,
        "origin_sequence": start.origin_sequence,
        **_evaluation_values(start.evaluation),
        "eval_set_name": strip_nul(start.eval_set_name),
        "totals": None,
        "verdict": 0,
    }


def _evaluation_values(ref: EvaluationRef | None) -> dict[str, object]:
    if ref is None:
        return {"evaluation_id": "", "case_id": "", "evaluation_role": 0, "evaluation": None}
    return {
        "evaluation_id": strip_nul(ref.evaluation_id),
        "case_id": strip_nul(ref.case_id),
        "evaluation_role": ref.role,
        "evaluation": ref.SerializeToString(deterministic=True),
    }


NO_LABELS: Final = "{}"
"""What the column of labels holds if there are none."""


def labels_text(labels: dict[str, str]) -> str:
    """Return labels as the JSON object that their column holds."""
    # An escaped U+0000 is a valid text, but not one that PostgreSQL can take out of the JSON object again.
    labels = {strip_nul(key): strip_nul(value) for key, value in labels.items()}
    return json.dumps(labels, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def insert_run(
    cursor: DriverCursor,
    address: LogAddress,
    start: RunStart,
    *,
    create_time_ns: int,
    owner: str,
    last_sequence: int,
    definitions: Mapping[str, agent_pb2.AgentDefinition | tool_pb2.ToolInfo],
    kind: int = tables.RUN,
) -> None:
    """Insert the row of a run or an evaluation at epoch 1, and store the definitions that it names."""
    row = {"run_id": address.run_id, **_tenancy(address), "session_id": address.session_id}
    row |= {"create_time_ns": create_time_ns, "epoch": 1, "owner": owner, "last_sequence": last_sequence}
    _INSERT_RUN.write(cursor, [{**row, "kind": kind, "ended": False, **start_values(start)}])
    kept = [
        {"revision": revision, "name": strip_nul(one.name), "data": one.SerializeToString(deterministic=True)}
        for revision, one in definitions.items()
    ]
    _KEEP_DEFINITION.write(cursor, kept)
    named = [{"run_id": address.run_id, "revision": revision} for revision in start.revisions]
    _INSERT_RUN_DEFINITION.write(cursor, named)


def insert_session(
    cursor: DriverCursor, address: LogAddress, *, create_time_ns: int, run_time_ns: int, position: int
) -> None:
    """Insert the row of a session that this run creates and holds."""
    row = {"session_id": address.session_id, **_tenancy(address), "labels": "{}", "last_position": position}
    row |= {"create_time_ns": create_time_ns, "last_run_time_ns": run_time_ns, "current_run_id": address.run_id}
    row |= {"request_id": "", "request_digest": "", "state_json": "", "state_run_id": ""}
    _INSERT_SESSION.write(cursor, [row])


def _tenancy(address: LogAddress) -> dict[str, object]:
    return {"tenant_id": address.tenant_id, "user_id": address.user_id}


def check_evaluation(new_evaluation: NewEvaluation) -> None:
    """Raise ValueError if a new evaluation is inconsistent: a defect of the caller."""
    first, *cases = new_evaluation.log_events
    planned = first.event.evaluation_planned
    if first.sequence != 1 or first.kind != evaluation_events.EVALUATION_PLANNED:
        raise ValueError("an evaluation's log must begin with evaluation_planned, at sequence 1")
    if any(record.kind != evaluation_events.CASE_PLANNED for record in cases) or len(cases) != planned.case_count:
        raise ValueError("evaluation_planned must be followed by one case_planned for each case")
    if (planned.request_id, planned.request_digest) != (new_evaluation.request_id, new_evaluation.request_digest):
        raise ValueError("evaluation_planned must hold the request id and digest: a rebuild restores them from it")
    shown = (new_evaluation.eval_set_name, new_evaluation.agent, dict(new_evaluation.labels))
    if (planned.eval_set.name, planned.agent, dict(planned.labels)) != shown:
        raise ValueError("evaluation_planned must hold the set's name, the agent and the labels of the NewEvaluation")


def accept_evaluation(connection: Connection, heads: LogHeads, new_evaluation: NewEvaluation) -> None:
    """Create an evaluation. Raises RequestIdTaken before it writes anything."""
    principal, records = new_evaluation.principal, new_evaluation.log_events
    if is_accepted(connection, new_evaluation.evaluation_id, records[0]):
        return
    check_request(connection, principal, new_evaluation.request_id, kind=tables.EVALUATION)
    address = LogAddress(run_id=new_evaluation.evaluation_id, tenant_id=principal.tenant_id, user_id=principal.user_id)
    fold = EvaluationFold()
    _write_evaluation(connection, new_evaluation, address, fold.project(records))
    heads.put(Head(address=address, epoch=1, last_sequence=len(records), is_ended=False, fold=fold))


def _write_evaluation(
    connection: Connection, new_evaluation: NewEvaluation, address: LogAddress, projected: Projected
) -> None:
    assert projected.start is not None, "the first event is evaluation_planned"
    assert projected.evaluation is not None, "the first event is evaluation_planned"
    with DriverCursor(connection) as cursor:
        insert_run(
            cursor,
            address,
            projected.start,
            create_time_ns=new_evaluation.create_time_ns,
            owner=new_evaluation.owner,
            last_sequence=len(new_evaluation.log_events),
            definitions={},
            kind=tables.EVALUATION,
        )
        _SET_EVALUATION.write(cursor, [evaluation_row(address.run_id, projected.evaluation)])
        insert_events(cursor, address.run_id, new_evaluation.log_events)
