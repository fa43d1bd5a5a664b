"""Estimates of how often a case passes, from few trials: pass@k, pass^k, and intervals with 95 % confidence.

n trials of which c passed: pass@k = 1 - C(n-c, k) / C(n, k) is the probability that at least one of k passes, and
pass^k = C(c, k) / C(n, k) that all of them do. Both are unbiased, and exact up to the rounding of the quotient.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from types import ModuleType
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.distribution import install_command
from bough_server.errors import ConfigurationError

LEVEL: Final = 0.95
"""The probability with which an interval holds the number that is estimated."""

_Z_SQUARED: Final = 3.8414588206941254
"""The square of the normal distribution's quantile at 0.975."""

_TOLERANCE: Final = 1e-12
"""How far apart two numbers may be that count as equal: the mean of 0.1 and 0.3 is to reach 0.2."""

_RESAMPLES: Final = 9_999
_DRAWS: Final = 100_000_000
"""The most draws of a bootstrap. Beyond 10,000 cases it has fewer resamples, at least 1,000, and takes 2 s."""
_BATCH: Final = 1_000_000
"""How many draws are in memory at a time."""


def is_close(value: float, other: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return math.isclose(value, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def reaches(score: float, threshold: float) -> bool:
    """Return whether a score is at least its threshold, up to rounding."""
    return score >= threshold or is_close(score, threshold)


def mean(values: Sequence[float]) -> float:
    """Return the mean of some numbers, at least one."""
    return math.fsum(values) / len(values)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of k passes, if c of n passed. Raises ValueError unless k <= n."""
    _check_counts(n, c, k)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_all_k(n: int, c: int, k: int) -> float:
    """Return the probability that all of k trials pass, if c of n passed. Raises ValueError unless k <= n."""
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"must be 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")


def _interval(lower: float, upper: float) -> eval_result_pb2.ConfidenceInterval:
    return eval_result_pb2.ConfidenceInterval(lower=lower, upper=upper, level=LEVEL)


def wilson(c: int, n: int) -> eval_result_pb2.ConfidenceInterval:
    """Return Wilson's interval of a rate of which c of n were seen, n at least 1.

    Raises ConfigurationError if scipy is not installed.
    """
    lower, upper = _wilson(c, n)
    return _interval(lower, upper)


@lru_cache(maxsize=4_096)
def _wilson(c: int, n: int) -> tuple[float, float]:
    """Return the bounds of Wilson's interval; the cases of a set share few pairs of counts, and scipy takes 0.4 ms."""
    bounds = _scipy_stats().binomtest(c, n).proportion_ci(method="wilson")
    return float(bounds.low), float(bounds.high)


def highest_lower(n: int) -> float:
    """Return Wilson's lower bound of n of n: the most that n trials, or cases, can prove. It needs no scipy."""
    return n / (n + _Z_SQUARED)


def find_least_trials(lower: float) -> int:
    """Return the least n for which Wilson's lower bound of n of n reaches a number.

    Raises ValueError for 1 and more.
    """
    if lower >= 1:
        raise ValueError("The lower bound of any number of trials is below 1.")
    count = max(1, math.ceil(_Z_SQUARED * lower / (1 - lower)))
    # Rounding may have led to either side of a whole number.
    return count - 1 if count > 1 and reaches(highest_lower(count - 1), lower) else count


def bootstrap(rates: Sequence[float], seed: str) -> eval_result_pb2.ConfidenceInterval:
    """Return the interval of the mean of some cases' pass rates, at least one, by resampling the cases.

    The same rates, in any order, and the same seed have the same interval. If all rates are equal, resampling would
    say that the mean is certain: the interval is Wilson's then, with the cases as what is counted. And it is never
    narrower than what so many cases can prove: its lower bound is at most Wilson's of n of n, its upper bound at
    least that of 0 of n. Raises ConfigurationError if scipy is not installed.
    """
    count = len(rates)
    if is_close(min(rates), max(rates)):
        return _wilson_of_rate(rates[0], count)
    resampled = _resample(sorted(rates), seed)
    return _interval(
        lower=min(resampled.lower, wilson(count, count).lower), upper=max(resampled.upper, wilson(0, count).upper)
    )


def _wilson_of_rate(rate: float, count: int) -> eval_result_pb2.ConfidenceInterval:
    """Return Wilson's interval of a rate that need not be a whole number of what is counted: widened to the next."""
    seen = rate * count
    if is_close(seen, round(seen)):
        return wilson(round(seen), count)
    return _interval(wilson(math.floor(seen), count).lower, wilson(math.ceil(seen), count).upper)


def _resample(rates: Sequence[float], seed: str) -> eval_result_pb2.ConfidenceInterval:
    """Return the percentile interval of the mean; BCa, the default of scipy, is not defined for every sample."""
    # Imported late: numpy comes with scipy.
    import numpy as np

    bounds = (
        _scipy_stats()
        .bootstrap(
            (rates,),
            np.mean,
            method="percentile",
            n_resamples=min(_RESAMPLES, max(1_000, _DRAWS // len(rates))),
            batch=max(1, _BATCH // len(rates)),
            rng=np.random.default_rng(int.from_bytes(sha256(seed.encode()).digest())),
        )
        .confidence_interval
    )
    # Sums of the same rates in another order round differently: a mean above all rates is not one.
    return _interval(max(float(bounds.low), rates[0]), min(float(bounds.high), rates[-1]))


def pass_statistics(passed: int, trials: int) -> eval_result_pb2.PassStatistics:
    """Return how often a case passes that passed in some of its scored trials; without trials, no rate."""
    result = eval_result_pb2.PassStatistics(trials=trials, passed=passed, flaky=0 < passed < trials)
    if trials:
        interval = wilson(passed, trials)
        any_of_k, all_of_k = _probabilities(trials, passed)
        result.pass_rate = passed / trials
        result.pass_rate_interval.CopyFrom(interval)
        result.pass_at_k.extend(any_of_k)
        result.pass_all_k.extend(all_of_k)
        result.pass_all_k_intervals.extend(
            _interval(interval.lower**k, interval.upper**k) for k in range(1, trials + 1)
        )
    return result


@lru_cache(maxsize=64)
def _probabilities(n: int, c: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return pass@k and pass^k for every k; of 1,000 trials they take 0.1 s, and many cases share them."""
    every_k = range(1, n + 1)
    return tuple(pass_at_k(n, c, k) for k in every_k), tuple(pass_all_k(n, c, k) for k in every_k)


def _scipy_stats() -> ModuleType:
    """Return scipy's statistics, loaded when they are needed: it takes a second, and only evaluations use it."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigurationError(f"Evaluations need scipy. Install it: {install_command('eval')}.") from error
    assert isinstance(stats, ModuleType)
    return stats
