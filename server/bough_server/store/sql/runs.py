"""The run index."""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, bindparam, literal_column, select
from sqlalchemy.sql.selectable import Select

from bough.v1 import error_pb2, evaluation_ref_pb2, event_pb2, input_pb2, run_pb2, usage_pb2
from bough_server.errors import NotFound
from bough_server.identity import Principal, Scope
from bough_server.log import events
from bough_server.messages import set_time
from bough_server.store.ports.runs import Page, RunFilter, RunRow
from bough_server.store.sql import tables
from bough_server.store.sql.create_run import NO_LABELS
from bough_server.store.sql.open_inputs import OpenInputs
from bough_server.store.sql.pages import Listing, decode_token, encode_token
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.statements import in_scope, scope_parameters, unindexed

_runs = tables.runs.c

_RUN_IN_SCOPE: Final = select(tables.runs).where(
    _runs.run_id == bindparam("run"), *in_scope(tables.runs), tables.IS_RUN
)
_RUN: Final = select(tables.runs).where(_runs.run_id == bindparam("run"), tables.IS_RUN)
_BY_REQUEST: Final = select(tables.runs).where(
    tables.IS_RUN,
    _runs.tenant_id == bindparam("tenant"),
    _runs.user_id == bindparam("user"),
    _runs.request_id == bindparam("request"),
    _runs.request_id != literal_column("''"),  # the condition of the partial index, literally, or it is not used
)
_HOLDER: Final = (
    select(tables.runs)
    .join(tables.sessions, tables.sessions.c.current_run_id == _runs.run_id)
    .where(tables.sessions.c.tenant_id == bindparam("tenant"), tables.sessions.c.session_id == bindparam("session"))
)
_INPUT_REQUESTS: Final = (
    select(tables.events.c.data)
    .where(tables.events.c.run_id == bindparam("run"), tables.events.c.kind == events.INPUT_REQUESTED)
    .order_by(tables.events.c.sequence)
)
_NEXT_EXPIRY: Final = (
    select(_runs.next_expire_time_ns, _runs.run_id)
    .where(_runs.next_expire_time_ns.is_not(None), _runs.run_id.not_in(bindparam("but", expanding=True)))
    .order_by(_runs.next_expire_time_ns, _runs.run_id)
    .limit(1)
)


