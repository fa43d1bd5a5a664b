"""Patterns in schemas of agents and tools: linear as far as RE2 has them, and only such ones in requests."""

import json

import pytest

from bough.v1 import agent_pb2
from bough_server.agents.catalog import check_definitions
from bough_server.agents.validation import Known
from bough_server.errors import InvalidRequest
from bough_server.matching.schemas import caller_pattern_problem, schema_mistakes

SLOW = "(x+x+)+y"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": SLOW}}},
        {"patternProperties": {SLOW: False}},
        {"patternProperties": {SLOW: {}}, "additionalProperties": False},
    ],
)
def test_no_pattern_of_a_schema_takes_long(schema: object) -> None:
    schema_mistakes({"a": "x" * 60, "x" * 60: 1}, json.dumps(schema))


def test_patterns_mean_what_they_mean_elsewhere() -> None:
    schema = json.dumps({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False})
    assert schema_mistakes({"ab": "x"}, schema) == []
    assert schema_mistakes({"ab": 1}, schema) == ["ab: 1 is not of type 'string'"]
    assert schema_mistakes({"b": 1}, schema) == ["b is not known"]
    # Patterns of operators may have what RE2 has not.
    ahead = json.dumps({"properties": {"a": {"pattern": "^(?=.*b)a"}}})
    assert schema_mistakes({"a": "ab"}, ahead) == []
    assert schema_mistakes({"a": "a"}, ahead) == ["a: 'a' does not match '^(?=.*b)a'"]


@pytest.mark.parametrize("field", ["input_schema_json", "output_schema_json"])
def test_a_request_has_no_pattern_that_may_take_for_ever(field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)(x+x+)+y"}}}
    definition = agent_pb2.AgentDefinition(name="mine", description="Mine.")
    definition.llm.instruction = "Answer."
    setattr(definition, field, json.dumps(schema))
    with pytest.raises(InvalidRequest) as refused:
        check_definitions([definition], Known(), lambda index: f"definitions[{index}]")
    found = {one.field: one.description for one in refused.value.violations}
    assert "has a pattern that is not a regular expression of RE2" in found[f"definitions[0].{field}"]
    both = {"patternProperties": {SLOW: {}}, "unevaluatedProperties": False}
    assert "is not supported in a request" in caller_pattern_problem(json.dumps(both))
    assert caller_pattern_problem(json.dumps({"pattern": "^a+$"})) == ""
