"""Matchings of rows and columns, against trying everything; and how much work they take."""

import random
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough_server.evals.metrics.bipartite_matching import find_cheapest_matching, find_largest_matching
from bough_server.matching.work import MAX_STEPS, TooMuchWork, limit_work
from tests.support.examples import examples

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))
NAMES = st.sampled_from("abc*")


def matrices(weights: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[int]]]:
    """Matrices of up to six rows and columns, some with equal rows."""

    @st.composite
    def matrix(draw: st.DrawFn) -> list[list[int]]:
        height, width = draw(SIZES)
        rows = draw(st.lists(st.lists(weights, min_size=width, max_size=width), min_size=1, max_size=height))
        return [draw(st.sampled_from(rows)) for _ in range(height)] if draw(st.booleans()) else rows

    return matrix()


@st.composite
def blocks(draw: st.DrawFn) -> list[list[int]]:
    """Matrices as siblings have them: only rows and columns of one name can be paired, and rows of the name "*"."""
    height, width = draw(SIZES)
    rows = draw(st.lists(NAMES, min_size=height, max_size=height))
    columns = draw(st.lists(st.sampled_from("abc"), min_size=width, max_size=width))
    weights = st.integers(-4, -1)
    return [[draw(weights) if row in ("*", column) else 0 for column in columns] for row in rows]


def every_assignment(height: int, width: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to give each row of the shorter side one of the other side, in pairs of a row and a column."""
    if height <= width:
        yield from (list(enumerate(columns)) for columns in permutations(range(width), height))
    else:
        yield from ([(row, column) for column, row in pairs] for pairs in every_assignment(width, height))


def weight(weights: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]]) -> int:
    return sum(weights[row][column] for row, column in pairs)


def is_matching(pairs: Sequence[tuple[int, int]]) -> bool:
    rows, columns = [row for row, _ in pairs], [column for _, column in pairs]
    return len({*rows}) == len(rows) and len({*columns}) == len(columns)


# Wide and narrow ranges: without ties, with many, and with many pairs that are impossible.
@examples(100)
@given(
    st.one_of(
        matrices(st.integers(-(10**15), 0)),
        matrices(st.integers(-3, 0)),
        matrices(st.sampled_from([0, 0, 0, -1, -2])),
        blocks(),
    )
)
def test_no_matching_is_cheaper(weights: list[list[int]]) -> None:
    found = find_cheapest_matching(weights)
    assert is_matching(found)
    assert all(weights[row][column] < 0 for row, column in found)
    assert weight(weights, found) == min(
        weight(weights, pairs) for pairs in every_assignment(len(weights), len(weights[0]))
    )


@examples(50)
@given(blocks())
def test_equal_rows_have_their_columns_in_order_and_the_first_rows_have_one(weights: list[list[int]]) -> None:
    found = dict(find_cheapest_matching(weights))
    for row, line in enumerate(weights):
        for later in range(row + 1, len(weights)):
            if weights[later] == line and later in found:
                assert found[row] < found[later]


def test_of_equal_choices_the_first_rows_have_the_first_columns() -> None:
    assert find_cheapest_matching([[-1] * 4] * 3) == [(0, 0), (1, 1), (2, 2)]
    assert find_cheapest_matching([[-1] * 2] * 3) == [(0, 0), (1, 1)]
    assert find_cheapest_matching([[0, -5, -5], [-2, -5, 0]]) == [(0, 2), (1, 1)]


def test_no_row_and_no_possible_pair_have_no_matching() -> None:
    assert find_cheapest_matching([]) == []
    assert find_cheapest_matching([[0, 0], [0, 0]]) == []
    assert find_largest_matching([]) == {}
    assert find_largest_matching([[], []]) == {}


@examples(100)
@given(SIZES.flatmap(lambda size: st.lists(st.sets(st.integers(0, size[1] - 1)), min_size=size[0], max_size=size[0])))
def test_no_matching_is_larger(columns: list[set[int]]) -> None:
    found = find_largest_matching([sorted(each) for each in columns])
    assert is_matching(list(found.items()))
    assert all(column in columns[row] for row, column in found.items())
    assert len(found) == max(
        sum(column in columns[row] for row, column in pairs) for pairs in every_assignment(len(columns), 6)
    )


def test_rows_give_way_along_a_path_of_any_length() -> None:
    # Each row but the last takes its first column until the last one, which has only that of the first, is matched.
    size = 3_000
    columns = [[row, row + 1] for row in range(size - 1)] + [[0]]
    assert find_largest_matching(columns) == {**{row: row + 1 for row in range(size - 1)}, size - 1: 0}
    weights = [[0] * 200 for _ in range(200)]
    for row in range(199):
        weights[row][row : row + 2] = [-9, -9]
    weights[199][0] = -1
    assert find_cheapest_matching(weights) == [*((row, row + 1) for row in range(199)), (199, 0)]


def varied(count: int) -> list[list[int]]:
    """Weights of siblings that compete for each other's columns, and of which each weighs something else."""
    numbers = random.Random(1)
    return [[-numbers.randint(1, 10**6) for _ in range(count)] for _ in range(count)]


def test_a_thousand_siblings_of_one_name_are_matched_unless_each_weighs_something_else() -> None:
    with limit_work(MAX_STEPS // 10):
        assert len(find_cheapest_matching([[-1] * 1_000] * 1_000)) == 1_000
        assert len(find_cheapest_matching([list(range(-1_000, 0))] * 1_000)) == 1_000
    with limit_work(MAX_STEPS // 10):
        assert len(find_largest_matching([list(range(1_000))] * 1_000)) == 1_000
    with limit_work(MAX_STEPS // 10):
        assert len(find_cheapest_matching(varied(200))) == 200
    with limit_work(MAX_STEPS // 100), pytest.raises(TooMuchWork):
        find_cheapest_matching(varied(300))


def test_blocks_take_the_work_of_blocks() -> None:
    block, count = varied(20), 20
    weights = [[0] * 20 * number + line + [0] * 20 * (count - 1 - number) for number in range(count) for line in block]
    with limit_work(100_000):
        one = weight(block, find_cheapest_matching(block))
    with limit_work(count * 100_000):
        assert weight(weights, find_cheapest_matching(weights)) == count * one


def test_a_search_for_the_largest_matching_is_bounded() -> None:
    with limit_work(1_000), pytest.raises(TooMuchWork):
        find_largest_matching([list(range(100))] * 100)
