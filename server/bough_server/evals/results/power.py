"""What a comparison can find: how large a drop it takes, and how likely a drop of a few cases is found."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bough_server.evals.results.gate_numbers import pluralize

_Z_LEVEL: Final = 1.6448536269514722
"""The normal distribution's quantile at 0.95: the tests are one-sided, at 5 %."""

_FOUND: Final = 0.8
"""How likely a drop is found that a comparison is said to find."""

_DROP: Final = 0.3
_SHARE: Final = 0.1
"""The drop, and the share of the cases that have it, of the second sentence."""

_STEPS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How a comparison is made."""

    cases: int
    """How many cases both sides have."""
    pass_rate: float
    """How often a trial passed in the baseline, over all of these cases."""
    trials: int
    """How many planned trials a case has; with suspects, a case becomes one if one of them fails."""
    reruns: int
    """How many fresh trials a suspect has; 0 without suspects."""
    baseline_trials: int
    """How many trials of the baseline those of a case are compared with."""

    def describe(self) -> str:
        """Return sentences about what this comparison finds; empty without a case, or if none ever passed."""
        if not self.cases or not self.baseline_trials or not self.pass_rate:
            return ""
        compared = self.reruns or self.trials
        made = f"{pluralize(compared, 'fresh trial' if self.reruns else 'trial')} against {self.baseline_trials}"
        few = max(1, round(_SHARE * self.cases))
        drop = self._find_least_drop()
        every = (
            "finds no drop of all cases together in 80 %"
            if drop is None
            else f"finds a drop of all cases by {_points(drop)} in 80 %"
        )
        chance = self._find_chance(min(_DROP, self.pass_rate), few)
        return (
            f"This comparison, {made} of {pluralize(self.cases, 'case')}, {every}, "
            f"and a drop of {few} of them by {_points(min(_DROP, self.pass_rate))} in {100 * chance:.0f} %."
        )

    def _find_least_drop(self) -> float | None:
        """Return the least drop of all cases that is found as often as _FOUND, or None."""
        return _find_least(lambda drop: self._find_chance(drop, self.cases) >= _FOUND, self.pass_rate)

    def _find_chance(self, drop: float, dropping: int) -> float:
        """Return how likely the test rejects if so many cases pass less often by `drop`, by the normal distribution."""
        compared, before = self.reruns or self.trials, self.baseline_trials
        weight = compared * before / (compared + before)
        shift = null_variance = variance = 0.0
        # A rate of just 0 or 1 would be without variance: half a trial more or less was not seen.
        unseen = 0.5 / (self.cases * before + 1)
        old = min(max(self.pass_rate, unseen), 1 - unseen)
        for count, change in ((dropping, drop), (self.cases - dropping, 0.0)):
            new = min(max(old - change, unseen), 1 - unseen)
            chosen = count * (1 - new**self.trials if self.reruns else 1.0)
            both = (compared * new + before * old) / (compared + before)
            shift += chosen * weight * (old - new)
            null_variance += chosen * weight * both * (1 - both)
            variance += chosen * weight**2 * (new * (1 - new) / compared + old * (1 - old) / before)
            # Which cases are chosen varies too.
            variance += chosen * (1 - chosen / count if count else 0.0) * (weight * (old - new)) ** 2
        # By half a trial: the test counts whole ones.
        needed = _Z_LEVEL * math.sqrt(null_variance) + 0.5
        return 0.5 * math.erfc((needed - shift) / math.sqrt(2 * variance))


def _find_least(is_enough: Callable[[float], bool], highest: float) -> float | None:
    """Return the least number up to the highest that is enough, if larger ones are too; None if there is none."""
    if not is_enough(highest):
        return None
    low = 0.0
    for _ in range(_STEPS):
        middle = (low + highest) / 2
        low, highest = (low, middle) if is_enough(middle) else (middle, highest)
    return highest


def _points(rate: float) -> str:
    return pluralize(math.ceil(100 * rate - 1e-6), "point")
