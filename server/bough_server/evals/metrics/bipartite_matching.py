"""Pair rows with columns, each at most once: as many pairs as possible, or those with the least sum of weights.

Both are deterministic, and their work is counted in steps as it is done (see `matching.work`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from bough_server.matching.work import spend

_EDGE_STEPS: Final = 4
"""The steps to follow an edge: about 0.2 microseconds."""


def find_largest_matching(columns: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return a column for as many rows as possible, if each row can have one of its `columns`.

    By Hopcroft and Karp: each phase finds shortest augmenting paths that share no row, and at most about 2 * sqrt(n)
    phases are needed. Raises TooMuchWork.
    """
    matching = _LargestMatching(columns)
    while depths := matching.find_depths():
        matching.augment(depths)
    return dict(sorted(matching.column_of.items()))


class _LargestMatching:
    def __init__(self, columns: Sequence[Sequence[int]]) -> None:
        self._columns = columns
        self._steps = _EDGE_STEPS * sum(map(len, columns))
        self._row_of: dict[int, int] = {}
        self.column_of: dict[int, int] = {}

    def find_depths(self) -> dict[int, int]:
        """Return the distance of each row from the unmatched ones; nothing if no path from them can be augmented."""
        spend(self._steps)
        rows = [row for row in range(len(self._columns)) if row not in self.column_of]
        depths = dict.fromkeys(rows, 0)
        has_path = False
        for row in rows:  # which grows
            for column in self._columns[row]:
                other = self._row_of.get(column)
                if other is None:
                    has_path = True
                elif other not in depths:
                    depths[other] = depths[row] + 1
                    rows.append(other)
        return depths if has_path else {}

    def augment(self, depths: Mapping[int, int]) -> None:
        """Match unmatched rows by paths on which each row is one further away than the one before."""
        # All paths of a phase share the iterators: an edge that led nowhere is not followed again.
        edges = [iter(columns) for columns in self._columns]
        for row in depths:
            if row not in self.column_of:
                self._augment_from(row, edges, depths)

    def _augment_from(self, start: int, edges: Sequence[Iterator[int]], depths: Mapping[int, int]) -> None:
        path = [start]
        while path:
            row = path[-1]
            for column in edges[row]:
                other = self._row_of.get(column)
                if other is None:
                    self._shift(path, column)
                    return
                if depths[other] == depths[row] + 1:
                    path.append(other)
                    break
            else:
                path.pop()

    def _shift(self, path: Sequence[int], free: int) -> None:
        """Give the last row of a path the free column, and each other row the column of the one behind it."""
        column: int | None = free
        for row in reversed(path):
            assert column is not None
            previous = self.column_of.get(row)
            self.column_of[row], self._row_of[column] = column, row
            column = previous


