"""Words that all reports share: statuses, reasons, rates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2, execution_pb2
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.evals.results.significance import describe_p_value
from bough_server.evals.results.verdicts import list_usages

STATUS: Final = {
    eval_result_pb2.VERDICT_PASSED: "passed",
    eval_result_pb2.VERDICT_FAILED: "failed",
    eval_result_pb2.VERDICT_NOT_EVALUATED: "not scored",
}

CHANGES: Final = {
    eval_result_pb2.CASE_CHANGE_BETTER: "better",
    eval_result_pb2.CASE_CHANGE_WORSE: "worse",
    eval_result_pb2.CASE_CHANGE_UNCLEAR: "unclear",
    eval_result_pb2.CASE_CHANGE_REMOVED: "removed",
    eval_result_pb2.CASE_CHANGE_ADDED: "added",
}


def comparison_text(comparison: eval_result_pb2.EvalComparison) -> str:
    """Return how many cases changed, and by how much the pass rate of those did that both sides have, as gates do."""
    counts = (comparison.better, comparison.worse, comparison.unclear, comparison.removed, comparison.added)
    parts = [f"{count} {word}" for count, word in zip(counts, CHANGES.values(), strict=True)]
    parts += [f"pass rate {change.value:+.2f}" for change in comparison.changes if change.name == "pass_rate"]
    return ", ".join(parts)


def comparison_sentences(
    comparison: eval_result_pb2.EvalComparison, suspects: eval_result_pb2.EvalSuspects
) -> Iterator[str]:
    """Yield what a comparison says of all cases together: what got worse, what it could find, and how numbers changed.

    `suspects` are those of the candidate; without any, they are empty.
    """
    test = comparison.regression_test
    if test.HasField("p_value"):
        count = comparison.regressions
        found = pluralize(count, "regression") if count else "No regression is proven"
        yield (
            f"{found}: over {pluralize(test.cases, 'case')} {test.candidate.passed} of {test.candidate.trials} trials "
            f"passed, {test.baseline.passed} of {test.baseline.trials} in the baseline "
            f"({describe_p_value(test.p_value)})."
        )
    elif suspects.trials and not suspects.case_ids and not any(map(_has_failed_in_both, comparison.cases)):
        yield "No regression: no trial failed of a case that the baseline has."
    if suspects.baseline_not_rerun_reason:
        yield f"The baseline did not run again. {suspects.baseline_not_rerun_reason}"
    yield from filter(None, (test.incomplete_reason, test.power))
    if comparison.changes:
        yield f"Mean changes of a case: {', '.join(map(_change_text, comparison.changes))}."


def _has_failed_in_both(case: eval_result_pb2.CaseComparison) -> bool:
    """Return whether a case that the baseline has did not pass each trial."""
    in_both = case.change not in (eval_result_pb2.CASE_CHANGE_ADDED, eval_result_pb2.CASE_CHANGE_REMOVED)
    return in_both and case.pass_rate_candidate < 1


def _change_text(change: eval_result_pb2.EstimatedChange) -> str:
    bounds = f" ({change.interval.lower:+.3g} to {change.interval.upper:+.3g})" if change.HasField("interval") else ""
    return f"{change.name} {change.value:+.3g}{bounds}"


def rates_text(case: eval_result_pb2.CaseComparison) -> str:
    """Return the pass rates of a case in the baseline and now, "-" for one that is not known."""
    before = f"{case.pass_rate_baseline:.2f}" if case.HasField("pass_rate_baseline") else "-"
    after = f"{case.pass_rate_candidate:.2f}" if case.HasField("pass_rate_candidate") else "-"
    return f"{before} to {after}" if before != after else before


def change_reasons(case: eval_result_pb2.CaseComparison) -> list[str]:
    """Return why a case changed: what its trials prove, and what differs in its tree."""
    return [*filter(None, [case.reason]), *(one.message for one in case.differences)]


def verdict_text(status: eval_result_pb2.Verdict.ValueType) -> str:
    """Return a verdict in words; "pending" for one that is not known yet."""
    return STATUS.get(status, "pending")


def result_text(result: eval_result_pb2.EvalResult) -> str:
    """Return the verdict of a result in words; of an evaluation that has not succeeded, what became of it."""
    if result.state == execution_pb2.EXECUTION_STATE_CANCELLED:
        return "cancelled"
    if result.state == execution_pb2.EXECUTION_STATE_FAILED:
        return "ended without a verdict"
    return "running" if _is_unfinished(result) else verdict_text(result.verdict)


def incomplete_text(result: eval_result_pb2.EvalResult) -> str:
    """Return that a result is not of a whole evaluation and why, in sentences; empty if it is of one that succeeded."""
    if not _is_unfinished(result):
        return ""
    ends = {execution_pb2.EXECUTION_STATE_CANCELLED: "was cancelled", execution_pb2.EXECUTION_STATE_FAILED: "failed"}
    end = ends.get(result.state, "has not ended")
    why = f": {result.error.message.rstrip('.')}" if result.error.message else ""
    ended, trials = result.totals.trials_ended, pluralize(result.totals.trials, "trial")
    return f"The evaluation {end}{why}. It has no verdict: {ended} of {trials} ended."


def _is_unfinished(result: eval_result_pb2.EvalResult) -> bool:
    """Return whether an evaluation has not succeeded; a result without a state is finished if it has a verdict."""
    if not result.state:
        return not result.verdict
    return result.state != execution_pb2.EXECUTION_STATE_SUCCEEDED


def retries_text(totals: eval_result_pb2.EvalTotals) -> str:
    """Return how many trials were run again after a crash, as a sentence; empty if none was."""
    count, trials = totals.retried_trials, pluralize(totals.trials + totals.reruns, "trial")
    return f"{count} of {trials} {'was' if count == 1 else 'were'} retried after a crash." if count else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """A cell of a matrix, in words."""

    name: str
    cases: str
    rate: str
    means: str
    cost: str
    is_best: bool


def cell_rows(result: eval_result_pb2.EvalResult) -> list[CellRow]:
    """Return what each cell of the matrix came to; none without a matrix."""
    return [
        CellRow(
            name=cell.cell,
            cases=f"{cell.totals.cases_passed}/{cell.totals.cases}",
            rate=pass_rate_text(cell.totals),
            means=", ".join(means_texts(cell.totals)),
            cost=cost_text(cell.totals),
            is_best=cell.best,
        )
        for cell in result.cells
    ]


def best_text(result: eval_result_pb2.EvalResult) -> str:
    """Return whether a cell is the best, as a sentence; empty if there are no cells to compare."""
    for cell in result.cells:
        if cell.HasField("p_value"):
            p_value = f"{describe_p_value(cell.p_value)}, corrected for {len(result.cells)} cells"
            if cell.best:
                return f"{cell.cell} passes more often than every other cell ({p_value})."
            return f"No cell is proven to be the best: {cell.cell} has the highest pass rate ({p_value})."
    return ""


def pass_rate_text(totals: eval_result_pb2.EvalTotals) -> str:
    """Return the mean pass rate with its interval; empty without one."""
    if not totals.HasField("pass_rate"):
        return ""
    bounds = totals.pass_rate_interval
    return f"{totals.pass_rate:.2f} ({bounds.lower:.2f} to {bounds.upper:.2f})"


def value_text(gate: eval_result_pb2.GateResult) -> str:
    """Return the value of a gate's number, with its cell if the gate does not name it; empty without a value."""
    if not gate.HasField("value"):
        return ""
    place = f" in {gate.cell}" if gate.cell and not gate.gate.endswith(gate.cell) else ""
    return f"{gate.value:.4g}{place}"


