"""How many random examples a property has."""

from typing import Final

from hypothesis import settings

EXAMPLES: Final = 25
"""How many a property has that does not say how many."""


def examples(count: int) -> settings:
    """Settings with about so many random examples; with --whole-grid, whose profile has more, twenty times as many."""
    return settings(max_examples=count * settings().max_examples // EXAMPLES)
