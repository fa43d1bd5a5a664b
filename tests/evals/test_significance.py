"""What is beyond chance: exact tests of cases and of all together, their false alarms and what they find."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import comb, exp, fsum, isclose, lgamma
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough_server.evals.results import power
from bough_server.evals.results.significance import LEVEL, Passes, case_p_values, drop_p_value, least_p_value, reject


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


class _Simulation:
    """Comparisons of sets whose cases pass with given probabilities."""

    def __init__(self, rates: Sequence[float], *, fresh: int, runs_baseline_again: bool, trials: int = 5) -> None:
        self._rates, self._fresh, self._trials = rates, fresh, trials
        self._before = fresh if runs_baseline_again else trials
        self._random = Random(11)

    def _count(self, trials: int, rate: float) -> int:
        return sum(self._random.random() < rate for _ in range(trials))

    def _compare(self, drops: Sequence[float]) -> bool:
        """Whether `regressions == 0` fails if each case passes less often by so much."""
        strata = []
        for rate, drop in zip(self._rates, drops, strict=True):
            now = rate - drop
            if self._count(self._trials, now) < self._trials:
                strata.append(
                    Passes(self._count(self._fresh, now), self._fresh, self._count(self._before, rate), self._before)
                )
        return drop_p_value(strata) <= LEVEL

    def share_of_alarms(self, drops: Sequence[float], repeated: int) -> float:
        return sum(self._compare(drops) for _ in range(repeated)) / repeated

    def describe_power(self) -> str:
        """Return what the comparison says of itself."""
        design = power.Design(
            cases=len(self._rates),
            pass_rate=self._rates[0],
            trials=self._trials,
            reruns=self._fresh,
            baseline_trials=self._before,
        )
        return design.describe()


EQUAL = [0.95] * 40
MIXED = [0.5 + number / 80 for number in range(40)]
NO_DROP = [0.0] * 40
FOUR_DROP = [0.3] * 4 + [0.0] * 36


@pytest.mark.parametrize("rates", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("runs_baseline_again", [True, False], ids=["baseline again", "file"])
def test_a_set_compared_with_itself_fails_the_gate_in_at_most_five_percent(
    rates: Sequence[float], runs_baseline_again: bool
) -> None:
    simulation = _Simulation(rates, fresh=20, runs_baseline_again=runs_baseline_again)
    # 0.0136 is twice the deviation of 1,000 repetitions.
    assert simulation.share_of_alarms(NO_DROP, 1_000) <= LEVEL + 0.0136


@pytest.mark.parametrize(
    ("runs_baseline_again", "found", "said"),
    [(True, 0.8, "a drop of 4 of them by 30 points in 92 %"), (False, 0.5, "a drop of 4 of them by 30 points in 56 %")],
    ids=["baseline again", "file"],
)
def test_a_drop_of_four_of_forty_cases_by_thirty_points_is_found_as_often_as_is_said(
    runs_baseline_again: bool, found: float, said: str
) -> None:
    simulation = _Simulation(EQUAL, fresh=20, runs_baseline_again=runs_baseline_again)
    assert simulation.share_of_alarms(FOUR_DROP, 300) >= found
    assert said in simulation.describe_power()
