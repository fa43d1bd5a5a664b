"""Mocks of tools in trpc-agent-go: what they answer, which calls fail, and which cases cannot be scored."""

import json

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.values import JsonValue
from tests.evals.trpc_files import imported, matcher, members_of, metric, trpc_case, trpc_set, turn


def mocked(*mocks: JsonValue) -> JsonValue:
    return {**members_of(turn()), "toolMock": {"actual": list(mocks)}}


def mocks_of(*turns: JsonValue) -> tuple[eval_set_pb2.EvalCase, list[str]]:
    eval_set, sentences = imported(trpc_set(trpc_case(*turns)), metric({"toolTrajectory": {}}))
    return eval_set.cases[0], sentences


def mocks_from(*tools: dict[str, object]) -> eval_set_pb2.ToolMocks:
    return json_format.ParseDict({"tools": list(tools), "strict": False}, eval_set_pb2.ToolMocks())


def refusal(name: str) -> dict[str, object]:
    message = f"The tool {name!r} is mocked, and no mock matches the call."
    return {"name": name, "outcome": {"failure": {"message": message}}}


def test_a_mock_answers_every_call_of_its_tool_and_other_tools_run() -> None:
    case, sentences = mocks_of(
        mocked({"name": "weather", "result": {"sunny": True}}, {"name": "now", "result": "12:00"})
    )
    assert case.mocks == mocks_from(
        {"name": "weather", "result_json": '{"sunny":true}'}, {"name": "now", "result_json": '"12:00"'}
    )
    assert sentences == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"expected": {"x": 1.5}}, matcher({"x": 1.5}, tolerance=0)),
        ({"expected": {"x": 1}, "numberTolerance": 0.5}, matcher({"x": 1}, tolerance=0.5)),
        ({"expected": {"x": 1, "at": 2}, "ignoreTree": {"at": True}}, matcher({"x": 1, "at": 2}, "at", tolerance=0)),
    ],
)
def test_a_call_that_no_mock_of_its_tool_matches_fails(arguments: JsonValue, expected: dict[str, object]) -> None:
    case, _ = mocks_of(mocked({"name": "weather", "arguments": arguments, "result": 1}))
    assert case.mocks == mocks_from(
        {"name": "weather", "arguments_match": expected, "result_json": "1"}, refusal("weather")
    )


def test_only_selected_arguments_are_compared() -> None:
    arguments: JsonValue = {"expected": {"x": "a", "y": 2}, "onlyTree": {"x": True}}
    case, _ = mocks_of(mocked({"name": "weather", "arguments": arguments, "result": 1}))
    assert json.loads(case.mocks.tools[0].arguments_match.schema_json) == {
        "type": "object",
        "required": ["x"],
        "properties": {"x": {"const": "a"}},
    }


def test_the_first_mock_that_matches_answers_and_the_last_may_take_any_call() -> None:
    first: JsonValue = {"name": "weather", "arguments": {"expected": {"x": 1}}, "result": 1}
    rest: JsonValue = {"name": "weather", "arguments": {"ignore": True}, "result": 2}
    case, _ = mocks_of(mocked(first, rest))
    assert case.mocks == mocks_from(
        {"name": "weather", "arguments_match": matcher({"x": 1}, tolerance=0), "result_json": "1"},
        {"name": "weather", "result_json": "2"},
    )


def test_a_mock_that_a_model_answers_makes_the_case_not_scored_and_its_tool_does_not_run() -> None:
    case, sentences = mocks_of(mocked({"name": "weather", "llmGenerator": {"prompt": "Make up some weather."}}))
    assert case.mocks == mocks_from(refusal("weather"))
    assert sentences == [
        "The metric 'toolMock' has no counterpart: a mock of the tool 'weather' has no counterpart: a model answers "
        "the calls. Its cases are not scored until it is removed. (Case 'one'.)",
        "evalCases[0].conversation[0].toolMock.actual[0].llmGenerator (1): no model answers calls; the mock fails them",
    ]


def test_turns_that_mock_a_tool_in_different_ways_make_the_case_not_scored() -> None:
    _, sentences = mocks_of(mocked({"name": "now", "result": 1}), mocked({"name": "now", "result": 2}))
    assert sentences == [
        "The metric 'toolMock' has no counterpart: its turns mock the tool 'now' in different ways, and mocks hold for "
        "a case. Its cases are not scored until it is removed. (Case 'one'.)"
    ]


def test_a_mock_of_one_turn_holds_for_the_whole_case() -> None:
    case, sentences = mocks_of(turn(), mocked({"name": "now", "result": 1}))
    assert case.mocks == mocks_from({"name": "now", "result_json": "1"})
    assert sentences == ["A mock of a turn answers calls in the other turns of its case too. (Case 'one'.)"]


@pytest.mark.parametrize(
    ("mock", "problem"),
    [
        ({"result": 1}, "name: is required"),
        ({"name": "n" * 257, "result": 1}, "name: has more than 256 characters"),
        ({"name": "now"}, "result: is required, or llmGenerator"),
        ({"name": "now", "result": 1, "arguments": {}}, "arguments.expected: is required unless ignore is true"),
    ],
)
def test_a_mock_that_fails_in_trpc_agent_go_is_refused_with_its_place(mock: JsonValue, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        mocks_of(mocked(mock))
    assert raised.value.message.startswith("basic.evalset.json:")
    assert raised.value.message.endswith(f"evalCases[0].conversation[0].toolMock.actual[0].{problem}")
