"""Words that all reports share: statuses, reasons, rates."""

from collections.abc import Iterator, Sequence
from typing import Final

from bough.v1 import eval_result_pb2, execution_pb2
from bough_server.evals.results.gate_numbers import pluralize
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
            f"passed, {test.baseline.passed} of {test.baseline.trials} in the baseline (p = {test.p_value:.2g})."
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


def means_texts(totals: eval_result_pb2.EvalTotals) -> list[str]:
    """Return the mean of each metric as gates have it: a crashed trial counts as 0."""
    return [f"{name} {mean:.3g}" for name, mean in sorted(totals.metric_means.items())]


def reasons_of(case: eval_result_pb2.CaseResult) -> list[str]:
    """Return why a case did not pass, without what a sentence before has said already: its own reason, then its runs'.

    Sentences about one of several runs begin with its number, from 1.
    """
    unused = describe_unused_mocks(case)
    if case.verdict == eval_result_pb2.VERDICT_PASSED:
        return unused
    shown = [case.reason] if case.reason else []
    for trial in case.trials:
        number = f"trial {trial.trial + 1}: " if len(case.trials) > 1 else ""
        shown += [f"{number}{text}" for text in reasons_of_trial(trial, earlier_reasons=shown)]
    return shown + unused


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
    """Return why a run did not pass, without what has been `said`: its reason, its scores', its trees' differences."""
    shown: list[str] = []
    for text in filter(None, _sentences(trial)):
        # The reason of a score is also in that of its trial, and of its case, with other words before it.
        if not any((text.partition(": ")[2] or text) in one for one in (*earlier_reasons, *shown)):
            shown.append(text)
    return shown


def _sentences(trial: eval_result_pb2.CaseTrialResult) -> Iterator[str]:
    yield trial.reason
    for score in trial.scores:
        if score.verdict == eval_result_pb2.VERDICT_PASSED:
            continue
        if score.reason:
            yield f"{score.name}: {score.reason}"
        for comparison in score.tree_comparisons:
            yield from (f"{score.name}: {difference.message}" for difference in comparison.differences)


def rate_text(statistics: eval_result_pb2.PassStatistics) -> str:
    """Return how many runs passed, with the interval of the rate: "4/5 (0.38 to 0.96)"; empty without runs."""
    if not statistics.trials:
        return ""
    interval = statistics.pass_rate_interval
    shared = ""
    if statistics.distinct_trials and statistics.distinct_trials < statistics.trials:
        shared = f", {pluralize(statistics.distinct_trials, 'distinct judgment')}"
    return f"{statistics.passed}/{statistics.trials} ({interval.lower:.2f} to {interval.upper:.2f}{shared})"


def cost_text(result: eval_result_pb2.EvalResult) -> str:
    """Return what the runs cost, and what judges and simulated users did, as far as it is known."""
    parts: list[str] = []
    for name, usage in zip(("runs", "judges", "simulated users"), list_usages(result.totals), strict=True):
        if usage.HasField("cost_nanos"):
            parts.append(f"{name} {usage.cost_nanos / 1e9:.4g} {usage.currency_code}")
    return ", ".join(parts)
