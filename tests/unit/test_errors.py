"""Errors of runs: whatever their message holds, an event can carry them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2
from bough_server.errors import MAX_DETAILS_BYTES, MAX_MESSAGE_BYTES, RunError

INTERNAL = error_pb2.ERROR_REASON_INTERNAL


def test_an_error_that_is_short_is_carried_as_it_is() -> None:
    made = RunError("Größe", reason=INTERNAL, retryable=True, details_json='{"a":"ä"}')
    assert made.to_agent_error(agent="a", invocation_id="i") == error_pb2.AgentError(
        reason=INTERNAL, message="Größe", agent="a", invocation_id="i", retryable=True, details_json='{"a":"ä"}'
    )


def test_a_message_over_8_kib_keeps_its_head_and_its_tail() -> None:
    carried = RunError("head" + "ä" * 10_000 + "tail", reason=INTERNAL).to_agent_error().message
    assert MAX_MESSAGE_BYTES - 8 <= len(carried.encode()) <= MAX_MESSAGE_BYTES
    assert (carried[:5], carried[-5:]) == ("headä", "ätail")


def test_details_over_64_kib_are_left_out() -> None:
    fits, too_long = '"' + "x" * (MAX_DETAILS_BYTES - 2) + '"', '"' + "ä" * (MAX_DETAILS_BYTES // 2) + '"'
    assert RunError("a", reason=INTERNAL, details_json=fits).to_agent_error().details_json == fits
    assert RunError("a", reason=INTERNAL, details_json=too_long).to_agent_error().details_json == ""


@given(text=st.text(st.characters(exclude_categories=()), max_size=50), times=st.integers(0, 1_000))
def test_any_text_becomes_an_error_that_an_event_can_hold(text: str, times: int) -> None:
    carried = RunError(text * times, reason=INTERNAL).to_agent_error()
    assert len(carried.message.encode()) <= MAX_MESSAGE_BYTES
    assert RunError(carried.message, reason=INTERNAL).message == carried.message


def test_what_an_event_carries_is_the_error_that_was_raised() -> None:
    carried = RunError("Größe", reason=INTERNAL, retryable=True, details_json='{"a":1}').to_agent_error(agent="a")
    again = RunError.of(carried)
    assert again.to_agent_error(agent="a") == carried


def test_an_author_names_a_reason_by_text_or_by_value_or_leaves_it_out() -> None:
    value = error_pb2.ERROR_REASON_BAD_ARGUMENTS
    errors = [RunError("No.", reason=reason) for reason in ("BAD_ARGUMENTS", "ERROR_REASON_BAD_ARGUMENTS", value)]
    assert [(error.reason, error.reason_name) for error in errors] == [(value, "BAD_ARGUMENTS")] * 3
    assert (RunError("No.").reason, RunError("No.").reason_name) == (error_pb2.ERROR_REASON_TOOL_FAILED, "TOOL_FAILED")


def test_every_reason_is_known_by_its_name() -> None:
    names = [name.removeprefix("ERROR_REASON_") for name, value in error_pb2.ErrorReason.items() if value]
    assert [RunError("No.", reason=name).reason_name for name in names] == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BAD_ARGUMENT", "There is no error reason 'BAD_ARGUMENT'. Did you mean BAD_ARGUMENTS"),
        ("tool_failed", "Did you mean TOOL_FAILED"),
        ("UNSPECIFIED", "There is no error reason 'UNSPECIFIED'."),
        ("?", "The names are NOT_LINKED, UNKNOWN_AGENT, "),
    ],
)
def test_an_unknown_reason_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RunError("No.", reason=name)


def test_a_reason_of_a_later_version_is_named_by_its_number() -> None:
    later = RunError.of(error_pb2.AgentError(message="No.", reason=999))  # type: ignore[arg-type]
    assert (later.reason, later.reason_name) == (999, "999")
