"""Placeholders of redaction in what is expected: what they match, and what not."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_set_pb2, input_pb2
from bough.v1.eval_set_pb2 import ExpectedAnswer, ValueMatcher
from bough.v1.message_pb2 import ToolCall
from bough_server.errors import RunError
from bough_server.evals.job.answers import answers_to
from bough_server.matching.placeholders import has_text, is_text, match_placeholders
from bough_server.matching.secrets import REDACTED, Redactor
from bough_server.matching.values import answer_mismatch, mismatch
from bough_server.runtime.tool_mocks import find_mock

CARD = r"\d{4}-\d{4}"
LEAVES = (
    st.none()
    | st.booleans()
    | st.sampled_from([1, 1234, 12345, 1.5, ",", ":", "12", "card 1234-5678"])
    | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "token"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def recorded(text: str, *, fields: list[str], patterns: list[str]) -> tuple[str, Redactor]:
    """A JSON text as a recorded case has it, and what redacts the same text when the case runs."""
    redactor = Redactor(fields=fields, patterns=patterns)
    redactor.collect(text)
    return redactor.redact(text, is_json=True), redactor


def answer_matches(expected: ExpectedAnswer, text: str, redactor: Redactor | None) -> bool:
    with match_placeholders(redactor):
        return answer_mismatch(expected, text) == ""


@given(value=VALUES, other=VALUES, fields=st.sampled_from([[], ["token"]]))
def test_a_value_matches_its_recorded_form_and_no_value_of_another_recorded_form(
    value: object, other: object, fields: list[str]
) -> None:
    text, others = json.dumps(value), json.dumps(other)
    expected, redactor = recorded(text, fields=fields, patterns=[CARD])
    with match_placeholders(redactor):
        assert mismatch(ValueMatcher(equals_json=expected), text) == ""
    redactor = Redactor(patterns=[CARD])
    with match_placeholders(redactor):
        is_same = json.loads(redactor.redact(others, is_json=True)) == json.loads(expected)
        found = mismatch(ValueMatcher(equals_json=expected), others)
        assert found != "" or is_same


@pytest.mark.parametrize(
    ("expected", "actual", "patterns_only", "with_fields"),
    [
        (f"Card {REDACTED}.", "Card 1234-5678.", True, True),
        (f"Card {REDACTED}.", "Card unknown.", False, True),
        (f"Card {REDACTED}.", "Card 1234-5678!", False, False),
        (f"Card {REDACTED}.", "Card .", False, False),
        (f"Card {REDACTED}.", f"Card {REDACTED}.", True, True),
        (REDACTED, "1234-5678", True, True),
        ("Card 1234-5678.", "Card 1234-5678.", True, True),
        ("Card 1234-5679.", "Card 1234-5678.", False, False),
    ],
)
def test_a_placeholder_matches_what_patterns_remove_and_with_fields_any_text(
    expected: str, actual: str, patterns_only: bool, with_fields: bool
) -> None:
    exact, part = ExpectedAnswer(exact=expected), ExpectedAnswer(contains=[expected.upper()], ignore_case=True)
    for fields, matches in (([], patterns_only), (["token"], with_fields)):
        redactor = Redactor(fields=fields, patterns=[CARD])
        assert answer_matches(exact, actual, redactor) == matches
        if REDACTED not in expected:
            assert answer_matches(part, f"Well. {actual}", redactor) == matches
        in_json = ValueMatcher(subset_json=json.dumps({"said": expected}))
        with match_placeholders(redactor):
            assert (mismatch(in_json, json.dumps({"said": actual, "more": 1})) == "") == matches


def test_without_redaction_a_placeholder_is_a_text_as_any_other() -> None:
    assert "expected" in answer_mismatch(ExpectedAnswer(exact=REDACTED), "1234-5678")
    assert "expected" in mismatch(ValueMatcher(equals_json=json.dumps(REDACTED)), '"1234-5678"')


def test_what_is_excluded_and_regexes_see_the_answer_itself() -> None:
    redactor = Redactor(patterns=[CARD])
    assert not answer_matches(ExpectedAnswer(exact=f"Card {REDACTED}", excludes=["1234"]), "Card 1234-5678", redactor)
    assert answer_matches(ExpectedAnswer(exact=f"Card {REDACTED}", regex="1234"), "Card 1234-5678", redactor)
    assert not answer_matches(ExpectedAnswer(regex=re.escape(REDACTED)), "Card 1234-5678", redactor)


@given(
    expected=st.lists(st.sampled_from(["a", "b", REDACTED]), max_size=6).map("".join),
    text=st.text("ab", max_size=8),
)
def test_a_placeholder_stands_for_one_character_or_more(expected: str, text: str) -> None:
    pattern = ".+".join(map(re.escape, expected.split(REDACTED)))
    with match_placeholders(None):
        assert is_text(expected, text) == (re.fullmatch(pattern, text, re.DOTALL) is not None)
        assert has_text(expected, text) == (re.search(pattern, text, re.DOTALL) is not None)


def test_mocks_and_answers_of_a_recorded_case_answer_whatever_was_redacted() -> None:
    mock = eval_set_pb2.ToolMock(name="pay", result_json='"ok"')
    mock.arguments_match.equals_json = json.dumps({"card": REDACTED, "note": f"for {REDACTED}", "sum": 3})
    mocks = eval_set_pb2.ToolMocks(tools=[mock], strict=True)
    call = ToolCall(name="pay", arguments_json='{"card": 12345678, "note": "for Anna", "sum": 3}')
    assert find_mock(mocks, call, agent="lead") == 0
    call.arguments_json = call.arguments_json.replace("3", "4")
    with pytest.raises(RunError, match="No mock answers the call"):
        find_mock(mocks, call, agent="lead")

    answer = eval_set_pb2.EvalAnswer(question=f"Is {REDACTED} right?", value_json="true")
    asked = input_pb2.InputRequest(input_id="i1", kind=input_pb2.INPUT_KIND_QUESTION, prompt="Is 1234-5678 right?")
    assert answers_to([answer], [asked]) == ([input_pb2.InputAnswer(input_id="i1", value_json="true")], None)
    asked.prompt = "Is it wrong?"
    assert answers_to([answer], [asked]) == ([], asked)
