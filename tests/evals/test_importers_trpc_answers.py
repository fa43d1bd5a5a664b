"""Final responses of trpc-agent-go: how a criterion compares answers, and which evaluator a metric is of."""

import pytest
from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.evals.importers.judges import ANSWER_TEMPLATE, MATCHES_REFERENCE, NO_MODEL, REFERENCE_TEMPLATE
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

ROUGE: JsonValue = {"rougeType": "rouge1", "measure": "f1", "threshold": {"f1": 0.4}}
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
        ({"finalResponse": {"rouge": {"rougeType": "rougeL"}}}, "x", "it counts by 'rougeL', and rouge_1 counts words"),
        (
            {"finalResponse": {"rouge": {"rougeType": "rouge1", "tokenizerName": "jieba"}}},
            "x",
            "its rouge has 'tokenizerName'",
        ),
        ({"finalResponse": {"rouge": {"rougeType": "rouge1"}, "text": {}}}, "x", "it has 'text' beside 'rouge'"),
        ({"finalResponse": {"rouge": ROUGE}}, "", "no answer is expected whose words it could compare"),
        (
            {"finalResponse": {"rouge": ROUGE}},
            "晴",
            "an expected answer has no word of the letters a to z or digits, which are all that ROUGE-1 counts: use "
            "`similarity`",
        ),
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


# Reference answers beside a metric that does not compare them.

BOUND: JsonValue = {"finalResponse": {"text": {"matchStrategy": "skip", "length": {"max": 6}}}}
SKIP: JsonValue = {"finalResponse": {"text": {"matchStrategy": "skip"}}}


def kept_beside(criterion: JsonValue, *answers: str) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    eval_set, sentences = imported(trpc_set(trpc_case(*map(turn, answers))), metric(criterion, name="a", threshold=1))
    return eval_set, sentences


@pytest.mark.parametrize("answers", [["Yes"], ["Yes", "No"]])
def test_a_reference_answer_beside_a_metric_that_compares_nothing_is_kept_and_passes(answers: list[str]) -> None:
    eval_set, sentences = kept_beside(SKIP, *answers)
    assert list(eval_set.defaults.metrics) == [
        eval_set_pb2.EvalMetric(name="a", threshold=0, final_response=eval_set_pb2.FinalResponseMetric())
    ]
    assert [one.expect.answer.exact for one in eval_set.cases[0].turns] == answers
    assert sentences == ["The metric 'a' compares nothing: it is kept with the threshold 0."]


def test_a_reference_answer_beside_a_metric_that_bounds_it_is_kept_and_passes() -> None:
    eval_set, sentences = kept_beside(BOUND, "Yes")
    bounds = eval_set_pb2.ExpectedAnswer(max_characters=6)
    assert list(eval_set.defaults.metrics) == [
        eval_set_pb2.EvalMetric(name="a", threshold=1, final_response=eval_set_pb2.FinalResponseMetric(answer=bounds)),
        eval_set_pb2.EvalMetric(name="expected_answer", threshold=0, final_response=eval_set_pb2.FinalResponseMetric()),
    ]
    assert eval_set.cases[0].turns[0].expect.answer == eval_set_pb2.ExpectedAnswer(exact="Yes")
    assert sentences == ["No metric compares the expected answers: they are kept with the threshold 0."]


def test_reference_answers_of_several_turns_have_no_place_beside_bounds() -> None:
    eval_set, sentences = kept_beside(BOUND, "Yes", "No")
    assert [one.expect.answer for one in eval_set.cases[0].turns] == [eval_set_pb2.ExpectedAnswer(max_characters=6)] * 2
    assert sentences == [
        "The expected answers were left out: a metric bounds the answers of several turns instead. (Case 'one'.)"
    ]


# Words.


def compared(rouge: JsonValue, *turns: JsonValue, beside: JsonValue = None) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    metrics = [metric({"finalResponse": {"rouge": rouge}}, name="words", threshold=1)]
    if beside is not None:
        metrics.insert(0, metric({"finalResponse": beside}, name="texts", threshold=1))
    return imported(trpc_set(trpc_case(*turns)), *metrics)


def words(threshold: float, reference: str = "") -> eval_set_pb2.EvalMetric:
    return eval_set_pb2.EvalMetric(
        name="words", threshold=threshold, rouge_1=eval_set_pb2.RougeMetric(reference=reference)
    )


def test_the_words_of_answers_are_compared_with_those_that_the_turns_expect() -> None:
    eval_set, sentences = compared(ROUGE, turn("It rains."))
    assert list(eval_set.defaults.metrics) == [words(0.4)]
    assert eval_set.cases[0].turns[0].expect.answer == eval_set_pb2.ExpectedAnswer(exact="It rains.")
    assert sentences == []


def test_bounds_of_precision_and_recall_imply_one_of_f1_and_are_left_out() -> None:
    eval_set, sentences = compared(
        {**members_of(ROUGE), "threshold": {"precision": 0.5, "recall": 1}}, turn("It rains.")
    )
    place = "[0].criterion.finalResponse.rouge.threshold"
    assert list(eval_set.defaults.metrics) == [words(2 / 3)]
    assert sentences == [
        f"{place}.precision (1): rouge_1 bounds F1 alone",
        f"{place}.recall (1): rouge_1 bounds F1 alone",
    ]


def test_the_words_of_several_turns_are_compared_in_the_mean() -> None:
    eval_set, sentences = compared(ROUGE, turn("It rains."), turn())
    assert list(eval_set.defaults.metrics) == [words(0.4)]
    assert sentences == ["The metric 'words' bounds the mean of the turns instead of each. (Case 'one'.)"]


