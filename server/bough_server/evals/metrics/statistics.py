"""Estimates of how often a case passes, from few trials: pass@k, pass^k, and intervals with 95 % confidence.

n trials of which c passed: pass@k = 1 - C(n-c, k) / C(n, k) is the probability that at least one of k passes, and
pass^k = C(c, k) / C(n, k) that all of them do. Both are unbiased, and exact up to the rounding of the quotient.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from random import Random
from statistics import quantiles
from typing import Final

from bough.v1 import eval_result_pb2

LEVEL: Final = 0.95
"""The probability with which an interval holds the number that is estimated."""

_Z: Final = 1.959963984540054
"""The normal distribution's quantile at 0.975. A literal: computed, its last digit depends on the machine."""
_Z_SQUARED: Final = _Z * _Z

_TOLERANCE: Final = 1e-12
"""How far apart two numbers may be that count as equal: the mean of 0.1 and 0.3 is to reach 0.2."""

_RESAMPLES: Final = 9_999
_DRAWS: Final = 1_000_000
"""The most draws of a bootstrap, some 0.2 s: over 100 cases it has fewer resamples, and at 500 cases 2,000.

Numbers of the same cases share the draws, and each takes a few hundredths of a second more.
"""
_RESAMPLED_CASES: Final = 500
"""The most cases that are resampled. Of more, the mean is as good as normally distributed."""


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


def wilson(c: float, n: int) -> eval_result_pb2.ConfidenceInterval:
    """Return Wilson's interval of a rate of which c of n were seen, n at least 1; c need not be whole."""
    rate, denominator = c / n, 2 * (n + _Z_SQUARED)
    center = (2 * n * rate + _Z_SQUARED) / denominator
    half = _Z / denominator * math.sqrt(4 * n * rate * (1 - rate) + _Z_SQUARED)
    # Rounding must not move the ends that are known.
    return _interval(center - half if c else 0.0, center + half if c < n else 1.0)


def highest_lower(n: int) -> float:
    """Return Wilson's lower bound of n of n: the most that n trials, or cases, can prove."""
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

    Over 500 cases it is the normal interval instead. The same rates, in any order, and the same seed have the same
    interval, on any machine. If all rates are equal, resampling would claim that the mean is certain: the interval is
    then Wilson's, counting cases. The interval is never narrower than that many cases can prove: its lower bound is at
    most Wilson's of n of n, its upper bound at least Wilson's of 0 of n.
    """
    count = len(rates)
    if is_close(min(rates), max(rates)):
        return _wilson_of_rate(rates[0], count)
    ordered = sorted(rates)
    ((lower, upper),) = _find_bounds([ordered], seed)
    # Sums of the same rates in another order round differently: a mean above all rates is not one.
    lower, upper = max(lower, ordered[0]), min(upper, ordered[-1])
    return _interval(lower=min(lower, wilson(count, count).lower), upper=max(upper, wilson(0, count).upper))


def find_change_intervals(
    differences: Mapping[str, Sequence[float]], seed: str, *, rates: Collection[str]
) -> dict[str, eval_result_pb2.ConfidenceInterval | None]:
    """Return the interval of the mean of each number's differences, at least one, by resampling the cases.

    `rates` are the names of those numbers that are rates. Over 500 cases it is the normal interval instead. If all
    differences are equal, resampling would claim that the mean is certain: of rates, the interval then goes as far
    beyond as Wilson's of 0 of so many cases. Of what has no scale it is None for one case.
    """
    ordered = {name: sorted(values) for name, values in differences.items()}
    found = {name: _find_constant_interval(values, is_rate=name in rates) for name, values in ordered.items()}
    by_count: dict[int, list[str]] = {}
    for name, values in ordered.items():
        if not is_close(values[0], values[-1]):
            by_count.setdefault(len(values), []).append(name)
    for names in by_count.values():
        bounds = _find_bounds([ordered[name] for name in names], seed)
        found.update((name, _interval(*each)) for name, each in zip(names, bounds, strict=True))
    return found


def _find_constant_interval(ordered: Sequence[float], *, is_rate: bool) -> eval_result_pb2.ConfidenceInterval | None:
    """Return the interval of the mean of differences that are all equal."""
    count = len(ordered)
    if not is_rate:
        return None if count == 1 else _interval(ordered[0], ordered[-1])
    beyond = wilson(0, count).upper
    return _interval(max(-1.0, ordered[0] - beyond), min(1.0, ordered[-1] + beyond))


def _wilson_of_rate(rate: float, count: int) -> eval_result_pb2.ConfidenceInterval:
    """Return Wilson's interval of a rate that need not be a whole number of what is counted: widened to the next."""
    seen = rate * count
    if is_close(seen, round(seen)):
        return wilson(round(seen), count)
    return _interval(wilson(math.floor(seen), count).lower, wilson(math.ceil(seen), count).upper)


def _find_bounds(samples: Sequence[Sequence[float]], seed: str) -> list[tuple[float, float]]:
    """Return the bounds of the mean of each sample, all of one size."""
    if len(samples[0]) > _RESAMPLED_CASES:
        return [_find_normal_bounds(sample) for sample in samples]
    return _resample(samples, seed)


def _resample(samples: Sequence[Sequence[float]], seed: str) -> list[tuple[float, float]]:
    """Return the percentile interval of each mean; BCa, another usual one, is not defined for every sample.

    A sample's interval depends on no other: the draws that all share are those that each would have alone.
    """
    # Of Random's methods, only the sequence of random() is the same in every version of Python.
    draw, count = Random(int.from_bytes(sha256(seed.encode()).digest())).random, len(samples[0])
    means: list[list[float]] = [[] for _ in samples]
    for _ in range(min(_RESAMPLES, _DRAWS // count)):
        drawn = [int(draw() * count) for _ in range(count)]
        for sample, found in zip(samples, means, strict=True):
            found.append(math.fsum(map(sample.__getitem__, drawn)) / count)
    percentiles = [quantiles(found, n=40, method="inclusive") for found in means]
    return [(each[0], each[-1]) for each in percentiles]


def _find_normal_bounds(rates: Sequence[float]) -> tuple[float, float]:
    """Return the normal interval of the mean, by the standard error of the sample."""
    center = mean(rates)
    variance = math.fsum([(rate - center) ** 2 for rate in rates]) / (len(rates) - 1)
    half = _Z * math.sqrt(variance / len(rates))
    return center - half, center + half


def pass_statistics(passed: int, trials: int, *, distinct_trials: int | None = None) -> eval_result_pb2.PassStatistics:
    """Return how often a case passes that passed in some of its scored trials; without trials, no rate.

    `distinct_trials` is for how many trials they count in the interval; by default for all.
    """
    distinct = trials if distinct_trials is None else distinct_trials
    result = eval_result_pb2.PassStatistics(
        trials=trials, passed=passed, flaky=0 < passed < trials, distinct_trials=distinct
    )
    if trials:
        interval = wilson(distinct * passed / trials, distinct)
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
