"""Eval sets and test files of ADK as sets of Bough's."""

import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.judges import (
    ANSWER_AND_TOOLS_TEMPLATE,
    MATCHES_REFERENCE,
    NO_MODEL,
    REFERENCE_TEMPLATE,
)
from bough_server.evals.importers.values import JsonValue
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import problems_of
from tests.evals.trpc_files import import_paths, import_values

FILES = Path(__file__).parents[1] / "golden" / "imports"
PATH = Path("basic.test.json")
CASE = "eval_cases[0]"


def set_of(members: dict[str, object]) -> eval_set_pb2.EvalSet:
    return json_format.ParseDict(members, eval_set_pb2.EvalSet())


def adk_set(*turns: JsonValue, **members: JsonValue) -> JsonValue:
    case: dict[str, JsonValue] = {"eval_id": "one", "conversation": list(turns), **members}
    return {"eval_set_id": "basic", "eval_cases": [case]}


def turn(intermediate: JsonValue = None, answer: JsonValue = None) -> JsonValue:
    return {
        "invocation_id": "",
        "user_content": {"parts": [{"text": "hello"}], "role": "user"},
        "final_response": answer,
        "intermediate_data": intermediate,
    }


def imported(source: JsonValue, criteria: JsonValue) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    """Import a set, and check that nothing in it but its agent is missing or wrong."""
    eval_set, sentences = import_values(source, {"criteria": criteria}, path=PATH)
    assert [problem for problem in problems_of(eval_set, known=KnownNames()) if problem[0] != "agent"] == []
    return eval_set, sentences


def calls_of(source: JsonValue) -> list[tuple[str, str]]:
    eval_set, _ = imported(source, {"tool_trajectory_avg_score": 1.0})
    return [(tool.name, tool.arguments_json) for tool in eval_set.cases[0].turns[0].expect.tools]


ELICITATION = "To book your flight to London, please provide the date of travel and the passenger's full name."
TRAJECTORY = {
    "name": "tool_trajectory_avg_score",
    "threshold": 1,
    "tool_trajectory": {"mode": "TRAJECTORY_MODE_EXACT"},
}


def test_the_sample_is_imported_with_the_default_criteria() -> None:
    eval_set, sentences = import_paths([FILES / "elicitation_flow.test.json"])
    asked = {"missing_entities": ["date", "passenger_name"], "elicitation_prompt": ELICITATION}
    booked = {"destination": "London", "date": "2026-05-15", "passenger_name": "Alice"}
    case_id = "tests/integration/fixture/elicitation_agent/elicitation_flow.test.json"
    assert eval_set == set_of(
        {
            "name": "elicitation-integration-test-set",
            "description": "Integration test for stateless elicitation feature.",
            "defaults": {
                "metrics": [
                    TRAJECTORY,
                    {"name": "response_match_score", "threshold": 0.8, "rouge_1": {}},
                ]
            },
            "cases": [
                {
                    "id": case_id,
                    "turns": [
                        {
                            "user": "Book a flight to London",
                            "expect": {
                                "tools": [
                                    {
                                        "name": "trigger_elicitation",
                                        "arguments_json": json.dumps(asked, separators=(",", ":")),
                                    }
                                ]
                            },
                        },
                        {
                            "user": "The traveler is Alice and the date is 2026-05-15",
                            "expect": {
                                "answer": {"exact": "Successfully booked flight to London on 2026-05-15 for Alice."},
                                "tools": [
                                    {"name": "book_flight", "arguments_json": json.dumps(booked, separators=(",", ":"))}
                                ],
                            },
                        },
                    ],
                }
            ],
        }
    )
    assert sentences == [
        "There is no configuration: the criteria are those that ADK takes then.",
        "The metric 'response_match_score' compares whole words, ADK their stems: scores may be lower here.",
    ]


def test_words_without_expected_answers_are_not_said_to_be_compared() -> None:
    _, sentences = imported(adk_set(turn()), {"response_match_score": 0.8})
    assert sentences == [
        "The metric 'response_match_score' has no counterpart: no answer is expected whose words it could compare. "
        "Its cases are not scored until it is removed. (Case 'one'.)"
    ]