class SqlRunIndex:
    """RunIndex on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def get(self, scope: Scope, run_id: str) -> RunRow:
        """See RunIndex."""
        rows = await self._rows(_RUN_IN_SCOPE, {"run": run_id, **scope_parameters(scope)})
        if not rows:
            raise NotFound("run", run_id)
        return to_run_row(rows[0])

    async def find(self, run_id: str) -> RunRow | None:
        """See RunIndex."""
        rows = await self._rows(_RUN, {"run": run_id})
        return to_run_row(rows[0]) if rows else None

    async def find_request(self, principal: Principal, request_id: str) -> RunRow | None:
        """See RunIndex."""
        asked: dict[str, object] = {"tenant": principal.tenant_id, "user": principal.user_id, "request": request_id}
        rows = await self._rows(_BY_REQUEST, asked)
        return to_run_row(rows[0]) if rows else None

    async def list(self, scope: Scope, run_filter: RunFilter, page: Page) -> tuple[Sequence[run_pb2.Run], str]:
        """See RunIndex."""
        filters = ["runs", scope.tenant_id, scope.user_id, *_filter_values(run_filter)]
        listing = Listing(
            table=tables.runs,
            kind=tables.RUN,
            name=_runs.run_id,
            scope=scope,
            common=[tables.IS_RUN, *_conditions(run_filter, scope)],
            branches=_branches(run_filter, scope),
            labels=run_filter.labels,
            after=decode_token(page.token, filters),
        )
        shown, following = await self._readers.run(partial(listing.read, count=page.size, size=_size))
        return [_to_run(row) for row in shown], encode_token(following, filters) if following is not None else ""

    async def list_open_inputs(
        self,
        scope: Scope,
        takes: Callable[[Principal, input_pb2.InputRequest], bool],
        page: Page,
        *,
        filters: Sequence[object],
    ) -> tuple[Sequence[input_pb2.OpenInput], str]:
        """See RunIndex."""
        filters = ["inputs", scope.tenant_id, scope.user_id, *filters]
        open_inputs = OpenInputs(scope=scope, takes=takes, count=page.size, after=decode_token(page.token, filters))
        found, following = await self._readers.run(open_inputs.read)
        return found, encode_token(following, filters) if following is not None else ""

    async def list_input_requests(self, run_id: str) -> Sequence[input_pb2.InputRequest]:
        """See RunIndex."""
        rows = await self._rows(_INPUT_REQUESTS, {"run": run_id})
        return [events.parse(row.data).input_requested.request for row in rows]

    async def holder(self, principal: Principal, session_id: str) -> RunRow | None:
        """See RunIndex."""
        rows = await self._rows(_HOLDER, {"tenant": principal.tenant_id, "session": session_id})
        return to_run_row(rows[0]) if rows else None

    async def next_expiry(self, *, but: Collection[str] = ()) -> tuple[int, str] | None:
        """See RunIndex."""
        rows = await self._rows(_NEXT_EXPIRY, {"but": list(but)})
        return (rows[0].next_expire_time_ns, rows[0].run_id) if rows else None

    async def _rows(self, statement: Select[Any], parameters: dict[str, object]) -> Sequence[Row[Any]]:
        if any(isinstance(value, str) and "\0" in value for value in parameters.values()):
            return []  # no column has U+0000, and PostgreSQL does not even look for it
        return await self._readers.run(partial(_fetch_all, statement=statement, parameters=parameters))


def _fetch_all(connection: Connection, *, statement: Select[Any], parameters: dict[str, object]) -> Sequence[Row[Any]]:
    return connection.execute(statement, parameters).all()


def _size(row: Row[Any]) -> int:
    """Return the bytes of those columns of a run's row whose size depends on its caller."""
    columns = row._mapping
    texts = len(columns["labels"].encode()) + len(columns["input_excerpt"].encode())
    return texts + sum(len(data) for name in _SIZED if (data := columns[name]) is not None)


_SIZED: Final = ("error", "open_requests", "evaluation")


def _filter_values(run_filter: RunFilter) -> list[object]:
    return [
        run_filter.session_id,
        run_filter.agent,
        sorted(run_filter.states),
        dict(run_filter.labels),
        run_filter.create_time_from_ns,
        run_filter.create_time_before_ns,
        run_filter.evaluation_id,
        run_filter.case_id,
        run_filter.evaluation_role,
        run_filter.include_evaluation_runs,
    ]


def _conditions(run_filter: RunFilter, scope: Scope) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    by_evaluation, by_session = bool(run_filter.evaluation_id), bool(run_filter.session_id)
    by_user = scope.user_id is not None
    if by_user:
        conditions.append(_equals(_runs.user_id, scope.user_id, narrowed=by_evaluation or by_session))
    if by_evaluation:  # the condition of the partial index, literally, or it is not used
        conditions += [_runs.evaluation_id == run_filter.evaluation_id, _runs.evaluation_id != literal_column("''")]
    if run_filter.case_id:
        conditions += [_runs.case_id == run_filter.case_id, tables.IS_OF_EVALUATION]
    if run_filter.evaluation_role:
        conditions += [_runs.evaluation_role == run_filter.evaluation_role, tables.IS_OF_EVALUATION]
    if _excludes_evaluations(run_filter):
        conditions.append(tables.IS_OF_CALLER)
    if by_session:
        conditions.append(_equals(_runs.session_id, run_filter.session_id, narrowed=by_evaluation))
    if run_filter.agent:
        conditions.append(_equals(_runs.agent, run_filter.agent, narrowed=by_evaluation or by_session or by_user))
    if run_filter.create_time_from_ns is not None:
        conditions.append(_runs.create_time_ns >= _clamp_time(run_filter.create_time_from_ns))
    if run_filter.create_time_before_ns is not None:
        conditions.append(_runs.create_time_ns < _clamp_time(run_filter.create_time_before_ns))
    return conditions


