"""The numbers that gates bound, each measured over what is known of an evaluation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.evals.metrics import statistics
from bough_server.evals.results.significance import describe_p_value
from bough_server.evals.results.verdicts import (
    FAILED,
    NOT_EVALUATED,
    PASSED,
    has_unscored,
    list_usages,
    measure_metrics,
    total_cost,
)
from bough_server.log.usage import has_whole_cost

_NANOS: Final = 1_000_000_000
"""The units of cost in one of the currency."""
_NAMED: Final = 5
"""The most cases that a sentence names."""

_UNKNOWN_COST: Final = (
    "The cost of some model calls is not known: their models have no price, or prices in several currencies, or the"
    " provider did not report what was used."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number of an evaluation, over what is known."""

    value: float | None
    note: str = ""
    """What the value is about: the worst case, what was counted as failed; a sentence, or empty."""
    unknown: str = ""
    """Why the value is not over everything; a sentence, empty if it is."""
    unbounded: str = ""
    """Why no upper bound holds, whatever the value is: a sentence; empty if an upper bound can hold."""


def pluralize(number: int, noun: str) -> str:
    """Return a number of something in words."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def describe_missing_scores(cases: Iterable[eval_result_pb2.CaseResult]) -> str:
    """Return the sentence that names a case of which not every run is judged; empty if there is none."""
    found = [case.case_id for case in cases if has_unscored(case)]
    return f"Not every trial of {pluralize(len(found), 'case')} could be scored, such as {found[0]!r}." if found else ""


def worst_case(cases: Sequence[eval_result_pb2.CaseResult]) -> Measured:
    """Return the lowest lower bound of a case's pass rate."""
    judged = [case for case in cases if case.statistics.HasField("pass_rate_interval")]
    if not judged:
        return Measured(value=None, unknown=describe_missing_scores(cases) or "There is no case.")
    case = min(judged, key=lambda each: each.statistics.pass_rate_interval.lower)
    counts = case.statistics
    judgments = pluralize(counts.distinct_trials, "distinct judgment")
    shared = f", by {judgments}" if counts.distinct_trials < counts.trials else ""
    return Measured(
        value=counts.pass_rate_interval.lower,
        note=f"In the case {case.case_id!r} {counts.passed} of {pluralize(counts.trials, 'trial')} passed{shared}.",
        unknown=describe_missing_scores(cases),
    )


def pass_k(
    cases: Sequence[eval_result_pb2.CaseResult],
    k: int,
    values_of: Callable[[eval_result_pb2.CaseResult], Sequence[float]],
) -> Measured:
    """Return the mean of pass^K or pass@K over the cases that have so many scored trials."""
    values = [values_of(case)[k - 1] for case in cases if case.statistics.trials >= k]
    value = statistics.mean(values) if values else None
    few = next((case.case_id for case in cases if case.statistics.trials < k), "")
    return Measured(
        value=value,
        unknown=f"The case {few!r} has fewer than {k} scored trials." if few else describe_missing_scores(cases),
    )


def metric_mean(cases: Sequence[eval_result_pb2.CaseResult], metric: str) -> Measured:
    """Return the mean of a metric over the cases that have it; a case whose runs all crashed counts as one.

    A crashed trial counts as 0, or as the lowest score if that is below 0. With a crashed trial no upper bound holds:
    otherwise crashing would meet it.
    """
    mean = measure_metrics(cases, [metric])[metric]
    if mean.value is None:
        return Measured(value=None, unknown=f"No trial has a score of {metric}.")
    crashed = pluralize(mean.crashes, "crashed trial")
    return Measured(
        value=mean.value,
        note=f"{crashed} counted as {mean.crash_score:g}." if mean.crashes else "",
        unknown=f"{pluralize(mean.unscored, 'case')} could not be scored by {metric} in every trial."
        if mean.unscored
        else "",
        unbounded=f"{crashed} {'has' if mean.crashes == 1 else 'have'} no score." if mean.crashes else "",
    )


def cost(cases: Iterable[eval_result_pb2.CaseResult], totals: eval_result_pb2.EvalTotals) -> Measured:
    """Return what runs, judges and simulated users cost, in units of the currency."""
    used = total_cost(totals)
    parts = [*list_usages(totals)]
    # A sum has a cost as soon as one of its parts has: it is whole only if each of them has.
    trials = [trial for case in cases for trial in (*case.trials, *case.reruns)]
    parts += [usage for trial in trials for usage in list_usages(trial)]
    unknown = not all(map(has_whole_cost, parts))
    if not used.HasField("cost_nanos"):
        called = any(part.model_calls for part in parts)
        return Measured(value=None if called else 0.0, unknown=_UNKNOWN_COST if called else "")
    return Measured(
        value=used.cost_nanos / _NANOS, note=f"In {used.currency_code}.", unknown=_UNKNOWN_COST if unknown else ""
    )


