"""What the cells of a matrix came to, and which of them is the best."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.agents.definition import revision
from bough_server.evals.metrics.statistics import is_close
from bough_server.evals.results.significance import Passes, drop_p_value, rejects
from bough_server.evals.results.verdicts import totals

MAX_METRICS: Final = 100
"""The most metrics of which a cell has the mean: the cells are part of an event and of every page of a result."""

CaseResult = eval_result_pb2.CaseResult


def summarize_cells(
    planned: evaluation_pb2.EvaluationPlanned, cases: Sequence[CaseResult]
) -> list[eval_result_pb2.CellResult]:
    """Return what each cell came to; none without a matrix. Takes tenths of a second each: call it in a thread."""
    found = group_by_cell(cases)
    cells = [_summarize(planned, cell, found[cell.name]) for cell in planned.cells]
    mark_best(cells, found)
    return cells


def group_by_cell(cases: Sequence[CaseResult]) -> Mapping[str, list[CaseResult]]:
    """Return the cases of each cell, in the order of the set."""
    found: defaultdict[str, list[CaseResult]] = defaultdict(list)
    for case in cases:
        found[case.cell].append(case)
    return found


def _summarize(
    planned: evaluation_pb2.EvaluationPlanned, cell: evaluation_pb2.EvalCell, cases: Sequence[CaseResult]
) -> eval_result_pb2.CellResult:
    numbers = totals(
        cases,
        planned_trials=planned.trial_count // len(planned.cells),
        planned_reruns=sum(len(case.reruns) for case in cases),
        digest=planned.pins.eval_set_digest,
    )
    del numbers.flaky_cases[:]  # those of all cells are in the totals of the evaluation
    for name in sorted(numbers.metric_means)[MAX_METRICS:]:
        del numbers.metric_means[name]
    return eval_result_pb2.CellResult(
        cell=cell.name, values=dict(cell.values), revision=revision(cell.definition), totals=numbers
    )


def mark_best(cells: Sequence[eval_result_pb2.CellResult], found: Mapping[str, Sequence[CaseResult]]) -> None:
    """Mark the cell that passes more often than each other one, if tests say so.

    Only the first cell with the highest rate is compared, by one test with each other cell. One of k equal cells is
    marked by chance in at most 5 %: it takes a rejection at 5 % / k, and any of the k can be the first.
    """
    rated = [cell for cell in cells if cell.totals.HasField("pass_rate")]
    if len(cells) < 2 or not rated:
        return
    highest = max(cell.totals.pass_rate for cell in rated)
    first = next(cell for cell in rated if is_close(cell.totals.pass_rate, highest))
    p_values = [_compare(found[cell.cell], found[first.cell]) for cell in cells if cell is not first]
    first.p_value = min(1.0, max(p_values) * len(cells))
    first.best = rejects(first.p_value)


def _compare(cases: Sequence[CaseResult], best: Sequence[CaseResult]) -> float:
    """Return the probability that a cell passes so seldom, or less, if the other passes no more often."""
    pairs = [
        Passes(one.statistics.passed, one.statistics.trials, other.statistics.passed, other.statistics.trials)
        for one, other in zip(cases, best, strict=True)
    ]
    return drop_p_value(passes for passes in pairs if passes.trials and passes.trials_before)
