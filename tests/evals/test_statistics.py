"""What few trials say about how often a case passes: pass@k, pass^k and intervals."""

import math
from itertools import combinations, product
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2
from bough_server.evals.metrics import statistics
from tests.support.examples import examples

ConfidenceInterval = eval_result_pb2.ConfidenceInterval

COUNTS = st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
"""How many passed, and of how many."""


@pytest.mark.parametrize(("n", "c", "k", "expected"), [(10, 0, 1, 0), (10, 10, 1, 1), (5, 4, 2, 1), (10, 5, 1, 0.5)])
def test_pass_at_k_is_the_probability_that_one_of_k_passes(n: int, c: int, k: int, expected: float) -> None:
    assert statistics.pass_at_k(n, c, k) == expected


@pytest.mark.parametrize(("n", "c", "k", "expected"), [(10, 5, 2, 2 / 9), (10, 5, 6, 0), (7, 7, 7, 1), (4, 3, 1, 0.75)])
def test_pass_all_k_is_the_probability_that_all_of_k_pass(n: int, c: int, k: int, expected: float) -> None:
    assert statistics.pass_all_k(n, c, k) == expected


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_more_trials_than_there_were_have_no_probability(n: int, c: int, k: int) -> None:
    for estimate in (statistics.pass_at_k, statistics.pass_all_k):
        with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
            estimate(n, c, k)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_both_probabilities_are_what_counting_every_choice_of_k_trials_finds(counts: tuple[int, int, int]) -> None:
    n, c, k = counts
    choices = list(combinations([True] * c + [False] * (n - c), k))
    assert statistics.pass_at_k(n, c, k) == sum(map(any, choices)) / len(choices)
    assert statistics.pass_all_k(n, c, k) == sum(map(all, choices)) / len(choices)


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.8, 1.0])
def test_both_are_unbiased_over_all_outcomes_of_trials_that_pass_at_a_rate(rate: float) -> None:
    n = 6
    for k in range(1, n + 1):
        at_k = all_k = 0.0
        for outcome in product([True, False], repeat=n):
            probability = math.prod(rate if passed else 1 - rate for passed in outcome)
            at_k += probability * statistics.pass_at_k(n, sum(outcome), k)
            all_k += probability * statistics.pass_all_k(n, sum(outcome), k)
        assert at_k == pytest.approx(1 - (1 - rate) ** k)
        assert all_k == pytest.approx(rate**k)


@given(COUNTS)
def test_with_more_trials_one_of_them_passes_more_often_and_all_of_them_less(counts: tuple[int, int]) -> None:
    c, n = counts
    at_k = [statistics.pass_at_k(n, c, k) for k in range(1, n + 1)]
    all_k = [statistics.pass_all_k(n, c, k) for k in range(1, n + 1)]
    assert at_k == sorted(at_k)
    assert all_k == sorted(all_k, reverse=True)
    assert at_k[0] == all_k[0] == pytest.approx(c / n)


@pytest.mark.parametrize(("n", "lower"), [(5, 0.566), (10, 0.722), (15, 0.796), (16, 0.806), (35, 0.901), (73, 0.950)])
def test_the_lower_bound_of_n_of_n_is_far_below_one(n: int, lower: float) -> None:
    assert statistics.wilson(n, n).lower == pytest.approx(lower, abs=0.0005)
    assert statistics.wilson(n, n).upper == 1


@given(st.integers(1, 2_000))
def test_the_most_that_a_number_of_trials_can_prove_is_wilsons_lower_bound_of_all(n: int) -> None:
    assert statistics.highest_lower(n) == pytest.approx(statistics.wilson(n, n).lower, rel=1e-13)


@pytest.mark.parametrize(
    ("c", "n", "lower", "upper"),
    # scipy 1.17.1: stats.binomtest(c, n).proportion_ci(method="wilson")
    [
        (0, 1, 0.0, 0.7934506856227626),
        (1, 1, 0.20654931437723745, 1.0),
        (0, 5, 0.0, 0.43448246478317476),
        (1, 5, 0.036224108632430196, 0.6244653702374747),
        (3, 5, 0.23072428127601297, 0.8823792257673521),
        (4, 5, 0.3755346297625253, 0.9637758913675698),
        (5, 5, 0.5655175352168251, 1.0),
        (24, 30, 0.6269430358685175, 0.9049489282271013),
        (16, 16, 0.8063923194655637, 1.0),
        (7, 40, 0.08745413746035918, 0.3194999033178771),
        (123, 4567, 0.02262002231302803, 0.032039816815401245),
        (2000, 2000, 0.9980829527187471, 1.0),
    ],
)
def test_the_interval_of_a_rate_is_wilsons(c: int, n: int, lower: float, upper: float) -> None:
    interval = statistics.wilson(c, n)
    assert interval.lower == pytest.approx(lower, rel=1e-14)
    assert interval.upper == pytest.approx(upper, rel=1e-14)


