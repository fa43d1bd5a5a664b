"""The matching of trees against a matcher that tries everything, on small random trees."""

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_set_pb2
from bough_server.evals.metrics.agent_trajectory import compare_trees
from bough_server.evals.metrics.tree_matching import (
    Match,
    Pairs,
    Row,
    best_in_any_order,
    best_in_order,
    best_matching,
    build_expected_tree,
)
from bough_server.evals.trees.agent_tree import agent_tree
from tests.evals.invocations import Agent, agent, expected, invocation
from tests.support.examples import examples

Cost = tuple[int, int, int]
Expected = eval_set_pb2.ExpectedAgent

NAMES = ("a", "b")
TOOLS = ("t", "u")

# -- The matcher that tries everything. It shares no code with the one that it checks.


def plus(*costs: Cost) -> Cost:
    first, second, third = (sum(parts) for parts in zip(*costs, strict=True))
    return first, second, third


def nodes_below(tree: Agent) -> list[Agent]:
    return [below for child in tree.children for below in (child, *nodes_below(child))]


def presences(children: Sequence[Expected]) -> Iterator[list[Expected]]:
    """Every way to have optional children of which several are expected: none, or as many as if it were required."""
    if not children:
        yield []
        return
    first, *others = children
    if not (first.optional and first.repeat.min > 1):
        choices: list[list[Expected]] = [[first]]
    else:
        there = Expected()
        there.CopyFrom(first)
        there.optional = False
        choices = [[], [there]]
    for rest in presences(others):
        yield from ([*choice, *rest] for choice in choices)


def copies(children: Sequence[Expected], siblings: Sequence[Agent]) -> list[tuple[Expected, bool]]:
    """Each expected child as often as it may be there, and whether that copy is required."""
    found = []
    for child in children:
        least, most = 1, 1
        if child.HasField("repeat"):
            least = child.repeat.min if child.repeat.HasField("min") else 1
            same = [one for one in siblings if child.name in ("*", one.name)]
            most = child.repeat.max if child.repeat.HasField("max") else max(least, len(same))
        if child.optional:
            least = 0
        found += [(child, number < least) for number in range(max(least, most))]
    return found


def required_in(one: Expected) -> int:
    return 1 + sum(required_in(child) for child, is_required in copies(one.children, ()) if is_required)


def matchings(count: int, siblings: int, *, is_ordered: bool) -> Iterator[list[int | None]]:
    """Every way to give each of `count` copies a sibling or none."""

    def further(chosen: list[int | None]) -> Iterator[list[int | None]]:
        if len(chosen) == count:
            yield chosen
            return
        taken = [one for one in chosen if one is not None]
        yield from further([*chosen, None])
        for sibling in range(siblings):
            if sibling not in taken and (not is_ordered or all(sibling > one for one in taken)):
                yield from further([*chosen, sibling])

    yield from further([])


def pair_cost(one: Expected, tree: Agent) -> Cost | None:
    if one.name not in ("*", tree.name):
        return None
    wrong = sum(below.name in one.forbidden for below in nodes_below(tree))
    if one.tools:
        wrong += [tool.name for tool in one.tools] != [call.name for call in tree.calls]
    is_ordered = one.children_order == eval_set_pb2.EVAL_ORDER_ORDERED
    refuses = one.extra != eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW
    return plus((wrong, -1, 0), children_cost(one.children, tree.children, is_ordered=is_ordered, refuses=refuses))


def children_cost(children: Sequence[Expected], siblings: Sequence[Agent], *, is_ordered: bool, refuses: bool) -> Cost:
    return min(
        cost_of_children(there, siblings, is_ordered=is_ordered, refuses=refuses) for there in presences(children)
    )


def cost_of_children(
    children: Sequence[Expected], siblings: Sequence[Agent], *, is_ordered: bool, refuses: bool
) -> Cost:
    wanted = copies(children, siblings)
    pairs = [[pair_cost(one, sibling) for sibling in siblings] for one, _ in wanted]
    best: Cost | None = None
    for chosen in matchings(len(wanted), len(siblings), is_ordered=is_ordered):
        costs: list[Cost | None] = [(0, 0, 0)]
        for number, (one, is_required) in enumerate(wanted):
            sibling = chosen[number]
            if sibling is not None:
                costs.append(pairs[number][sibling])
            elif is_required:
                costs.append((required_in(one), 0, 0))
        if refuses:
            left = [siblings[number] for number in range(len(siblings)) if number not in chosen]
            costs += [(1, 0, 1 + len(nodes_below(one))) for one in left]
        possible = [cost for cost in costs if cost is not None]
        if len(possible) == len(costs):
            total = plus(*possible)
            best = total if best is None else min(best, total)
    assert best is not None
    return best


# -- Small random trees.


def agents(depth: int) -> st.SearchStrategy[Agent]:
    children = st.lists(agents(depth - 1), max_size=3) if depth else st.just([])
    calls = st.lists(st.sampled_from(TOOLS), max_size=2)
    return st.builds(lambda name, below, made: agent(name, *below, calls=made), st.sampled_from(NAMES), children, calls)