def test_words_have_a_reference_apart_from_what_another_metric_compares() -> None:
    eval_set, _ = compared(ROUGE, turn("It rains."), beside={"text": {"matchStrategy": "contains"}})
    assert eval_set.defaults.metrics[1] == words(0.4, reference="It rains.")
    assert eval_set.cases[0].turns[0].expect.answer == eval_set_pb2.ExpectedAnswer(contains=["It rains."])


def test_words_of_several_turns_have_no_place_beside_what_another_metric_compares() -> None:
    _, sentences = compared(ROUGE, turn("a"), turn("b"), beside={"text": {"matchStrategy": "contains"}})
    assert any("another metric of the set compares the same turns in another way" in each for each in sentences)


# Judges.


def judged(evaluator: str = "llm_rubric_response", **members: JsonValue) -> JsonValue:
    model: JsonValue = {
        "providerName": "openai",
        "modelName": "${JUDGE}",
        "baseURL": "https://example.org",
        "apiKey": "sk-abcdefgh12345678",
        "numSamples": 3,
        "generationConfig": {"max_tokens": 512, "temperature": 0.5, "stream": False, "stop": ["."]},
    }
    return metric({"llmJudge": {"judgeModel": model, **members}}, name="q", evaluatorName=evaluator, threshold=0.9)


def rubric(id: str, text: str) -> JsonValue:
    return {"id": id, "description": "For people.", "content": {"text": text}}


def test_a_judge_by_address_and_key_asks_the_configured_model_instead() -> None:
    source = trpc_set(trpc_case(turn()))
    eval_set, sentences = imported(source, judged(rubrics=[rubric("1", "It is brief.")]), judge="strict")
    assert list(eval_set.defaults.metrics) == [
        json_format.ParseDict(
            {
                "name": "q",
                "threshold": 0.9,
                "llm_judge": {
                    "model": "strict",
                    "rubrics": [{"id": "1", "text": "It is brief."}],
                    "template": ANSWER_TEMPLATE,
                    "samples": 3,
                    "settings": {"temperature": 0.5, "max_output_tokens": 512},
                },
            },
            eval_set_pb2.EvalMetric(),
        )
    ]
    assert sentences == [
        "The metric 'q' asks the configured model 'strict' instead of '${JUDGE}'.",
        "[0].criterion.llmJudge.judgeModel.generationConfig.stop (1): the importer does not know it",
    ]


def test_a_judge_that_compares_with_the_reference_answer_is_shown_it() -> None:
    eval_set, _ = imported(
        trpc_set(trpc_case(turn("Yes"), turn("No"))), metric(BOUND, name="a"), judged("llm_final_response"), judge="m"
    )
    (judge,) = (one.llm_judge for one in eval_set.defaults.metrics if one.HasField("llm_judge"))
    assert (judge.template, [one.text for one in judge.rubrics]) == (REFERENCE_TEMPLATE, [MATCHES_REFERENCE[1]])
    assert [one.expect.answer.exact for one in eval_set.cases[0].turns] == ["Yes", "No"]


def test_a_case_adds_its_rubrics_to_the_metric_that_they_name() -> None:
    own: JsonValue = {**members_of(rubric("2", "It is right.")), "metricName": "q"}
    other: JsonValue = {**members_of(rubric("3", "It is kind.")), "metricName": "gone"}
    eval_set, sentences = imported(
        trpc_set(trpc_case(turn(), rubrics=[own, other])), judged(rubrics=[rubric("1", "It is brief.")]), judge="m"
    )
    assert [one.id for one in eval_set.defaults.metrics[0].llm_judge.rubrics] == ["1", "2"]
    assert "evalCases[0].rubrics[1] (1): no metric of the set asks for it" in sentences


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (judged(), "it has no rubrics; a judge is asked 1 to 64"),
        (judged(rubrics=[rubric("1", "A")] * 2), "its rubrics need ids that differ, of 1 to 128 printable characters"),
        (judged(rubrics=[rubric("1", "")]), "its rubrics need texts of 1 to 16,384 characters"),
        (
            judged(judgeModel={"numSamples": 26}, rubrics=[rubric("1", "A")]),
            "it asks 26 times; a judge is asked 1 to 25 times",
        ),
        (judged(judgeModel={"numSamples": 1.5}), "it asks 1.5 times"),
        (judged(template={"prompt": "{{answer}}"}), "its judge has 'template'"),
        (judged("llm_hallucinations"), "no metric asks a judge as its evaluator 'llm_hallucinations' does"),
    ],
)
def test_a_judge_that_is_asked_otherwise_makes_its_cases_not_scored(source: JsonValue, why: str) -> None:
    eval_set, sentences = imported(trpc_set(trpc_case(turn())), source, judge="m")
    assert eval_set.defaults.metrics[0].custom.name == "trpc.q"
    assert "sk-abcdefgh12345678" not in str(eval_set)
    assert any(f"The metric 'q' has no counterpart: {why}. Its" in sentence for sentence in sentences)


def test_a_judge_without_a_configured_model_makes_its_cases_not_scored() -> None:
    _, sentences = imported(trpc_set(trpc_case(turn())), judged(rubrics=[rubric("1", "A")]))
    assert sentences[0].startswith(f"The metric 'q' has no counterpart: {NO_MODEL}. ")


def test_a_judge_that_no_metric_asks_is_said() -> None:
    _, sentences = imported(trpc_set(trpc_case(turn())), judge="m")
    assert sentences == ["No metric of the files asks a judge, so that the model 'm' is not asked."]