def means_texts(totals: eval_result_pb2.EvalTotals) -> list[str]:
    """Return the mean of each metric as gates have it: a crashed trial counts as 0."""
    return [f"{name} {mean:.3g}" for name, mean in sorted(totals.metric_means.items())]


def reasons_of(case: eval_result_pb2.CaseResult) -> list[str]:
    """Return why a case did not pass, without what a sentence before has said already: its own reason, then its runs'.

    After these come its faults, and mocks that answered nothing, also of a case that passed.

    Sentences about one of several runs begin with its number, from 1.
    """
    faults, unused = [_describe_fault(fault) for fault in case.faults], describe_unused_mocks(case)
    several = len(case.trials) > 1
    if case.verdict == eval_result_pb2.VERDICT_PASSED:
        retries = (
            f"trial {trial.trial + 1}: {text}" if several else text
            for trial in case.trials
            for text in retry_texts(trial)
        )
        return [*retries, *faults, *unused]
    shown = [case.reason] if case.reason else []
    for trial in case.trials:
        number = f"trial {trial.trial + 1}: " if several else ""
        shown += [f"{number}{text}" for text in reasons_of_trial(trial, earlier_reasons=shown)]
    return shown + faults + unused


def _describe_fault(fault: eval_result_pb2.FaultSummary) -> str:
    name = f"faults[{fault.index}], of {'the model ' if fault.is_model else ''}{fault.name},"
    if not fault.injected:
        return f"{name} was drawn for no call."
    times = "once" if fault.injected == 1 else f"{fault.injected:,} times"
    return f"{name} was injected {times}: {fault.passed} of {pluralize(fault.trials, 'trial')} with it passed."


