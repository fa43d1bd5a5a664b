"""What the waiting case asks of its model, and what its calls took, in short; it makes no call."""

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Final

AGENT: Final = "botanist"
SCENARIO: Final = "reasoning"
"""Two thoughts and two words: the model's server is to wait, not to work."""

TEXT: Final = "word0 word1 "


def spread(took: Sequence[float | None]) -> Mapping[str, float]:
    """How many of some calls failed, which is None, and the seconds that half and 99 in 100 of the others took."""
    seconds = [one for one in took if one is not None]
    hundredths = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [0.0] * 99
    return {"failed": len(took) - len(seconds), "p50": hundredths[49], "p99": hundredths[98]}