def expectations(depth: int) -> st.SearchStrategy[Expected]:
    children = st.lists(expectations(depth - 1), max_size=3 if depth > 1 else 2) if depth else st.just([])
    repeats = st.sampled_from([None] * 4 + [(None, None), (0, None), (2, None), (1, 2), (2, 3), (None, 2), (0, 1)])

    @st.composite
    def one(draw: st.DrawFn) -> Expected:
        repeat = draw(repeats)
        return expected(
            draw(st.sampled_from((*NAMES, "*"))),
            *draw(children),
            optional=draw(st.booleans()) and draw(st.booleans()),
            repeated=repeat is not None,
            at_least=repeat[0] if repeat else None,
            at_most=repeat[1] if repeat else None,
            is_ordered=draw(st.booleans()),
            allows_extra=draw(st.booleans()),
            forbidden=draw(st.sampled_from([(), (), (), ("a",), ("b",), ("a", "b")])),
            tools=draw(st.sampled_from([(), (), ("t",), ("u",), ("t", "u")])),
        )

    return one()


TREES = st.lists(agents(2), max_size=3)
EXPECTED_TREES = st.lists(expectations(2), max_size=2)


def cost_of(matches: Sequence[Match], wrong: int) -> Cost:
    """The cost of a matching, counted from its matches."""
    refused = [node for match in matches if match.expected.refuses_extra for node in match.extra]
    missing = sum(child.required * count for match in matches for child, count in match.missing)
    return wrong + missing + len(refused), 1 - len(matches), sum(node.size for node in refused)


@examples(40)
@given(EXPECTED_TREES, TREES, st.booleans(), st.booleans())
def test_no_matching_costs_less(
    wanted: list[Expected], there: list[Agent], is_ordered: bool, allows_extra: bool
) -> None:
    metric = eval_set_pb2.AgentTrajectoryMetric(
        roots_order=eval_set_pb2.EVAL_ORDER_ORDERED if is_ordered else eval_set_pb2.EVAL_ORDER_UNORDERED,
        extra_roots=eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW if allows_extra else eval_set_pb2.EXTRA_AGENTS_POLICY_REFUSE,
    )
    record = invocation(*there)
    best = children_cost(wanted, there, is_ordered=is_ordered, refuses=not allows_extra)

    score = compare_trees(wanted, record, metric)

    violations, matched, extra = best[0], -best[1], best[2]
    assert score.comparison.violations == violations
    assert score.comparison.precision == (matched / (matched + extra) if matched + extra else 1)
    assert (score.score == 1) == (violations == 0)
    assert bool(score.comparison.differences) == (violations > 0)
    assert len(score.marks) == len(record.agents)
    assert score == compare_trees(wanted, record, metric)


@examples(40)
@given(EXPECTED_TREES, TREES, st.booleans(), st.booleans())
def test_the_matches_add_up_to_the_least_cost(
    wanted: list[Expected], there: list[Agent], is_ordered: bool, allows_extra: bool
) -> None:
    for one in wanted:
        without_tools(one)
    tree = build_expected_tree(
        wanted,
        order=eval_set_pb2.EVAL_ORDER_ORDERED if is_ordered else eval_set_pb2.EVAL_ORDER_UNORDERED,
        extra=eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW if allows_extra else eval_set_pb2.EXTRA_AGENTS_POLICY_REFUSE,
    )
    matches = best_matching(tree, agent_tree(invocation(*there)), lambda _, __: 0)
    for one in wanted:
        without_forbidden(one)
    assert cost_of(matches, 0) == children_cost(wanted, there, is_ordered=is_ordered, refuses=not allows_extra)
    for match in matches[1:]:
        assert match.expected.agent.name in ("*", match.actual.agent.name)


def without_tools(one: Expected) -> None:
    one.ClearField("tools")
    for child in one.children:
        without_tools(child)


def without_forbidden(one: Expected) -> None:
    one.ClearField("forbidden")
    for child in one.children:
        without_forbidden(child)


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    width = draw(st.integers(1, 4))
    weights = st.lists(st.integers(-4, 0), min_size=width, max_size=width)
    return draw(
        st.lists(
            st.builds(lambda each, is_open: Row(weights=each, is_open=is_open), weights, st.booleans()),
            min_size=1,
            max_size=4,
        )
    )


def every_choice(rows: Sequence[Row]) -> Iterator[Pairs]:
    """Every way to give each column a row or none, closed rows once."""

    def further(chosen: Pairs, column: int) -> Iterator[Pairs]:
        if column == len(rows[0].weights):
            yield chosen
            return
        yield from further(chosen, column + 1)
        for number, row in enumerate(rows):
            if row.is_open or all(number != taken for taken, _ in chosen):
                yield from further([*chosen, (number, column)], column + 1)

    yield from further([], 0)


def weight(rows: Sequence[Row], pairs: Pairs) -> int:
    return sum(rows[i].weights[j] for i, j in pairs)


@examples(40)
@given(row_lists())
def test_no_choice_in_any_order_weighs_less(rows: list[Row]) -> None:
    found = best_in_any_order(rows)
    assert found in list(every_choice(rows))
    assert weight(rows, found) == min(weight(rows, pairs) for pairs in every_choice(rows))


@examples(40)
@given(row_lists())
def test_no_choice_in_order_weighs_less(rows: list[Row]) -> None:
    in_order = [pairs for pairs in every_choice(rows) if [i for i, _ in pairs] == sorted(i for i, _ in pairs)]
    found = best_in_order(rows)
    assert found in in_order
    assert weight(rows, found) == min(weight(rows, pairs) for pairs in in_order)
