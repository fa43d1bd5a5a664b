"""Eval sets and results of trpc-agent-go as sets of Bough's: samples, cases and records."""

import json
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2, invocation_pb2
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.values import JsonValue
from tests.evals.trpc_files import (
    FILES,
    import_paths,
    import_values,
    imported,
    matcher,
    members_of,
    metric,
    set_of,
    tool,
    trpc_case,
    trpc_set,
    turn,
)

ANSWER_SHANGHAI = (
    "Weather in Shanghai: sunny, 26C. City alert: festival traffic downtown. Tickets available (25 left). "
    "Arrive early to pick up tickets and watch traffic."
)


def test_the_tool_trajectory_sample_is_imported_with_the_metrics_beside_it() -> None:
    eval_set, sentences = import_paths([FILES / "tooltrajectory-basic.evalset.json"])
    city: JsonValue = {"city": "Shanghai"}
    weather: JsonValue = {"city": "Shanghai", "condition": "sunny", "tempC": 26}
    news: JsonValue = {"city": "Shanghai", "headline": "Festival downtown, expect traffic."}
    ticket: JsonValue = {"city": "Shanghai", "seatsLeft": 25}
    assert eval_set == set_of(
        {
            "name": "tooltrajectory-basic",
            "defaults": {
                "metrics": [
                    {
                        "name": "tool_trajectory_avg_score",
                        "threshold": 1,
                        "tool_trajectory": {"mode": "TRAJECTORY_MODE_ANY_ORDER"},
                    },
                    {"name": "expected_answer", "threshold": 0, "final_response": {}},
                ]
            },
            "cases": [
                {
                    "id": "travel_alerts",
                    "turns": [
                        {
                            "user": "I'm traveling to Shanghai; what should I watch out for?",
                            "expect": {
                                "answer": {"exact": ANSWER_SHANGHAI},
                                "tools": [
                                    {
                                        "name": "get_weather",
                                        "arguments_match": matcher(city),
                                        "result_match": matcher(weather),
                                    },
                                    {
                                        "name": "get_news",
                                        "arguments_match": matcher(city),
                                        "result_match": matcher(news),
                                    },
                                    {"name": "get_time"},
                                    {
                                        "name": "get_ticket",
                                        "arguments_match": matcher(city, "time"),
                                        "result_match": matcher(ticket, "time"),
                                    },
                                ],
                            },
                        }
                    ],
                }
            ],
        }
    )
    names = "compares no names, so trpc-agent-go also accepts calls of other tools; here the name has to be equal."
    assert sentences == [
        f"The metrics are those of {FILES / 'tooltrajectory-basic.metrics.json'}.",
        f"The strategy of the tool 'get_time' {names}",
        f"The strategy of the tool 'get_ticket' {names}",
        "No metric compares the expected answers: they are kept with the threshold 0.",
    ]


def test_the_metrics_file_can_be_named() -> None:
    named = [FILES / "tooltrajectory-basic.metrics.json", FILES / "tooltrajectory-basic.evalset.json"]
    assert import_paths(named)[0] == import_paths(named[1:])[0]


