"""Choose pairs of rows and columns whose weights have the least sum, in order or in any order.

Weights are integers up to 0, and a pair is worth choosing only if its weight is below 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

from bough_server.evals.metrics.bipartite_matching import find_cheapest_matching

MAX_SUM: Final = 2**52
"""The most that the absolute weights of all chosen pairs may add up to: arithmetic with larger integers is slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of weights, one a column."""

    weights: Sequence[int]
    is_open: bool = False
    """Whether any number of columns may be paired with it, instead of one."""


Pairs: TypeAlias = list[tuple[int, int]]
"""Indexes of rows and columns, by column; a column is in one pair at most."""


def best_in_order(rows: Sequence[Row]) -> Pairs:
    """Return the pairs with the least sum of which no two cross: a later column has the same or a later row."""
    if len(rows[0].weights) == 1:
        return _best_of_one_column(rows)
    # best[i][j] is the least sum of the first i rows and the first j columns.
    best = [[0] * (len(rows[0].weights) + 1)]
    for row in rows:
        best.append(_extend_open(row, best[-1]) if row.is_open else _extend_closed(row, best[-1]))
    return _traced(rows, best)


def _extend_open(row: Row, above: Sequence[int]) -> list[int]:
    """Return the least sums with one more row, which can be paired with each column once it is reached."""
    least, line = 0, [0]
    for weight, without in zip(row.weights, islice(above, 1, None), strict=True):
        least += weight
        if without < least:
            least = without
        line.append(least)
    return line


def _extend_closed(row: Row, above: Sequence[int]) -> list[int]:
    """Return the least sums with one more row, which can be paired with one column."""
    # Plain comparisons: `min` takes three times as long, and there may be millions of sums.
    least, line = 0, [0]
    for weight, before, without in zip(row.weights, above, islice(above, 1, None), strict=False):
        if without < least:
            least = without
        if before + weight < least:
            least = before + weight
        line.append(least)
    return line


def _traced(rows: Sequence[Row], best: Sequence[Sequence[int]]) -> Pairs:
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
    for number, j in find_cheapest_matching(weights):
        chosen[j] = closed[number]
    return sorted(((i, j) for j, i in chosen.items()), key=lambda pair: pair[1])


def _best_of_open_rows(rows: Sequence[Row]) -> tuple[dict[int, int], list[int]]:
    """Return the best open row of each column, which no other column takes from it, and what it weighs."""
    is_open = [(i, row) for i, row in enumerate(rows) if row.is_open]
    if not is_open:
        return {}, []
    gains = [min(row.weights[j] for _, row in is_open) for j in range(len(rows[0].weights))]
    chosen = {j: next(i for i, row in is_open if row.weights[j] == gain) for j, gain in enumerate(gains) if gain < 0}
    return chosen, gains


def _best_of_one_column(rows: Sequence[Row]) -> Pairs:
    best = min(range(len(rows)), key=lambda i: rows[i].weights[0])
    return [(best, 0)] if rows[best].weights[0] < 0 else []
