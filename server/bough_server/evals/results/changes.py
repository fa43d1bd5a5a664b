"""What changed from a baseline to a candidate beyond chance: of each case, of all together, and of numbers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2
from bough_server.evals.metrics import statistics
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.evals.results.power import Design
from bough_server.evals.results.significance import LEVEL, Key, Passes, case_p_values, drop_p_value, reject
from bough_server.evals.results.verdicts import count_distinct, is_scored

Change: TypeAlias = eval_result_pb2.CaseChange.ValueType
Pair: TypeAlias = tuple[eval_result_pb2.CaseResult, eval_result_pb2.CaseResult]
"""A case in the baseline, and in the candidate."""

BETTER: Final = eval_result_pb2.CASE_CHANGE_BETTER
WORSE: Final = eval_result_pb2.CASE_CHANGE_WORSE

_NANOS: Final = 1_000_000_000


class CountedTrials:
    """Counts the trials by which the cases of two results are compared."""

    def __init__(self, before: eval_result_pb2.EvalResult, after: eval_result_pb2.EvalResult) -> None:
        suspects = after.suspects
        self._reruns = suspects.trials if after.HasField("suspects") else 0
        self._suspects = frozenset(suspects.case_ids) if after.HasField("suspects") else None
        # The fresh trials of another baseline say nothing about this one.
        self._has_baseline_reruns = suspects.HasField("baseline_pins") and suspects.baseline_pins == before.pins

    def is_suspect(self, case: eval_result_pb2.CaseResult) -> bool:
        """Return whether a case of the candidate can have got worse: all can if suspects were not chosen."""
        return self._suspects is None or case.case_id in self._suspects

    def count(self, before: eval_result_pb2.CaseResult, after: eval_result_pb2.CaseResult) -> Passes | None:
        """Return how many trials of a case passed on both sides, fresh ones if it has some; None without any."""
        new, old = after.statistics, before.statistics
        passes = Passes(*count_distinct_trials(new), *count_distinct_trials(old))
        if self._suspects is not None and after.case_id in self._suspects:
            passed, trials = _count_reruns(after, eval_result_pb2.TRIAL_PURPOSE_RERUN)
            passes = passes._replace(passed=passed, trials=trials)
            if self._has_baseline_reruns:
                passed, trials = _count_reruns(after, eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN)
                passes = passes._replace(passed_before=passed, trials_before=trials)
        return passes if passes.trials and passes.trials_before else None

    def test(self, pairs: Sequence[Pair]) -> eval_result_pb2.RegressionTest:
        """Return the test of all cases that both results have: of the suspects, if there was a choice of them."""
        chosen = [pair for pair in pairs if self.is_suspect(pair[1])]
        strata = [passes for pair in chosen if (passes := self.count(*pair)) is not None]
        test = eval_result_pb2.RegressionTest(
            level=LEVEL,
            cases=len(strata),
            candidate=eval_result_pb2.PassCounts(
                trials=sum(each.trials for each in strata), passed=sum(each.passed for each in strata)
            ),
            baseline=eval_result_pb2.PassCounts(
                trials=sum(each.trials_before for each in strata), passed=sum(each.passed_before for each in strata)
            ),
            power=self._design(pairs).describe(),
            incomplete_reason=self._explain_incomplete(chosen),
        )
        if strata:
            test.p_value = drop_p_value(strata)
        return test

    def _explain_incomplete(self, suspects: Sequence[Pair]) -> str:
        if self._suspects is None:
            return ""
        expected = self._reruns * (2 if self._has_baseline_reruns else 1)
        missing = {
            after.case_id: count
            for _, after in suspects
            if (count := expected - sum(self._is_counted(trial) for trial in after.reruns)) > 0
        }
        if not missing:
            return ""
        trials = pluralize(sum(missing.values()), "fresh trial")
        return f"{trials} could not be scored, such as of the case {next(iter(missing))!r}."

    def _is_counted(self, trial: eval_result_pb2.CaseTrialResult) -> bool:
        is_own = trial.purpose == eval_result_pb2.TRIAL_PURPOSE_RERUN
        return is_scored(trial) and (is_own or self._has_baseline_reruns)

    def _design(self, pairs: Sequence[Pair]) -> Design:
        known = [(old.statistics, new.statistics) for old, new in pairs if old.statistics.trials]
        before = [count_distinct_trials(old) for old, _ in known]
        trials = sum(count for _, count in before)
        rerun_before = self._reruns if self._has_baseline_reruns else 0
        return Design(
            cases=len(known),
            pass_rate=sum(passed for passed, _ in before) / max(1, trials),
            trials=round(sum(count_distinct_trials(new)[1] for _, new in known) / max(1, len(known))) or 1,
            reruns=self._reruns,
            baseline_trials=rerun_before or round(trials / max(1, len(known))),
        )


def _count_reruns(case: eval_result_pb2.CaseResult, purpose: eval_result_pb2.TrialPurpose.ValueType) -> tuple[int, int]:
    """Return how many of a case's fresh trials for a purpose passed, and how many were scored."""
    return count_distinct(trial for trial in case.reruns if trial.purpose == purpose and is_scored(trial))