def find_cheapest_matching(weights: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of a row and a column whose weights, all below 0, have the least sum.

    It uses shortest augmenting paths with potentials, only through columns that compete, and treats equal rows as one:
    a matrix that consists of blocks takes only the time of its blocks. Equal rows have their columns in order, and a
    row that can have several columns takes the first. Raises TooMuchWork.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, line in enumerate(weights):
        alike.setdefault(tuple(line), []).append(number)
    kinds = [_RowKind.of(line) for line in alike]
    matching = _CheapestMatching(kinds, columns=len(weights[0]) if weights else 0)
    matching.add_rows([len(numbers) for numbers in alike.values()])
    return [
        pair
        for kind, numbers in zip(kinds, alike.values(), strict=True)
        for pair in zip(numbers, sorted(kind.columns), strict=False)
    ]


@dataclass(slots=True, eq=False, kw_only=True)
class _RowKind:
    """Rows with equal weights, which can be exchanged for each other."""

    candidates: Sequence[int]
    """The columns that a row can be paired with."""
    weights: Sequence[int]
    """Those of the candidates."""
    potential: int
    columns: set[int] = field(default_factory=set)
    """The columns that its rows have."""

    @classmethod
    def of(cls, line: Sequence[int]) -> "_RowKind":
        candidates = [column for column, weight in enumerate(line) if weight < 0]
        return cls(candidates=candidates, weights=[line[column] for column in candidates], potential=min(line))


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search for the cheapest way to change the matching by one more row."""

    reached: dict[int, int]
    """The least cost with which a row of each kind loses its column to the one more."""
    through: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By kind: that column, and the kind that takes it."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Kinds that are not reached for good, and the least cost so far."""
    cost: int
    """The least cost of an end of the search."""
    last: int
    """The kind of the row at that end, and the free column that it takes; None if it goes without one."""
    free: int | None = None


class _CheapestMatching:
    """A matching with the least sum for the rows that were added.

    A row may go without a column, at no cost. Reduced costs, `weight - kind.potential - potential of the column`, are
    never negative and 0 for pairs of the matching, so the next search can be Dijkstra's.
    """

    def __init__(self, kinds: Sequence[_RowKind], *, columns: int) -> None:
        self._kinds = kinds
        self._potentials = [0] * columns
        self._owners: list[int | None] = [None] * columns

    def add_rows(self, counts: Sequence[int]) -> None:
        """Add the rows of each kind."""
        # Most rows can have the cheapest of their columns; paths are searched for the others.
        searching = [count - self._take_cheapest(kind, count) for kind, count in enumerate(counts)]
        for kind, count in enumerate(searching):
            for _ in range(count):
                self._add_row(kind)

    def _take_cheapest(self, number: int, most: int) -> int:
        """Give rows of a kind free columns of its least weight; return how many."""
        kind = self._kinds[number]
        cheapest = (
            column
            for column, weight in zip(kind.candidates, kind.weights, strict=True)
            if weight == kind.potential and self._owners[column] is None
        )
        for column in islice(cheapest, most):
            self._owners[column] = number
            kind.columns.add(column)
        return len(kind.columns)

    def _add_row(self, number: int) -> None:
        """Add a row of a kind: it takes a free column, one of another row that then looks further, or none."""
        search = _Search(reached={number: 0}, cost=-self._kinds[number].potential, last=number)
        reached: int | None = number
        while reached is not None:
            self._follow(reached, search)
            reached = _reach_next(search)
        self._update_potentials(search)
        self._shift(search)

    def _follow(self, kind: int, search: _Search) -> None:
        """Follow the edges of a kind that was reached, as far as they lead to less than the cheapest end."""
        follower, ahead = self._kinds[kind], search.ahead
        spend(_EDGE_STEPS * (len(follower.candidates) + len(ahead)))
        base = search.reached[kind] - follower.potential
        if base < search.cost:
            search.cost, search.last, search.free = base, kind, None
        for column, weight in zip(follower.candidates, follower.weights, strict=True):
            cost = base + weight - self._potentials[column]
            if cost >= search.cost:
                continue
            owner = self._owners[column]
            if owner is None:
                search.cost, search.last, search.free = cost, kind, column
            elif owner not in search.reached and (owner not in ahead or cost < ahead[owner]):
                ahead[owner] = cost
                search.through[owner] = column, kind

    def _update_potentials(self, search: _Search) -> None:
        for number, cost in search.reached.items():
            kind, rest = self._kinds[number], search.cost - cost
            kind.potential += rest
            if rest:
                for column in kind.columns:
                    self._potentials[column] -= rest

    def _shift(self, search: _Search) -> None:
        """Give the free column to the kind at the end, and the column that leads to each kind to the one before."""
        kind, column = search.last, search.free
        while True:
            if column is not None:
                self._owners[column] = kind
                self._kinds[kind].columns.add(column)
            if kind not in search.through:
                return
            column, before = search.through[kind]
            self._kinds[kind].columns.remove(column)
            kind = before


def _reach_next(search: _Search) -> int | None:
    """Return the kind that is reached next, if it can lead to less than the cheapest end."""
    if not search.ahead:
        return None
    kind = min(search.ahead, key=search.ahead.__getitem__)
    cost = search.ahead.pop(kind)
    if cost >= search.cost:
        return None
    search.reached[kind] = cost
    return kind
