"""What usage costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import usage_pb2
from bough_server.models.model import Price, cost_of

TOKENS = st.integers(0, 10**9)


@pytest.mark.parametrize(
    ("price", "usage", "nanos"),
    [
        (Price(input=2_500_000, output=10_000_000), {"input_tokens": 1000, "output_tokens": 100}, 3_500_000),
        (Price(input=150_000, output=0), {"input_tokens": 10, "output_tokens": 0}, 1_500),
        (Price(input=20_000, output=0), {"input_tokens": 10, "output_tokens": 0}, 200),
        (Price(input=1, output=0), {"input_tokens": 499, "output_tokens": 0}, 0),
        (Price(input=1, output=0), {"input_tokens": 500, "output_tokens": 0}, 1),
        (Price(input=0.1, output=0), {"input_tokens": 5_000, "output_tokens": 0}, 1),
        (Price(input=10, output=0), {"input_tokens": 10**6, "cached_input_tokens": 10**6, "output_tokens": 0}, 10_000),
        (
            Price(input=10, output=0, cached_input=1),
            {"input_tokens": 10**6, "cached_input_tokens": 10**6, "output_tokens": 0},
            1_000,
        ),
        (
            Price(input=10, output=0, cached_input=0),
            {"input_tokens": 10**6, "cached_input_tokens": 2 * 10**6, "output_tokens": 0},
            0,
        ),
        (Price(input=1e18, output=1e18), {"input_tokens": 10**9, "output_tokens": 10**9}, 2**63 - 1),
        (Price(input=1, output=1), {"input_tokens": 0, "output_tokens": 0}, 0),
        (Price(input=1, output=1), {"input_tokens": 5}, None),
        (Price(input=1, output=1), {"output_tokens": 5}, None),
        (Price(input=1, output=1), {"total_tokens": 5}, None),
    ],
)
def test_a_cost_is_whole_billionths_half_rounded_up_and_unknown_where_tokens_are(
    price: Price, usage: dict[str, int], nanos: int | None
) -> None:
    assert cost_of(usage_pb2.Usage(**usage), price) == nanos


@given(TOKENS, TOKENS, TOKENS)
def test_a_cost_never_falls_when_tokens_are_added(input_tokens: int, output_tokens: int, more: int) -> None:
    price = Price(input=0.3, output=1.7)
    less = cost_of(usage_pb2.Usage(input_tokens=input_tokens, output_tokens=output_tokens), price)
    dearer = cost_of(usage_pb2.Usage(input_tokens=input_tokens, output_tokens=output_tokens + more), price)
    assert less is not None
    assert dearer is not None
    assert less <= dearer
