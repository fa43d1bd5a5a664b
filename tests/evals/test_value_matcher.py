"""Matchers of JSON values and of answers: what matches, and how a value that does not match is said to differ."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1.eval_set_pb2 import ExpectedAnswer, ValueMatcher
from bough_server.matching.values import MAX_SENTENCE, answer_mismatch, check_answer, check_matcher, mismatch

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
DEEP = "[" * 900 + "]" * 900


def equals(expected: str, actual: str, *ignore: str, tolerance: float = 0) -> str:
    return mismatch(ValueMatcher(equals_json=expected, ignore=ignore, number_tolerance=tolerance), actual)


def subset(expected: str, actual: str, *ignore: str, tolerance: float = 0) -> str:
    return mismatch(ValueMatcher(subset_json=expected, ignore=ignore, number_tolerance=tolerance), actual)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("1", "1.0"),
        ("1e2", "100"),
        ("-0.0", "0"),
        ('{"a": 1, "b": [2]}', '{"b": [2.0], "a": 1}'),
        ('"\\u00e9"', '"é"'),
        ('"plain words"', "plain words"),
        ('"NaN"', "NaN"),
        ("null", " null\n"),
    ],
)
def test_equal_values_match_however_they_are_written(expected: str, actual: str) -> None:
    assert (equals(expected, actual), subset(expected, actual)) == ("", "")


@pytest.mark.parametrize(
    ("expected", "actual", "words"),
    [
        ("1", "2", "the value is 2, expected 1"),
        ("1", "true", "the value is true, expected 1"),
        ("false", "0", "the value is 0, expected false"),
        ("0", "false", "the value is false, expected 0"),
        ("null", "false", "the value is false, expected null"),
        ('"1"', "1", 'the value is 1, expected "1"'),
        ("1", "plain words", 'the value is "plain words", expected 1'),
        ('{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 3]}}', "a.b[1] is 3, expected 2"),
        ('{"a": 1}', "{}", "a is missing, expected 1"),
        ('{"a": 1}', '{"b": 2, "a": 1}', "b is 2, which is not expected"),
        (
            '{"a": 1, "b": [2, 3], "c": 4}',
            '{"b": [5, 6], "c": 4}',
            "a is missing, expected 1; b[0] is 5, expected 2; b[1] is 6, expected 3",
        ),
        (
            "[1, 1, 1, 1, 1]",
            "[2, 2, 2, 2, 2]",
            "[0] is 2, expected 1; [1] is 2, expected 1; [2] is 2, expected 1; [3] is 2, expected 1; "
            "[4] is 2, expected 1",
        ),
        (
            "[1, 1, 1, 1, 1, 1]",
            "[2, 2, 2, 2, 2, 2]",
            "[0] is 2, expected 1; [1] is 2, expected 1; [2] is 2, expected 1; [3] is 2, expected 1; "
            "[4] is 2, expected 1; and more",
        ),
        ("[1]", "[1, 2]", "the value has 2 items, expected 1"),
        ("[1, 2]", "[1]", "the value has 1 item, expected 2"),
        ("{}", "[]", "the value is [], expected {}"),
        ("1.5", '{"a": NaN}', 'the value is "{\\"a\\": NaN}", expected 1.5'),
        ('"a"', '"\\ud800"', 'the value is "?", expected "a"'),
    ],
)
def test_differences_are_named_by_their_paths_and_both_values_up_to_a_few(
    expected: str, actual: str, words: str
) -> None:
    assert equals(expected, actual) == words


def test_a_subset_has_fewer_members_at_every_depth_and_lists_as_long() -> None:
    actual = '{"a": {"b": 1, "c": 2}, "d": [{"e": 3, "f": 4}]}'
    assert subset('{"a": {"c": 2}, "d": [{"f": 4}]}', actual) == ""
    assert subset('{"d": []}', actual) == "d has 1 item, expected 0"
    assert subset('{"d": [{"f": 5}]}', actual) == "d[0].f is 4, expected 5"
    assert subset("{}", "[]") == "the value is [], expected {}"


@pytest.mark.parametrize(
    ("ignored", "words"),
    [
        (["id", "items.*.at"], ""),
        (["*"], ""),
        (["id", "*.*.at"], ""),
        (["id", "items.*"], ""),
        (["id"], "items[0].at is 4, expected 3"),
        (["items"], "id is 2, expected 1"),
        (["id", "items.at"], "items[0].at is 4, expected 3"),
        (["id", "items.0.at"], "items[0].at is 4, expected 3"),
    ],
)
def test_ignored_paths_are_left_out_on_both_sides(ignored: list[str], words: str) -> None:
    expected, actual = '{"id": 1, "items": [{"at": 3}]}', '{"id": 2, "items": [{"at": 4}]}'
    assert (equals(expected, actual, *ignored), subset(expected, actual, *ignored)) == (words, words)


def test_a_member_that_only_one_side_has_can_be_ignored() -> None:
    assert equals('{"a": 1}', '{"a": 1, "at": 2}', "at") == equals('{"a": 1, "at": 2}', '{"a": 1}', "at") == ""


def test_numbers_may_be_apart_by_the_tolerance_and_nothing_else_may() -> None:
    assert equals("[1, 2.5]", "[1.1, 2.4]", tolerance=0.11) == ""
    assert equals("1", "1.2", tolerance=0.11) == "the value is 1.2, expected 1"
    assert equals("1", "true", tolerance=1) == "the value is true, expected 1"
    assert equals("1", "0.9", tolerance=0) == "the value is 0.9, expected 1"
    assert equals("0.5", str(10**400), tolerance=1).endswith("expected 0.5")
    assert equals(str(10**400), str(10**400 + 1), tolerance=1) == ""


def test_a_regex_is_searched_in_a_string_or_in_the_json_text() -> None:
    assert mismatch(ValueMatcher(regex="^b+$"), '"bb"') == ""
    assert mismatch(ValueMatcher(regex="^b+$"), "bb") == ""
    assert mismatch(ValueMatcher(regex=r'"n": \d'), '{"n": 4}') == ""
    assert mismatch(ValueMatcher(regex="^b+$"), '"ab"') == '"ab" does not match the regex ^b+$'


def test_a_value_fits_a_json_schema_of_2020_12() -> None:
    matcher = ValueMatcher(schema_json='{"prefixItems": [{"type": "integer"}], "minItems": 1}')
    assert mismatch(matcher, "[1]") == ""
    assert mismatch(matcher, '["a"]') == "[0]: 'a' is not of type 'integer'"
    assert mismatch(ValueMatcher(schema_json="true"), "1") == ""


def test_any_value_matches_where_nothing_is_expected() -> None:
    assert mismatch(ValueMatcher(), "{}") == ""


def test_a_sentence_is_short_however_large_the_values_are() -> None:
    name, text = "a" * 1000, json.dumps({"b": "x" * 1000})
    for words in (equals(f'{{"{name}": {text}}}', f'{{"{name}": {{"b": "y"}}}}'), equals('"y"', text)):
        assert 0 < len(words) <= MAX_SENTENCE
    assert (
        len(mismatch(ValueMatcher(schema_json='{"required": ["' + '","'.join("abc" * 99) + '"]}'), "{}"))
        <= MAX_SENTENCE
    )


def test_values_that_are_nested_too_deeply_do_not_match() -> None:
    assert equals(DEEP, DEEP) == "it is nested too deeply to be compared"
    assert equals("1", "[" * 100_000).startswith('the value is "[[[[')


@given(VALUES)
def test_every_value_equals_itself_and_is_its_own_subset(value: object) -> None:
    text = json.dumps(value)
    assert (equals(text, text), subset(text, text)) == ("", "")


@given(VALUES, VALUES)
def test_what_is_equal_is_a_subset_and_equality_has_no_direction(one: object, other: object) -> None:
    left, right = json.dumps(one), json.dumps(other)
    assert (equals(left, right) == "") == (equals(right, left) == "")
    if equals(left, right) == "":
        assert subset(left, right) == ""


@pytest.mark.parametrize(
    ("matcher", "words"),
    [
        (ValueMatcher(equals_json="{a}"), "equals_json is not JSON: Expecting property name"),
        (ValueMatcher(equals_json="[NaN]"), "equals_json is not JSON: NaN is not JSON."),
        (ValueMatcher(subset_json="-Infinity"), "subset_json is not JSON: -Infinity is not JSON."),
        (ValueMatcher(subset_json="[" * 100_000), "subset_json is not JSON: it is nested too deeply."),
        (ValueMatcher(regex="("), "regex is not a regular expression of RE2: missing )"),
        (ValueMatcher(regex=""), "regex is empty, so that every value matches it."),
        (ValueMatcher(schema_json="{"), "schema_json is not JSON: "),
        (ValueMatcher(schema_json="3"), "schema_json is not a JSON Schema: it is no object."),
        (ValueMatcher(schema_json='{"type": "text"}'), "schema_json is not a JSON Schema: type: "),
        (ValueMatcher(schema_json='{"$ref": "https://a.example/b"}'), "schema_json must hold only references to its"),
        (ValueMatcher(ignore=["a..b"]), "ignore has 'a..b', which is not names separated by dots, such as items.*.id."),
        (ValueMatcher(ignore=[""]), "ignore has '', which is"),
        (ValueMatcher(number_tolerance=-1), "number_tolerance must be a number from 0."),
        (ValueMatcher(number_tolerance=float("nan")), "number_tolerance must be a number from 0."),
    ],
)
def test_what_is_wrong_with_a_matcher_is_said(matcher: ValueMatcher, words: str) -> None:
    assert check_matcher(matcher).startswith(words)
    assert check_answer(ExpectedAnswer(json=matcher)).startswith(words)


@pytest.mark.parametrize(
    "matcher",
    [
        ValueMatcher(),
        ValueMatcher(equals_json="null", ignore=["a.*.b", "*"], number_tolerance=1e-6),
        ValueMatcher(schema_json='{"type": "string"}'),
        ValueMatcher(regex="a|b"),
    ],
)
def test_nothing_is_wrong_with_a_matcher_that_can_be_used(matcher: ValueMatcher) -> None:
    assert check_matcher(matcher) == ""


def test_a_matcher_that_cannot_be_used_matches_nothing() -> None:
    for matcher in (ValueMatcher(equals_json="{"), ValueMatcher(regex="("), ValueMatcher(schema_json="{")):
        assert mismatch(matcher, "{") != ""
    assert answer_mismatch(ExpectedAnswer(regex="("), "(").startswith("the expected regex is not a regular expression")


@pytest.mark.parametrize(
    ("expected", "text", "words"),
    [
        (ExpectedAnswer(), "anything", ""),
        (ExpectedAnswer(exact="Yes.\n"), "  Yes. ", ""),
        (ExpectedAnswer(exact="yes."), "Yes.", 'the answer is "Yes.", expected "yes."'),
        (ExpectedAnswer(exact="yes.", ignore_case=True), "YES.", ""),
        (ExpectedAnswer(exact=""), "", ""),
        (ExpectedAnswer(exact=""), "a", 'the answer is "a", expected ""'),
        (ExpectedAnswer(contains=["a", "b"]), "cab", ""),
        (ExpectedAnswer(contains=["a", "x"]), "cab", 'the answer "cab" does not contain "x"'),
        (ExpectedAnswer(contains=["STRASSE"], ignore_case=True), "Straße", ""),
        (ExpectedAnswer(excludes=["x", "a"]), "cab", 'the answer contains "a", which is excluded'),
        (
            ExpectedAnswer(contains=["x", "a", "y"], excludes=["b", "c"], regex="^z", min_characters=9),
            "cab",
            'the answer "cab" does not contain "x", "y"; the answer contains "b", "c", which are excluded; '
            '"cab" does not match the regex ^z; the answer\'s length is 3, expected at least 9 characters',
        ),
        (ExpectedAnswer(regex="^c.b$"), "cab", ""),
        (ExpectedAnswer(regex="^C.B$"), "cab", '"cab" does not match the regex ^C.B$'),
        (ExpectedAnswer(regex="^C.B$", ignore_case=True), "cab", ""),
        (ExpectedAnswer(json=ValueMatcher(subset_json='{"a": 1}')), '{"a": 1, "b": 2}', ""),
        (
            ExpectedAnswer(json=ValueMatcher(equals_json='{"a": 1}')),
            '{"a": 2}',
            "in the answer's JSON a is 2, expected 1",
        ),
        (ExpectedAnswer(json=ValueMatcher()), "plain words", 'the answer "plain words" is not JSON'),
        (ExpectedAnswer(contains=["a"], excludes=["b"], regex="c"), "ac", ""),
    ],
)
def test_an_answer_matches_if_every_condition_holds(expected: ExpectedAnswer, text: str, words: str) -> None:
    assert answer_mismatch(expected, text) == words


def test_an_empty_text_to_contain_is_a_mistake() -> None:
    assert check_answer(ExpectedAnswer(excludes=[""])) == "excludes has an empty text, which every answer contains."
    alone = (
        "contains has [redacted] alone, which is in every answer if members of JSON are redacted: write the text "
        "around it."
    )
    assert check_answer(ExpectedAnswer(contains=["a", " [redacted]\n[redacted]"])) == alone
    assert check_answer(ExpectedAnswer(contains=["a [redacted]"], exact="[redacted]")) == ""
    assert check_answer(ExpectedAnswer(contains=["a"], excludes=["b"], regex="c", exact="")) == ""
    assert check_answer(ExpectedAnswer(regex="(")).startswith("regex is not a regular expression of RE2: ")
    assert check_answer(ExpectedAnswer(min_characters=2, max_characters=1)) == (
        "max_characters must not be less than min_characters, which is 2."
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("é", "the answer's length is 1, expected at least 2 characters"),
        ("éé", ""),
        ("abc", ""),
        ("abcd", "the answer's length is 4, expected at most 3"),
    ],
)
def test_an_answer_has_so_many_characters(text: str, words: str) -> None:
    found = answer_mismatch(ExpectedAnswer(min_characters=2, max_characters=3), text)
    assert found.startswith(words)
    assert bool(found) == bool(words)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(x+x+)+y", "(.*)*z"])
def test_no_pattern_takes_long(pattern: str) -> None:
    start = time.process_time()
    assert answer_mismatch(ExpectedAnswer(regex=pattern), "a" * 40_000 + "x" * 40_000 + "!") != ""
    assert time.process_time() - start < 2


def test_a_pattern_too_costly_for_a_text_is_said() -> None:
    wrong = answer_mismatch(ExpectedAnswer(regex="[ab]*a[ab]{900}c"), "ab" * 100_000)
    assert wrong == "the expected regex is too costly for a text of 200,000 bytes"
    assert answer_mismatch(ExpectedAnswer(regex="[ab]*a[ab]{900}c|b$"), "ab" * 10_000) == ""


def test_lookaround_is_refused_before_anything_is_matched() -> None:
    for pattern in ("(?=a)b", r"(a)\1", "(?:a{1000}){1000}", "a" * 5_000):
        assert check_answer(ExpectedAnswer(regex=pattern)).startswith("regex is ")


def test_the_patterns_of_a_schema_are_bounded_too() -> None:
    text = json.dumps({"a": "x" * 5_000 + "!", "x" * 5_000: 1})
    for schema in (
        {"properties": {"a": {"pattern": "(x+x+)+y"}}},
        {"patternProperties": {"(x+x+)+y": {}}, "additionalProperties": False},
        {"unevaluatedProperties": False, "patternProperties": {"(x+x+)+y": {}}},
    ):
        assert mismatch(ValueMatcher(schema_json=json.dumps(schema)), text) != ""
    assert check_matcher(ValueMatcher(schema_json='{"pattern": "(?=a)"}')).startswith(
        "schema_json has a pattern that is not a regular expression of RE2: "
    )


def test_a_schema_cannot_ask_for_endless_work_by_references() -> None:
    definitions = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": {}}})
    assert mismatch(ValueMatcher(schema_json=schema), "1").startswith("the expected schema_json cannot be used: ")
    assert "more than 20,000 references" in check_matcher(ValueMatcher(schema_json=schema))


@pytest.mark.parametrize(
    ("schema", "value", "is_valid"),
    [
        ({"patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": False}, {"n_a": 1}, True),
        ({"patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": False}, {"n_a": "1"}, False),
        ({"patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": False}, {"a": 1}, False),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"a": 1, "b": "c"}, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"a": 1, "b": 2}, False),
        ({"properties": {"a": {"pattern": "^x"}}}, {"a": "xy"}, True),
        ({"properties": {"a": {"pattern": "^x"}}}, {"a": "y"}, False),
        ({"pattern": "^x"}, 5, True),
    ],
)
def test_bounded_rules_mean_what_they_mean_elsewhere(schema: object, value: object, is_valid: bool) -> None:
    assert (mismatch(ValueMatcher(schema_json=json.dumps(schema)), json.dumps(value)) == "") is is_valid
