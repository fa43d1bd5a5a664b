"""Eval sets, metrics and results of trpc-agent-go as sets of Bough's."""

import json
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2, invocation_pb2
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.files import import_files, import_values
from bough_server.evals.importers.values import JsonValue

FILES = Path(__file__).parents[1] / "golden" / "imports"
EXACT: JsonValue = {"matchStrategy": "exact"}


def set_of(members: dict[str, object]) -> eval_set_pb2.EvalSet:
    return json_format.ParseDict(members, eval_set_pb2.EvalSet())


def trpc_set(*cases: JsonValue) -> JsonValue:
    return {"evalSetId": "basic", "evalCases": list(cases)}


def trpc_case(*turns: JsonValue, **members: JsonValue) -> JsonValue:
    return {"evalId": "one", "conversation": list(turns), **members}


def turn(answer: str | None = None, tools: JsonValue = None, user: str = "hello") -> JsonValue:
    made: dict[str, JsonValue] = {"userContent": {"role": "user", "content": user}}
    if answer is not None:
        made["finalResponse"] = {"role": "assistant", "content": answer}
    return {**made, "tools": tools}


def tool(name: str, arguments: JsonValue = None, result: JsonValue = None) -> JsonValue:
    return {"id": "1", "name": name, "arguments": arguments, "result": result}


def metric(criterion: JsonValue, name: str = "m", **members: JsonValue) -> JsonValue:
    return {"metricName": name, "criterion": criterion, **members}


def imported(source: JsonValue, *metrics: JsonValue) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    return import_values(source, list(metrics), path=Path("basic.evalset.json"))


def only_metric(source: JsonValue, *metrics: JsonValue) -> eval_set_pb2.Metric:
    eval_set, _ = imported(source, *metrics)
    return eval_set.defaults.metrics[0]


def expected_tools(source: JsonValue, *metrics: JsonValue) -> list[eval_set_pb2.ExpectedTool]:
    eval_set, _ = imported(source, *metrics)
    return list(eval_set.cases[0].turns[0].expect.tools)


def expected_answer(criterion: JsonValue, answer: str | None) -> eval_set_pb2.ExpectedAnswer:
    eval_set, _ = imported(trpc_set(trpc_case(turn(answer))), metric({"finalResponse": criterion}, threshold=1))
    assert eval_set.defaults.metrics[0].HasField("final_response")
    return eval_set.cases[0].turns[0].expect.answer


def matcher(value: JsonValue, *ignore: str, tolerance: float = 1e-6) -> dict[str, object]:
    return {
        "equals_json": json.dumps(value, separators=(",", ":")),
        "number_tolerance": tolerance,
        "ignore": list(ignore),
    }


def mapped(member: str, criterion: JsonValue, call: JsonValue) -> eval_set_pb2.ExpectedTool:
    """Return an expected call whose arguments or result are compared by a criterion."""
    strategy: JsonValue = {"name": EXACT, member: criterion}
    found = expected_tools(
        trpc_set(trpc_case(turn(tools=[call]))), metric({"toolTrajectory": {"defaultStrategy": strategy}})
    )
    return found[0]


ANSWER_SHANGHAI = (
    "Weather in Shanghai: sunny, 26C. City alert: festival traffic downtown. Tickets available (25 left). "
    "Arrive early to pick up tickets and watch traffic."
)


def test_the_tool_trajectory_sample_is_imported_with_the_metrics_beside_it() -> None:
    eval_set, sentences = import_files([FILES / "tooltrajectory-basic.evalset.json"])
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
    names = "compares no names, so that trpc-agent-go takes calls of other tools for it; here the name has to be equal."
    assert sentences == [
        f"The metrics are those of {FILES / 'tooltrajectory-basic.metrics.json'}.",
        "appName, userId of the session have no place: each run of a case has its session.",
        f"The strategy of the tool 'get_time' {names}",
        f"The strategy of the tool 'get_ticket' {names}",
        "No metric compares the expected answers: they are kept with the threshold 0.",
    ]


def test_the_metrics_file_can_be_named() -> None:
    named = [FILES / "tooltrajectory-basic.metrics.json", FILES / "tooltrajectory-basic.evalset.json"]
    assert import_files(named)[0] == import_files(named[1:])[0]