def describe_unused_mocks(case: eval_result_pb2.CaseResult) -> list[str]:
    """Return a sentence for each mock of a case that no trial used."""
    return [
        f"mocks.{'agents' if mock.is_agent else 'tools'}[{mock.index}], of {mock.name}, answered no call."
        for mock in case.unused_mocks
    ]


def trial_text(trial: eval_result_pb2.CaseTrialResult) -> str:
    """Return what a trial is called, with its number from 1."""
    names = {
        eval_result_pb2.TRIAL_PURPOSE_RERUN: "fresh trial",
        eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN: "fresh trial of the baseline",
    }
    return f"{names.get(trial.purpose, 'trial')} {trial.trial + 1}"


def reasons_of_trial(trial: eval_result_pb2.CaseTrialResult, *, earlier_reasons: Sequence[str] = ()) -> list[str]:
    """Return why a run did not pass, without the `earlier_reasons`: its reason, its scores', its trees' differences."""
    shown: list[str] = []
    for text in filter(None, _sentences(trial)):
        # The reason of a score is also in that of its trial, and of its case, with other words before it.
        if not any((text.partition(": ")[2] or text) in one for one in (*earlier_reasons, *shown)):
            shown.append(text)
    return shown


def retry_texts(trial: eval_result_pb2.CaseTrialResult) -> list[str]:
    """Return a sentence for each attempt at a trial that crashed, after which it began anew."""
    return [
        f"It crashed and was retried ({number} of {len(trial.crashed_attempts)}): {attempt.reason}"
        for number, attempt in enumerate(trial.crashed_attempts, start=1)
    ]


def _sentences(trial: eval_result_pb2.CaseTrialResult) -> Iterator[str]:
    yield trial.reason
    yield from retry_texts(trial)
    for score in trial.scores:
        if score.verdict == eval_result_pb2.VERDICT_PASSED:
            continue
        if score.reason:
            yield f"{score.name}: {score.reason}"
        for comparison in score.tree_comparisons:
            yield from (f"{score.name}: {difference.message}" for difference in comparison.differences)


def describe_judgment(judgment: eval_result_pb2.Judgment) -> str:
    """Return what a judge said of a rubric, and which model it is: "grounded (judge): holds: The order says so."."""
    model = f" ({judgment.model})" if judgment.model else ""
    if judgment.HasField("grade"):
        verdict = f"grade {judgment.grade}"
    elif judgment.HasField("holds"):
        verdict = "holds" if judgment.holds else "does not hold"
    else:
        verdict = "no verdict"
    return f"{judgment.rubric_id}{model}: {verdict}: {judgment.reason}"


def rate_text(statistics: eval_result_pb2.PassStatistics) -> str:
    """Return how many runs passed, with the interval of the rate: "4/5 (0.38 to 0.96)"; empty without runs."""
    if not statistics.trials:
        return ""
    interval = statistics.pass_rate_interval
    shared = ""
    if statistics.distinct_trials and statistics.distinct_trials < statistics.trials:
        shared = f", {pluralize(statistics.distinct_trials, 'distinct judgment')}"
    return f"{statistics.passed}/{statistics.trials} ({interval.lower:.2f} to {interval.upper:.2f}{shared})"


def cost_text(totals: eval_result_pb2.EvalTotals) -> str:
    """Return what the runs cost, and what judges and simulated users did, as far as it is known."""
    parts: list[str] = []
    for name, usage in zip(("runs", "judges", "simulated users"), list_usages(totals), strict=True):
        if usage.HasField("cost_nanos"):
            parts.append(f"{name} {usage.cost_nanos / 1e9:.4g} {usage.currency_code}")
    return ", ".join(parts)