@given(COUNTS)
def test_an_interval_lies_between_zero_and_one_and_holds_the_rate(counts: tuple[int, int]) -> None:
    c, n = counts
    interval = statistics.wilson(c, n)
    assert 0 <= interval.lower <= c / n <= interval.upper <= 1
    assert interval.upper - interval.lower > 0


@pytest.mark.parametrize(("lower", "trials"), [(0, 1), (-1, 1), (0.2, 1), (0.566, 6), (0.8, 16), (0.9, 35), (0.95, 73)])
def test_the_least_number_of_trials_for_a_bound_is_known(lower: float, trials: int) -> None:
    assert statistics.find_least_trials(lower) == trials


@given(st.integers(1, 200))
def test_a_bound_that_a_number_of_trials_just_reaches_takes_that_number(n: int) -> None:
    bound = statistics.wilson(n, n).lower
    assert statistics.find_least_trials(bound) == n
    assert statistics.find_least_trials(bound + 1e-6) == n + 1


def test_no_number_of_trials_proves_certainty() -> None:
    with pytest.raises(ValueError, match="below 1"):
        statistics.find_least_trials(1)


def test_every_interval_says_with_which_probability_it_holds_its_number() -> None:
    over_cases = [statistics.bootstrap(rates, "set") for rates in ([1.0, 1.0], [2 / 3] * 5, [0.2, 0.4, 1.0])]
    assert {interval.level for interval in (statistics.wilson(3, 5), *over_cases)} == {0.95}


def test_over_cases_that_all_have_one_rate_the_interval_is_wilsons_with_the_cases_counted() -> None:
    assert statistics.bootstrap([1.0] * 30, "set") == statistics.wilson(30, 30)
    assert statistics.bootstrap([0.0] * 7, "set") == statistics.wilson(0, 7)
    assert statistics.bootstrap([0.8] * 5, "set") == statistics.wilson(4, 5)


def test_a_common_rate_that_is_no_whole_number_of_cases_has_the_interval_of_the_numbers_around_it() -> None:
    assert statistics.bootstrap([2 / 3] * 5, "set") == ConfidenceInterval(
        lower=statistics.wilson(3, 5).lower, upper=statistics.wilson(4, 5).upper, level=0.95
    )


def test_over_cases_the_interval_comes_from_resampling_the_cases_and_not_from_counting_their_trials() -> None:
    rates = [1.0] * 24 + [0.0] * 6
    interval = statistics.bootstrap(rates, "set")
    # Of 150 trials counted as independent, 120 of them passed, the lower bound would be 0.73.
    assert interval.lower == pytest.approx(0.667, abs=0.04)
    assert interval.upper == pytest.approx(0.933, abs=0.04)


def test_the_same_cases_in_any_order_and_the_same_set_have_the_same_interval() -> None:
    rates = [math.sqrt(number) / 5 for number in range(25)]
    interval = statistics.bootstrap(rates, "set")
    assert statistics.bootstrap(rates[::-1], "set") == interval
    assert any(statistics.bootstrap(rates, f"set {number}") != interval for number in range(5))


def test_two_cases_that_nearly_always_pass_prove_no_more_than_two_that_always_do() -> None:
    assert statistics.bootstrap([1.0, 0.99], "set").lower == statistics.wilson(2, 2).lower
    assert statistics.bootstrap([0.0, 0.01], "set").upper == statistics.wilson(0, 2).upper


@given(st.lists(st.sampled_from([0, 0.2, 0.25, 1 / 3, 0.5, 0.6, 2 / 3, 1]), min_size=1, max_size=12))
@examples(30)
def test_the_interval_over_cases_holds_their_mean_and_never_says_more_than_so_many_cases_can(
    rates: list[float],
) -> None:
    interval = statistics.bootstrap(rates, "set")
    mean = statistics.mean(rates)
    assert 0 <= interval.lower <= mean <= interval.upper <= 1
    assert interval.lower <= statistics.wilson(len(rates), len(rates)).lower
    assert interval.upper >= statistics.wilson(0, len(rates)).upper