def test_the_trace_sample_is_imported_as_a_record_that_is_judged() -> None:
    eval_set, _ = import_files([FILES / "trace-basic.evalset.json"])
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
                                "invocation_id": "trace_calc_add-1",
                                "user_content": {"role": "ROLE_USER", "parts": [{"text": "calc add 123 456"}]},
                                "final_response": {"role": "ROLE_ASSISTANT", "parts": [{"text": "calc result: 579"}]},
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
                            },
                        }
                    ],
                }
            ],
        }
    )


# Tool trajectories.


@pytest.mark.parametrize(
    ("members", "mode"),
    [
        ({"orderSensitive": True}, eval_set_pb2.TRAJECTORY_MODE_EXACT),
        ({"orderSensitive": True, "subsetMatching": True}, eval_set_pb2.TRAJECTORY_MODE_IN_ORDER),
        ({}, eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER),
        ({"orderSensitive": False, "subsetMatching": False}, eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER),
        ({"subsetMatching": True}, eval_set_pb2.TRAJECTORY_MODE_SUPERSET),
    ],
)
def test_order_and_subset_say_the_mode(members: JsonValue, mode: eval_set_pb2.TrajectoryMode.ValueType) -> None:
    found = only_metric(trpc_set(trpc_case(turn())), metric({"toolTrajectory": members}, threshold=0.5))
    assert found == eval_set_pb2.Metric(
        name="m", threshold=0.5, tool_trajectory=eval_set_pb2.ToolTrajectoryMetric(mode=mode)
    )


def test_a_threshold_that_is_left_out_is_zero() -> None:
    assert only_metric(trpc_set(trpc_case(turn())), metric({"toolTrajectory": {}})) == eval_set_pb2.Metric(
        name="m",
        threshold=0,
        tool_trajectory=eval_set_pb2.ToolTrajectoryMetric(mode=eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER),
    )


def test_a_turn_without_calls_expects_that_there_are_none() -> None:
    eval_set, _ = imported(trpc_set(trpc_case(turn())), metric({"toolTrajectory": {}}))
    assert eval_set.cases[0].turns[0].HasField("expect")


def test_a_metric_of_that_name_without_a_criterion_compares_exactly() -> None:
    found = expected_tools(
        trpc_set(trpc_case(turn(tools=[tool("add", {"a": 1}, 2)]))), {"metricName": "tool_trajectory_avg_score"}
    )
    assert [json_format.MessageToDict(one, preserving_proto_field_name=True) for one in found] == [
        {
            "name": "add",
            "arguments_match": {"equals_json": '{"a":1}', "number_tolerance": 1e-6},
            "result_match": {"equals_json": "2", "number_tolerance": 1e-6},
        }
    ]


def test_the_strategy_of_a_tool_is_by_its_name_else_the_default() -> None:
    criterion: JsonValue = {
        "defaultStrategy": {"name": EXACT, "arguments": EXACT},
        "toolStrategy": {"b": {"name": EXACT, "result": EXACT}, "c": {}},
    }
    calls: JsonValue = [tool(name, {"x": 1}, 2) for name in "abc"]
    found = expected_tools(trpc_set(trpc_case(turn(tools=calls))), metric({"toolTrajectory": criterion}))
    assert [(one.name, one.arguments_match.equals_json, one.result_match.equals_json) for one in found] == [
        ("a", '{"x":1}', ""),
        ("b", "", "2"),
        ("c", "", ""),
    ]


def test_names_of_tools_in_snake_case_are_not_names_of_members() -> None:
    criterion: JsonValue = {"defaultStrategy": {"name": EXACT}, "toolStrategy": {"getTime": {"arguments": EXACT}}}
    found = expected_tools(
        trpc_set(trpc_case(turn(tools=[tool("get_time", {"x": 1})]))), metric({"toolTrajectory": criterion})
    )
    assert found == [eval_set_pb2.ExpectedTool(name="get_time")]


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        ({}, matcher({"x": [1.5]})),
        ({"matchStrategy": "exact", "numberTolerance": 0.25}, matcher({"x": [1.5]}, tolerance=0.25)),
        ({"numberTolerance": 0}, matcher({"x": [1.5]}, tolerance=0)),
        ({"ignore": True}, None),
        ({"matchStrategy": "skip", "valid": True}, None),
        (
            {"ignoreTree": {"a": True, "b": {"c": True, "d": {"e": True}, "f": False}, "g": False}},
            matcher({"x": [1.5]}, "a", "b.c", "b.d.e"),
        ),
    ],
)
def test_arguments_are_compared_as_the_criterion_says(criterion: JsonValue, expected: dict[str, object] | None) -> None:
    found = mapped("arguments", criterion, tool("add", {"x": [1.5]}))
    wanted = {"name": "add"} if expected is None else {"name": "add", "arguments_match": expected}
    assert found == json_format.ParseDict(wanted, eval_set_pb2.ExpectedTool())


