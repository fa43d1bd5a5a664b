"""Rebuild all tables that are derived from the logs; the logs themselves are only read."""

from typing import Final

from sqlalchemy import Connection, Row, and_, bindparam, delete, exists, func, insert, select, update

from bough_server.store.evaluation_projection import EvaluationFold
from bough_server.store.projected import LogAddress, Projected
from bough_server.store.projection import RunFold
from bough_server.store.sql import tables
from bough_server.store.sql.append import (
    END_RUN,
    INSERT_CALLS,
    INSERT_MESSAGES,
    INSERT_USAGE,
    MOVE_RUN,
    SET_EVALUATION,
    SET_STATE,
    SPEND,
)
from bough_server.store.sql.create_run import start_values
from bough_server.store.sql.label_index import fill_index
from bough_server.store.sql.log_heads import iter_evaluation_log, iter_log
from bough_server.store.sql.rows import (
    call_rows,
    end_row,
    evaluation_row,
    message_rows,
    run_state_row,
    state_row,
    usage_row,
)
from bough_server.store.sql.statements import greatest
from bough_server.store.sql.usage_rows import usage_rows

_runs, _sessions, _messages = tables.runs.c, tables.sessions.c, tables.messages.c

_ADDRESSES: Final = select(
    _runs.run_id, _runs.tenant_id, _runs.user_id, _runs.session_id, _sessions.state_run_id == _runs.run_id
).join_from(
    tables.runs,
    tables.sessions,
    and_(_sessions.tenant_id == _runs.tenant_id, _sessions.session_id == _runs.session_id),
)
_EVALUATIONS: Final = select(_runs.run_id, _runs.tenant_id, _runs.user_id).where(tables.IS_EVALUATION)
_LAST: Final = select(func.max(tables.events.c.sequence)).where(tables.events.c.run_id == bindparam("run"))
_START_RUN: Final = update(tables.runs).where(_runs.run_id == bindparam("run"))
_FORGET: Final = tuple(
    delete(table).where(
        exists().where(
            _runs.run_id == table.c.run_id,
            _runs.tenant_id == table.c.tenant_id,
            _runs.session_id == table.c.session_id,
        )
    )
    for table in (tables.messages, tables.calls)
)
_NEWEST_MESSAGE: Final = (
    select(func.coalesce(func.max(_messages.position), 0))
    .where(_messages.tenant_id == _sessions.tenant_id, _messages.session_id == _sessions.session_id)
    .scalar_subquery()
)
_ITS_RUNS: Final = (_runs.tenant_id == _sessions.tenant_id, _runs.session_id == _sessions.session_id)
_HOLDER: Final = (
    select(_runs.run_id)
    .where(*_ITS_RUNS, ~_runs.ended)
    .order_by(_runs.state == tables.PENDING, _runs.create_time_ns, _runs.run_id)
    .limit(1)
    .scalar_subquery()
)
_LAST_MOVE: Final = greatest(
    func.coalesce(_runs.start_time_ns, _runs.end_time_ns), func.coalesce(_runs.end_time_ns, _runs.start_time_ns)
)
_LAST_RUN: Final = select(func.max(_LAST_MOVE)).where(*_ITS_RUNS).scalar_subquery()
_REFRESH_SESSIONS: Final = update(tables.sessions).values(
    last_position=_NEWEST_MESSAGE, current_run_id=func.coalesce(_HOLDER, ""), last_run_time_ns=_LAST_RUN
)


def rebuild(connection: Connection) -> int:
    """Rebuild all derived tables from the logs; return the number of runs. Nothing else may use the database.

    These are messages, usage entries, request ids, the rows of runs and evaluations, and the index of labels. Session
    states are rebuilt too, except those that a call has changed since, which are in no log. Usage entries of deleted
    runs are kept, and so are adjustments of accounts, which are in no log. Snapshots of accounts are made again later.
    """
    addresses = connection.execute(_ADDRESSES).all()
    for statement in _FORGET:
        connection.execute(statement)
    connection.execute(delete(tables.run_definitions))
    connection.execute(delete(tables.account_snapshots))
    known = select(_runs.run_id)
    connection.execute(delete(tables.usage_entries).where(tables.usage_entries.c.run_id.in_(known)))
    # The index on request ids is unique: with stale ids left, a row could collide with one that is not restored yet.
    connection.execute(update(tables.runs).values(request_id=""))
    for row in addresses:
        _rebuild_run(connection, row)
    for evaluation_id, tenant_id, user_id in connection.execute(_EVALUATIONS).all():
        address = LogAddress(run_id=evaluation_id, tenant_id=tenant_id, user_id=user_id)
        _restore_row(connection, address, EvaluationFold().project(iter_evaluation_log(connection, evaluation_id)))
    connection.execute(_REFRESH_SESSIONS)
    fill_index(connection)
    return len(addresses)


def _rebuild_run(connection: Connection, row: "Row[tuple[str, str, str, str, bool]]") -> None:
    run_id, tenant_id, user_id, session_id, makes_state = row
    address = LogAddress(run_id=run_id, tenant_id=tenant_id, user_id=user_id, session_id=session_id)
    fold = RunFold(address)
    projected = fold.project(iter_log(connection, run_id))
    _restore_row(connection, address, projected)
    if rows := message_rows(tenant_id, session_id, [*projected.shared, *projected.messages]):
        connection.execute(INSERT_MESSAGES, rows)
    if rows := call_rows(tenant_id, session_id, [*projected.shared_calls, *projected.calls]):
        connection.execute(INSERT_CALLS, rows)
    if rows := usage_rows(projected.usage):
        connection.execute(INSERT_USAGE, rows)
    if makes_state:
        connection.execute(SET_STATE, state_row(tenant_id, session_id, run_id, fold.state_json))


def _restore_row(connection: Connection, address: LogAddress, projected: Projected) -> None:
    assert projected.start is not None, "a log begins with run_started or evaluation_planned"
    last_sequence = connection.execute(_LAST, {"run": address.run_id}).scalar_one()
    values = {**start_values(projected.start), "last_sequence": last_sequence, "ended": projected.end is not None}
    connection.execute(_START_RUN.values(**values), {"run": address.run_id})
    if projected.run_state is not None:
        connection.execute(MOVE_RUN, run_state_row(address.run_id, projected.run_state))
    if projected.tree_usage is not None:
        connection.execute(SPEND, usage_row(address.run_id, projected.tree_usage, projected.reserved_nanos))
    if projected.evaluation is not None:
        connection.execute(SET_EVALUATION, evaluation_row(address.run_id, projected.evaluation))
    if projected.end is not None:
        connection.execute(END_RUN, end_row(address.run_id, projected.end))
    named = [{"run_id": address.run_id, "revision": revision} for revision in projected.start.revisions]
    if named:
        connection.execute(insert(tables.run_definitions), named)