def test_the_trace_sample_is_imported_as_a_record_that_is_scored() -> None:
    eval_set, _ = import_paths([FILES / "trace-basic.evalset.json"])
    arguments: JsonValue = {"a": 123, "b": 456, "operation": "add"}
    result: JsonValue = {"a": 123, "b": 456, "operation": "add", "result": 579}
    assert eval_set == set_of(
        {
            "name": "trace-basic",
            "defaults": {
                "metrics": [
                    {
                        "name": "tool_trajectory_avg_score",
                        "threshold": 1,
                        "tool_trajectory": {"mode": "TRAJECTORY_MODE_ANY_ORDER"},
                    },
                    {"name": "expected_answer", "threshold": 0, "final_response": {}},
                ]
            },
            "cases": [
                {
                    "id": "trace_calc_add",
                    "turns": [
                        {
                            "expect": {
                                "answer": {"exact": "calc result: 579"},
                                "tools": [
                                    {
                                        "name": "calculator",
                                        "arguments_match": matcher(arguments),
                                        "result_match": matcher(result),
                                    }
                                ],
                            },
                            "recorded": {
                                "invocation": {
                                    "invocation_id": "trace_calc_add-1",
                                    "user_content": {"role": "ROLE_USER", "parts": [{"text": "calc add 123 456"}]},
                                    "final_response": {
                                        "role": "ROLE_ASSISTANT",
                                        "parts": [{"text": "calc result: 579"}],
                                    },
                                    "tools": [
                                        {
                                            "call_id": "call_00_example",
                                            "name": "calculator",
                                            "arguments_json": json.dumps(arguments, separators=(",", ":")),
                                            "result_json": json.dumps(result, separators=(",", ":")),
                                            "state": "EXECUTION_STATE_SUCCEEDED",
                                            "sequence": 1,
                                        }
                                    ],
                                    "state": "EXECUTION_STATE_SUCCEEDED",
                                    "complete": True,
                                    "as_of_sequence": 1,
                                    "tools_total": 1,
                                }
                            },
                        }
                    ],
                }
            ],
        }
    )


# Cases.


def test_the_state_of_the_session_is_kept_and_the_rest_of_it_is_said() -> None:
    session: JsonValue = {"appName": "app", "userId": "u", "state": {"n": 1, "user:name": "Ann", "_x": 2}}
    eval_set, sentences = imported(trpc_set(trpc_case(turn(), sessionInput=session)))
    assert eval_set.cases[0].session_state_json == '{"n":1,"user:name":"Ann"}'
    assert sentences == [
        "evalCases[0].sessionInput.state._x (1): it is not a key of a session's state",
    ]


def test_what_has_no_place_in_a_case_is_said_once() -> None:
    said: JsonValue = [{"role": "system", "content": "Be brief."}]
    case: dict[str, JsonValue] = {
        **members_of(trpc_case({**members_of(turn()), "contextMessages": said, "intermediateResponses": said})),
        "contextMessages": said,
        "expectedRunnerEnabled": True,
        "rubrics": [{"id": "r"}],
        "creationTimestamp": 1763994917.76,
    }
    _, sentences = imported(trpc_set(case, None, {**case, "evalId": "two"}))
    turn_place = "evalCases[0].conversation[0]"
    assert sentences == [
        f"{turn_place}.contextMessages (2): the agent does not see these messages",
        f"{turn_place}.intermediateResponses (2): no metric compares what is said before the answer",
        "evalCases[0].contextMessages (2): the agent does not see these messages",
        "evalCases[0].expectedRunnerEnabled (2): only the expectations of the file are used",
        "evalCases[0].rubrics (2): no metric of the set asks for it",
    ]


def test_a_scenario_that_a_model_plays_is_left_out() -> None:
    scenario: JsonValue = {"evalId": "played", "conversationScenario": {"conversationPlan": "Book a flight."}}
    eval_set, sentences = imported(trpc_set(scenario, trpc_case(turn())))
    assert [case.id for case in eval_set.cases] == ["one"]
    assert sentences == [
        "A case without a conversation was left out. (Case 'played'.)",
        "evalCases[0].conversationScenario (1): no model plays the user; name a configured one by --user",
    ]
    with pytest.raises(
        ConfigurationError, match=r"^basic\.evalset\.json: The set has no case that can be imported\. A"
    ):
        imported(trpc_set(scenario))


def test_ids_are_unique_and_valid() -> None:
    cases = [{**members_of(trpc_case(turn())), "evalId": id} for id in ("a", "a", "", "b\n", "x" * 300)]
    eval_set, _ = imported(trpc_set(*cases))
    assert [case.id for case in eval_set.cases] == ["a", "a-2", "case-3", "b-", "x" * 256]


def test_many_cases_of_one_id_are_imported() -> None:
    cases = [trpc_case(turn(tools=[tool("add", {"a": number})]), rubrics=[{"id": "r"}]) for number in range(1_000)]
    eval_set, sentences = imported(trpc_set(*cases), metric({"toolTrajectory": {}}))
    assert len({case.id for case in eval_set.cases}) == 1_000
    assert sentences == [
        "A case without an id, or with an id that is taken or not valid, got a new id. "
        "(Cases 'one-2', 'one-3', 'one-4' and 996 more.)",
        "evalCases[0].rubrics (1000): no metric of the set asks for it",
    ]