def test_only_tree_becomes_a_schema_of_what_it_selects() -> None:
    call = tool("add", {"a": {"b": 1.5, "c": "x"}, "d": [True, None], "e": 2})
    found = mapped("arguments", {"onlyTree": {"a": {"b": True}, "d": True, "e": False}, "numberTolerance": 0.5}, call)
    assert json.loads(found.arguments_match.schema_json) == {
        "type": "object",
        "required": ["a", "d"],
        "properties": {
            "a": {
                "type": "object",
                "required": ["b"],
                "properties": {"b": {"type": "number", "minimum": 1.0, "maximum": 2.0}},
            },
            "d": {"type": "array", "prefixItems": [{"const": True}, {"const": None}], "minItems": 2, "maxItems": 2},
        },
    }


def test_arguments_that_are_missing_are_none_and_a_missing_result_is_null() -> None:
    found = mapped("arguments", EXACT, tool("add"))
    assert found.arguments_match.equals_json == "{}"
    assert mapped("result", EXACT, tool("add")).result_match.equals_json == "null"


def test_arguments_and_results_can_be_any_json() -> None:
    assert mapped("arguments", EXACT, tool("add", "plain")).arguments_match.equals_json == '"plain"'
    assert mapped("result", EXACT, tool("add", {}, [1, "é"])).result_match.equals_json == '[1,"é"]'


def test_a_name_that_is_ignored_is_any_name() -> None:
    criterion: JsonValue = {"defaultStrategy": {"name": {"ignore": True}, "arguments": EXACT}}
    found = expected_tools(
        trpc_set(trpc_case(turn(tools=[tool("add", {"a": 1})]))), metric({"toolTrajectory": criterion})
    )
    assert [one.name for one in found] == ["*"]


@pytest.mark.parametrize(
    ("criterion", "why"),
    [
        ({"defaultStrategy": {"name": {"matchStrategy": "regex"}}}, "it compares names of tools by 'regex'"),
        ({"defaultStrategy": {"name": {"matchStrategy": "contains"}}}, "it compares names of tools by 'contains'"),
        ({"toolStrategy": {"x": {"name": {"caseInsensitive": True}}}}, "it compares names of tools without case"),
        ({"defaultStrategy": {"arguments": {"compareName": "mine"}}}, "it has 'compareName'"),
        ({"defaultStrategy": {"arguments": {"textCriterion": EXACT}}}, "it has 'textCriterion'"),
        ({"orderInsensitive": True}, "it has 'orderInsensitive'"),
        ({"compareName": "mine"}, "it has 'compareName'"),
        ({"defaultStrategy": {"result": {"matchStrategy": "fuzzy"}}}, "it compares JSON by 'fuzzy'"),
        ({"defaultStrategy": {"result": {"ignoreTree": {"a.b": True}}}}, "its ignoreTree has the name 'a.b'"),
        (
            {"defaultStrategy": {"result": {"ignoreTree": {"a": True}, "onlyTree": {"b": True}}}},
            "it has both onlyTree and ignoreTree, which fails in trpc-agent-go",
        ),
    ],
)
def test_a_trajectory_that_is_compared_otherwise_makes_its_cases_not_judged(criterion: JsonValue, why: str) -> None:
    source = metric({"toolTrajectory": criterion}, name="calls", threshold=0.5)
    eval_set, sentences = imported(trpc_set(trpc_case(turn())), source)
    assert [json_format.MessageToDict(one) for one in eval_set.defaults.metrics] == [
        {
            "name": "calls",
            "threshold": 0.5,
            "custom": {"name": "trpc.calls", "configJson": json.dumps(source, separators=(",", ":"))},
        }
    ]
    assert sentences == [
        f"The metric 'calls' has no counterpart: {why}. Its cases are not judged until it is removed. (Case 'one'.)"
    ]


def test_calls_that_no_metric_compares_are_kept_and_always_pass() -> None:
    eval_set, sentences = imported(trpc_set(trpc_case(turn(tools=[tool("add")]))))
    assert [(one.name, one.threshold, one.HasField("threshold")) for one in eval_set.defaults.metrics] == [
        ("expected_tools", 0, True)
    ]
    assert [one.name for one in eval_set.cases[0].turns[0].expect.tools] == ["add"]
    assert sentences == ["No metric compares the expected tool calls: they are kept with the threshold 0."]


