"""Durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough_server.documents.yaml import parse_duration


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("10m", 600 * 10**9),
        ("50ms", 50 * 10**6),
        ("1h30m", 5_400 * 10**9),
        ("1.5s", 1_500_000_000),
        ("0s", 0),
        (" 2s ", 2 * 10**9),
        ("-3s", -3 * 10**9),
        ("1d", 86_400 * 10**9),
        ("0.000000001s", 1),
    ],
)
def test_units_add_up(text: str, nanoseconds: int) -> None:
    assert parse_duration(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "10", "m", "10 m", "1h 30m", "1,5s", "s1", "10min", "--1s", "1e3s"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration such as 10m, 50ms or 1h30m"):
        parse_duration(text)


def test_more_than_a_message_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="at most ten thousand years"):
        parse_duration("999999999999999999d")


@given(st.integers(min_value=0, max_value=10**18))
def test_any_number_of_nanoseconds_reads_back(nanoseconds: int) -> None:
    seconds, rest = divmod(nanoseconds, 10**9)
    assert parse_duration(f"{seconds}s{rest}ns") == nanoseconds