def count_distinct_trials(counts: eval_result_pb2.PassStatistics) -> tuple[int, int]:
    """Return how many of the trials passed, and how many were scored; those that share their judgments are one."""
    if counts.distinct_trials:
        return counts.distinct_passed, counts.distinct_trials
    return counts.passed, counts.trials  # of a result from before they were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCase:
    """What the trials of a case say of its change."""

    passes: Passes
    direction: int
    """1 if it passed more often than before, -1 if less often, else 0."""
    p_value: float
    """In that direction, by the case alone."""
    change: Change
    """BETTER or WORSE; 0 if that may be chance."""


def judge_cases(passes: Mapping[Key, Passes], suspects: Collection[Key]) -> dict[Key, JudgedCase]:
    """Return what the trials of each case say, each direction tested with 5 % for all cases together.

    Only suspects can be worse: the others are not tested for that, and take nothing from what can be found.
    """
    p_values = {key: case_p_values(each) for key, each in passes.items()}
    worse = reject({key: fewer for key, (fewer, _) in p_values.items() if key in suspects})
    better = reject({key: more for key, (_, more) in p_values.items()})
    found = {}
    for key, each in passes.items():
        difference = each.passed * each.trials_before - each.passed_before * each.trials
        found[key] = JudgedCase(
            passes=each,
            direction=(difference > 0) - (difference < 0),
            p_value=p_values[key][1 if difference > 0 else 0],
            change=WORSE if key in worse else BETTER if key in better else eval_result_pb2.CASE_CHANGE_UNSPECIFIED,
        )
    return found


def estimate_changes(pairs: Sequence[Pair], *, seed: str) -> Iterator[eval_result_pb2.EstimatedChange]:
    """Yield how each number changed that cases have on both sides; `seed` is that of the resampling."""
    found: dict[str, list[float]] = {}
    for before, after in pairs:
        old, new = _measure(before), _measure(after)
        # A cost in another currency has no difference to this one.
        if before.trial_means.cost_currency_code != after.trial_means.cost_currency_code:
            old.pop("cost", None)
        for name, value in new.items():
            if name in old:
                found.setdefault(name, []).append(value - old[name])
    rates = {name for name in found if name == "pass_rate" or name.endswith(".mean")}
    intervals = statistics.find_change_intervals(found, seed, rates=rates)
    for name, differences in found.items():
        yield eval_result_pb2.EstimatedChange(
            name=name,
            value=statistics.mean(differences),
            interval=intervals[name],
            cases=len(differences),
        )


def _measure(case: eval_result_pb2.CaseResult) -> dict[str, float]:
    """Return the numbers of a case that are known, by the names of their changes."""
    found: dict[str, float] = {}
    if case.statistics.HasField("pass_rate"):
        found["pass_rate"] = case.statistics.pass_rate
    found.update((f"{metric.name}.mean", metric.mean) for metric in case.metrics if metric.HasField("mean"))
    means = case.trial_means
    if means.HasField("cost_nanos"):
        found["cost"] = means.cost_nanos / _NANOS
    if means.HasField("tokens"):
        found["tokens"] = means.tokens
    if means.HasField("duration_seconds"):
        found["duration"] = means.duration_seconds
    return found
