"""Conversation scenarios of other tools: a model plays the user of the case that they become."""

from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.values import JsonValue
from tests.evals.trpc_files import import_values, metric

PERSONA: JsonValue = {
    "id": "HURRIED",
    "description": "You are in a hurry.",
    "behaviors": [
        {
            "name": "Brevity",
            "description": "You say little.",
            "behavior_instructions": ["Use few words.", "Skip greetings."],
            "violation_rubrics": ["It is long."],
        }
    ],
}


def adk(config: JsonValue = None, **scenario: JsonValue) -> tuple[eval_set_pb2.EvalCase, list[str]]:
    case: JsonValue = {
        "eval_id": "one",
        "conversation_scenario": {"starting_prompt": "Hi", "conversation_plan": "Book a flight.", **scenario},
        "final_session_state": {"booked": True},
    }
    simulator = {"user_simulator_config": config} if config is not None else {}
    eval_set, sentences = import_values(
        {"eval_set_id": "s", "eval_cases": [case]},
        {"criteria": {}, **simulator},
        path=Path("a.test.json"),
        user="human",
    )
    return eval_set.cases[0], sentences


def trpc(*metrics: JsonValue, **scenario: JsonValue) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    case: JsonValue = {"evalId": "one", "conversationScenario": {"conversationPlan": "Book a flight.", **scenario}}
    return import_values({"evalSetId": "s", "evalCases": [case]}, list(metrics), path=Path("a.json"), user="human")


def simulated(**members: object) -> eval_set_pb2.SimulatedUser:
    user = {"plan": "Book a flight.", "model": "human", **members}
    return json_format.ParseDict(user, eval_set_pb2.SimulatedUser())


def test_a_scenario_opens_with_its_prompt_and_a_model_goes_on_by_its_plan() -> None:
    case, sentences = adk(user_persona=PERSONA)
    booked = {"run": {"session_state": [{"path": "booked", "value_match": {"equals_json": "true"}}]}}
    assert list(case.turns) == [eval_set_pb2.EvalTurn(user="Hi")]
    assert case.user == simulated(
        persona="You are in a hurry.\nYou say little.\n- Use few words.\n- Skip greetings.",
        max_turns=20,
        expect=booked,
    )
    assert sentences == ["No metric compares the final state of sessions: it is kept with the threshold 0."]


def test_the_configuration_says_how_long_a_conversation_is() -> None:
    case, sentences = adk({"model": "m", "max_allowed_invocations": 7, "custom_instructions": "Be odd."})
    assert case.user.max_turns == 7
    assert sentences == [
        "The configured model 'human' plays the user instead of 'm'.",
        "No metric compares the final state of sessions: it is kept with the threshold 0.",
        "user_simulator_config.custom_instructions (1): the importer does not know it",
    ]


@pytest.mark.parametrize(("most", "turns"), [(-1, 100), (0, 100), (1000, 100), (2, 2)])
def test_a_conversation_of_any_length_has_a_hundred_turns_at_most(most: int, turns: int) -> None:
    assert trpc(maxAllowedInvocations=most)[0].cases[0].user.max_turns == turns


def test_a_conversation_of_one_turn_needs_nobody_to_play_the_user() -> None:
    case = trpc(maxAllowedInvocations=1, startingPrompt="Hi")[0].cases[0]
    assert (list(case.turns), case.HasField("user")) == ([eval_set_pb2.EvalTurn(user="Hi")], False)


def test_a_scenario_of_trpc_agent_go_needs_no_prompt_and_ends_where_its_signal_would_be_said() -> None:
    eval_set, sentences = trpc(driver="actual", stopSignal="</end>", maxAllowedInvocations=3)
    assert list(eval_set.cases[0].turns) == []
    assert eval_set.cases[0].user == simulated(
        max_turns=3, stop_when="Where the plan has you say '</end>', end the conversation instead."
    )
    assert sentences == []


def test_a_metric_that_compares_has_nothing_to_compare_a_scenario_with() -> None:
    eval_set, sentences = trpc(metric({"toolTrajectory": {}}, name="calls"), driver="expected")
    assert eval_set.defaults.metrics[0].custom.name == "trpc.calls"
    assert sentences == [
        "The metric 'calls' has no counterpart: a model plays the user, so that nothing is expected of the turns. Its "
        "cases are not scored until it is removed. (Case 'one'.)",
        "evalCases[0].conversationScenario.driver (1): the evaluated agent always answers",
    ]


def test_a_persona_that_is_a_name_is_left_out() -> None:
    case, sentences = adk(user_persona="NOVICE")
    assert case.user.persona == ""
    place = "eval_cases[0].conversation_scenario.user_persona"
    assert sentences[-1] == f"{place} (1): a persona that is a name is not known here"


@pytest.mark.parametrize(
    ("scenario", "problem"),
    [
        ({"conversation_plan": ""}, "conversation_plan: is required"),
        ({"conversation_plan": "x" * 16_385}, "conversation_plan: has more than 16,384 characters"),
        ({"user_persona": {"description": "x" * 8_193}}, "user_persona: has more than 8,192 characters"),
        (
            {"user_persona": {"behaviors": [{"behavior_instructions": [1]}]}},
            "user_persona.behaviors[0].behavior_instructions: must be a list of texts",
        ),
    ],
)
def test_a_scenario_that_cannot_be_played_is_refused_with_its_place(
    scenario: dict[str, JsonValue], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        adk(**scenario)
    assert raised.value.message.endswith(f"eval_cases[0].conversation_scenario.{problem}")
