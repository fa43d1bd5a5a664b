"""Answers as a person types them: what each kind of request takes, and what is asked again."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import input_pb2, message_pb2
from bough_server.cli.prompts import answer_of, answers_of, ask_all, find_request, outcome_of, value_of
from bough_server.errors import ConfigurationError
from bough_server.matching.schemas import schema_mistakes
from tests.clients.waiting_run_server import APPROVAL_ID, CARD_ID, QUESTION_ID, approval, card, question


def failure(message: str, *beside: message_pb2.Part) -> message_pb2.ToolOutcome:
    return message_pb2.ToolOutcome(parts=beside, failure=message_pb2.ToolFailure(message=message))


def text(said: str) -> message_pb2.ToolOutcome:
    return message_pb2.ToolOutcome(parts=[message_pb2.Part(text=said)])


def data(value: str) -> message_pb2.ToolOutcome:
    return message_pb2.ToolOutcome(parts=[message_pb2.Part(data_json=value)])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("true", input_pb2.ApprovalDecision(approved=True)),
        (" false ", input_pb2.ApprovalDecision()),
        ('{"approved": false, "note": "no"}', input_pb2.ApprovalDecision(note="no")),
        (
            '{"approved": true, "arguments": {"a": "ü"}}',
            input_pb2.ApprovalDecision(approved=True, arguments_json='{"a": "ü"}'),
        ),
    ],
)
def test_an_approval_is_true_false_or_an_object(typed: str, expected: input_pb2.ApprovalDecision) -> None:
    assert answer_of(approval(), typed) == input_pb2.InputAnswer(input_id=APPROVAL_ID, approval=expected)


@pytest.mark.parametrize(
    "typed",
    ["1", '"yes"', "{}", '{"approved": 1}', '{"approved": true, "arguments": []}', '{"approved": true, "why": ""}'],
)
def test_an_approval_of_another_shape_is_refused_with_what_it_takes(typed: str) -> None:
    with pytest.raises(ConfigurationError, match="the answer must be true, false, or"):
        answer_of(approval(), typed)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ('"4242"', text("4242")),
        ('{"last": 4242}', data('{"last": 4242}')),
        ("12345678901234567890123.10", data("12345678901234567890123.10")),
        ('{"error": "no reader"}', failure("no reader")),
        ('{"error": "torn", "result": "42"}', failure("torn", message_pb2.Part(text="42"))),
        ('{"error": "torn", "result": {"a": 1}}', failure("torn", message_pb2.Part(data_json='{"a": 1}'))),
        ('{"error": null, "result": 1}', data('{"error": null, "result": 1}')),
        ('{"error": "x", "code": 1}', data('{"error": "x", "code": 1}')),
    ],
)
def test_a_result_is_text_data_or_an_error(typed: str, expected: message_pb2.ToolOutcome) -> None:
    assert outcome_of(typed) == expected
    assert answer_of(card(), typed) == input_pb2.InputAnswer(input_id=CARD_ID, tool_outcome=expected)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("true", input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(approved=True))),
        ('{"result": "4242"}', input_pb2.InputAnswer(tool_outcome=text("4242"))),
        ('{"error": "lost"}', input_pb2.InputAnswer(tool_outcome=failure("lost"))),
        (
            '{"error": "torn", "result": "42"}',
            input_pb2.InputAnswer(tool_outcome=failure("torn", message_pb2.Part(text="42"))),
        ),
    ],
)
def test_a_lost_tool_is_run_again_refused_or_given_its_result(typed: str, expected: input_pb2.InputAnswer) -> None:
    expected.input_id = CARD_ID
    assert answer_of(card(input_pb2.INPUT_KIND_RECOVERY), typed) == expected


def test_a_question_takes_its_value_as_it_is_written() -> None:
    typed = ' {"b": 1.10, "a": 2} '
    assert answer_of(question(""), typed) == input_pb2.InputAnswer(
        input_id=QUESTION_ID, value_json='{"b": 1.10, "a": 2}'
    )


@pytest.mark.parametrize("typed", ["yes", "", "{", "NaN", "1e999", r'"\ud800"', '"\udcff"', "[" * 100_000])
def test_what_is_no_json_is_refused(typed: str) -> None:
    with pytest.raises(ConfigurationError, match="is not JSON"):
        answer_of(question(), typed)


def test_a_request_is_meant_by_either_end_of_its_id() -> None:
    requests = [approval(), question(), card()]
    for name in (APPROVAL_ID, APPROVAL_ID.upper(), "6f1c2d", "00aaaa"):
        assert find_request(name, requests) == approval()
    for name, words in (("6f1c2", "too short"), ("6f1c2e", "its requests"), ("", "too short")):
        with pytest.raises(ConfigurationError, match=words):
            find_request(name, requests)
    twin = approval()
    twin.input_id = APPROVAL_ID[:-1] + "b"
    with pytest.raises(ConfigurationError, match=f"2 requests match '6f1c2d', such as {APPROVAL_ID} and "):
        find_request("6f1c2d", [approval(), twin])


def test_each_request_is_answered_once() -> None:
    with pytest.raises(ConfigurationError, match="has two answers"):
        answers_of([f"{APPROVAL_ID}=true", "6f1c2d=true"], [approval()])
    with pytest.raises(ConfigurationError, match="write INPUT_ID=JSON"):
        answers_of([APPROVAL_ID], [approval()])


class Typist:
    """Types these lines, then no more."""

    def __init__(self, *typed: str) -> None:
        self.typed = list(typed)
        self.shown: list[str] = []

    def show(self, lines: Iterable[str]) -> None:
        self.shown += lines

    async def ask(self, prompt: str) -> str | None:
        return self.typed.pop(0) if self.typed else None


async def answers(requests: Iterable[input_pb2.InputRequest], *typed: str) -> list[input_pb2.InputAnswer]:
    return await ask_all(list(requests), Typist(*typed))


async def test_a_prompt_shows_who_asks_what_for_and_until_when() -> None:
    typist = Typist("y", "4")
    await ask_all([approval(), question('{"type": "integer"}')], typist)
    assert typist.shown == [
        '1/2 lead/refunds asks for approval of refund {"amount": 180}',
        "    Is that much to be paid?",
        "    until 2023-11-14 22:13 UTC; then refused: too late",
        "2/2 lead/interviewer asks: Why does it come back?",
        '    takes JSON that fits {"type": "integer"}',
    ]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("y",), input_pb2.ApprovalDecision(approved=True)),
        (("YES go on",), input_pb2.ApprovalDecision(approved=True, note="go on")),
        (("n too much",), input_pb2.ApprovalDecision(note="too much")),
        (("maybe", "y"), input_pb2.ApprovalDecision(approved=True)),
        (("e", "{", "[1]", '{"amount": 9}'), input_pb2.ApprovalDecision(approved=True, arguments_json='{"amount": 9}')),
        (("e", "", "n"), input_pb2.ApprovalDecision()),
    ],
)
async def test_an_approval_is_typed_as_y_or_n_or_edited(
    typed: tuple[str, ...], expected: input_pb2.ApprovalDecision
) -> None:
    assert await answers([approval()], *typed) == [input_pb2.InputAnswer(input_id=APPROVAL_ID, approval=expected)]


async def test_edited_arguments_must_fit_the_tool() -> None:
    request = approval()
    request.answer_schema_json = '{"type": "object", "required": ["amount"]}'
    typist = Typist("e", "{}", '{"amount": 1}')
    (answer,) = await ask_all([request], typist)
    assert answer.approval.arguments_json == '{"amount": 1}'
    assert any("amount" in line for line in typist.shown[3:])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("4242 on it", text("4242 on it")),
        ('{"a": 1}', data('{"a": 1}')),
        ("Error: torn", failure("torn")),
        ('{"error": "torn", "result": "42"}', failure("torn", message_pb2.Part(text="42"))),
    ],
)
async def test_a_result_is_typed_as_json_text_or_an_error(typed: str, expected: message_pb2.ToolOutcome) -> None:
    assert await answers([card()], typed) == [input_pb2.InputAnswer(input_id=CARD_ID, tool_outcome=expected)]
    lost = card(input_pb2.INPUT_KIND_RECOVERY)
    assert await answers([lost], "r", typed) == [input_pb2.InputAnswer(input_id=CARD_ID, tool_outcome=expected)]


async def test_a_value_that_does_not_fit_is_asked_again() -> None:
    typist = Typist("many", "2.5", "3")
    (answer,) = await ask_all([question('{"type": "integer"}')], typist)
    assert answer == input_pb2.InputAnswer(input_id=QUESTION_ID, value_json="3")
    assert len(typist.shown) == 4


async def test_a_skipped_question_stays_open_and_nothing_is_asked_after_the_end() -> None:
    assert await answers([approval(), question()], "", "why") == [
        input_pb2.InputAnswer(input_id=QUESTION_ID, value_json='"why"')
    ]
    assert await answers([question(), approval()], "why") == [
        input_pb2.InputAnswer(input_id=QUESTION_ID, value_json='"why"')
    ]


SCHEMAS = st.sampled_from(
    ["", '{"type": "string"}', '{"type": "integer"}', '{"enum": ["yes", 1]}', '{"type": ["string", "null"]}', "{}"]
)
TYPED = st.one_of(st.text(min_size=1), st.sampled_from(["1", '"1"', "null", "yes", '"yes"', "{}", "[1", "1e5", "NaN"]))


@given(TYPED, SCHEMAS)
def test_a_typed_value_without_mistakes_is_json_that_fits(typed: str, schema: str) -> None:
    value_json, mistakes = value_of(typed, question(schema))
    if not mistakes:
        value = json.loads(value_json)
        assert not schema or schema_mistakes(value, schema) == []
        assert value_json == typed or value == typed
