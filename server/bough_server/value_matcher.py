"""Compare JSON values and texts with the matchers of eval sets."""

import json
import re

from jsonschema import Draft202012Validator

from bough.v1 import eval_set_pb2

_LONGEST = 300


def check_answer(expected: eval_set_pb2.ExpectedAnswer) -> str:
    """Return what is wrong with an expected answer; empty if nothing is."""
    if wrong := _regex_problem(expected.regex):
        return f"`regex` {wrong}"
    return check_matcher(expected.json) if expected.HasField("json") else ""


def check_matcher(matcher: eval_set_pb2.ValueMatcher) -> str:
    """Return what is wrong with a matcher; empty if nothing is."""
    match matcher.WhichOneof("expected"):
        case "regex":
            wrong = _regex_problem(matcher.regex)
            return f"`regex` {wrong}" if wrong else ""
        case ("equals_json" | "subset_json" | "schema_json") as name:
            wrong = _json_problem(getattr(matcher, name), is_schema=name == "schema_json")
            return f"`{name.removesuffix('_json')}` {wrong}" if wrong else ""
    return ""


def _regex_problem(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression of Python: {error}."[:_LONGEST]
    return ""


def _json_problem(text: str, *, is_schema: bool) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"must be JSON text: {error}."
    if is_schema:
        for mistake in Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(value):
            return f"is not a JSON Schema: {mistake.message}"[:_LONGEST]
    return ""