def _excludes_evaluations(run_filter: RunFilter) -> bool:
    """Return whether runs of evaluations are not listed: no condition asks for any."""
    is_asked = run_filter.session_id or run_filter.evaluation_id or run_filter.case_id or run_filter.evaluation_role
    return not (is_asked or run_filter.include_evaluation_runs)


def _branches(run_filter: RunFilter, scope: Scope) -> list[ColumnElement[bool]]:
    """Return one condition for each state; without states, if evaluations' runs are listed too, one for each index."""
    is_narrow = _is_narrow(run_filter, scope)
    if run_filter.states or _is_narrow_by_filter(run_filter) or _excludes_evaluations(run_filter):
        return [_equals(_runs.state, state, narrowed=is_narrow) for state in sorted(run_filter.states)]
    return [tables.IS_OF_CALLER, tables.IS_OF_EVALUATION]


def _is_narrow(run_filter: RunFilter, scope: Scope) -> bool:
    return scope.user_id is not None or _is_narrow_by_filter(run_filter)


def _is_narrow_by_filter(run_filter: RunFilter) -> bool:
    return bool(run_filter.evaluation_id or run_filter.session_id or run_filter.agent)


def _equals(column: ColumnElement[Any], value: object, *, narrowed: bool) -> ColumnElement[bool]:
    """Return the condition that a column has a value.

    If the list is `narrowed` by another column's index already, this column's is not used: without statistics, the
    query planner takes any of them, and the runs of a session or a user are far fewer than those of an agent or a
    state.
    """
    return (unindexed(column) if narrowed else column) == value


def _clamp_time(time_ns: int) -> int:
    """Clamp a time to SQLite's 64 bits; runs are well inside that range, so no comparison changes."""
    return max(-(2**63), min(time_ns, 2**63 - 1))


def to_run_row(row: Row[Any]) -> RunRow:
    """Return a row of the table of runs as a record."""
    return RunRow(
        run=_to_run(row),
        principal=Principal(tenant_id=row.tenant_id, user_id=row.user_id),
        epoch=row.epoch,
        request_digest=row.request_digest,
        owner=row.owner,
    )


def _to_run(row: Row[Any]) -> run_pb2.Run:
    columns = row._mapping  # the attributes of a row take five times as long, and a page has thousands
    run = run_pb2.Run(
        run_id=columns["run_id"],
        session_id=columns["session_id"],
        user_id=columns["user_id"],
        agent=columns["agent"],
        state=columns["state"],
        input_excerpt=columns["input_excerpt"],
        last_sequence=columns["last_sequence"],
        tree_usage=usage_pb2.Usage.FromString(columns["tree_usage"]),
    )
    if columns["labels"] != NO_LABELS:
        run.labels.update(json.loads(columns["labels"]))
    if columns["evaluation"] is not None:
        run.evaluation.CopyFrom(evaluation_ref_pb2.EvaluationRef.FromString(columns["evaluation"]))
    set_time(run.create_time, columns["create_time_ns"])
    if columns["start_time_ns"] is not None:
        set_time(run.start_time, columns["start_time_ns"])
    if columns["end_time_ns"] is not None:
        set_time(run.end_time, columns["end_time_ns"])
    if columns["deadline_time_ns"] is not None:
        set_time(run.deadline_time, columns["deadline_time_ns"])
    if columns["error"] is not None:
        run.error.CopyFrom(error_pb2.AgentError.FromString(columns["error"]))
    if columns["open_requests"] is not None:
        run.open_requests.extend(event_pb2.RunInterrupted.FromString(columns["open_requests"]).requests)
    if columns["origin_run_id"]:
        run.forked_from.run_id, run.forked_from.sequence = columns["origin_run_id"], columns["origin_sequence"]
    return run
