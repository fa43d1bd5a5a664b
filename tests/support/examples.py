"""How many random examples a property has."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Settings with about so many random examples; ten times as many with --whole-grid, by the profile loaded then."""
    return settings(max_examples=count * settings().max_examples // 100)