@pytest.mark.parametrize(
    ("rates", "lower", "upper"),
    # scipy 1.17.1 and numpy 2.4.6: stats.bootstrap((rates,), np.mean, method="percentile", n_resamples=99_999), the
    # mean over five seeds; of 20,000 rates 2,000 resamples and one seed.
    [
        ([0.2, 0.4, 1.0], 0.2, 1.0),
        ([0.2, 0.4, 0.4, 0.6, 0.8, 1.0, 0.0], 0.2571, 0.7143),
        ([1.0] * 24 + [0.0] * 6, 0.6400, 0.9333),
        ([number % 5 / 4 for number in range(100)], 0.4305, 0.5700),
        ([number % 5 / 4 for number in range(500)], 0.4691, 0.5310),
        ([number % 5 / 4 for number in range(501)], 0.4680, 0.5300),
        ([number % 5 / 4 for number in range(20_000)], 0.4952, 0.5047),
    ],
)
def test_the_interval_over_cases_is_that_of_many_resamples(rates: list[float], lower: float, upper: float) -> None:
    interval = statistics.bootstrap(rates, "set")
    steps = 1.01 / len(rates) if len(rates) < 100 else 0.003  # a percentile of few resamples lies a few steps away
    assert interval.lower == pytest.approx(min(lower, statistics.wilson(len(rates), len(rates)).lower), abs=steps)
    assert interval.upper == pytest.approx(max(upper, statistics.wilson(0, len(rates)).upper), abs=steps)


def test_the_interval_over_cases_is_the_same_on_every_machine() -> None:
    # More cases than two or three, whose percentiles would hide another sequence of draws.
    rates = [math.sqrt(number) / 5 for number in range(25)]
    interval = statistics.bootstrap(rates, "set")
    assert (interval.lower, interval.upper) == (0.545417429324967, 0.742054968761797)


def test_over_500_cases_the_interval_is_that_of_the_normal_distribution() -> None:
    rates = [number % 5 / 4 for number in range(10_000)]
    # The variance of 0, 1/4, 1/2, 3/4 and 1 is 1/8.
    half = NormalDist().inv_cdf(0.975) * math.sqrt(1 / 8 * 10_000 / 9_999 / 10_000)
    interval = statistics.bootstrap(rates, "set")
    assert (interval.lower, interval.upper) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert statistics.bootstrap(rates, "another set") == interval


def test_nearly_equal_rates_have_an_interval_between_zero_and_one() -> None:
    rates = [1.0] * 999 + [0.5]
    interval = statistics.bootstrap(rates, "set")
    assert interval.upper == 1
    assert interval.lower == statistics.wilson(1_000, 1_000).lower


def test_the_statistics_of_a_case_hold_every_k_up_to_its_trials() -> None:
    interval = statistics.wilson(2, 3)
    assert statistics.pass_statistics(2, 3) == eval_result_pb2.PassStatistics(
        trials=3,
        passed=2,
        pass_rate=2 / 3,
        pass_rate_interval=interval,
        pass_at_k=[2 / 3, 1, 1],
        pass_all_k=[2 / 3, 1 / 3, 0],
        pass_all_k_intervals=[
            ConfidenceInterval(lower=interval.lower**k, upper=interval.upper**k, level=0.95) for k in (1, 2, 3)
        ],
        flaky=True,
        distinct_trials=3,
    )


def test_an_interval_is_as_wide_as_that_of_distinct_trials_and_around_the_rate_of_all() -> None:
    shared = statistics.pass_statistics(15, 20, distinct_trials=4)
    assert shared.pass_rate_interval == statistics.wilson(3, 4)
    assert (shared.trials, shared.passed, shared.distinct_trials) == (20, 15, 4)
    assert shared.pass_all_k[1] == statistics.pass_all_k(20, 15, 2), "the estimates are over all trials"


def test_a_case_without_scored_trials_has_no_rate() -> None:
    assert statistics.pass_statistics(0, 0) == eval_result_pb2.PassStatistics()


@pytest.mark.parametrize(
    ("scores", "threshold", "is_enough"),
    [([0.1, 0.3], 0.2, True), ([0.7] * 3, 0.7, True), ([0.5, 1.5], 1, True), ([0.7] * 3, 0.7001, False)],
)
def test_a_mean_reaches_a_threshold_up_to_rounding(scores: list[float], threshold: float, is_enough: bool) -> None:
    assert statistics.reaches(statistics.mean(scores), threshold) is is_enough


def test_a_change_has_the_interval_that_it_would_have_alone() -> None:
    changes = {
        "pass_rate": [0.2, -0.4, 0.0, 0.2],
        "cost": [0.1, 0.3, -0.2, 0.7],
        "same.mean": [0.2] * 4,
        "tokens": [5.0, 9.0],
        "duration": [3.0],
    }
    rates = {"pass_rate", "same.mean"}
    alone = [statistics.find_change_intervals({name: each}, "set", rates=rates) for name, each in changes.items()]
    found = statistics.find_change_intervals(changes, "set", rates=rates)
    assert found == {name: interval for each in alone for name, interval in each.items()}
    assert [name for name, interval in found.items() if interval is None] == ["duration"]
