"""Answers that fit a schema: as the root's, as a sub-agent's, after repairs, and never after too many."""

import json
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, message_pb2
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import tool
from tests.support.log_readings import check_replay, having, results_of
from tests.support.teams import call, calls, llm, open_team, script

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "words": {"type": "integer", "minimum": 1}},
    "required": ["title", "words"],
    "additionalProperties": False,
}
GOOD = '{"words": 3, "title": "Oaks"}'


def formed(name: str, **facts: object) -> agent_pb2.AgentDefinition:
    """An agent whose answer has to fit the schema."""
    definition = llm(name, **facts)
    definition.output_schema_json = json.dumps(SCHEMA)
    return definition


def said(message: message_pb2.Message) -> str:
    return "".join(part.text or part.data_json for part in message.parts)


async def test_an_answer_that_fits_is_json_as_the_model_wrote_it(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(p=[f" {GOOD}\n"]), formed("p"), heard=heard) as harness:
        log = await harness.turn("p")
        messages = await harness.messages(log[0].session_id)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    answer = log[-1].run_completed.final_answer
    assert list(answer.parts) == [message_pb2.Part(data_json=GOOD)]
    assert (heard[0].output_schema_json, len(heard)) == (json.dumps(SCHEMA), 1)
    assert messages[-1].message.parts[0].data_json == tree.final_response.parts[0].data_json == GOOD


async def test_json_in_a_fence_is_json(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=[f"```json\n{GOOD}\n```"]), formed("p")) as harness:
        log = await harness.turn("p")
    assert log[-1].run_completed.final_answer.parts[0].data_json == GOOD


async def test_the_model_is_told_what_does_not_fit_and_answers_again_in_further_steps(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(p=["Oaks, three words.", '{"title": "Oaks", "words": 0}', GOOD])
    async with open_team(tmp_path, turns, formed("p"), heard=heard) as harness:
        log = await harness.turn("p")
        messages = await harness.messages(log[0].session_id)
        await check_replay(harness, log)
    asked = [[said(message) for message in request.messages] for request in heard]
    again = "Answer again, with one JSON object and nothing around it."
    assert asked[0] == ["hello"]
    assert asked[1][:2] == ["hello", "Oaks, three words."]
    assert asked[1][2].startswith("Your answer does not fit: it is not JSON (")
    assert asked[2][3:] == [
        '{"title": "Oaks", "words": 0}',
        f"Your answer does not fit: words: 0 is less than the minimum of 1. {again}",
    ]
    assert [event.step_index for event in having(log, "step_completed")] == [0, 1, 2]
    assert log[-1].run_completed.final_answer.parts[0].data_json == GOOD
    assert [said(stored.message) for stored in messages] == ["hello", GOOD]


@pytest.mark.parametrize(
    "bad",
    [
        "no",
        "[]",
        '{"title": 1, "words": 1}',
        '{"title": "a", "words": NaN}',
        '{"title": "\\ud800", "words": 1}',
        "{" * 5000,
    ],
)
async def test_after_two_repairs_the_agent_fails(tmp_path: Path, bad: str) -> None:
    async with open_team(tmp_path, script(p=[bad] * 4), formed("p")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_INVALID_OUTPUT
    assert error.message.startswith("The model of 'p' returned 3 answers that do not fit its output schema: ")
    assert len(having(log, "llm_completed")) == 3


async def test_an_empty_answer_is_asked_for_once_more_and_is_no_repair(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(p=["", "no", GOOD]), formed("p"), heard=heard) as harness:
        log = await harness.turn("p")
    assert said(heard[1].messages[-1]).startswith("Your last answer was empty. Answer now, with one JSON object")
    assert len(heard[2].messages) == 3
    assert log[-1].run_completed.final_answer.parts[0].data_json == GOOD


async def test_repairs_are_steps_and_end_with_them(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=["no"] * 3), formed("p", max_steps=2)) as harness:
        log = await harness.turn("p")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED


@tool
def count(text: str) -> int:
    """Counts words."""
    return len(text.split())


async def test_an_agent_with_a_schema_uses_its_tools_first(tmp_path: Path) -> None:
    turns = script(p=[calls(call("count", text="a b c")), "no", calls(call("count", text="a")), GOOD])
    async with open_team(tmp_path, turns, formed("p", tools=["count"]), tools=[count]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [said_of(result) for result in results_of(log)] == ["3", "1"]
    assert log[-1].run_completed.final_answer.parts[0].data_json == GOOD


def said_of(result: message_pb2.ToolResult) -> str:
    return "".join(part.text or part.data_json for part in result.parts)


async def test_the_json_of_a_sub_agent_is_the_result_of_its_call(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(p=[calls(call("call_c", message="x")), "Done."], c=["no", GOOD])
    async with open_team(tmp_path, turns, llm("p", links=["c"]), formed("c"), heard=heard) as harness:
        log = await harness.turn("p")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    (result,) = results_of(log)
    assert list(result.parts) == [message_pb2.Part(data_json=GOOD)]
    assert having(log, "sub_agent_completed")[0].sub_agent_completed.output.parts[0].data_json == GOOD
    assert said_of(heard[-1].messages[-1].parts[0].tool_result) == GOOD
    assert (heard[0].output_schema_json, heard[1].output_schema_json) == ("", json.dumps(SCHEMA))
    assert tree.tools[0].result_json == GOOD


async def test_a_sub_agent_that_never_fits_is_a_failed_result(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="x")), "Done."], c=["no"] * 3)
    async with open_team(tmp_path, turns, llm("p", links=["c"]), formed("c")) as harness:
        log = await harness.turn("p")
    (result,) = results_of(log)
    assert result.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert "do not fit its output schema" in result.error.message
    assert said(log[-1].run_completed.final_answer) == "Done."