def test_a_name_of_a_set_is_made_valid() -> None:
    eval_set, _ = import_values({"evalCases": [trpc_case(turn())]}, [], path=Path("7 days.evalset.json"))
    assert eval_set.name == "set-7-days"


def test_a_message_with_an_image_is_an_input() -> None:
    said: JsonValue = {
        "role": "user",
        "content": "Who is it?",
        "content_parts": [
            {"type": "image", "image": {"url": "https://example.org/a.png", "format": "png"}},
            {"type": "image", "image": {"data": "AQI=", "format": "png"}},
            {"type": "audio", "audio": {"data": "AQI="}},
        ],
    }
    eval_set, sentences = imported(trpc_set(trpc_case({"userContent": said})))
    assert eval_set.cases[0].turns == [
        json_format.ParseDict(
            {
                "input": {
                    "role": "ROLE_USER",
                    "parts": [
                        {"text": "Who is it?"},
                        {"blob": {"uri": "https://example.org/a.png", "media_type": "image/png"}},
                        {"blob": {"data": "AQI=", "media_type": "image/png"}},
                    ],
                }
            },
            eval_set_pb2.EvalTurn(),
        )
    ]
    audio = "evalCases[0].conversation[0].userContent.content_parts[2].audio"
    assert sentences == [f"{audio} (1): the importer does not know it"]


# Records.


def recorded(**members: JsonValue) -> tuple[eval_set_pb2.EvalCase, list[str]]:
    eval_set, sentences = imported(
        trpc_set({"evalId": "one", **members}),
        metric({"toolTrajectory": {}}, name="calls"),
        metric({"finalResponse": {"text": {}}}, name="a"),
    )
    case = eval_set.cases[0]
    case.metrics.extend(eval_set.defaults.metrics)
    return case, sentences


def test_an_older_trace_is_its_conversation_and_expects_nothing() -> None:
    case, sentences = recorded(evalMode="trace", conversation=[turn("x", [tool("add")])])
    assert [one.name for one in case.turns[0].recorded.invocation.tools] == ["add"]
    assert case.turns[0].expect == eval_set_pb2.EvalExpectation(answer=eval_set_pb2.ExpectedAnswer(exact=""))
    assert sentences[0].startswith("A trace has no actualConversation: ")


def test_an_actual_conversation_is_scored_in_a_case_that_is_no_trace() -> None:
    case, sentences = recorded(conversation=[turn("x")], actualConversation=[turn("y")])
    assert case.turns[0].recorded.invocation.final_response.parts[0].text == "y"
    assert case.turns[0].expect.answer.exact == "x"
    assert sentences[0].startswith("A case that is not a trace has actualConversation: ")


def test_an_answer_that_is_missing_on_both_sides_is_equal() -> None:
    case, _ = recorded(evalMode="trace", conversation=[turn()], actualConversation=[turn()])
    assert case.turns[0].expect.answer.exact == ""
    assert case.turns[0].recorded.invocation.HasField("final_response")
    case, _ = recorded(evalMode="trace", conversation=[turn("x")], actualConversation=[turn()])
    assert not case.turns[0].recorded.invocation.HasField("final_response")


@pytest.mark.parametrize("expected", [1, 3])
def test_a_trace_of_another_length_is_not_scored(expected: int) -> None:
    case, sentences = recorded(
        evalMode="trace", conversation=[turn("x")] * expected, actualConversation=[turn("x"), turn("x")]
    )
    assert [one.HasField("recorded") for one in case.turns] == [True, True]
    assert "trpc.actualConversation" in [one.custom.name for one in case.metrics]
    assert any(f"2 turns are recorded and {expected} are expected" in sentence for sentence in sentences)


