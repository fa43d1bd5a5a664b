"""What changed from a baseline to a candidate beyond chance: of each case, of all together, and of numbers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2
from bough_server.evals.metrics import statistics
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.evals.results.power import Design
from bough_server.evals.results.significance import LEVEL, Key, Passes, case_p_values, drop_p_value, reject
from bough_server.evals.results.verdicts import has_passed, is_scored

Change: TypeAlias = eval_result_pb2.CaseChange.ValueType
Pair: TypeAlias = tuple[eval_result_pb2.CaseResult, eval_result_pb2.CaseResult]
"""A case in the baseline, and in the candidate."""

BETTER: Final = eval_result_pb2.CASE_CHANGE_BETTER
WORSE: Final = eval_result_pb2.CASE_CHANGE_WORSE

_NANOS: Final = 1_000_000_000


class CountedTrials:
    """Counts the trials by which the cases that two results have are compared."""

    def __init__(
        self, before: eval_result_pb2.EvalResult, after: eval_result_pb2.EvalResult, pairs: Sequence[Pair]
    ) -> None:
        self._pairs, suspects = pairs, after.suspects
        rerun, recorded = frozenset(suspects.case_ids), frozenset(suspects.recorded_case_ids)
        # Suspects of another baseline, which lacked a case that failed, are not all that can have got worse here.
        is_chosen_here = all(new.case_id in rerun | recorded for _, new in pairs if _has_failed(new))
        self._has_suspects = after.HasField("suspects") and is_chosen_here
        self._rerun, self._recorded = (rerun, recorded) if self._has_suspects else (frozenset(), frozenset())
        self._reruns = suspects.trials if self._has_suspects else 0
        # The fresh trials of another baseline say nothing about this one.
        has_baseline_pins = suspects.HasField("baseline_pins") and suspects.baseline_pins == before.pins
        self._has_baseline_reruns = self._has_suspects and has_baseline_pins

    def is_suspect(self, case: eval_result_pb2.CaseResult) -> bool:
        """Return whether the trials of a case can prove a change: of suspects and of recorded cases, if suspects were
        chosen, else of all.
        """
        return not self._has_suspects or case.case_id in self._rerun or case.case_id in self._recorded

    def count(self, before: eval_result_pb2.CaseResult, after: eval_result_pb2.CaseResult) -> Passes | None:
        """Return how many trials of a case passed on both sides, fresh ones if it has some; None without any."""
        new, old = after.statistics, before.statistics
        passes = Passes(new.passed, new.trials, old.passed, old.trials)
        if after.case_id in self._rerun:
            passed, trials = _count_reruns(after, eval_result_pb2.TRIAL_PURPOSE_RERUN)
            passes = passes._replace(passed=passed, trials=trials)
            if self._has_baseline_reruns:
                passed, trials = _count_reruns(after, eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN)
                passes = passes._replace(passed_before=passed, trials_before=trials)
        return passes if passes.trials and passes.trials_before else None

    def test(self) -> eval_result_pb2.RegressionTest:
        """Return the test of all cases whose trials can prove a change."""
        chosen = [pair for pair in self._pairs if self.is_suspect(pair[1])]
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
            power=self._design().describe(),
            incomplete_reason=self._explain_incomplete(),
        )
        if strata:
            test.p_value = drop_p_value(strata)
        return test

    def _explain_incomplete(self) -> str:
        expected = self._reruns * (2 if self._has_baseline_reruns else 1)
        missing = {
            after.case_id: count
            for _, after in self._pairs
            if after.case_id in self._rerun
            and (count := expected - sum(self._is_counted(trial) for trial in after.reruns)) > 0
        }
        if not missing:
            return ""
        trials = pluralize(sum(missing.values()), "fresh trial")
        return f"{trials} could not be scored, such as of the case {next(iter(missing))!r}."

    def _is_counted(self, trial: eval_result_pb2.CaseTrialResult) -> bool:
        is_own = trial.purpose == eval_result_pb2.TRIAL_PURPOSE_RERUN
        return is_scored(trial) and (is_own or self._has_baseline_reruns)

    def _design(self) -> Design:
        known = [
            (old.statistics, new.statistics)
            for old, new in self._pairs
            if old.statistics.trials and new.case_id not in self._recorded
        ]
        trials = sum(old.trials for old, _ in known)
        rerun_before = self._reruns if self._has_baseline_reruns else 0
        return Design(
            cases=len(known),
            pass_rate=sum(old.passed for old, _ in known) / max(1, trials),
            trials=round(sum(new.trials for _, new in known) / max(1, len(known))) or 1,
            reruns=self._reruns,
            baseline_trials=rerun_before or round(trials / max(1, len(known))),
        )


def _has_failed(case: eval_result_pb2.CaseResult) -> bool:
    """Return whether a planned trial of a case failed."""
    return case.statistics.passed < case.statistics.trials


def _count_reruns(case: eval_result_pb2.CaseResult, purpose: eval_result_pb2.TrialPurpose.ValueType) -> tuple[int, int]:
    """Return how many of a case's fresh trials for a purpose passed, and how many were scored."""
    scored = [trial for trial in case.reruns if trial.purpose == purpose and is_scored(trial)]
    return sum(map(has_passed, scored)), len(scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCase:
    """What the trials of a case say of its change."""

    passes: Passes
    direction: int
    """1 if it passed more often than before, -1 if less often, else 0."""
    p_value: float | None
    """In that direction, by the case alone; None for one that is no suspect."""
    change: Change
    """BETTER or WORSE; 0 if that may be chance."""


def judge_cases(passes: Mapping[Key, Passes], suspects: Collection[Key]) -> dict[Key, JudgedCase]:
    """Return what the trials of each case say, each direction tested with 5 % for all cases together.

    Only suspects can be worse or better: the trials of the others were chosen for having passed, and prove nothing.
    """
    p_values = {key: case_p_values(each) for key, each in passes.items() if key in suspects}
    worse = reject({key: fewer for key, (fewer, _) in p_values.items()})
    better = reject({key: more for key, (_, more) in p_values.items()})
    found = {}
    for key, each in passes.items():
        difference = each.passed * each.trials_before - each.passed_before * each.trials
        found[key] = JudgedCase(
            passes=each,
            direction=(difference > 0) - (difference < 0),
            p_value=p_values[key][1 if difference > 0 else 0] if key in p_values else None,
            change=WORSE if key in worse else BETTER if key in better else eval_result_pb2.CASE_CHANGE_UNSPECIFIED,
        )
    return found


def estimate_changes(pairs: Sequence[Pair], *, seed: str) -> Iterator[eval_result_pb2.EstimatedChange]:
    """Yield how each number changed that cases have on both sides; `seed` is that of the resampling."""
    found: dict[str, list[float]] = {}
    unscaled: set[str] = set()
    for before, after in pairs:
        old, new = _measure(before), _measure(after)
        # A cost in another currency has no difference to this one.
        if before.trial_means.cost_currency_code != after.trial_means.cost_currency_code:
            old.pop("cost", None)
        for name, value in new.items():
            if name in old:
                found.setdefault(name, []).append(value - old[name])
                # A project's own metric may have any scale, which only its scores tell.
                if not (0 <= value <= 1 and 0 <= old[name] <= 1):
                    unscaled.add(name)
    rates = {name for name in found if name == "pass_rate" or name.endswith(".mean")} - unscaled
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
