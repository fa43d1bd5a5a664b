"""Sums of usages: what is unknown stays unknown, and costs add up in one currency only."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import usage_pb2
from bough_server.log.usage import ONE_TOOL_CALL, Sums, has_whole_cost
from bough_server.models.anthropic.message import usage_of
from tests.support.usages import summed

Usage = usage_pb2.Usage


def cost(nanos: int, currency: str = "USD", **rest: int) -> usage_pb2.Usage:
    usage = Usage(cost_nanos=nanos, currency_code=currency)
    for name, value in rest.items():
        setattr(usage, name, value)
    return usage


def test_a_number_that_was_not_reported_is_absent_and_a_zero_is_a_number() -> None:
    total = summed([Usage(input_tokens=3), Usage(input_tokens=0, output_tokens=0), Usage(model_calls=1)])
    assert total == Usage(input_tokens=3, output_tokens=0, model_calls=1)
    assert not total.HasField("cost_nanos")


def test_costs_of_one_currency_are_one_cost_with_that_currency() -> None:
    assert summed([cost(3), Usage(input_tokens=1), cost(0), cost(4)]) == cost(7, input_tokens=1)
    assert summed([cost(0, "EUR")]) == cost(0, "EUR")


def test_costs_of_several_currencies_have_no_sum_in_whatever_order_and_the_rest_has() -> None:
    parts = [cost(1, "USD", input_tokens=1), cost(2, "EUR", input_tokens=2), cost(4, "USD", input_tokens=4)]
    for ordered in itertools.permutations(parts):
        assert summed(ordered) == Usage(input_tokens=7)


@pytest.mark.parametrize("currency", ["", "usd", "several", "US", "USDX", "ÜSD"])
def test_a_cost_without_a_currency_is_unknown(currency: str) -> None:
    assert summed([cost(5, currency, input_tokens=1)]) == Usage(input_tokens=1)
    assert summed([cost(5, currency), cost(2)]) == cost(2)


def test_a_currency_without_a_cost_says_nothing() -> None:
    assert summed([Usage(currency_code="EUR", input_tokens=1), cost(2)]) == cost(2, input_tokens=1)


def test_what_anthropic_put_into_its_cache_is_part_of_the_input_and_is_added_up() -> None:
    said = {"input_tokens": 10, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 60, "output_tokens": 1}
    stored = Usage(input_tokens=100, cached_input_tokens=60, cache_write_tokens=30, output_tokens=1, total_tokens=101)
    assert usage_of(said) == stored
    fresh = usage_of({"input_tokens": 10, "output_tokens": 1})
    assert not fresh.HasField("cache_write_tokens")
    assert summed([stored, fresh, stored]).cache_write_tokens == 60


def test_an_attempt_is_one_model_call_whatever_it_says_of_calls_itself() -> None:
    claimed = cost(3, input_tokens=5, model_calls=7, tool_calls=7, model_calls_without_usage=7)
    assert Sums.of_attempt(claimed).usage() == cost(3, input_tokens=5, model_calls=1)
    assert Sums.of_attempt(Usage()).usage() == Usage(model_calls=1, model_calls_without_usage=1)


def test_beside_a_cost_the_calls_that_are_not_part_of_it_are_counted() -> None:
    priced, unpriced, lost = cost(3, input_tokens=1), Usage(input_tokens=1), Usage()
    total = Sums()
    for attempt in (unpriced, priced, lost):
        total.add(Sums.of_attempt(attempt))
    assert total.usage() == cost(
        3, input_tokens=2, model_calls=3, model_calls_without_cost=2, model_calls_without_usage=1
    )
    assert summed([Usage(model_calls=2), cost(3, model_calls=1)]) == cost(3, model_calls=3, model_calls_without_cost=2)


def test_without_any_cost_no_call_is_counted_as_without() -> None:
    assert summed([Usage(model_calls=2), Usage(model_calls=1)]) == Usage(model_calls=3)
    assert summed([cost(1, model_calls=1), cost(1, "EUR", model_calls=1)]) == Usage(model_calls=2)
    assert Sums.of(Usage(model_calls=2, model_calls_without_cost=1)).usage() == Usage(model_calls=2)


@pytest.mark.parametrize(
    ("usage", "is_whole"),
    [
        (Usage(), True),
        (cost(3, model_calls=1), True),
        (Usage(model_calls=1), False),
        (cost(3, model_calls=2, model_calls_without_cost=1), False),
        (cost(3, model_calls=2, model_calls_without_usage=1), False),  # of an earlier version
    ],
)
def test_a_cost_is_whole_if_that_of_every_call_is_known(usage: usage_pb2.Usage, is_whole: bool) -> None:
    assert has_whole_cost(usage) == is_whole


def test_a_tool_call_is_added_without_a_trace_in_its_constant() -> None:
    sums = Sums()
    sums.add(ONE_TOOL_CALL)
    sums.add(ONE_TOOL_CALL)
    assert (sums.usage(), ONE_TOOL_CALL.usage()) == (Usage(tool_calls=2), Usage(tool_calls=1))


def test_a_copy_changes_by_itself() -> None:
    sums = Sums.of(cost(1))
    copy = sums.copy()
    copy.add(Sums.of(cost(1, "EUR")))
    assert (sums.usage(), copy.usage()) == (cost(1), Usage())


USAGES = st.builds(
    lambda nanos, currency, tokens, calls: Usage(
        cost_nanos=nanos, currency_code=currency, input_tokens=tokens, model_calls=calls
    ),
    st.none() | st.integers(0, 9),
    st.sampled_from(["USD", "EUR", ""]),
    st.none() | st.integers(0, 9),
    st.integers(0, 3),
)


@given(st.lists(st.lists(USAGES, max_size=4), max_size=4))
def test_sums_of_groups_come_to_the_sum_of_all(groups: list[list[usage_pb2.Usage]]) -> None:
    total = Sums()
    for group in groups:
        part = Sums()
        for usage in group:
            part.add(Sums.of(usage))
        total.add(part)
    whole = summed(itertools.chain.from_iterable(groups))
    assert total.usage() == whole
    assert whole.HasField("cost_nanos") == bool(whole.currency_code)
