"""Choose pairs of rows and columns whose weights have the least sum, in order or in any order.

Weights are integers up to 0, and a pair is worth choosing only if its weight is below 0. numpy and scipy are imported
when they are needed: together they take 0.3 s, and a server that judges nothing does without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough_server.distribution import install_command
from bough_server.errors import ConfigurationError

MAX_SUM: Final = 2**52
"""The most that the absolute weights of all chosen pairs may add up to: scipy counts with floats, exact below 2^53."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of weights, one a column."""

    weights: Sequence[int]
    is_open: bool = False
    """Whether any number of columns may be paired with it, instead of one."""


Pairs: TypeAlias = list[tuple[int, int]]
"""Indexes of rows and columns, by column; a column is in one pair at most."""

_MISSING: Final = f"Trees of agents are compared with scipy, which is not installed: {install_command('eval')}."


def best_in_order(rows: Sequence[Row]) -> Pairs:
    """Return the pairs with the least sum of which no two cross: a later column has the same or a later row."""
    if len(rows[0].weights) == 1:
        return _best_of_one_column(rows)
    try:
        import numpy as np
    except ImportError as error:
        raise ConfigurationError(_MISSING) from error
    zero = np.zeros(1, dtype=np.int64)
    # best[i][j] is the least sum of the first i rows and the first j columns.
    best = [np.zeros(len(rows[0].weights) + 1, dtype=np.int64)]
    for row in rows:
        weights = np.array(row.weights, dtype=np.int64)
        above = best[-1]
        if row.is_open:
            # Once the row is reached, each further column can be paired with it: weights are never above 0.
            total = np.concatenate((zero, np.cumsum(weights)))
            best.append(total + np.minimum.accumulate(above - total))
        else:
            paired = np.concatenate((zero, above[:-1] + weights))
            best.append(np.minimum.accumulate(np.minimum(above, paired)))
    return _trace_back(rows, [line.tolist() for line in best])


def _trace_back(rows: Sequence[Row], best: Sequence[Sequence[int]]) -> Pairs:
    pairs: Pairs = []
    i, j = len(rows), len(best[0]) - 1
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            j -= 1
            pairs.append((i - 1, j))
            i -= not rows[i - 1].is_open
    return pairs[::-1]


def best_in_any_order(rows: Sequence[Row]) -> Pairs:
    """Return the pairs with the least sum."""
    if len(rows[0].weights) == 1:
        return _best_of_one_column(rows)
    chosen, gains = _best_of_open_rows(rows)
    closed = [i for i, row in enumerate(rows) if not row.is_open]
    weights = [rows[i].weights for i in closed]
    if any(gains):
        weights = [[min(0, weight - gain) for weight, gain in zip(line, gains, strict=True)] for line in weights]
    for number, j in _assign(weights):
        if weights[number][j] < 0:
            chosen[j] = closed[number]
    return sorted(((i, j) for j, i in chosen.items()), key=lambda pair: pair[1])


def _best_of_open_rows(rows: Sequence[Row]) -> tuple[dict[int, int], list[int]]:
    """Return the best open row of each column, which no other column takes from it, and what it weighs."""
    is_open = [(i, row) for i, row in enumerate(rows) if row.is_open]
    gains = [min((row.weights[j] for _, row in is_open), default=0) for j in range(len(rows[0].weights))]
    chosen = {j: next(i for i, row in is_open if row.weights[j] == gain) for j, gain in enumerate(gains) if gain < 0}
    return chosen, gains


def _assign(weights: Sequence[Sequence[int]]) -> Pairs:
    """Return the complete assignment with the least sum."""
    if not weights:
        return []
    if len(weights) == 1:
        return [(0, min(range(len(weights[0])), key=lambda j: weights[0][j]))]
    try:
        import numpy as np
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ConfigurationError(_MISSING) from error
    numbers, columns = linear_sum_assignment(np.array(weights, dtype=np.float64))
    return list(zip(numbers.tolist(), columns.tolist(), strict=True))


def _best_of_one_column(rows: Sequence[Row]) -> Pairs:
    best = min(range(len(rows)), key=lambda i: rows[i].weights[0])
    return [(best, 0)] if rows[best].weights[0] < 0 else []