def duration(cases: Iterable[eval_result_pb2.CaseResult], share: float) -> Measured:
    """Return the time in seconds within which so many of the trials ended, by the nearest rank.

    With a crashed trial no upper bound holds: otherwise crashing early would meet it.
    """
    trials = [trial for case in cases for trial in case.trials]
    times = sorted(trial.duration.ToNanoseconds() / _NANOS for trial in trials if trial.HasField("duration"))
    crashes, missing = sum(trial.crashed for trial in trials), len(trials) - len(times)
    return Measured(
        value=times[max(0, ceil(share * len(times)) - 1)] if times else None,
        note=f"Of {pluralize(len(times), 'trial')}.",
        unknown=f"{pluralize(missing, 'trial')} without a time." if missing or not trials else "",
        unbounded=f"{pluralize(crashes, 'trial')} crashed." if crashes else "",
    )


def regressions(comparison: eval_result_pb2.EvalComparison | None) -> Measured:
    """Return how many cases got worse, as one test of all of them says.

    A case that could not be scored is not known to have got worse, nor one of which fresh trials could not be.
    """
    if comparison is None:
        return _NO_BASELINE
    test = comparison.regression_test
    differing = [case for case in comparison.cases if case.change == eval_result_pb2.CASE_CHANGE_UNCLEAR]
    unjudged_now = [case.case_id for case in differing if (case.verdict_candidate, case.verdict_baseline) == _LOST]
    unjudged_before = [
        case.case_id
        for case in comparison.cases
        if case.change not in (eval_result_pb2.CASE_CHANGE_ADDED, eval_result_pb2.CASE_CHANGE_WORSE)
        and case.verdict_baseline not in (PASSED, FAILED)
        and case.verdict_candidate == FAILED
    ]
    sentences = [
        f"Could not be scored, and passed in the baseline: {quote_ids(unjudged_now)}." if unjudged_now else "",
        f"Fails, and could not be scored in the baseline: {quote_ids(unjudged_before)}." if unjudged_before else "",
        test.incomplete_reason,
    ]
    return Measured(
        value=comparison.regressions,
        note=_describe_regressions(comparison) if comparison.regressions else "",
        unknown=" ".join(filter(None, sentences)),
    )


_LOST: Final = (NOT_EVALUATED, PASSED)
"""The verdicts, now and before, of a case that passed and could not be scored."""


def _describe_regressions(comparison: eval_result_pb2.EvalComparison) -> str:
    test = comparison.regression_test
    found = [case.case_id for case in comparison.cases if case.change == eval_result_pb2.CASE_CHANGE_WORSE]
    worse = f"Worse: {quote_ids(found)}." if found else "No case is worse by its own trials alone."
    return (
        f"{test.candidate.passed} of {pluralize(test.candidate.trials, 'trial')} of {pluralize(test.cases, 'case')} "
        f"passed, {test.baseline.passed} of {test.baseline.trials} in the baseline "
        f"({describe_p_value(test.p_value)}). {worse}"
    )


def change(
    cases: Sequence[eval_result_pb2.CaseResult],
    comparison: eval_result_pb2.EvalComparison | None,
    name: str,
    bound_of: Callable[[eval_result_pb2.EstimatedChange], float],
) -> Measured:
    """Return how a number changed from the baseline, or a bound of that; with a crashed trial no upper bound holds."""
    if comparison is None:
        return _NO_BASELINE
    found = next((each for each in comparison.changes if each.name == name), None)
    paired = sum(
        case.change not in (eval_result_pb2.CASE_CHANGE_ADDED, eval_result_pb2.CASE_CHANGE_REMOVED)
        for case in comparison.cases
    )
    if found is None or not found.HasField("interval"):
        return Measured(value=None, unknown=f"Too few cases have {name} both here and in the baseline.")
    count = paired - found.cases
    missing = f"{pluralize(count, 'case')} without {name} here or there." if count else ""
    crashes = sum(trial.crashed for case in cases for trial in case.trials)
    return Measured(
        value=bound_of(found),
        note=f"Over {pluralize(found.cases, 'case')}.",
        unknown=missing or describe_missing_scores(cases),
        # Else crashing early would make trials cheap and short.
        unbounded=f"{pluralize(crashes, 'trial')} crashed." if crashes and name in _SPENT else "",
    )


_SPENT: Final = ("cost", "tokens", "duration")


def count_removed_cases(comparison: eval_result_pb2.EvalComparison | None) -> Measured:
    """Return how many cases of the baseline are missing."""
    if comparison is None:
        return _NO_BASELINE
    found = [case.case_id for case in comparison.cases if case.change == eval_result_pb2.CASE_CHANGE_REMOVED]
    return Measured(value=len(found), note=f"Removed: {quote_ids(found)}." if found else "")


_NO_BASELINE: Final = Measured(value=None, unknown="The gate needs a baseline, and there is none.")


def quote_ids(ids: Sequence[str]) -> str:
    """Return the first of some ids, in quotes."""
    return ", ".join(map(repr, ids[:_NAMED])) + (" and others" if len(ids) > _NAMED else "")
