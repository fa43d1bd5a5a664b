"""Compare two results of evaluations: what they depended on, and then case by case."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from bough.v1 import eval_result_pb2, execution_pb2
from bough_server.evals.metrics import statistics
from bough_server.evals.results.changes import (
    BETTER,
    WORSE,
    CountedTrials,
    JudgedCase,
    estimate_changes,
    judge_cases,
)
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.evals.results.significance import describe_p_value, rejects
from bough_server.evals.results.verdicts import PASSED, total_cost

SAME: Final = eval_result_pb2.CASE_CHANGE_SAME
UNCLEAR: Final = eval_result_pb2.CASE_CHANGE_UNCLEAR
REMOVED: Final = eval_result_pb2.CASE_CHANGE_REMOVED
ADDED: Final = eval_result_pb2.CASE_CHANGE_ADDED

MAX_BYTES: Final = 3_900_000
"""The most bytes of a comparison that a server returns: clients accept messages of 4 MiB."""

MAX_PINS: Final = 500
"""The most sentences about what results depended on in such a comparison."""

_SHOWN: Final = 20
"""How many characters of a hash are in a sentence."""


def compare(before: eval_result_pb2.EvalResult, after: eval_result_pb2.EvalResult) -> eval_result_pb2.EvalComparison:
    """Return how a result differs from an earlier one: what they depended on, and their cases in pairs by id.

    Cases of one id, which only results of given records have, are paired in order. Takes tenths of a second with many
    cases: call it in a thread.
    """
    left, right = _by_id(before.cases), _by_id(after.cases)
    pairs = {key: (left[key], case) for key, case in right.items() if key in left}
    counted = CountedTrials(before, after, [*pairs.values()])
    passes = {key: found for key, (old, new) in pairs.items() if (found := counted.count(old, new)) is not None}
    changes = judge_cases(passes, {key for key, (_, new) in pairs.items() if counted.is_suspect(new)})
    cases = [_compare_case(left.get(key), case, changes.get(key)) for key, case in right.items()]
    cases += [_build_removal(case) for key, case in left.items() if key not in right]
    numbers = Counter(case.change for case in cases)
    result = eval_result_pb2.EvalComparison(
        pins_changed=_compare_pins(before, after),
        cases=cases,
        better=numbers[BETTER],
        worse=numbers[WORSE],
        removed=numbers[REMOVED],
        added=numbers[ADDED],
        unclear=numbers[UNCLEAR],
        state_baseline=before.state,
        state_candidate=after.state,
        regression_test=counted.test(),
        changes=estimate_changes([*pairs.values()], seed=after.pins.eval_set_digest),
    )
    test = result.regression_test
    if test.HasField("p_value") and rejects(test.p_value):
        result.regressions = max(1, numbers[WORSE])
    if before.totals.HasField("pass_rate") and after.totals.HasField("pass_rate"):
        result.pass_rate_change = after.totals.pass_rate - before.totals.pass_rate
    old, new = total_cost(before.totals), total_cost(after.totals)
    # A cost that is not known, or in another currency, has no difference to this one.
    if old.HasField("cost_nanos") and new.HasField("cost_nanos") and old.currency_code == new.currency_code:
        result.cost_nanos_change, result.cost_currency_code = new.cost_nanos - old.cost_nanos, new.currency_code
    return result


def find_baseline_problem(result: eval_result_pb2.EvalResult) -> str:
    """Return why a result is no baseline unless a caller allows it, as the end of a sentence; empty if it is one."""
    if result.state == execution_pb2.EXECUTION_STATE_SUCCEEDED:
        return ""
    state = execution_pb2.ExecutionState.Name(result.state).removeprefix("EXECUTION_STATE_")
    return f"is of an evaluation that is {state}, not SUCCEEDED"


def shrink_comparison(
    comparison: eval_result_pb2.EvalComparison, *, most: int = MAX_BYTES
) -> eval_result_pb2.EvalComparison:
    """Leave out what does not fit into `most` bytes, in place: from the last case on, differences, then metrics.

    What remains of 10,000 cases fits. Of the sentences about what the results depended on, the first MAX_PINS are kept.
    """
    del comparison.pins_changed[MAX_PINS:]
    size = comparison.ByteSize()
    # From the last case on: what a reader comes to first stays whole.
    for name in ("differences", "metric_changes"):
        for case in reversed(comparison.cases):
            if size <= most:
                return comparison
            whole = case.ByteSize()
            case.ClearField(name)
            size -= whole - case.ByteSize()
    return comparison


def baseline_of(result: eval_result_pb2.EvalResult) -> eval_result_pb2.EvalResult:
    """Return the part of a result that later results are compared with: pins, totals, and the numbers of each case.

    The cases are without runs and turns, and without the probabilities for each k, which follow from the number of
    runs and of those that passed.
    """
    return eval_result_pb2.EvalResult(
        evaluation_id=result.evaluation_id,
        eval_set_name=result.eval_set_name,
        pins=result.pins,
        verdict=result.verdict,
        state=result.state,
        totals=result.totals,
        cases=map(_baseline_case, result.cases),
    )


def _baseline_case(case: eval_result_pb2.CaseResult) -> eval_result_pb2.CaseResult:
    kept = eval_result_pb2.CaseResult(
        case_id=case.case_id,
        verdict=case.verdict,
        metrics=case.metrics,
        statistics=case.statistics,
        trial_means=case.trial_means if case.HasField("trial_means") else None,
    )
    for name in ("pass_at_k", "pass_all_k", "pass_all_k_intervals"):
        kept.statistics.ClearField(name)
    return kept


def _by_id(cases: Iterable[eval_result_pb2.CaseResult]) -> dict[tuple[str, int], eval_result_pb2.CaseResult]:
    """Return the cases by their ids, and by how many with the same id came before."""
    seen: Counter[str] = Counter()
    found = {}
    for case in cases:
        found[case.case_id, seen[case.case_id]] = case
        seen[case.case_id] += 1
    return found


def _compare_pins(before: eval_result_pb2.EvalResult, after: eval_result_pb2.EvalResult) -> Iterator[str]:
    """Return sentences about what the results depended on and in which they differ."""
    left, right = before.pins, after.pins
    yield from _describe_change("The name of the set", before.eval_set_name, after.eval_set_name)
    yield from _describe_change("The content of the set", left.eval_set_digest, right.eval_set_digest)
    yield from _describe_change("The evaluated agent", left.agent, right.agent)
    yield from _compare_entries("agent", left.agents, right.agents)
    yield from _compare_entries("model", left.models, right.models)
    yield from _compare_entries("tool", left.tools, right.tools)
    # Unknown in older results, and empty without Python: then the agents and tools say what is new.
    if left.code_digest and right.code_digest:
        yield from _describe_change("The Python code", left.code_digest, right.code_digest)
    yield from _describe_change("The price list", left.prices, right.prices)
    yield from _compare_entries("judge", left.judges, right.judges)
    yield from _compare_entries("model of simulated users", left.users, right.users)
    yield from _describe_change("The version of the server", left.server_version, right.server_version)


def _describe_change(what: str, before: str, after: str) -> Iterator[str]:
    if before != after:
        old, new = before[:_SHOWN], after[:_SHOWN]
        # Hashes that differ only in what is not shown would read as if nothing had changed.
        if old == new:
            old, new = before, after
        yield f"{what} has changed: {old or 'none'}, now {new or 'none'}."


def _compare_entries(kind: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if name not in before:
            yield f"The {kind} {name!r} was added."
        elif name not in after:
            yield f"The {kind} {name!r} was removed."
        else:
            yield from _describe_change(f"The {kind} {name!r}", before[name], after[name])


def _build_removal(before: eval_result_pb2.CaseResult) -> eval_result_pb2.CaseComparison:
    return eval_result_pb2.CaseComparison(
        case_id=before.case_id, change=REMOVED, verdict_baseline=before.verdict, pass_rate_baseline=_pass_rate(before)
    )


def _compare_case(
    before: eval_result_pb2.CaseResult | None, after: eval_result_pb2.CaseResult, judged: JudgedCase | None
) -> eval_result_pb2.CaseComparison:
    result = eval_result_pb2.CaseComparison(
        case_id=after.case_id, change=ADDED, verdict_candidate=after.verdict, pass_rate_candidate=_pass_rate(after)
    )
    if before is None:
        return result
    direction = _direction(before, after)
    result.change = UNCLEAR if direction else SAME
    result.verdict_baseline = before.verdict
    if before.statistics.HasField("pass_rate"):
        result.pass_rate_baseline = before.statistics.pass_rate
    if judged is not None:
        direction = direction or judged.direction
        result.change = judged.change or (UNCLEAR if direction else SAME)
        old, new = judged.passes.trials_before, judged.passes.trials
        result.trials_baseline.trials, result.trials_baseline.passed = old, judged.passes.passed_before
        result.trials_candidate.trials, result.trials_candidate.passed = new, judged.passes.passed
        if judged.p_value is not None:
            result.p_value = judged.p_value
    result.reason = _explain_case(result)
    result.metric_changes.update(_metric_changes(before, after))
    result.differences.extend(_differences(before, after, direction))
    return result


def _explain_case(compared: eval_result_pb2.CaseComparison) -> str:
    if compared.change == SAME:
        return ""
    if not compared.HasField("trials_candidate"):
        return "Not enough of its trials could be scored to compare it."
    new, old = compared.trials_candidate, compared.trials_baseline
    counts = f"{new.passed} of {pluralize(new.trials, 'trial')} passed, {old.passed} of {old.trials} in the baseline"
    if not compared.HasField("p_value"):
        return f"{counts}. No trial failed, so it has no fresh ones, which a proof would take."
    chance = ", which may be chance" if compared.change == UNCLEAR else ""
    return f"{counts}{chance} ({describe_p_value(compared.p_value)})."


def _pass_rate(case: eval_result_pb2.CaseResult) -> float | None:
    return case.statistics.pass_rate if case.statistics.HasField("pass_rate") else None


def _direction(before: eval_result_pb2.CaseResult, after: eval_result_pb2.CaseResult) -> int:
    """Return 1 if a case looks better, -1 if it looks worse: its verdict decides, and then how often it passed."""
    if (before.verdict == PASSED) != (after.verdict == PASSED):
        return 1 if after.verdict == PASSED else -1
    old, new = _pass_rate(before), _pass_rate(after)
    # Rates are quotients: two that are equal may differ in their last bit.
    if old is None or new is None or statistics.is_close(old, new):
        return 0
    return 1 if new > old else -1


def _metric_changes(before: eval_result_pb2.CaseResult, after: eval_result_pb2.CaseResult) -> dict[str, float]:
    """Return how the means of the metrics changed that both sides have."""
    old = {metric.name: metric.mean for metric in before.metrics if metric.HasField("mean")}
    return {
        metric.name: metric.mean - old[metric.name]
        for metric in after.metrics
        if metric.HasField("mean") and metric.name in old
    }


def _differences(
    before: eval_result_pb2.CaseResult, after: eval_result_pb2.CaseResult, direction: int
) -> Sequence[eval_result_pb2.TreeDifference]:
    """Return the differences from the expected tree that explain a change, in the first two runs that differ.

    The two runs have one index. For a case that looks worse they are the differences that only the new run has, for one
    that looks better those that only the old run had. A run that the other result lacks, as a kept baseline lacks all,
    counts as one without differences if the case looks better or worse.
    """
    old_runs, new_runs = ({trial.trial: trial for trial in case.trials} for case in (before, after))
    old_side, new_side = (new_runs, old_runs) if direction > 0 else (old_runs, new_runs)
    empty = eval_result_pb2.CaseTrialResult()
    pairs = (
        (trial, old_side.get(index, empty))
        for index, trial in sorted(new_side.items())
        if index in old_side or direction
    )
    return next(filter(None, (_only_in(trial, other) for trial, other in pairs)), [])


def _only_in(
    trial: eval_result_pb2.CaseTrialResult, other: eval_result_pb2.CaseTrialResult
) -> list[eval_result_pb2.TreeDifference]:
    """Return the differences of a run that another run has not, or not so often."""
    left = Counter(key for key, _ in _key_differences(other))
    found = []
    for key, difference in _key_differences(trial):
        if left[key]:
            left[key] -= 1
        else:
            found.append(difference)
    return found


def _key_differences(
    trial: eval_result_pb2.CaseTrialResult,
) -> Iterator[tuple[tuple[str | int, ...], eval_result_pb2.TreeDifference]]:
    """Return the differences of a trial, each with what it is without the ids of invocations: they are always new."""
    for score in trial.scores:
        for comparison in score.tree_comparisons:
            for each in comparison.differences:
                place = (each.expected_parent, each.actual_parent)
                yield (score.name, comparison.turn, each.kind, each.agent, *place, each.message), each
