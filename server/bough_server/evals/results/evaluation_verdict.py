"""The verdict of an evaluation: its gates, and the cases that its baseline has and it has not."""

from collections.abc import Iterator, Mapping, Sequence

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.evals.results.cells import group_by_cell, summarize_cells
from bough_server.evals.results.compare import compare
from bough_server.evals.results.gate_numbers import describe_missing_scores, pluralize, quote_ids
from bough_server.evals.results.gates import Gate, check_gate, parse_gate
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED, has_crashed, verdict


def compute_verdict(
    planned: evaluation_pb2.EvaluationPlanned, result: eval_result_pb2.EvalResult
) -> evaluation_pb2.EvaluationTotaled:
    """Return the verdict on a result that has all of its cases, and what each gate found."""
    comparison = compare(planned.baseline, result) if planned.HasField("baseline") else None
    gates = [parse_gate(text) for text in planned.gates]
    cells = summarize_cells(planned, result.cases)
    by_cell = group_by_cell(result.cases)
    checked = [
        check_gate(gate, result.cases, result.totals, comparison, allow_removed=planned.allow_removed)
        if gate.needs_baseline or not cells
        else _check_in_cells(gate, cells, by_cell)
        for gate in gates
    ]
    removed: list[str] = []
    if comparison is not None and not planned.allow_removed:
        removed = [one.case_id for one in comparison.cases if one.change == eval_result_pb2.CASE_CHANGE_REMOVED]
    counts_crashes = not gates or any(gate.counts_crashes for gate in gates)
    return evaluation_pb2.EvaluationTotaled(
        verdict=verdict(result.cases, checked, removed=removed, counts_crashes=counts_crashes),
        totals=result.totals,
        gates=checked,
        reason=" ".join(_reasons(result.cases, checked, removed=removed, counts_crashes=counts_crashes)),
        cells=cells,
    )


def _check_in_cells(
    gate: Gate,
    cells: Sequence[eval_result_pb2.CellResult],
    by_cell: Mapping[str, Sequence[eval_result_pb2.CaseResult]],
) -> eval_result_pb2.GateResult:
    """Return what a gate found in the cell that it names, else in the one that is farthest from holding it."""
    checked: list[eval_result_pb2.GateResult] = []
    for cell in cells:
        if gate.cell in ("", cell.cell):
            found = check_gate(gate, by_cell[cell.cell], cell.totals, None, allow_removed=True)
            found.cell = cell.cell
            checked.append(found)
    order = (FAILED, NOT_EVALUATED, PASSED)
    return min(checked, key=lambda found: (order.index(found.verdict), gate.measure_slack(found.value)))


def _reasons(
    cases: Sequence[eval_result_pb2.CaseResult],
    gates: Sequence[eval_result_pb2.GateResult],
    *,
    removed: Sequence[str],
    counts_crashes: bool,
) -> Iterator[str]:
    """Yield why an evaluation did not pass, as far as neither a gate nor a case that counts says so."""
    if not counts_crashes:
        found = [case.case_id for case in cases if has_crashed(case)]
        trials = sum(trial.crashed for case in cases for trial in case.trials)
        if trials:
            yield (
                f"{pluralize(trials, 'trial')} crashed, of {quote_ids(found)}, and no gate counts crashed "
                "trials: a gate on a pass rate, such as pass_rate >= 0.9, does."
            )
    if removed:
        count = pluralize(len(removed), "case")
        yield f"{count} of the baseline may not be removed from the set: {quote_ids(removed)}."
    if gates and all(gate.verdict == PASSED for gate in gates) and (text := describe_missing_scores(cases)):
        yield text
