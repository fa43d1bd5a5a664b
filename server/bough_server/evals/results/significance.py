"""Tests of whether cases pass less, or more, often than before: exact, given how many trials passed on both sides.

If nothing changed, each trial of a case passes with the same probability on both sides. Given how many of a case's
trials passed in all, those on one side are then distributed hypergeometrically, whatever that probability is: Fisher's
exact test. Of several cases the sums are compared, each case being a stratum: unlike a test of the sums alone, it is
right for cases that pass with different probabilities.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias, TypeVar

from bough_server.evals.metrics.statistics import reaches

LEVEL: Final = 0.05
"""The probability of a false alarm up to which a test rejects."""

_TRIMMED: Final = 1e-16
"""The probability up to which the ends of a distribution are left out."""

_LEAST: Final = 1e-12
"""The lowest probability that sums of trimmed distributions are exact to."""

_MAX_VARIANCE: Final = 2_500
"""The variance beyond which a sum counts as normally distributed: exact distributions of 10,000 cases take seconds."""

Key = TypeVar("Key", bound=Hashable)


class Passes(NamedTuple):
    """How many trials of a case passed on both sides."""

    passed: int
    trials: int
    passed_before: int
    trials_before: int

    @property
    def margins(self) -> "_Margins":
        """What the distribution of `passed` depends on if nothing changed."""
        return self.trials, self.trials_before, self.passed + self.passed_before


_Margins: TypeAlias = tuple[int, int, int]
"""The trials, those before, and how many of both passed."""

_Distribution: TypeAlias = tuple[int, Sequence[float]]
"""The smallest number, and the probabilities of it and of those that follow."""


def drop_p_value(strata: Iterable[Passes]) -> float:
    """Return the probability that so few trials pass, or fewer, if nothing changed; 1 for no strata."""
    strata = list(strata)
    observed = sum(one.passed for one in strata)
    counts = Counter(one.margins for one in strata)
    variance = sum(_variance(margins) * count for margins, count in counts.items())
    if variance > _MAX_VARIANCE:
        center = sum(_mean(margins) * count for margins, count in counts.items())
        return _normal_below((observed + 0.5 - center) / math.sqrt(variance))
    total: _Distribution = (0, [1.0])
    for margins, count in sorted(counts.items()):
        total = _convolve(total, _power(_hypergeometric(margins), count))
    return _sum_through(total, observed)


def case_p_values(one: Passes) -> tuple[float, float]:
    """Return the probabilities that so few, and that so many, trials of a case pass if nothing changed."""
    distribution = _hypergeometric(one.margins)
    return _sum_through(distribution, one.passed), min(1.0, 1 - _sum_through(distribution, one.passed - 1))


def least_p_value(sizes: Iterable[tuple[int, int]]) -> float:
    """Return the lowest probability that trials of cases, each with those before, can have: none passes, all did."""
    return math.exp(-sum(math.log(math.comb(trials + before, before)) for trials, before in sizes))


def describe_p_value(p_value: float) -> str:
    """Return the probability of a test as sentences have it, with a bound in the place of one too small to compute."""
    return f"p < {_LEAST:g}" if p_value < _LEAST else f"p = {p_value:.2g}"


def rejects(p_value: float, level: float = LEVEL) -> bool:
    """Return whether a test with this probability rejects at a level, up to rounding: 1 in 20 does at 5 %."""
    return reaches(level, p_value)


def reject(p_values: Mapping[Key, float], level: float = LEVEL) -> set[Key]:
    """Return what is rejected at a level for all together, by Holm's procedure."""
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    found: set[Key] = set()
    for index, (key, p_value) in enumerate(ordered):
        if not rejects(p_value, level / (len(ordered) - index)):
            break
        found.add(key)
    return found


def _mean(margins: _Margins) -> float:
    trials, before, passed = margins
    return trials * passed / (trials + before)


def _variance(margins: _Margins) -> float:
    trials, before, passed = margins
    total = trials + before
    return 0.0 if total < 2 else trials * before * passed * (total - passed) / (total * total * (total - 1))


@lru_cache(maxsize=4_096)
def _hypergeometric(margins: _Margins) -> _Distribution:
    """Return how many of the trials pass if so many of both sides' trials do."""
    trials, before, passed = margins
    lowest, highest = max(0, passed - before), min(trials, passed)
    mode = min(highest, max(lowest, round(_mean(margins))))
    # From about the most likely number outwards: no factorial is as large as those of a thousand trials.
    above = [1.0]
    for x in range(mode, highest):
        above.append(above[-1] * (trials - x) * (passed - x) / ((x + 1) * (before - passed + x + 1)))
    below = [1.0]
    for x in range(mode, lowest, -1):
        below.append(below[-1] * x * (before - passed + x) / ((trials - x + 1) * (passed - x + 1)))
    weights = [*below[:0:-1], *above]
    total = math.fsum(weights)
    return _trim(lowest, [weight / total for weight in weights])


def _trim(lowest: int, probabilities: Sequence[float]) -> _Distribution:
    first, end = 0, len(probabilities)
    while end - first > 1 and probabilities[first] < _TRIMMED:
        first += 1
    while end - first > 1 and probabilities[end - 1] < _TRIMMED:
        end -= 1
    return lowest + first, probabilities[first:end]


def _convolve(left: _Distribution, right: _Distribution) -> _Distribution:
    """Return the distribution of the sum of two independent numbers."""
    (low, longer), (high, shorter) = sorted((left, right), key=lambda each: -len(each[1]))
    found = [0.0] * (len(longer) + len(shorter) - 1)
    for offset, weight in enumerate(shorter):
        end = offset + len(longer)
        found[offset:end] = [value + weight * each for value, each in zip(found[offset:end], longer, strict=True)]
    return _trim(low + high, found)


def _power(base: _Distribution, count: int) -> _Distribution:
    """Return the distribution of the sum of `count` independent numbers of one distribution, by squaring."""
    found: _Distribution = (0, [1.0])
    while count:
        if count & 1:
            found = _convolve(found, base)
        count >>= 1
        if count:
            base = _convolve(base, base)
    return found


def _sum_through(distribution: _Distribution, last: int) -> float:
    """Return the probability of a number and of all below it."""
    lowest, probabilities = distribution
    if last < lowest:
        return 0.0
    # What is trimmed above the last is at most _TRIMMED for each: a whole distribution is certain.
    return 1.0 if last >= lowest + len(probabilities) - 1 else min(1.0, math.fsum(probabilities[: last - lowest + 1]))


def _normal_below(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))
