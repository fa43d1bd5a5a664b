"""What a model is told of arguments that do not fit, and which schemas may say what fits."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.tools.arguments import parse_arguments, schema_problem

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "topic": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1},
            "places": {"type": "array", "items": {"type": "object", "required": ["city", "street"]}},
        },
        "required": ["topic"],
        "additionalProperties": False,
    }
)


def refusal(arguments_json: str) -> str:
    with pytest.raises(RunError) as refused:
        parse_arguments(arguments_json, SCHEMA)
    assert refused.value.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    return refused.value.message


def test_arguments_that_fit_are_their_values() -> None:
    assert parse_arguments('{"topic": "leaves", "limit": 2}', SCHEMA) == {"topic": "leaves", "limit": 2}


def test_no_text_is_no_arguments() -> None:
    assert parse_arguments(" ", '{"type": "object"}') == {}


@pytest.mark.parametrize(
    ("arguments_json", "words"),
    [
        ("[1]", "they must be one JSON object, not [1]"),
        ("{}", "topic is missing"),
        ('{"topic": 1}', "topic: 1 is not of type 'string'"),
        ('{"topic": "a", "limit": 0}', "limit: 0 is less than the minimum of 1"),
        ('{"topic": "a", "tpoic": 1}', "tpoic is not known"),
        (
            '{"topic": "a", "places": [{"city": "x"}, {}]}',
            "places[0].street is missing; places[1].city is missing; places[1].street is missing",
        ),
    ],
)
def test_every_field_that_does_not_fit_is_named(arguments_json: str, words: str) -> None:
    assert refusal(arguments_json) == f"The arguments do not fit: {words}."


@pytest.mark.parametrize("arguments_json", ["{", "topic=leaves", '{"limit": NaN}', "[" * 100_000, "1" * 10_000])
def test_what_is_no_json_is_said_to_be_none(arguments_json: str) -> None:
    assert refusal(arguments_json).startswith("The arguments do not fit: they are not JSON (")


def test_a_long_list_of_mistakes_is_cut() -> None:
    message = refusal(json.dumps({"topic": "a", **{f"extra{i}": "x" * 10_000 for i in range(50)}}))
    assert message.endswith("; and 45 more.")
    assert len(message) < 2_000


@given(st.dictionaries(st.text(max_size=8), st.recursive(st.integers() | st.text(), st.lists, max_leaves=5)))
def test_any_object_fits_or_is_refused_as_bad_arguments(values: dict[str, Any]) -> None:
    reason = None
    try:
        parsed = parse_arguments(json.dumps(values), SCHEMA)
    except RunError as refused:
        reason = refused.reason
    assert reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS or parsed == values


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array"}, 'must be a JSON Schema of "type": "object"'),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "properties.a.type: 'strin'"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "properties.a.pattern: '(' is not a 'regex'"),
        ({"type": "object", "properties": {"a": {"$ref": "http://localhost/x"}}}, "references to its own parts"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "references to its own parts"),
        ({"type": "object", "$ref": "#"}, "none that leads back to itself"),
    ],
)
def test_a_schema_that_cannot_judge_arguments_is_refused(schema: Any, words: str) -> None:
    assert words in schema_problem(json.dumps(schema))


def test_a_schema_with_references_to_its_own_parts_is_fine() -> None:
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}},
        "$defs": {"tree": {"type": "object", "properties": {"below": {"$ref": "#/$defs/tree"}}}},
    }
    assert schema_problem(json.dumps(schema)) == ""
    with pytest.raises(RunError, match=r"tree\.below\.below: 1 is not of type 'object'"):
        parse_arguments('{"tree": {"below": {"below": 1}}}', json.dumps(schema))


def test_a_schema_that_is_no_json_is_refused() -> None:
    assert schema_problem("{").startswith("must be JSON text: ")
