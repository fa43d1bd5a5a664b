"""The verdict of an evaluation: its gates, and the cases that its baseline has and it has not."""

from collections.abc import Sequence

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.evals.compare import compare
from bough_server.evals.gates import check_gate, parse_gate
from bough_server.evals.verdicts import verdict


def judged(
    planned: evaluation_pb2.EvaluationPlanned, result: eval_result_pb2.EvalResult
) -> tuple[eval_result_pb2.MetricStatus.ValueType, Sequence[eval_result_pb2.GateResult]]:
    """Return the verdict on a result that has all of its cases, and what each gate found."""
    comparison = compare(planned.baseline, result) if planned.HasField("baseline") else None
    gates = [
        check_gate(parse_gate(text), result.cases, result.totals, comparison, allow_removed=planned.allow_removed)
        for text in planned.gates
    ]
    removed: list[str] = []
    if comparison is not None and not planned.allow_removed:
        removed = [one.case_id for one in comparison.cases if one.change == eval_result_pb2.CASE_CHANGE_REMOVED]
    return verdict(result.cases, gates, removed=removed), gates
