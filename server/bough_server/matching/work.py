"""A bound on the work of comparing values with what callers expect.

Work is counted in steps, not in time, so that equal input always has the same outcome.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

MAX_STEPS: Final = 100_000_000
"""The most steps of judging one run of a case, about 5 s: a step is a byte of JSON that is compared."""


class TooMuchWork(Exception):
    """A comparison that takes more steps than are left; the message is a sentence."""


_left: ContextVar[list[int] | None] = ContextVar("bough_comparison_steps_left", default=None)


@contextmanager
def limit_work(most: int | list[int] = MAX_STEPS) -> Iterator[list[int]]:
    """Bound the steps of everything that is compared inside. What is compared outside of any bound has none.

    `most`: the steps, or a list that holds only those that are left of several bounds; such a list is also yielded.
    """
    left = [most] if isinstance(most, int) else most
    token = _left.set(left)
    try:
        yield left
    finally:
        _left.reset(token)


def spend(steps: int) -> None:
    """Count steps before they are taken. Raises TooMuchWork if there are not so many left, now and from then on."""
    left = _left.get()
    if left is None:
        return
    left[0] -= steps
    if left[0] < 0:
        raise TooMuchWork("There is too much to compare: expect fewer or smaller values.")
