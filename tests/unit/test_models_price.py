"""What usage costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import usage_pb2
from bough_server.models.model import Price, cost_of

TOKENS = st.integers(0, 10**9)
_CACHED = {"input_tokens": 1000, "cached_input_tokens": 600, "cache_write_tokens": 300, "output_tokens": 0}


def _price(input: float, output: float, *, cached: float | None = None, stored: float | None = None) -> Price:
    return Price(
        input_per_million=input,
        output_per_million=output,
        cached_input_per_million=cached,
        cache_write_per_million=stored,
    )


@pytest.mark.parametrize(
    ("price", "usage", "nanos"),
    [
        (_price(2.5, 10), {"input_tokens": 1000, "output_tokens": 100}, 3_500_000),
        (_price(0.15, 0), {"input_tokens": 10, "output_tokens": 0}, 1_500),
        (_price(0.02, 0), {"input_tokens": 10, "output_tokens": 0}, 200),
        (_price(1e-06, 0), {"input_tokens": 499, "output_tokens": 0}, 0),
        (_price(1e-06, 0), {"input_tokens": 500, "output_tokens": 0}, 1),
        (_price(1e-07, 0), {"input_tokens": 5_000, "output_tokens": 0}, 1),
        (
            _price(1e-05, 0),
            {"input_tokens": 10**6, "cached_input_tokens": 10**6, "output_tokens": 0},
            10_000,
        ),
        (
            _price(1e-05, 0, cached=1e-06),
            {"input_tokens": 10**6, "cached_input_tokens": 10**6, "output_tokens": 0},
            1_000,
        ),
        (
            _price(1e-05, 0, cached=0),
            {"input_tokens": 10**6, "cached_input_tokens": 2 * 10**6, "output_tokens": 0},
            0,
        ),
        (_price(1, 0, cached=0.1, stored=1.25), _CACHED, 535_000),
        (_price(1, 0, cached=0.1), _CACHED, 460_000),
        (_price(1, 0, stored=1.25), _CACHED, 1_075_000),
        (
            _price(1, 0, cached=0, stored=2),
            {"input_tokens": 100, "cached_input_tokens": 90, "cache_write_tokens": 70, "output_tokens": 0},
            20_000,
        ),
        (
            _price(1000000000000, 1000000000000),
            {"input_tokens": 10**9, "output_tokens": 10**9},
            2**63 - 1,
        ),
        (_price(1e-06, 1e-06), {"input_tokens": 0, "output_tokens": 0}, 0),
        (_price(1e-06, 1e-06), {"input_tokens": 5}, None),
        (_price(1e-06, 1e-06), {"output_tokens": 5}, None),
        (_price(1e-06, 1e-06), {"total_tokens": 5}, None),
    ],
)
def test_a_cost_is_whole_billionths_half_rounded_up_and_unknown_where_tokens_are(
    price: Price, usage: dict[str, int], nanos: int | None
) -> None:
    assert cost_of(usage_pb2.Usage(**usage), price) == nanos


@given(TOKENS, TOKENS, TOKENS)
def test_a_cost_never_falls_when_tokens_are_added(input_tokens: int, output_tokens: int, more: int) -> None:
    price = _price(3e-07, 1.7e-06)
    less = cost_of(usage_pb2.Usage(input_tokens=input_tokens, output_tokens=output_tokens), price)
    dearer = cost_of(usage_pb2.Usage(input_tokens=input_tokens, output_tokens=output_tokens + more), price)
    assert less is not None
    assert dearer is not None
    assert less <= dearer
