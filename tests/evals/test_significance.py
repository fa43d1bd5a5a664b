"""What is beyond chance: exact tests of cases and of all together, their false alarms and what they find."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import comb, exp, fsum, isclose, lgamma
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.evals.job.evaluation_log import EvaluationState
from bough_server.evals.results import power
from bough_server.evals.results.compare import baseline_of, compare
from bough_server.evals.results.significance import (
    LEVEL,
    Passes,
    case_p_values,
    describe_p_value,
    drop_p_value,
    least_p_value,
    reject,
)
from bough_server.evals.results.verdicts import case_result
from tests.support.eval_results import RECORDED, Trial, crashed, planned_case, scored

CaseResult, EvalResult = eval_result_pb2.CaseResult, eval_result_pb2.EvalResult


@st.composite
def _passes(draw: st.DrawFn) -> Passes:
    trials, before = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return Passes(draw(st.integers(0, trials)), trials, draw(st.integers(0, before)), before)


def _chances(one: Passes) -> dict[int, Fraction]:
    """How likely each number of passes is, by counting the ways to spread all passes over all trials."""
    passed, total = one.passed + one.passed_before, one.trials + one.trials_before
    return {
        x: Fraction(comb(one.trials, x) * comb(one.trials_before, passed - x), comb(total, passed))
        for x in range(one.trials + 1)
        if 0 <= passed - x <= one.trials_before
    }


@given(st.lists(_passes(), max_size=4))
def test_the_probability_of_a_drop_is_that_of_all_ways_to_spread_the_passes(strata: list[Passes]) -> None:
    observed = sum(each.passed for each in strata)
    exact = Fraction(0)
    for chosen in product(*(_chances(each).items() for each in strata)):
        if sum(x for x, _ in chosen) <= observed:
            chance = Fraction(1)
            for _, each in chosen:
                chance *= each
            exact += chance
    assert isclose(drop_p_value(strata), exact, rel_tol=1e-9)


@given(_passes())
def test_a_case_by_itself_is_tested_in_both_directions(one: Passes) -> None:
    fewer, more = case_p_values(one)
    chances = _chances(one)
    assert isclose(fewer, sum(chance for x, chance in chances.items() if x <= one.passed), rel_tol=1e-9)
    assert isclose(more, sum(chance for x, chance in chances.items() if x >= one.passed), abs_tol=1e-12)
    assert isclose(fewer, drop_p_value([one]), rel_tol=1e-9)


def test_none_of_five_after_five_of_five_has_the_probability_that_tables_have() -> None:
    assert isclose(drop_p_value([Passes(0, 5, 5, 5)]), 1 / 252)
    assert isclose(least_p_value([(5, 5)]), 1 / 252)
    assert isclose(least_p_value([(1, 1)] * 5), 1 / 32)


def test_of_very_many_trials_the_probability_is_as_good_as_exact() -> None:
    # One stratum is a hypergeometric number, which logarithms of factorials sum up.
    passed, before, trials = 13_850, 14_000, 24_000
    total, margin = 2 * trials, passed + before
    ways = lgamma(total + 1) - lgamma(margin + 1) - lgamma(total - margin + 1)
    exact = fsum(
        exp(_log_comb(trials, x) + _log_comb(trials, margin - x) - ways) for x in range(margin - trials, passed + 1)
    )
    assert 0.05 < exact < 0.15
    assert isclose(drop_p_value([Passes(passed, trials, before, trials)]), exact, abs_tol=1e-4)


def _log_comb(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def test_of_several_cases_as_many_are_rejected_as_holm_rejects() -> None:
    # 0.05 / 4, / 3 and / 2: the third misses its bound, and with it the fourth.
    assert reject({"a": 0.012, "b": 0.016, "c": 0.026, "d": 0.027}) == {"a", "b"}
    assert reject({"a": 0.013, "b": 0.001}) == {"a", "b"}
    assert reject({}) == set()


def _score(_: str, *, passes: bool) -> Trial:
    return scored(answer=1 if passes else 0)


def _judge(case_id: str, *, passes: bool) -> Trial:
    """A trial that another metric fails, if any: a case's trials share a judgment, as those with equal answers do."""
    trial = scored(judge=1, answer=1 if passes else 0)
    trial.scores[0].judgments.add(run_id=f"judgment of {case_id}")
    return trial


def _crash(case_id: str, *, passes: bool) -> Trial:
    return _judge(case_id, passes=True) if passes else crashed()


