"""Tool trajectories of trpc-agent-go: how a criterion compares calls, in the terms of eval sets."""

import json

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.evals.importers.values import JsonValue
from tests.evals.trpc_files import (
    EXACT,
    expected_tools,
    imported,
    mapped,
    matcher,
    metric,
    only_metric,
    tool,
    trpc_case,
    trpc_set,
    turn,
)


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
    assert found == eval_set_pb2.EvalMetric(
        name="m", threshold=0.5, tool_trajectory=eval_set_pb2.ToolTrajectoryMetric(mode=mode)
    )


def test_a_threshold_that_is_left_out_is_zero() -> None:
    assert only_metric(trpc_set(trpc_case(turn())), metric({"toolTrajectory": {}})) == eval_set_pb2.EvalMetric(
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


def test_names_of_tools_in_snake_case_are_not_names_ofmembers_of() -> None:
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
    ("name", "criterion", "pattern"),
    [
        ("get_.*", {"matchStrategy": "regex"}, "get_.*"),
        ("get_.*", {"matchStrategy": "regex", "caseInsensitive": True}, "(?i)get_.*"),
        ("a.b", {"matchStrategy": "contains"}, r"a\.b"),
        ("a.b", {"matchStrategy": "exact", "caseInsensitive": True}, r"(?i)\Aa\.b\z"),
        ("a.b", {"caseInsensitive": True}, r"(?i)\Aa\.b\z"),
    ],
)
def test_a_name_that_is_no_exact_one_becomes_a_pattern(name: str, criterion: JsonValue, pattern: str) -> None:
    found = mapped("name", criterion, tool(name))
    assert found == eval_set_pb2.ExpectedTool(name_regex=pattern)


def test_a_pattern_of_a_name_that_is_none_makes_the_case_not_scored() -> None:
    source = metric({"toolTrajectory": {"defaultStrategy": {"name": {"matchStrategy": "regex"}}}}, name="calls")
    eval_set, sentences = imported(trpc_set(trpc_case(turn(tools=[tool("a(")]))), source)
    assert eval_set.defaults.metrics[0].custom.name == "trpc.calls"
    assert "the pattern 'a(' is not a regular expression of RE2" in sentences[0]


@pytest.mark.parametrize(
    ("criterion", "why"),
    [
        ({"defaultStrategy": {"name": {"matchStrategy": "near"}}}, "it compares names of tools by 'near'"),
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
def test_a_trajectory_that_is_compared_otherwise_makes_its_cases_not_scored(criterion: JsonValue, why: str) -> None:
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
        f"The metric 'calls' has no counterpart: {why}. Its cases are not scored until it is removed. (Case 'one'.)"
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