def test_two_metrics_that_expect_the_same_calls_share_them() -> None:
    one, other = (metric({"toolTrajectory": {"subsetMatching": subset}}, name=f"m{subset}") for subset in (False, True))
    eval_set, _ = imported(trpc_set(trpc_case(turn(tools=[tool("add")]), turn())), one, other)
    assert [(each.name, list(each.tool_trajectory.tools)) for each in eval_set.defaults.metrics] == [
        ("mFalse", []),
        ("mTrue", []),
    ]


def test_a_second_way_to_compare_the_calls_of_one_turn_is_the_metrics() -> None:
    names = metric({"toolTrajectory": {"defaultStrategy": {"name": EXACT}}}, name="names")
    eval_set, _ = imported(trpc_set(trpc_case(turn(tools=[tool("add")]))), metric({"toolTrajectory": {}}), names)
    assert eval_set.defaults.metrics[1].tool_trajectory.tools == [eval_set_pb2.ExpectedTool(name="add")]


def test_a_second_way_to_compare_the_calls_of_several_turns_has_no_counterpart() -> None:
    names = metric({"toolTrajectory": {"defaultStrategy": {"name": EXACT}}}, name="names")
    case = trpc_case(turn(tools=[tool("add")]), turn())
    eval_set, _ = imported(trpc_set(case), metric({"toolTrajectory": {}}), names)
    assert [one.WhichOneof("kind") for one in eval_set.defaults.metrics] == ["tool_trajectory", "custom"]


# Answers.


@pytest.mark.parametrize(
    ("criterion", "answer", "expected"),
    [
        ({"text": {}}, "Yes", {"exact": "Yes"}),
        ({"text": {"matchStrategy": "exact", "caseInsensitive": True}}, "Yes", {"exact": "Yes", "ignore_case": True}),
        ({"text": {"matchStrategy": "contains"}}, "Yes", {"contains": ["Yes"]}),
        ({"text": {"matchStrategy": "contains"}}, "", {}),
        ({"text": {"matchStrategy": "regex"}}, "Ye+s", {"regex": "Ye+s"}),
        ({"text": {"ignore": True}}, "Yes", {}),
        ({"text": {"matchStrategy": "skip", "length": {"min": 40}}}, None, {"regex": r"\A(?s:.{40,})\Z"}),
        ({"text": {"matchStrategy": "skip", "length": {"max": 6}}}, None, {"regex": r"\A(?s:.{0,6})\Z"}),
        ({"text": {"length": {"min": 1, "max": 6}}}, "Yes", {"exact": "Yes", "regex": r"\A(?s:.{1,6})\Z"}),
        (
            {"text": {"matchStrategy": "regex", "length": {"max": 6}}},
            "Ye+s",
            {"regex": r"\A(?=(?s:.{0,6})\Z)(?s:.*?)(?:Ye+s)"},
        ),
        ({"json": {"ignoreTree": {"id": True}}}, '{"a":1}', {"json": matcher({"a": 1}, "id")}),
        ({"json": {"matchStrategy": "skip"}}, "no JSON", {"json": {}}),
        ({"text": {"matchStrategy": "contains"}, "json": EXACT}, "7", {"contains": ["7"], "json": matcher(7)}),
        ({"text": {}}, None, {"exact": ""}),
        ({"json": {}}, None, {"exact": ""}),
    ],
)
def test_answers_are_compared_as_the_criterion_says(
    criterion: JsonValue, answer: str | None, expected: dict[str, object]
) -> None:
    assert expected_answer(criterion, answer) == json_format.ParseDict(expected, eval_set_pb2.ExpectedAnswer())


