"""The rows of evaluations."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, literal_column, select
from sqlalchemy.sql.selectable import Select

from bough.v1 import error_pb2, eval_result_pb2, evaluation_pb2
from bough_server.errors import NotFound
from bough_server.identity import Principal, Scope
from bough_server.store.ports.evaluations import EvaluationFilter, EvaluationRow
from bough_server.store.ports.runs import Page
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Reach
from bough_server.store.sql.pages import Listing, decode_token, encode_token
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.statements import in_scope, scope_parameters, unindexed
from bough_server.store.sql.write_queue import WriteQueue

_runs = tables.runs.c

_ALL: Final = select(tables.runs).where(tables.IS_EVALUATION)
_EVALUATION: Final = _ALL.where(_runs.run_id == bindparam("evaluation"))
_EVALUATION_IN_SCOPE: Final = _EVALUATION.where(*in_scope(tables.runs))
_BY_REQUEST: Final = _ALL.where(
    _runs.tenant_id == bindparam("tenant"),
    _runs.user_id == bindparam("user"),
    _runs.request_id == bindparam("request"),
    _runs.request_id != literal_column("''"),  # the condition of the partial index, literally, or it is not used
)
_DELETIONS: Final = tuple(
    delete(table).where(table.c.run_id == bindparam("evaluation"))
    for table in (tables.run_commands, tables.events, tables.runs)
)
_OPEN: Final = _ALL.where(~_runs.ended).order_by(_runs.create_time_ns, _runs.run_id)


class SqlEvaluations:
    """Evaluations on SQL."""

    def __init__(self, queue: WriteQueue, readers: Readers) -> None:
        self._queue, self._readers = queue, readers

    async def get(self, scope: Scope, evaluation_id: str) -> EvaluationRow:
        """See EvaluationIndex."""
        rows = await self._rows(_EVALUATION_IN_SCOPE, {"evaluation": evaluation_id, **scope_parameters(scope)})
        if not rows:
            raise NotFound("evaluation", evaluation_id)
        return _to_row(rows[0])

    async def find(self, evaluation_id: str) -> EvaluationRow | None:
        """See EvaluationIndex."""
        rows = await self._rows(_EVALUATION, {"evaluation": evaluation_id})
        return _to_row(rows[0]) if rows else None

    async def find_request(self, principal: Principal, request_id: str) -> EvaluationRow | None:
        """See EvaluationIndex."""
        asked = {"tenant": principal.tenant_id, "user": principal.user_id, "request": request_id}
        rows = await self._rows(_BY_REQUEST, asked)
        return _to_row(rows[0]) if rows else None

    async def list(
        self, scope: Scope, evaluation_filter: EvaluationFilter, page: Page
    ) -> tuple[Sequence[evaluation_pb2.Evaluation], str]:
        """See EvaluationIndex."""
        filters = ["evaluations", scope.tenant_id, scope.user_id, *_filter_values(evaluation_filter)]
        listing = Listing(
            table=tables.runs,
            kind=tables.EVALUATION,
            name=_runs.run_id,
            scope=scope,
            common=[tables.IS_EVALUATION, *_conditions(evaluation_filter, scope)],
            labels=evaluation_filter.labels,
            after=decode_token(page.token, filters),
        )
        shown, following = await self._readers.run(partial(listing.read, count=page.size, size=_size))
        return [_to_evaluation(row) for row in shown], encode_token(following, filters) if following is not None else ""

    async def delete(self, scope: Scope, evaluation_id: str) -> bool:
        """See EvaluationIndex."""
        deleting = partial(_delete, scope=scope, evaluation_id=evaluation_id)
        return await self._queue.execute(deleting, run_id=evaluation_id, reach=Reach(runs=[evaluation_id]))

    async def open_evaluations(self) -> Sequence[EvaluationRow]:
        """See EvaluationIndex."""
        return [_to_row(row) for row in await self._rows(_OPEN, {})]

    async def _rows(self, statement: Select[Any], parameters: Mapping[str, str | None]) -> Sequence[Row[Any]]:
        return await self._readers.run(partial(_fetch_all, statement=statement, parameters=parameters))


def _fetch_all(
    connection: Connection, *, statement: Select[Any], parameters: Mapping[str, str | None]
) -> Sequence[Row[Any]]:
    return connection.execute(statement, parameters).all()


def _delete(connection: Connection, *, scope: Scope, evaluation_id: str) -> bool:
    here = {"evaluation": evaluation_id, **scope_parameters(scope)}
    row = connection.execute(_EVALUATION_IN_SCOPE, here).one_or_none()
    if row is None:
        raise NotFound("evaluation", evaluation_id)
    if not row.ended:
        return False
    for statement in _DELETIONS:
        connection.execute(statement, {"evaluation": evaluation_id})
    return True


def _size(row: Row[Any]) -> int:
    """Return the bytes of those columns of an evaluation's row whose size depends on its caller."""
    return len(row.labels.encode()) + sum(len(data) for data in (row.error, row.totals) if data is not None)


def _filter_values(evaluation_filter: EvaluationFilter) -> list[object]:
    return [
        evaluation_filter.eval_set_name,
        evaluation_filter.agent,
        sorted(evaluation_filter.states),
        dict(evaluation_filter.labels),
    ]


def _conditions(evaluation_filter: EvaluationFilter, scope: Scope) -> list[ColumnElement[bool]]:
    """Return the conditions of a list; those on agent and state must not use the indexes, which are mostly of runs."""
    conditions: list[ColumnElement[bool]] = []
    if scope.user_id is not None:
        conditions.append(_runs.user_id == scope.user_id)
    if evaluation_filter.eval_set_name:
        set_name = _runs.eval_set_name if scope.user_id is None else unindexed(_runs.eval_set_name)
        conditions.append(set_name == evaluation_filter.eval_set_name)
    if evaluation_filter.agent:
        conditions.append(unindexed(_runs.agent) == evaluation_filter.agent)
    if evaluation_filter.states:
        conditions.append(unindexed(_runs.state).in_(sorted(evaluation_filter.states)))
    return conditions


def _to_row(row: Row[Any]) -> EvaluationRow:
    return EvaluationRow(
        evaluation=_to_evaluation(row),
        principal=Principal(tenant_id=row.tenant_id, user_id=row.user_id),
        epoch=row.epoch,
        request_digest=row.request_digest,
        owner=row.owner,
    )


def _to_evaluation(row: Row[Any]) -> evaluation_pb2.Evaluation:
    evaluation = evaluation_pb2.Evaluation(
        evaluation_id=row.run_id,
        eval_set_name=row.eval_set_name,
        agent=row.agent,
        user_id=row.user_id,
        state=row.state,
        verdict=row.verdict,
        totals=eval_result_pb2.EvalTotals.FromString(row.totals),
        labels=json.loads(row.labels),
        last_sequence=row.last_sequence,
    )
    evaluation.create_time.FromNanoseconds(row.create_time_ns)
    if row.end_time_ns is not None:
        evaluation.end_time.FromNanoseconds(row.end_time_ns)
    if row.error is not None:
        evaluation.error.CopyFrom(error_pb2.AgentError.FromString(row.error))
    return evaluation
