"""Match an expected tree of agents with the actual tree, with as few violations as possible.

The cost of a matching is (violations, -matched, extras), compared from left to right. It is counted as one integer in
which each component outweighs everything behind it, so sums keep the order. A required agent that is missing, a refused
extra agent, failed tool calls and each forbidden agent are one violation each: everything that decides a verdict has to
be in the first component, because otherwise two agents of one name could be matched the wrong way round.

Nothing here recurses: the depth of a tree is not bounded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Final, TypeAlias

from bough.v1 import eval_set_pb2
from bough_server.evals.metrics.bipartite_matching import find_cheapest_matching
from bough_server.evals.trees.agent_tree import AgentNode
from bough_server.matching.work import spend

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
        best.append(_extend_open_row(row, best[-1]) if row.is_open else _extend_closed_row(row, best[-1]))
    return _trace_back(rows, best)


def _extend_open_row(row: Row, above: Sequence[int]) -> list[int]:
    """Return the least sums with one more row, which can be paired with each column once it is reached."""
    least, line = 0, [0]
    for weight, without in zip(row.weights, islice(above, 1, None), strict=True):
        least += weight
        if without < least:
            least = without
        line.append(least)
    return line


def _extend_closed_row(row: Row, above: Sequence[int]) -> list[int]:
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


ANY: Final = "*"
"""The name of an expected agent that any agent matches."""

MAX_PAIRS: Final = 4_000_000
"""The most pairs of expected and actual agents that are compared, repeats counted."""
_ALIGN_STEPS: Final = 250
"""The steps to match the children of a pair."""


@dataclass(slots=True, eq=False, kw_only=True)
class ExpectedNode:
    """An agent that is expected. The one at the top is virtual: its children are the expected roots."""

    index: int
    """The position in preorder; 0 for the virtual root."""
    agent: eval_set_pb2.ExpectedAgent
    parent: "ExpectedNode | None" = None
    children: "list[ExpectedNode]" = field(default_factory=list)
    required: int = 1
    """The number of agents that must be there if this one is, itself included, repeats counted."""

    name: str = field(init=False)
    at_least: int = field(init=False)
    """How often it must be there; an optional agent need not."""
    spare: int | None = field(init=False)
    """How often it may be there beyond `at_least`; None for any number."""
    is_ordered: bool = field(init=False)
    """Whether the order of its children counts."""
    refuses_extra: bool = field(init=False)
    """Whether other children than the expected ones are violations."""
    least_if_there: int = field(init=False)
    """How often it must be there if it is there at all; more than `at_least` only if it is optional."""
    can_fail: bool = field(init=False)
    """Whether a match can be wrong in itself: by its tool calls, its state, its input or forbidden agents."""

    def __post_init__(self) -> None:
        # Read once: matching reads them for each pair of agents, and a field of a message is slow to read.
        agent, repeat = self.agent, self.agent.repeat
        self.name = agent.name
        least = repeat.min if repeat.HasField("min") else 1
        self.at_least = 0 if agent.optional else least
        if not agent.HasField("repeat"):
            self.spare = 1 - self.at_least
        else:
            self.spare = max(0, repeat.max - self.at_least) if repeat.HasField("max") else None
        self.is_ordered = agent.children_order == eval_set_pb2.EVAL_ORDER_ORDERED
        self.refuses_extra = agent.extra != eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW
        self.can_fail = bool(
            agent.tools or agent.tools_mode or agent.forbidden or agent.state or agent.HasField("input_match")
        )
        self.least_if_there = least

    @property
    def is_all_or_none(self) -> bool:
        """Whether it may be missing, but has to be there several times if it is there at all."""
        return self.at_least == 0 and self.least_if_there > 1


def build_expected_tree(
    roots: Sequence[eval_set_pb2.ExpectedAgent],
    *,
    order: eval_set_pb2.EvalOrder.ValueType = eval_set_pb2.EVAL_ORDER_UNSPECIFIED,
    extra: eval_set_pb2.ExtraAgentsPolicy.ValueType = eval_set_pb2.EXTRA_AGENTS_POLICY_UNSPECIFIED,
) -> list[ExpectedNode]:
    """Return the expected agents in preorder, below a virtual root that comes first."""
    nodes = [ExpectedNode(index=0, agent=eval_set_pb2.ExpectedAgent(children_order=order, extra=extra))]
    ahead = [(nodes[0], agent) for agent in reversed(roots)]
    while ahead:
        parent, agent = ahead.pop()
        node = ExpectedNode(index=len(nodes), agent=agent, parent=parent)
        parent.children.append(node)
        nodes.append(node)
        ahead.extend((node, child) for child in reversed(agent.children))
    for node in reversed(nodes[1:]):
        assert node.parent is not None
        node.parent.required += node.at_least * node.required
    return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An expected agent that is there, and what is different directly below it."""

    expected: ExpectedNode
    actual: AgentNode
    is_required: bool
    missing: tuple[tuple[ExpectedNode, int], ...]
    """Required children that are not there, and how often each is missing."""
    extra: tuple[AgentNode, ...]
    """Children that are there and match nothing."""