@pytest.mark.parametrize(
    ("criterion", "answer", "why"),
    [
        ({"finalResponse": {"rouge": {"rougeType": "rouge1"}}}, "x", "it has 'rouge'"),
        ({"finalResponse": {"xml": {}, "text": {}}}, "x", "it has 'xml'"),
        ({"finalResponse": {}}, "x", "it says neither text nor json"),
        ({"finalResponse": {"text": {"matchStrategy": "near"}}}, "x", "it compares texts by 'near'"),
        ({"finalResponse": {"text": {"length": {}}}}, "x", "its length has no valid bounds"),
        (
            {"finalResponse": {"json": {}}},
            "x",
            "it compares answers as JSON, and the expected answer is none",
        ),
        (
            {"finalResponse": {"text": {"matchStrategy": "regex"}}},
            "a(",
            "'a(' is not a regular expression of Python: missing ), unterminated subpattern at position 1",
        ),
        (
            {"llmJudge": {"judgeModel": {"modelName": "${JUDGE}"}}},
            "x",
            "it asks a judge by its provider, address and key; llm_judge asks a configured model",
        ),
        ({}, "x", "its criterion is neither toolTrajectory nor finalResponse"),
        ({"novel": {}}, "x", "its criterion has 'novel'"),
    ],
)
def test_an_answer_that_is_compared_otherwise_makes_its_case_not_judged(
    criterion: JsonValue, answer: str, why: str
) -> None:
    eval_set, sentences = imported(trpc_set(trpc_case(turn(answer))), metric(criterion, name="a"))
    assert eval_set.defaults.metrics[0].custom.name == "trpc.a"
    assert sentences[0] == (
        f"The metric 'a' has no counterpart: {why}. Its cases are not judged until it is removed. (Case 'one'.)"
    )


def test_a_metric_is_of_its_evaluator_whatever_its_name() -> None:
    bounds: tuple[tuple[str, JsonValue], ...] = (("long", {"min": 40}), ("short", {"max": 6}))
    lengths = [
        metric(
            {"finalResponse": {"text": {"matchStrategy": "skip", "length": length}}},
            name=name,
            evaluatorName="final_response_avg_score",
            threshold=1,
            extension={"weight": 0.8},
        )
        for name, length in bounds
    ]
    eval_set, sentences = imported(trpc_set(trpc_case(turn())), *lengths)
    assert eval_set == set_of(
        {
            "name": "basic",
            "defaults": {
                "metrics": [
                    {"name": "long", "threshold": 1, "final_response": {}},
                    {
                        "name": "short",
                        "threshold": 1,
                        "final_response": {"answer": {"regex": r"\A(?s:.{0,6})\Z"}},
                    },
                ]
            },
            "cases": [
                {
                    "id": "one",
                    "turns": [{"user": "hello", "expect": {"answer": {"regex": r"\A(?s:.{40,})\Z"}}}],
                }
            ],
        }
    )
    assert sentences == [
        "The metric 'long' has 'extension', which has no place.",
        "The metric 'short' has 'extension', which has no place.",
    ]


def test_a_metric_that_fits_some_cases_only_is_theirs() -> None:
    good = {**_members(trpc_case(turn("7"))), "evalId": "good"}
    bad = {**_members(trpc_case(turn("seven"))), "evalId": "bad"}
    shared = metric({"toolTrajectory": {}}, name="calls")
    eval_set, _ = imported(trpc_set(good, bad), metric({"finalResponse": {"json": {}}}, name="a"), shared)
    assert [one.name for one in eval_set.defaults.metrics] == ["calls"]
    assert [[one.WhichOneof("kind") for one in case.metrics] for case in eval_set.cases] == [
        ["final_response"],
        ["custom", "final_response"],
    ]


def _members(value: JsonValue) -> dict[str, JsonValue]:
    assert isinstance(value, dict)
    return value


# Cases.


def test_the_state_of_the_session_is_kept_and_the_rest_of_it_is_said() -> None:
    session: JsonValue = {"appName": "app", "userId": "u", "state": {"n": 1, "user:name": "Ann", "_x": 2}}
    eval_set, sentences = imported(trpc_set(trpc_case(turn(), sessionInput=session)))
    assert eval_set.cases[0].session_state_json == '{"n":1,"user:name":"Ann"}'
    assert sentences == [
        "appName, userId of the session have no place: each run of a case has its session.",
        "The key '_x' of the session's state was left out: it is not a key here. (Case 'one'.)",
    ]


def test_what_has_no_place_in_a_case_is_said_once() -> None:
    said: JsonValue = [{"role": "system", "content": "Be brief."}]
    case: dict[str, JsonValue] = {
        **_members(trpc_case({**_members(turn()), "contextMessages": said, "intermediateResponses": said})),
        "contextMessages": said,
        "expectedRunnerEnabled": True,
        "rubrics": [{"id": "r"}],
        "creationTimestamp": 1763994917.76,
    }
    _, sentences = imported(trpc_set(case, None, {**case, "evalId": "two"}))
    about = "(Cases 'one', 'two'.)"
    assert sentences == [
        f"contextMessages have no place: the agent does not see them. {about}",
        f"expectedRunnerEnabled has no place: what is expected is what the file says. {about}",
        f"Rubrics of cases have no place: no metric asks them. {about}",
        f"Intermediate responses that are expected have no place: no metric compares them. {about}",
    ]


