"""The rows of evaluations."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, literal_column, select
from sqlalchemy.sql.selectable import Select

from bough.v1 import error_pb2, eval_result_pb2, evaluation_pb2
from bough_server.errors import NotFound
from bough_server.store.ports.evaluations import EvaluationFilter, EvaluationRecord
from bough_server.store.ports.log import Principal
from bough_server.store.ports.runs import Page
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Reach
from bough_server.store.sql.pages import Listing, key_of, token_of
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.statements import unindexed
from bough_server.store.sql.write_queue import WriteQueue

_runs = tables.runs.c

_ALL: Final = select(tables.runs).where(tables.IS_EVALUATION)
_ANY: Final = _ALL.where(_runs.run_id == bindparam("evaluation"))
_ONE: Final = _ANY.where(_runs.tenant_id == bindparam("tenant"))
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

    async def get(self, principal: Principal, evaluation_id: str) -> EvaluationRecord:
        """See EvaluationIndex."""
        rows = await self._rows(_ONE, {"evaluation": evaluation_id, "tenant": principal.tenant_id})
        if not rows:
            raise NotFound("evaluation", evaluation_id)
        return _record(rows[0])

    async def find(self, evaluation_id: str) -> EvaluationRecord | None:
        """See EvaluationIndex."""
        rows = await self._rows(_ANY, {"evaluation": evaluation_id})
        return _record(rows[0]) if rows else None

    async def find_request(self, principal: Principal, request_id: str) -> EvaluationRecord | None:
        """See EvaluationIndex."""
        asked = {"tenant": principal.tenant_id, "user": principal.user_id, "request": request_id}
        rows = await self._rows(_BY_REQUEST, asked)
        return _record(rows[0]) if rows else None

    async def list(
        self, principal: Principal, evaluation_filter: EvaluationFilter, page: Page
    ) -> tuple[Sequence[evaluation_pb2.Evaluation], str]:
        """See EvaluationIndex."""
        filters = ["evaluations", principal.tenant_id, *_filter_values(evaluation_filter)]
        listing = Listing(
            table=tables.runs,
            name=_runs.run_id,
            common=[tables.IS_EVALUATION, _runs.tenant_id == principal.tenant_id, *_conditions(evaluation_filter)],
            labels=evaluation_filter.labels,
            after=key_of(page.token, filters),
        )
        shown, following = await self._readers.run(partial(listing.read, count=page.size, size=_size))
        return [_evaluation(row) for row in shown], token_of(following, filters) if following is not None else ""

    async def delete(self, principal: Principal, evaluation_id: str) -> bool:
        """See EvaluationIndex."""
        deleting = partial(_delete, tenant_id=principal.tenant_id, evaluation_id=evaluation_id)
        return await self._queue.execute(deleting, run_id=evaluation_id, reach=Reach(runs=[evaluation_id]))

    async def open_evaluations(self) -> Sequence[EvaluationRecord]:
        """See EvaluationIndex."""
        return [_record(row) for row in await self._rows(_OPEN, {})]

    async def _rows(self, statement: Select[Any], parameters: dict[str, str]) -> Sequence[Row[Any]]:
        return await self._readers.run(partial(_all, statement=statement, parameters=parameters))


def _all(connection: Connection, *, statement: Select[Any], parameters: dict[str, str]) -> Sequence[Row[Any]]:
    return connection.execute(statement, parameters).all()


def _delete(connection: Connection, *, tenant_id: str, evaluation_id: str) -> bool:
    row = connection.execute(_ONE, {"evaluation": evaluation_id, "tenant": tenant_id}).one_or_none()
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


def _conditions(evaluation_filter: EvaluationFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a list; those on agent and state must not use the indexes, which are mostly of runs."""
    conditions: list[ColumnElement[bool]] = []
    if evaluation_filter.eval_set_name:
        conditions.append(_runs.eval_set_name == evaluation_filter.eval_set_name)
    if evaluation_filter.agent:
        conditions.append(unindexed(_runs.agent) == evaluation_filter.agent)
    if evaluation_filter.states:
        conditions.append(unindexed(_runs.state).in_(sorted(evaluation_filter.states)))
    return conditions


def _record(row: Row[Any]) -> EvaluationRecord:
    return EvaluationRecord(
        evaluation=_evaluation(row),
        principal=Principal(tenant_id=row.tenant_id, user_id=row.user_id),
        epoch=row.epoch,
        request_digest=row.request_digest,
        owner=row.owner,
    )


def _evaluation(row: Row[Any]) -> evaluation_pb2.Evaluation:
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