def test_the_configuration_beside_a_set_is_read(tmp_path: Path) -> None:
    source = tmp_path / "flow.test.json"
    source.write_text(json.dumps(adk_set(turn())))
    config = tmp_path / "test_config.json"
    config.write_text('{"criteria": {"tool_trajectory_avg_score": 0.5}}')
    eval_set, sentences = import_paths([source])
    assert eval_set.defaults.metrics[0].threshold == 0.5
    assert sentences == [f"The metrics are those of {config}."]


@pytest.mark.parametrize(
    ("criterion", "threshold", "mode"),
    [
        (1, 1.0, "EXACT"),
        ({"threshold": 0.5}, 0.5, "EXACT"),
        ({"threshold": 1, "match_type": "EXACT"}, 1.0, "EXACT"),
        ({"threshold": 1, "match_type": "in order"}, 1.0, "IN_ORDER"),
        ({"threshold": 1, "matchType": "ANY_ORDER"}, 1.0, "SUPERSET"),
        ({"threshold": 1, "match_type": 0}, 1.0, "EXACT"),
        ({"threshold": 1, "match_type": 1}, 1.0, "IN_ORDER"),
        ({"threshold": 1, "match_type": 2}, 1.0, "SUPERSET"),
    ],
)
def test_the_match_type_says_the_mode(criterion: JsonValue, threshold: float, mode: str) -> None:
    eval_set, _ = imported(adk_set(turn()), {"tool_trajectory_avg_score": criterion})
    assert eval_set.defaults.metrics == [
        eval_set_pb2.EvalMetric(
            name="tool_trajectory_avg_score",
            threshold=threshold,
            tool_trajectory=eval_set_pb2.ToolTrajectoryMetric(
                mode=eval_set_pb2.TrajectoryMode.Value(f"TRAJECTORY_MODE_{mode}")
            ),
        )
    ]
    assert eval_set.cases[0].turns[0].HasField("expect")


def test_arguments_can_be_ignored() -> None:
    uses: JsonValue = {"tool_uses": [{"id": None, "name": "roll", "args": {"sides": 17}}]}
    eval_set, _ = imported(adk_set(turn(uses)), {"tool_trajectory_avg_score": {"threshold": 1, "ignore_args": True}})
    assert eval_set.cases[0].turns[0].expect.tools == [eval_set_pb2.ExpectedTool(name="roll")]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("safety_v1", "a service of its vendor judges it"),
        ("final_response_match_v2", NO_MODEL),
        ("hallucinations_v1", "no metric looks for hallucinations"),
        ("novel_v9", "no metric here judges the same"),
    ],
)
def test_a_criterion_without_a_counterpart_makes_its_cases_not_scored(name: str, why: str) -> None:
    criterion: JsonValue = {"threshold": 0.5, "judge_model_options": {"judge_model": "m", "num_samples": 5}}
    eval_set, sentences = imported(adk_set(turn()), {name: criterion})
    assert eval_set.defaults.metrics == [
        eval_set_pb2.EvalMetric(
            name=name,
            threshold=0.5,
            custom=eval_set_pb2.CustomMetric(
                name=f"adk.{name}", config_json=json.dumps({"criterion": criterion}, separators=(",", ":"))
            ),
        )
    ]
    assert sentences == [
        f"The metric {name!r} has no counterpart: {why}. Its cases are not scored until it is removed. (Case 'one'.)"
    ]


def test_a_custom_metric_has_no_counterpart_whatever_its_name() -> None:
    custom: JsonValue = {"tool_trajectory_avg_score": {"code_config": {"name": "my.module.judge"}}}
    config: JsonValue = {"criteria": {"tool_trajectory_avg_score": 1}, "customMetrics": custom}
    eval_set, _ = import_values(adk_set(turn()), config, path=PATH)
    assert json.loads(eval_set.defaults.metrics[0].custom.config_json) == {
        "criterion": 1,
        "custom_metric": {"code_config": {"name": "my.module.judge"}},
    }


