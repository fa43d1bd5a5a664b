"""How an LLM agent comes to its answer: the loop, its bounds, empty answers and the final_answer tool."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import tool
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import names
from tests.support.teams import call, calls, llm, open_team, script


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


ROUNDS = script(p=[*(calls(call("look", what=f"leaf {n}")) for n in range(5)), "Done."])


async def test_an_empty_answer_is_asked_for_once_more(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = 'agents: {p: [{text: ""}, Here it is.]}'
    async with open_team(tmp_path, turns, llm("p"), heard=heard) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "Here it is."
    assert [len(request.messages) for request in heard] == [1, 2]
    assert "empty" in text_of(heard[1].messages[-1])


async def test_two_empty_answers_fail_the_agent(tmp_path: Path) -> None:
    async with open_team(tmp_path, 'agents: {p: [{text: " "}, {text: ""}, never]}', llm("p")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_INVALID_OUTPUT
    assert log[-1].run_failed.tree_usage.model_calls == 2
    assert len(having(log, "step_completed")) + len(having(log, "step_failed")) == 2


async def test_six_steps_are_enough_for_five_rounds_of_tools_and_an_answer(tmp_path: Path) -> None:
    async with open_team(tmp_path, ROUNDS, llm("p", tools=["look"], max_steps=6), tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert [event.step_index for event in having(log, "step_completed")] == [0, 1, 2, 3, 4, 5]


async def test_five_steps_are_not_and_what_was_done_is_kept(tmp_path: Path) -> None:
    async with open_team(tmp_path, ROUNDS, llm("p", tools=["look"], max_steps=5), tools=[look]) as harness:
        log = await harness.turn("p")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    end = log[-1].run_failed
    assert (end.error.reason, end.end_reason) == (error_pb2.ERROR_REASON_LIMIT_EXCEEDED, execution_pb2.END_REASON_LIMIT)
    assert end.step_id == having(log, "step_completed")[-1].step_id
    assert [text_of(result) for result in results_of(log)] == [f"leaf {n} is red" for n in range(5)]
    assert (tree.state, len(tree.tools)) == (execution_pb2.EXECUTION_STATE_FAILED, 5)


async def test_twenty_steps_are_the_bound_where_the_definition_says_nothing(tmp_path: Path) -> None:
    turns = script(p=[calls(call("look", what="it"))] * 21)
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=[look]) as harness:
        log = await harness.turn("p")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert log[-1].run_failed.tree_usage.model_calls == 20


async def test_text_beside_calls_and_tool_results_stay_in_the_models_history(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(p=[calls(call("look", what="leaf"), text="I look."), "It is red."])
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=[look], heard=heard) as harness:
        log = await harness.turn("p", "What color?")
        await check_replay(harness, log)
    asked, said, answered = heard[1].messages
    assert (asked.role, text_of(asked)) == (message_pb2.ROLE_USER, "What color?")
    assert (said.role, text_of(said), said.parts[1].tool_call.name) == (message_pb2.ROLE_ASSISTANT, "I look.", "look")
    assert (answered.role, text_of(answered.parts[0].tool_result)) == (message_pb2.ROLE_TOOL, "leaf is red")
    assert answered.parts[0].tool_result.call.call_id == said.parts[1].tool_call.call_id


async def test_reasoning_streams_and_is_no_part_of_the_answer(tmp_path: Path) -> None:
    turns = "agents: {p: [{reasoning: Hm hm., text: Yes.}]}"
    async with open_team(tmp_path, turns, llm("p")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert [event.llm_reasoning_delta.text for event in having(log, "llm_reasoning_delta")] == ["Hm ", "hm."]
    assert [part.WhichOneof("content") for part in log[-1].run_completed.final_answer.parts] == ["text"]
    response = having(log, "llm_completed")[0].llm_completed.response
    assert response.message.parts[0].reasoning.text == "Hm hm."


async def test_final_answer_is_an_ordinary_result_in_the_last_step(tmp_path: Path) -> None:
    turns = script(p=[calls(call("final_answer", answer="Red."))])
    async with open_team(tmp_path, turns, llm("p", final_answer_tool=True)) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert names(log)[-4:] == ["p: tool.started", "p: tool.completed", "p: step.completed", "p: run.completed"]
    last = log[-2].step_completed.step
    assert [(result.call.name, text_of(result)) for result in last.tool_results] == [("final_answer", "Red.")]
    assert (answer_of(log), log[-1].run_completed.step_id) == ("Red.", last.step_id)


async def test_final_answer_with_bad_arguments_is_a_failed_result_and_the_model_tries_again(tmp_path: Path) -> None:
    bad = ["{}", '{"answer": ""}', '{"answer": 7}', '{"answer"']
    turns = [calls({"name": "final_answer", "arguments_json": text}) for text in bad]
    async with open_team(tmp_path, script(p=[*turns, "Red."]), llm("p", final_answer_tool=True)) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "Red."
    assert {result.error.reason for result in results_of(log)} == {error_pb2.ERROR_REASON_BAD_ARGUMENTS}
    assert having(log, "tool_started") == []


async def test_calls_beside_final_answer_are_run_and_the_first_final_answer_counts(tmp_path: Path) -> None:
    made = (call("look", what="leaf"), call("final_answer", answer="One."), call("final_answer", answer="Two."))
    turns = script(p=[calls(*made)])
    async with open_team(tmp_path, turns, llm("p", tools=["look"], final_answer_tool=True), tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    step = having(log, "step_completed")[0].step_completed.step
    assert [text_of(result) for result in step.tool_results] == ["leaf is red", "One.", "Two."]
    assert answer_of(log) == "One."


@pytest.mark.parametrize("action", [call("exit", final_answer="Bye."), call("transfer_to_agent", agent_name="a")])
async def test_an_action_behind_a_final_answer_is_not_carried_out(tmp_path: Path, action: dict[str, object]) -> None:
    to_a = agent_pb2.AgentLink(agent="a", link_mode=agent_pb2.LINK_MODE_TRANSFER)
    lead = llm("p", links=[to_a], tools=["exit"], final_answer_tool=True)
    turns = script(p=[calls(call("final_answer", answer="One."), action)])
    async with open_team(tmp_path, turns, lead, llm("a")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    (refused,) = [result for result in results_of(log) if result.HasField("error")]
    assert refused.call.name == action["name"]
    assert refused.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert refused.error.message == "An earlier call of final_answer ends the agent. This call was not carried out."
    assert answer_of(log) == "One."


async def test_an_agent_without_the_final_answer_tool_cannot_call_it(tmp_path: Path) -> None:
    turns = script(p=[calls(call("final_answer", answer="x")), "Red."])
    async with open_team(tmp_path, turns, llm("p")) as harness:
        log = await harness.turn("p")
    assert results_of(log)[0].error.reason == error_pb2.ERROR_REASON_UNKNOWN_TOOL
    assert answer_of(log) == "Red."


@pytest.mark.parametrize("error", ["UNAVAILABLE", "BAD_RESPONSE"])
async def test_a_step_that_fails_keeps_what_there_is_and_the_run_names_it(tmp_path: Path, error: str) -> None:
    turns = script(p=[calls(call("look", what="leaf")), {"text": "a b c", "error": {"reason": error}}])
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    failed = having(log, "step_failed")[0]
    assert (failed.run_id, failed.step_index) == (log[0].run_id, 1)
    assert failed.step_failed.error.reason == log[-1].run_failed.error.reason
    assert not failed.step_failed.step.HasField("llm_response")
    assert log[-1].run_failed.step_id == failed.step_id


async def test_a_model_that_ends_its_stream_without_an_answer_is_tried_again_and_then_fails(tmp_path: Path) -> None:
    async with open_team(tmp_path, "agents: {p: [{text: half an, cut: true}]}", llm("p")) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE
    assert [event.attempt for event in having(log, "llm_retrying")] == [2, 3]


async def test_every_step_holds_its_own_response_and_results(tmp_path: Path) -> None:
    async with open_team(tmp_path, ROUNDS, llm("p", tools=["look"]), tools=[look]) as harness:
        log = await harness.turn("p")
        tree = await harness.tree(log, include_steps=True)
    steps = [event.step_completed.step for event in having(log, "step_completed")]
    responses = [event.llm_completed.response for event in having(log, "llm_completed")]
    assert [step.step_index for step in steps] == list(range(6))
    assert [step.llm_response.message for step in steps] == [response.message for response in responses]
    assert [len(step.tool_results) for step in steps] == [1, 1, 1, 1, 1, 0]
    assert list(tree.steps) == steps
    assert all(response.raw_json for response in responses)
    assert not any(step.llm_response.raw_json for step in steps)