Faults = Callable[[ExpectedNode, AgentNode], int]
"""The violations of an agent in itself, whatever is matched below it: failed tool calls, forbidden agents."""


def best_matching(expected: Sequence[ExpectedNode], actual: Sequence[AgentNode], faults: Faults) -> list[Match]:
    """Return the matched agents of the cheapest matching, in preorder of the expected ones; the virtual roots first.

    Equal input has equal output: trees are read in preorder, and ties are decided by position.

    Raises:
        ValueError: The trees are too large to be compared exactly; the message says how large they are.
        TooMuchWork: It takes too many steps to compare them.
    """
    return _Matcher(expected, actual, faults).matches()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alignment:
    """Which children of a matched pair match: indexes of both lists, and what that changes the cost by."""

    pairs: Pairs
    gain: int


_NOTHING: Final = _Alignment(pairs=[], gain=0)


class _Matcher:
    def __init__(self, expected: Sequence[ExpectedNode], actual: Sequence[AgentNode], faults: Faults) -> None:
        self._expected = expected
        self._actual = actual
        self._faults = faults
        # Matched and extra agents are agents that there are, so neither count reaches the base.
        self._match = actual[0].size
        self._violation = self._match * self._match
        self._by_name: dict[int, dict[str, list[int]]] = {}
        self._alignments: dict[tuple[int, int], _Alignment] = {}
        self._raise_if_too_large()

    def _raise_if_too_large(self) -> None:
        """Every agent can be an extra, fail by its tools, state and input, and be forbidden by each agent above it."""
        forbids = [0] * len(self._expected)
        for node in self._expected[1:]:
            assert node.parent is not None
            forbids[node.index] = forbids[node.parent.index] + bool(node.agent.forbidden)
        most = _count_most(self._expected) + self._actual[0].size * (4 + max(forbids))
        if most * self._violation >= MAX_SUM:
            raise ValueError(
                f"The trees are too large to be compared: {self._expected[0].required - 1} agents are required and "
                f"{len(self._actual) - 1} are there."
            )

    def matches(self) -> list[Match]:
        for level in reversed(self._levels()):
            for expected, actual in level:
                self._alignments[expected.index, actual.index] = self._align(expected, actual)
        matches = []
        ahead = [(self._expected[0], self._actual[0], True)]
        while ahead:
            expected, actual, is_required = ahead.pop()
            pairs = self._alignments.get((expected.index, actual.index), _NOTHING).pairs
            match, below = _build_match(expected, actual, pairs, is_required=is_required)
            matches.append(match)
            ahead.extend(reversed(below))
        return matches

    def _levels(self) -> list[list[tuple[ExpectedNode, AgentNode]]]:
        """Return the pairs that can match and both have children, level by level.

        A pair below another is one level deeper in both trees.
        """
        levels = [[(self._expected[0], self._actual[0])]]
        count = 0
        while levels[-1]:
            below: list[tuple[ExpectedNode, AgentNode]] = []
            for expected, actual in levels[-1]:
                for child in expected.children:
                    candidates = self._candidates(child, actual)
                    pairs = sum(_copies(child, len(candidates), child.at_least)[:2]) * len(actual.children)
                    count += pairs
                    spend(pairs)
                    if child.children:
                        others = [actual.children[j] for j in candidates if actual.children[j].children]
                        spend(_ALIGN_STEPS * len(others))
                        below.extend((child, other) for other in others)
                if count > MAX_PAIRS:
                    raise ValueError(
                        f"The trees are too large to be compared: more than {MAX_PAIRS:,} pairs of agents could match."
                    )
            levels.append(below)
        return levels

    def _align(self, expected: ExpectedNode, actual: AgentNode) -> _Alignment:
        """Return the cheapest alignment, trying those children that are all or none in either way."""
        unsure = [i for i, child in enumerate(expected.children) if self._is_unsure(child, actual)]
        best = self._align_children(expected, actual, {})
        for is_there in islice(product((False, True), repeat=len(unsure)), 1, None):
            spend(_ALIGN_STEPS * (1 + len(actual.children)))
            least = {
                i: expected.children[i].least_if_there for i, chosen in zip(unsure, is_there, strict=True) if chosen
            }
            one = self._align_children(expected, actual, least)
            if one.gain < best.gain:
                best = one
        return best

    def _is_unsure(self, child: ExpectedNode, actual: AgentNode) -> bool:
        return child.is_all_or_none and bool(self._candidates(child, actual))

    def _align_children(self, expected: ExpectedNode, actual: AgentNode, least: Mapping[int, int]) -> _Alignment:
        """Return the cheapest alignment in which each child that is all or none is there if `least` has its position.

        `least` says how often. The parent's `required` does not count such children: the gain does.
        """
        rows: list[Row] = []
        owners: list[int] = []
        alike: dict[tuple[object, ...], list[Row]] = {}
        for i, child in enumerate(expected.children):
            candidates = self._candidates(child, actual)
            if not candidates or (child.is_all_or_none and i not in least):
                continue
            # Agents without children and conditions weigh the same if they are written the same.
            at_least = least.get(i, child.at_least)
            kind = (child.name, at_least, child.spare, child.refuses_extra)
            is_plain = not child.children and not child.can_fail
            new = alike.get(kind) if is_plain else None
            if new is None:
                new = self._rows(child, actual, candidates, at_least)
                if is_plain:
                    alike[kind] = new
            rows.extend(new)
            owners.extend([i] * len(new))
        if not rows:
            return _NOTHING
        pairs = best_in_order(rows) if expected.is_ordered else best_in_any_order(rows)
        missing = sum(count * expected.children[i].required for i, count in least.items()) * self._violation
        return _Alignment(
            pairs=[(owners[row], column) for row, column in pairs],
            gain=sum(rows[row].weights[column] for row, column in pairs) + missing,
        )

    def _rows(self, child: ExpectedNode, actual: AgentNode, candidates: Sequence[int], at_least: int) -> list[Row]:
        """Return a row for each copy of an expected child that can be needed, the `at_least` required ones first.

        A weight is what a match changes the cost by, compared with an expected agent and an actual one without a match.
        """
        parent = child.parent
        refuses = parent is None or parent.refuses_extra
        missing = child.required * self._violation
        required, optional = [0] * len(actual.children), [0] * len(actual.children)
        for j in candidates:
            other = actual.children[j]
            gain = self._cost(child, other) - (self._violation + other.size if refuses else 0)
            required[j] = min(0, gain - missing)
            optional[j] = min(0, gain)
        needed, others, is_open = _copies(child, len(candidates), at_least)
        return [Row(weights=required)] * needed + [Row(weights=optional, is_open=is_open)] * others

    def _cost(self, expected: ExpectedNode, actual: AgentNode) -> int:
        """Return the cost of a match with everything below it."""
        key = expected.index, actual.index
        cost = self._alignments.get(key, _NOTHING).gain - self._match
        if expected.can_fail:
            cost += self._faults(expected, actual) * self._violation
        if expected.refuses_extra and actual.children:
            cost += len(actual.children) * self._violation + actual.size - 1
        return cost + (expected.required - 1) * self._violation

    def _candidates(self, child: ExpectedNode, actual: AgentNode) -> Sequence[int]:
        """Return the positions of the children that an expected child can match."""
        if child.name == ANY:
            return range(len(actual.children))
        by_name = self._by_name.get(actual.index)
        if by_name is None:
            by_name = self._by_name[actual.index] = {}
            for j, other in enumerate(actual.children):
                by_name.setdefault(other.agent.name, []).append(j)
        return by_name.get(child.name, ())