class _Simulation:
    """Evaluations of cases that pass with given probabilities, planned and compared as a server does."""

    def __init__(
        self,
        rates: Sequence[float],
        *,
        runs_baseline_again: bool,
        reruns: int = 20,
        recorded: int = 0,
        build_trial: Callable[..., Trial] = _score,
    ) -> None:
        """`recorded` is how many of the cases, the last ones, are recorded and have one trial."""
        self._rates = {f"case-{number}": rate for number, rate in enumerate(rates)}
        self._random, self._reruns, self._runs_baseline_again = Random(11), reruns, runs_baseline_again
        self._trials = {
            (key, passes): build_trial(key, passes=passes) for key in self._rates for passes in (True, False)
        }
        self._results: dict[tuple[str, tuple[int, ...]], CaseResult] = {}
        self._cases = {
            key: planned_case(key, 1, turns=[RECORDED]) if number >= len(rates) - recorded else planned_case(key, 5)
            for number, key in enumerate(self._rates)
        }

    def _run(self, case_id: str, rate: float) -> Trial:
        return self._trials[case_id, self._random.random() < rate]

    def _run_planned(self, rates: Mapping[str, float]) -> EvaluationState:
        state = EvaluationState(cases=self._cases)
        for case_id, planned in self._cases.items():
            for trial in range(planned.trials):
                state.scored[case_id, trial] = self._run(case_id, rates[case_id])
        return state

    def _score_cases(self, state: EvaluationState) -> list[CaseResult]:
        """Return the results of the cases by their planned trials; computed once for equal outcomes."""
        found = []
        for case_id, planned in self._cases.items():
            trials = state.results_of(case_id)
            key = case_id, tuple(trial.verdict for trial in trials)
            if key not in self._results:
                numbered = [Trial(trial=number) for number in range(planned.trials)]
                for each, trial in zip(numbered, trials, strict=True):
                    each.MergeFrom(trial)
                self._results[key] = case_result(planned, numbered)
            found.append(self._results[key])
        return found

    def _evaluate(self, before: EvalResult, rates: Mapping[str, float]) -> EvalResult:
        state = self._run_planned(rates)
        state.planned.baseline.CopyFrom(before)
        state.planned.rerun_suspects = self._reruns
        state.planned.baseline_not_rerun_reason = "" if self._runs_baseline_again else "It is a file."
        if self._reruns:
            event = evaluation_pb2.EvaluationEvent()
            event.suspects_planned.suspects.CopyFrom(state.plan_suspects())
            state.apply(event)
        result = state.result("e", self._score_cases(state), eval_result_pb2.EvalTotals())
        for case, planned in zip(result.cases, self._cases.values(), strict=True):
            for trial in state.number_reruns(planned):
                purpose = state.find_purpose(planned, trial)
                is_own = purpose == eval_result_pb2.TRIAL_PURPOSE_RERUN
                case.reruns.append(self._run(case.case_id, (rates if is_own else self._rates)[case.case_id]))
                case.reruns[-1].trial, case.reruns[-1].purpose = trial, purpose
        return result

    def compare(self, drops: Sequence[float] = ()) -> eval_result_pb2.EvalComparison:
        """Return one comparison, if the first cases pass less often by so much."""
        before = self._run_planned(self._rates)
        earlier = baseline_of(before.result("b", self._score_cases(before), eval_result_pb2.EvalTotals()))
        rates = dict(self._rates)
        for key, drop in zip(rates, drops, strict=False):
            rates[key] -= drop
        return compare(earlier, self._evaluate(earlier, rates))

    def share_of_alarms(self, repeated: int, drops: Sequence[float] = ()) -> float:
        """Return in how many of the comparisons the gate `regressions == 0` fails."""
        return sum(self.compare(drops).regressions > 0 for _ in range(repeated)) / repeated


@pytest.fixture(autouse=True)
def _without_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the intervals of numbers, which take most of the time of a comparison and decide nothing here."""
    monkeypatch.setattr("bough_server.evals.results.compare.estimate_changes", lambda *_, **__: ())


EQUAL = [0.95] * 40
MIXED = [0.5 + number / 80 for number in range(40)]
FOUR_DROP = [0.3] * 4
REPEATED = 100


@pytest.mark.parametrize(
    ("rates", "options"),
    [
        (EQUAL, {"runs_baseline_again": True}),
        (EQUAL, {"runs_baseline_again": False}),
        (MIXED, {"runs_baseline_again": True}),
        (MIXED, {"runs_baseline_again": False, "build_trial": _judge}),
        (EQUAL, {"runs_baseline_again": False, "build_trial": _crash}),
        (EQUAL, {"runs_baseline_again": True, "recorded": 20}),
        (EQUAL, {"runs_baseline_again": False, "build_trial": _crash, "reruns": 0}),
    ],
    ids=["equal", "equal, file", "mixed", "judged, file", "crashing, file", "half recorded", "no fresh trials"],
)
def test_a_set_compared_with_itself_fails_the_gate_in_at_most_five_percent(
    rates: Sequence[float], options: dict[str, Any]
) -> None:
    simulation = _Simulation(rates, **options)
    # 0.044 is twice the deviation of so many comparisons.
    assert simulation.share_of_alarms(REPEATED) <= LEVEL + 0.044


@pytest.mark.parametrize(
    ("runs_baseline_again", "found", "said"),
    [(True, 0.8, "a drop of 4 of them by 30 points in 92 %"), (False, 0.5, "a drop of 4 of them by 30 points in 56 %")],
    ids=["baseline again", "file"],
)
def test_a_drop_of_four_of_forty_cases_by_thirty_points_is_found_as_often_as_is_said(
    runs_baseline_again: bool, found: float, said: str
) -> None:
    simulation = _Simulation(EQUAL, runs_baseline_again=runs_baseline_again)
    assert simulation.share_of_alarms(REPEATED, FOUR_DROP) >= found
    design = power.Design(
        cases=40, pass_rate=0.95, trials=5, reruns=20, baseline_trials=20 if runs_baseline_again else 5
    )
    assert said in design.describe()
    assert simulation.compare().regression_test.power.startswith(design.describe().partition(", finds")[0])


def test_a_drop_of_recorded_cases_is_found_beside_suspects_that_run_again() -> None:
    simulation = _Simulation(EQUAL, runs_baseline_again=True, recorded=20)
    found = simulation.compare([0.0] * 20 + [0.9] * 20)
    assert found.regressions > 0
    assert "20 fresh trials against 20 of 20 cases" in found.regression_test.power


def test_of_cases_that_never_passed_no_drop_is_said_to_be_found() -> None:
    assert not power.Design(cases=40, pass_rate=0, trials=5, reruns=20, baseline_trials=5).describe()


def test_a_probability_that_is_too_small_to_be_computed_is_not_said_to_be_zero() -> None:
    tiny = drop_p_value([Passes(0, 1, 1, 1)] * 1_000)
    assert [describe_p_value(value) for value in (0.05, 4.2e-06, tiny)] == ["p = 0.05", "p = 4.2e-06", "p < 1e-12"]
