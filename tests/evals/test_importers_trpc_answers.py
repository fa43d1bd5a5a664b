"""Final responses of trpc-agent-go: how a criterion compares answers, and which evaluator a metric is of."""

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.evals.importers.values import JsonValue
from tests.evals.trpc_files import (
    EXACT,
    expected_answer,
    imported,
    matcher,
    members_of,
    metric,
    set_of,
    trpc_case,
    trpc_set,
    turn,
)

OBJECT = {"schema_json": '{"type":"object"}'}


@pytest.mark.parametrize(
    ("criterion", "answer", "expected"),
    [
        ({"text": {}}, "Yes", {"exact": "Yes"}),
        ({"text": {"matchStrategy": "exact", "caseInsensitive": True}}, "Yes", {"exact": "Yes", "ignore_case": True}),
        ({"text": {"matchStrategy": "contains"}}, "Yes", {"contains": ["Yes"]}),
        ({"text": {"matchStrategy": "contains"}}, "", {}),
        ({"text": {"matchStrategy": "regex"}}, "Ye+s", {"regex": "Ye+s"}),
        ({"text": {"ignore": True}}, None, {}),
        ({"text": {"matchStrategy": "skip", "length": {"min": 40}}}, None, {"min_characters": 40}),
        ({"text": {"matchStrategy": "skip", "length": {"max": 6}}}, None, {"max_characters": 6}),
        ({"text": {"length": {"min": 1, "max": 6}}}, "Yes", {"exact": "Yes", "min_characters": 1, "max_characters": 6}),
        (
            {"text": {"matchStrategy": "regex", "length": {"max": 6}}},
            "Ye+s",
            {"regex": "Ye+s", "max_characters": 6},
        ),
        ({"json": {"ignoreTree": {"id": True}}}, '{"a":1}', {"json": matcher({"a": 1}, "id")}),
        ({"json": {"matchStrategy": "skip"}}, None, {}),
        ({"json": {"matchStrategy": "skip", "valid": True}}, None, {"json": {}}),
        ({"json": {"matchStrategy": "skip", "schema": {"type": "object"}}}, None, {"json": OBJECT}),
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
            "the pattern 'a(' is not a regular expression of RE2: missing ): a(",
        ),
        (
            {"llmJudge": {"judgeModel": {"modelName": "${JUDGE}"}}},
            "x",
            "no metric asks a judge as its evaluator 'a' does",
        ),
        ({}, "x", "its criterion is neither toolTrajectory nor finalResponse"),
        ({"novel": {}}, "x", "its criterion has 'novel'"),
    ],
)
def test_an_answer_that_is_compared_otherwise_makes_its_case_not_scored(
    criterion: JsonValue, answer: str, why: str
) -> None:
    eval_set, sentences = imported(trpc_set(trpc_case(turn(answer))), metric(criterion, name="a"))
    assert eval_set.defaults.metrics[0].custom.name == "trpc.a"
    assert sentences[0] == (
        f"The metric 'a' has no counterpart: {why}. Its cases are not scored until it is removed. (Case 'one'.)"
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
                        "final_response": {"answer": {"max_characters": 6}},
                    },
                ]
            },
            "cases": [
                {
                    "id": "one",
                    "turns": [{"user": "hello", "expect": {"answer": {"min_characters": 40}}}],
                }
            ],
        }
    )
    assert sentences == [
        "[0].extension (2): no metric reads it",
    ]


def test_a_metric_that_fits_some_cases_only_is_theirs() -> None:
    good = {**members_of(trpc_case(turn("7"))), "evalId": "good"}
    bad = {**members_of(trpc_case(turn("seven"))), "evalId": "bad"}
    shared = metric({"toolTrajectory": {}}, name="calls")
    eval_set, _ = imported(trpc_set(good, bad), metric({"finalResponse": {"json": {}}}, name="a"), shared)
    assert [one.name for one in eval_set.defaults.metrics] == ["calls"]
    assert [[one.WhichOneof("kind") for one in case.metrics] for case in eval_set.cases] == [
        ["final_response"],
        ["custom", "final_response"],
    ]