def _copies(child: ExpectedNode, candidates: int, at_least: int) -> tuple[int, int, bool]:
    """Return how many rows a child takes: required ones, others, and whether one row stands for all others."""
    needed = min(at_least, candidates)
    spare = None if child.spare is None else child.spare + child.at_least - at_least
    if spare is None or spare > candidates - needed:
        return needed, min(1, candidates - needed), True
    return needed, spare, False


def _count_most(nodes: Sequence[ExpectedNode]) -> int:
    """Return how many agents are required if each that is all or none is there, the virtual root included."""
    counts = [1] * len(nodes)
    for node in reversed(nodes[1:]):
        assert node.parent is not None
        least = node.least_if_there if node.is_all_or_none else node.at_least
        counts[node.parent.index] += least * counts[node.index]
    return counts[0]


def _build_match(
    expected: ExpectedNode, actual: AgentNode, pairs: Pairs, *, is_required: bool
) -> tuple[Match, list[tuple[ExpectedNode, AgentNode, bool]]]:
    """Return a match, and the matches directly below it: expected, actual, whether it is required."""
    counts = [0] * len(expected.children)
    below = []
    for i, j in sorted(pairs):
        child = expected.children[i]
        counts[i] += 1
        below.append((child, actual.children[j], counts[i] <= child.at_least))
    taken = {j for _, j in pairs}
    match = Match(
        expected=expected,
        actual=actual,
        is_required=is_required,
        missing=tuple(_missing(expected, counts)),
        extra=tuple(child for j, child in enumerate(actual.children) if j not in taken),
    )
    return match, below


def _missing(expected: ExpectedNode, counts: Sequence[int]) -> Iterator[tuple[ExpectedNode, int]]:
    for child, count in zip(expected.children, counts, strict=True):
        least = child.least_if_there if count else child.at_least
        if count < least:
            yield child, least - count
