"""The rouge_1 and similarity metrics: an answer compared with a reference."""

from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from bough.v1.eval_result_pb2 import VERDICT_FAILED, VERDICT_NOT_EVALUATED, CaseTrialResult
from bough.v1.eval_set_pb2 import EvalCase
from bough.v1.invocation_pb2 import Invocation
from bough_server.evals.metrics.scoring import score_trial
from bough_server.evals.metrics.text_metrics import (
    compare_characters,
    compare_words,
    find_words,
    levenshtein_distance,
)
from bough_server.matching.work import TooMuchWork, limit_work
from tests.evals.records import record
from tests.support.examples import examples

TEXTS = st.text(st.sampled_from("aAbé 1.\n"), max_size=12)


def words(answer: str, reference: str) -> float | None:
    return compare_words(answer, reference).value


def characters(answer: str, reference: str) -> float | None:
    return compare_characters(answer, reference).value


def scored(case: Mapping[str, Any], *runs: Invocation) -> CaseTrialResult:
    return score_trial(json_format.ParseDict({"id": "one", **case}, EvalCase()), runs, trial=0)


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        # The examples of rouge-score's own page and tests.
        ("The quick brown dog jumps on the log.", "The quick brown fox jumps over the lazy dog", 12 / 17),
        ("testing", "testing one two", 1 / 2),
        # Each word counts as often as both have it: two of three with one of one.
        ("the the the", "the", 2 / 4),
        ("The order shipped.", "Your order has shipped", 4 / 7),
        ("nothing", "alike", 0),
        ("", "alike", 0),
    ],
)
def test_rouge_1_is_the_f1_of_shared_words(answer: str, reference: str, f1: float) -> None:
    assert words(answer, reference) == pytest.approx(f1, abs=1e-15)


def test_words_are_those_of_rouge_score() -> None:
    assert find_words("It's 3.5 kg, naïve_X!") == ["it", "s", "3", "5", "kg", "na", "ve", "x"]
    assert find_words("Привет, 世界") == []


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("kitten", "sitting", 4 / 7),
        ("Yes.", "yes.", 3 / 4),
        (" Yes.\n", "Yes.", 1),
        ("世界", "世間", 1 / 2),
        ("", "Yes.", 0),
    ],
)
def test_similarity_is_the_part_of_the_characters_that_do_not_differ(answer: str, reference: str, value: float) -> None:
    assert characters(answer, reference) == pytest.approx(value, abs=1e-15)


@given(TEXTS, TEXTS)
@examples(80)
def test_scores_are_from_0_to_1_alike_both_ways_and_1_of_equal_texts(first: str, second: str) -> None:
    for compare, is_comparable in ((words, bool(find_words(first))), (characters, True)):
        value = compare(first, second)
        assert value is not None
        assert 0 <= value <= 1
        assert value == compare(second, first)
        assert compare(first, first) == (1 if is_comparable else 0)
    assert (characters(first, second) == 1) == (first.strip() == second.strip())


def distance_by_definition(first: str, second: str) -> int:
    """Compute the Levenshtein distance row by row."""
    row = list(range(len(second) + 1))
    for index, left in enumerate(first, start=1):
        before, row = row, [index]
        for position, right in enumerate(second, start=1):
            row.append(min(before[position] + 1, row[-1] + 1, before[position - 1] + (left != right)))
    return row[-1]


@given(TEXTS, TEXTS)
@examples(100)
def test_the_distance_is_that_of_the_definition(first: str, second: str) -> None:
    assert levenshtein_distance(first, second) == distance_by_definition(first, second)


def test_each_turn_is_compared_with_the_answer_that_it_expects() -> None:
    turns = [{"user": "1", "expect": {"answer": {"exact": "one two"}}}, {"user": "2"}, {"user": "3"}]
    turns[2]["expect"] = {"answer": {"exact": "three"}}
    metrics = [{"rouge1": {}, "threshold": 0.5}, {"similarity": {"reference": "three"}}]
    result = scored(
        {"turns": turns, "metrics": metrics}, record(answer="two"), record(answer="x"), record(answer="Three")
    )
    assert [(score.name, score.score) for score in result.scores] == [
        ("rouge_1", pytest.approx((2 / 3 + 1) / 2)),
        ("similarity", 0.8),
    ]
    assert result.reason == (
        "similarity is 0.8, below 1: turns[2]: the answer differs from the reference in 1 of 5 characters."
    )
    assert result.scores[0].reason == ("turns[0]: 1 of 1 words of the answer are among the 2 of the reference.")


def test_an_expected_answer_is_compared_exactly_as_well_if_the_case_says_so() -> None:
    case = {
        "turns": [{"user": "1", "expect": {"answer": {"exact": "one two"}}}],
        "metrics": [{"rouge1": {}, "threshold": 0.5}, {"finalResponse": {}}],
    }
    result = scored(case, record(answer="one"))
    assert [(score.name, score.verdict == VERDICT_FAILED) for score in result.scores] == [
        ("rouge_1", False),
        ("final_response", True),
    ]


def test_a_run_without_an_answer_scores_nothing_and_a_cut_one_cannot_be_scored() -> None:
    case = {"turns": [{"user": "1"}], "metrics": [{"similarity": {"reference": "one"}}]}
    assert [score.score for score in scored(case, record(answer=None)).scores] == [0]
    cut = record(answer="on")
    cut.final_response.parts[0].truncated = True
    assert [score.verdict for score in scored(case, cut).scores] == [VERDICT_NOT_EVALUATED]


def test_texts_that_take_too_many_steps_are_not_scored() -> None:
    case = {"turns": [{"user": "1"}], "metrics": [{"similarity": {"reference": "a" * 200_000}}]}
    result = scored(case, record(answer="b" * 200_000))
    assert result.reason == "similarity: There is too much to compare: expect fewer or smaller values."
    with limit_work(10_000), pytest.raises(TooMuchWork):
        compare_words("a " * 5_000, "a")