def test_a_configuration_without_criteria_judges_nothing() -> None:
    eval_set, sentences = import_values(
        adk_set(turn()), {"criteria": {}, "user_simulator_config": {"model": "m"}}, path=PATH
    )
    assert not eval_set.defaults.metrics
    assert sentences == ["user_simulator_config (1): no model plays the user; name a configured one by --user"]


@pytest.mark.parametrize(
    ("value", "place"), [("high", "3: criteria.m"), (True, "3: criteria.m"), ({"x": 1}, "3: criteria.m.threshold")]
)
def test_a_criterion_without_a_threshold_is_refused(value: JsonValue, place: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^metrics\.json:{re.escape(place)}: must be a number$"):
        imported(adk_set(turn()), {"m": value})


def test_a_criterion_that_is_null_is_none() -> None:
    assert not imported(adk_set(turn()), {"m": None})[0].defaults.metrics


def test_an_unknown_match_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\.match_type: must be EXACT, IN_ORDER or ANY_ORDER"):
        imported(adk_set(turn()), {"tool_trajectory_avg_score": {"threshold": 1, "match_type": "NEARLY"}})


# Conversations.


def test_calls_are_those_of_intermediate_data() -> None:
    uses: JsonValue = {
        "tool_uses": [
            {"id": None, "args": {"a": 1}, "name": "add"},
            {"id": "x", "args": None, "name": "now"},
        ],
        "tool_responses": [],
        "intermediate_responses": [],
    }
    assert calls_of(adk_set(turn(uses))) == [("add", '{"a":1}'), ("now", "{}")]


def test_calls_are_those_of_invocation_events() -> None:
    events: JsonValue = {
        "invocation_events": [
            {"author": "lead", "content": {"parts": [{"text": "First"}, {"function_call": {"name": "add"}}]}},
            {"author": "lead", "content": {"parts": [{"function_response": {"name": "add", "response": {"r": 1}}}]}},
            {"author": "writer", "content": {"parts": [{"functionCall": {"name": "write", "args": {"b": 2}}}]}},
            {"author": "writer", "content": None},
        ]
    }
    assert calls_of(adk_set(turn(events))) == [("add", "{}"), ("write", '{"b":2}')]


def test_camel_case_is_read_as_snake_case() -> None:
    source: JsonValue = {
        "evalSetId": "basic",
        "evalCases": [
            {
                "evalId": "one",
                "conversation": [
                    {
                        "invocationId": "i",
                        "userContent": {"parts": [{"text": "hello"}], "role": "user"},
                        "finalResponse": {"parts": [{"text": "hi"}], "role": "model"},
                        "intermediateData": {"toolUses": [{"name": "add", "args": {"a": 1}}]},
                    }
                ],
                "sessionInput": {"appName": "a", "userId": "u", "state": {"n": 1}},
            }
        ],
    }
    snake: JsonValue = {
        "eval_set_id": "basic",
        "eval_cases": [
            {
                "eval_id": "one",
                "conversation": [
                    {
                        "invocation_id": "i",
                        "user_content": {"parts": [{"text": "hello"}], "role": "user"},
                        "final_response": {"parts": [{"text": "hi"}], "role": "model"},
                        "intermediate_data": {"tool_uses": [{"name": "add", "args": {"a": 1}}]},
                    }
                ],
                "session_input": {"app_name": "a", "user_id": "u", "state": {"n": 1}},
            }
        ],
    }
    criteria: JsonValue = {"tool_trajectory_avg_score": 1}
    expected = set_of(
        {
            "name": "basic",
            "defaults": {"metrics": [TRAJECTORY, {"name": "expected_answer", "threshold": 0, "final_response": {}}]},
            "cases": [
                {
                    "id": "one",
                    "session_state_json": '{"n":1}',
                    "turns": [
                        {
                            "user": "hello",
                            "expect": {
                                "answer": {"exact": "hi"},
                                "tools": [{"name": "add", "arguments_json": '{"a":1}'}],
                            },
                        }
                    ],
                }
            ],
        }
    )
    assert imported(source, criteria)[0] == expected
    assert imported(snake, criteria)[0] == expected


@pytest.mark.parametrize("answer", [None, {"parts": None, "role": "model"}, {"parts": [{"text": None}]}, {"parts": []}])
def test_an_answer_without_text_expects_nothing(answer: JsonValue) -> None:
    eval_set, _ = imported(adk_set(turn(None, answer)), {"tool_trajectory_avg_score": 1})
    assert not eval_set.cases[0].turns[0].expect.HasField("answer")


def test_thoughts_are_no_part_of_an_answer() -> None:
    answer: JsonValue = {"parts": [{"text": "Hm.", "thought": True}, {"text": "One"}, {"text": "Two"}]}
    eval_set, _ = imported(adk_set(turn(None, answer)), {})
    assert eval_set.cases[0].turns[0].expect.answer.exact == "One\nTwo"


def test_a_file_that_the_user_sends_is_an_input() -> None:
    said: JsonValue = {
        "parts": [
            {"text": "Who?"},
            {"inline_data": {"data": "AQL_", "mime_type": "image/png"}},
            {"file_data": {"file_uri": "gs://b/f", "mime_type": "text/plain"}},
        ]
    }
    eval_set, _ = imported(adk_set({"user_content": said}), {})
    parts = eval_set.cases[0].turns[0].input.parts
    assert [part.WhichOneof("content") for part in parts] == ["text", "blob", "blob"]
    assert (parts[1].blob.data, parts[2].blob.uri) == (b"\x01\x02\xff", "gs://b/f")


def test_what_has_no_place_is_said() -> None:
    uses: JsonValue = {
        "tool_uses": [{"id": "1", "name": "add"}],
        "tool_responses": [{"id": "1", "name": "add", "response": {"r": 2}}],
        "intermediate_responses": [["writer", [{"text": "Wait."}]]],
    }
    source = adk_set(
        turn(uses),
        rubrics=[{"rubric_id": "r"}],
        session_input={"app_name": "a", "user_id": "u", "state": {}},
    )
    _, sentences = imported(source, {"tool_trajectory_avg_score": 1})
    assert sentences == [
        f"{CASE}.conversation[0].intermediate_data.intermediate_responses (1): "
        "no metric compares what is said before the answer",
        f"{CASE}.rubrics (1): no metric of the set asks for it",
    ]


def test_what_a_session_ends_with_is_kept_and_always_passes_since_adk_does_not_compare_it() -> None:
    state: JsonValue = {"order": {"items": [1]}, "user:name": None, "_x": 1, "a..b": 2}
    eval_set, sentences = imported(adk_set(turn(), turn(), final_session_state=state), {})
    assert eval_set.defaults.metrics == [
        eval_set_pb2.EvalMetric(name="final_session_state", threshold=0, run_outcome=eval_set_pb2.RunOutcomeMetric())
    ]
    assert [list(one.expect.run.session_state) for one in eval_set.cases[0].turns] == [
        [],
        [
            eval_set_pb2.ExpectedStateValue(
                path="order", value_match=eval_set_pb2.ValueMatcher(equals_json='{"items":[1]}')
            ),
            eval_set_pb2.ExpectedStateValue(
                path="user:name", value_match=eval_set_pb2.ValueMatcher(equals_json="null")
            ),
        ],
    ]
    assert sentences == [
        "No metric compares the final state of sessions: it is kept with the threshold 0.",
        f"{CASE}.final_session_state._x (1): it is not a key of a session's state",
        f"{CASE}.final_session_state.a..b (1): it is not a key of a session's state",
    ]


def test_judges_ask_the_configured_model() -> None:
    options: JsonValue = {"judge_model": "m", "judge_model_config": {"temperature": 0.5, "top_k": 3}}
    rubric: JsonValue = {"rubric_id": "r", "rubric_content": {"text_property": "It is brief."}, "description": "d"}
    criteria: JsonValue = {
        "final_response_match_v2": {"threshold": 0.5, "judge_model_options": options},
        "rubric_based_final_response_quality_v1": {
            "threshold": 1,
            "judge_model_options": {"num_samples": 3},
            "rubrics": [rubric],
        },
    }
    eval_set, sentences = import_values(adk_set(turn()), {"criteria": criteria}, path=PATH, judge="strict")
    assert list(eval_set.defaults.metrics) == [
        json_format.ParseDict(members, eval_set_pb2.EvalMetric())
        for members in (
            {
                "name": "final_response_match_v2",
                "threshold": 0.5,
                "llm_judge": {
                    "model": "strict",
                    "rubrics": [{"id": MATCHES_REFERENCE[0], "text": MATCHES_REFERENCE[1]}],
                    "template": REFERENCE_TEMPLATE,
                    "samples": 5,
                    "settings": {"temperature": 0.5},
                },
            },
            {
                "name": "rubric_based_final_response_quality_v1",
                "threshold": 1,
                "llm_judge": {
                    "model": "strict",
                    "rubrics": [{"id": "r", "text": "It is brief."}],
                    "template": ANSWER_AND_TOOLS_TEMPLATE,
                    "samples": 3,
                },
            },
        )
    ]
    assert sentences == [
        "The metric 'final_response_match_v2' asks the configured model 'strict' instead of 'm'.",
        "The metric 'rubric_based_final_response_quality_v1' asks the configured model 'strict'.",
        "criteria.final_response_match_v2.judge_model_options.judge_model_config.top_k (1): "
        "the importer does not know it",
    ]


def test_a_set_of_scenarios_alone_is_refused() -> None:
    scenario: JsonValue = {"starting_prompt": "Hello", "conversation_plan": "Book a flight."}
    source: JsonValue = {"eval_set_id": "s", "eval_cases": [{"eval_id": "e", "conversation_scenario": scenario}]}
    with pytest.raises(ConfigurationError, match="no case that can be imported"):
        imported(source, {})


# The older form.

TURNS: JsonValue = [
    {"query": "What can you do?", "expected_tool_use": [], "reference": "I can roll dice.\n"},
    {
        "query": "Roll two",
        "expected_tool_use": [
            {"tool_name": "roll_die", "tool_input": {"sides": 17}},
            {"tool_name": "roll_die", "tool_input": {"sides": 17}, "mock_tool_output": 13},
        ],
        "expected_intermediate_agent_responses": [{"author": "a", "text": "t"}],
        "reference": "13 and 4.",
    },
]
ROLL = {"name": "roll_die", "arguments_json": '{"sides":17}'}
OLDER_CASE = {
    "turns": [
        {"user": "What can you do?", "expect": {"answer": {"exact": "I can roll dice.\n"}}},
        {"user": "Roll two", "expect": {"answer": {"exact": "13 and 4."}, "tools": [ROLL, ROLL]}},
    ],
    "mocks": {
        "tools": [{"name": "roll_die", "arguments_match": {"equals_json": '{"sides":17}'}, "result_json": "13"}],
        "strict": False,
    },
}
OLDER_METRICS = {"metrics": [TRAJECTORY, {"name": "expected_answer", "threshold": 0, "final_response": {}}]}


def test_a_list_of_turns_is_one_case() -> None:
    eval_set, sentences = imported(TURNS, {"tool_trajectory_avg_score": 1})
    assert eval_set == set_of({"name": "basic", "defaults": OLDER_METRICS, "cases": [{"id": "basic", **OLDER_CASE}]})
    assert sentences == [
        "mock_tool_output answers the calls in place of the tools. (Case 'basic'.)",
        "No metric compares the expected answers: they are kept with the threshold 0.",
        "[1].expected_intermediate_agent_responses (1): no metric compares what is said before the answer",
    ]


def test_a_list_of_cases_has_their_names_and_sessions() -> None:
    source: JsonValue = [
        {"name": "dice", "data": TURNS, "initial_session": {"state": {"n": 1}, "app_name": "a", "user_id": "u"}},
        {"name": "empty", "data": [{"query": "Hi"}], "initial_session": {}},
    ]
    eval_set, _ = imported(source, {"tool_trajectory_avg_score": 1})
    assert [(case.id, case.session_state_json) for case in eval_set.cases] == [("dice", '{"n":1}'), ("empty", "")]
    assert eval_set.cases[0].mocks == set_of({"cases": [OLDER_CASE]}).cases[0].mocks
    assert eval_set.cases[1].turns == [eval_set_pb2.EvalTurn(user="Hi", expect=eval_set_pb2.EvalExpectation())]