def test_a_scenario_that_a_model_plays_is_left_out() -> None:
    scenario: JsonValue = {"evalId": "played", "conversationScenario": {"conversationPlan": "Book a flight."}}
    eval_set, sentences = imported(trpc_set(scenario, trpc_case(turn())))
    assert [case.id for case in eval_set.cases] == ["one"]
    assert sentences == [
        "conversationScenario has no place: no model plays the user. (Case 'played'.)",
        "A case without a conversation was left out. (Case 'played'.)",
    ]
    with pytest.raises(ConfigurationError, match=r"no case that can be imported\. conversationScenario has no place"):
        imported(trpc_set(scenario))


def test_ids_are_unique_and_valid() -> None:
    cases = [{**_members(trpc_case(turn())), "evalId": id} for id in ("a", "a", "", "b\n", "x" * 300)]
    eval_set, _ = imported(trpc_set(*cases))
    assert [case.id for case in eval_set.cases] == ["a", "a-2", "case-3", "b-", "x" * 256]


def test_many_cases_of_one_id_are_imported() -> None:
    cases = [trpc_case(turn(tools=[tool("add", {"a": number})]), rubrics=[{}]) for number in range(5_000)]
    eval_set, sentences = imported(trpc_set(*cases), metric({"toolTrajectory": {}}))
    assert len({case.id for case in eval_set.cases}) == 5_000
    assert sentences == [
        "Rubrics of cases have no place: no metric asks them. (Case 'one'.)",
        "A case without an id, or with one that is taken or not valid, has another one here. "
        "(Cases 'one-2', 'one-3', 'one-4' and 4996 more.)",
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
    assert sentences == ["Parts of messages with audio have no place. (Case 'one'.)"]


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
    assert [one.name for one in case.turns[0].recorded.tools] == ["add"]
    assert case.turns[0].expect == eval_set_pb2.Expectation(answer=eval_set_pb2.ExpectedAnswer(exact=""))
    assert sentences[0].startswith("A trace has no actualConversation: ")


def test_an_actual_conversation_is_judged_in_a_case_that_is_no_trace() -> None:
    case, sentences = recorded(conversation=[turn("x")], actualConversation=[turn("y")])
    assert case.turns[0].recorded.final_response.parts[0].text == "y"
    assert case.turns[0].expect.answer.exact == "x"
    assert sentences[0].startswith("A case has actualConversation and is no trace: ")


def test_an_answer_that_is_missing_on_both_sides_is_equal() -> None:
    case, _ = recorded(evalMode="trace", conversation=[turn()], actualConversation=[turn()])
    assert case.turns[0].expect.answer.exact == ""
    assert case.turns[0].recorded.HasField("final_response")
    case, _ = recorded(evalMode="trace", conversation=[turn("x")], actualConversation=[turn()])
    assert not case.turns[0].recorded.HasField("final_response")


@pytest.mark.parametrize("expected", [1, 3])
def test_a_trace_of_another_length_is_not_judged(expected: int) -> None:
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
    actual: JsonValue = {**_members(turn("x")), "agents": agents, "intermediateResponses": [{"content": "Wait."}]}
    record = recorded(evalMode="trace", actualConversation=[actual])[0].turns[0].recorded
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
        eval_set_pb2.Metric(name="a", threshold=1, final_response=eval_set_pb2.FinalResponseMetric())
    ]
    assert eval_set.cases[0].turns[0].expect.answer.exact == "x"
    assert eval_set.cases[0].turns[0].recorded.final_response.parts[0].text == "y"
    assert sentences == [
        "The scores of the result were left out: the recorded conversations can be judged again.",
        "A case without a conversation was left out. (Case 'two'.)",
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
    record = eval_set.cases[0].turns[0].recorded
    assert [(one.name, one.arguments_json, one.result_json) for one in record.tools] == [
        ("calculator", '{"a":2}', '{"result":5}')
    ]
    assert eval_set.cases[0].turns[0].expect.tools[0].result_match.equals_json == '{"result":5}'