def test_a_record_keeps_its_agents_and_what_was_said_between() -> None:
    agents: JsonValue = [
        {"invocationId": "i1", "name": "lead", "branch": "lead"},
        {"invocationId": "i2", "parentInvocationId": "i1", "name": "writer", "branch": "lead/writer"},
    ]
    actual: JsonValue = {**members_of(turn("x")), "agents": agents, "intermediateResponses": [{"content": "Wait."}]}
    record = recorded(evalMode="trace", actualConversation=[actual])[0].turns[0].recorded.invocation
    assert record.agent == "lead"
    assert record.intermediate_responses[0].parts[0].text == "Wait."
    assert list(record.agents) == [
        json_format.ParseDict(members, invocation_pb2.AgentInvocation())
        for members in (
            {
                "invocation_id": "i1",
                "name": "lead",
                "branch": "lead",
                "child_count": 1,
                "state": "EXECUTION_STATE_SUCCEEDED",
            },
            {
                "invocation_id": "i2",
                "parent_invocation_id": "i1",
                "name": "writer",
                "branch": "lead/writer",
                "depth": 1,
                "state": "EXECUTION_STATE_SUCCEEDED",
            },
        )
    ]


def test_a_result_is_a_set_of_what_was_recorded_and_expected() -> None:
    run: dict[str, JsonValue] = {
        "evalSetId": "basic",
        "evalId": "one",
        "finalEvalStatus": "failed",
        "overallEvalMetricResults": [
            {
                "metricName": "a",
                "evalStatus": "failed",
                "threshold": 1,
                "criterion": {"finalResponse": {"text": {}}},
                "details": {"reason": "no"},
            }
        ],
        "evalMetricResultPerInvocation": [
            {"actualInvocation": turn("y"), "expectedInvocation": turn("x"), "evalMetricResults": []}
        ],
    }
    crashed: JsonValue = {"evalSetId": "basic", "evalId": "two", "errorMessage": "boom"}
    source: JsonValue = {"evalSetId": "basic", "evalCaseResults": [{**run, "runId": 1}, {**run, "runId": 2}, crashed]}
    eval_set, sentences = import_values(source, path=Path("x.evalset_result.json"))
    assert [case.id for case in eval_set.cases] == ["one run 1", "one run 2"]
    assert eval_set.defaults.metrics == [
        eval_set_pb2.EvalMetric(name="a", threshold=1, final_response=eval_set_pb2.FinalResponseMetric())
    ]
    assert eval_set.cases[0].turns[0].expect.answer.exact == "x"
    assert eval_set.cases[0].turns[0].recorded.invocation.final_response.parts[0].text == "y"
    assert sentences == [
        "The scores of the result were left out: the recorded conversations can be scored again.",
        "A case without a conversation was left out. (Case 'two'.)",
        "evalCaseResults[2].errorMessage (1): the record counts as a run that succeeded",
    ]


def test_an_older_result_with_parts_and_numbers_for_statuses_is_read() -> None:
    said: JsonValue = {
        "userContent": {"parts": [{"text": "calc add 2 3"}], "role": "user"},
        "finalResponse": {"parts": [{"text": "5"}], "role": "assistant"},
        "intermediateData": {
            "toolUses": [{"id": "c", "args": {"a": 2}, "name": "calculator"}],
            "toolResponses": [{"id": "c", "name": "calculator", "response": {"result": 5}}],
        },
    }
    source: JsonValue = {
        "evalSetId": "math",
        "evalCaseResults": [
            {
                "evalId": "add",
                "finalEvalStatus": 2,
                "overallEvalMetricResults": [
                    {"metricName": "calls", "evalStatus": 2, "criterion": {"toolTrajectory": {}}},
                ],
                "evalMetricResultPerInvocation": [{"actualInvocation": said, "expectedInvocation": said}],
            }
        ],
        "creationTimestamp": 1763994917.7690995,
    }
    eval_set, _ = import_values(source, path=Path("x.evalset_result.json"))
    record = eval_set.cases[0].turns[0].recorded.invocation
    assert [(one.name, one.arguments_json, one.result_json) for one in record.tools] == [
        ("calculator", '{"a":2}', '{"result":5}')
    ]
    assert eval_set.cases[0].turns[0].expect.tools[0].result_match.equals_json == '{"result":5}'
