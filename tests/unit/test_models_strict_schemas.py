"""Which schemas a provider is asked to hold strictly: those that all of them can."""

import json

import pytest

from bough_server.models.structured_output import chat_format, responses_format

CLOSED = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
ONE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def is_strict(schema: object) -> object:
    text = json.dumps(schema)
    form = responses_format(text)
    assert chat_format(text) == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": form["strict"]},
    }
    assert form == {"type": "json_schema", "name": "answer", "schema": schema, "strict": form["strict"]}
    return form["strict"]


@pytest.mark.parametrize(
    "schema",
    [
        CLOSED,
        ONE,
        {**ONE, "properties": {"a": {"type": "array", "items": ONE}}},
        {**ONE, "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}}, "$defs": {"b": ONE}},
    ],
)
def test_closed_objects_that_require_all_they_have_are_held_strictly(schema: object) -> None:
    assert is_strict(schema) is True


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**ONE, "required": []},
        {**ONE, "additionalProperties": True},
        {**ONE, "properties": {"a": {"type": "string", "pattern": "a+"}}},
        {**ONE, "properties": {"a": {"type": "array", "items": {"type": "object"}}}},
        {**ONE, "$defs": {"b": {"type": "object"}}},
        {**ONE, "properties": {"a": {"anyOf": [{"type": "object"}]}}},
        {**ONE, "properties": {"a": True}},
    ],
)
def test_what_some_provider_would_refuse_is_asked_for_without_a_promise(schema: object) -> None:
    assert is_strict(schema) is False
