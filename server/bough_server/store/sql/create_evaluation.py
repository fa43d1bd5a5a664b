"""Create an evaluation in one transaction: its row, request id, and first events."""

from typing import Final

from sqlalchemy import Connection

from bough_server import evaluation_events
from bough_server.store.evaluation_projection import EvaluationFold
from bough_server.store.ports.log import NewEvaluation
from bough_server.store.projected import LogAddress, Projected
from bough_server.store.sql import tables
from bough_server.store.sql.append import SET_EVALUATION, insert_events
from bough_server.store.sql.create_run import check_request, insert_run, is_accepted
from bough_server.store.sql.log_heads import Head, LogHeads
from bough_server.store.sql.rows import evaluation_row
from bough_server.store.sql.statements import DriverCursor, DriverStatement

_SET_EVALUATION: Final = DriverStatement(SET_EVALUATION)


def check_evaluation(new_evaluation: NewEvaluation) -> None:
    """Raise ValueError if a new evaluation is inconsistent: a defect of the caller."""
    first, *cases = new_evaluation.records
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
    principal, records = new_evaluation.principal, new_evaluation.records
    if is_accepted(connection, new_evaluation.evaluation_id, records[0]):
        return
    check_request(connection, principal, new_evaluation.request_id, kind=tables.EVALUATION)
    address = LogAddress(run_id=new_evaluation.evaluation_id, tenant_id=principal.tenant_id, user_id=principal.user_id)
    fold = EvaluationFold()
    _write(connection, new_evaluation, address, fold.project(records))
    heads.put(Head(address=address, epoch=1, last_sequence=len(records), is_ended=False, fold=fold))


def _write(connection: Connection, new_evaluation: NewEvaluation, address: LogAddress, projected: Projected) -> None:
    assert projected.start is not None, "the first event is evaluation_planned"
    assert projected.evaluation is not None, "the first event is evaluation_planned"
    with DriverCursor(connection) as cursor:
        insert_run(
            cursor,
            address,
            projected.start,
            create_time_ns=new_evaluation.create_time_ns,
            owner=new_evaluation.owner,
            last_sequence=len(new_evaluation.records),
            definitions={},
            kind=tables.EVALUATION,
        )
        _SET_EVALUATION.write(cursor, [evaluation_row(address.run_id, projected.evaluation)])
        insert_events(cursor, address.run_id, new_evaluation.records)
