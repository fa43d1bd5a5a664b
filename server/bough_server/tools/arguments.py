"""Parse a call's arguments as a model wrote them, and validate them against a JSON Schema."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import referencing.exceptions
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.regexes import RegexProblem
from bough_server.tools.bounded_schemas import LinearPatterns, TooCostly, bounded_errors, pattern_problem

_MOST_MISTAKES: Final = 5
_LONGEST_MISTAKE: Final = 300


def parse_arguments(arguments_json: str, schema_json: str) -> dict[str, Any]:
    """Parse and validate the arguments of a call. An empty text means no arguments.

    Raises RunError BAD_ARGUMENTS, with a message for the model that names each value that does not match.
    """
    try:
        values = json.loads(arguments_json, parse_constant=_refuse) if arguments_json.strip() else {}
    except (ValueError, RecursionError) as error:
        raise bad_arguments([f"they are not JSON ({error})"]) from None
    if not isinstance(values, dict):
        raise bad_arguments([f"they must be one JSON object, not {json.dumps(values)[:40]}"])
    mistakes = schema_mistakes(values, schema_json)
    if mistakes:
        raise bad_arguments(mistakes)
    return values


def bad_arguments(mistakes: Sequence[str]) -> RunError:
    """Return the error that a model sees for its arguments; it lists at most 5 mistakes."""
    shown = [mistake[:_LONGEST_MISTAKE] for mistake in mistakes[:_MOST_MISTAKES]]
    if len(mistakes) > len(shown):
        shown.append(f"and {len(mistakes) - len(shown)} more")
    message = f"The arguments do not fit: {'; '.join(shown)}."
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


def schema_mistakes(value: Any, schema_json: str, *, is_bounded: bool = False) -> list[str]:
    """Return how a JSON value violates a schema, each mistake with its path; empty if it is valid.

    `is_bounded`: a schema that would take long to check is a mistake, and its patterns are RE2's.
    """
    try:
        found = bounded_errors(value, schema_json) if is_bounded else _validator(schema_json).iter_errors(value)
        errors = sorted(found, key=lambda error: [str(p) for p in error.path])
    except (RecursionError, referencing.exceptions.Unresolvable):
        return ["the tool's schema cannot be followed to its end"]
    except TooCostly as error:
        return [str(error)]
    except RegexProblem as error:
        return [f"a pattern of the schema {error}"]
    # jsonschema reports every missing name, and _mistakes() lists all of them each time: the dict drops duplicates.
    return list(dict.fromkeys(mistake for error in errors for mistake in _mistakes(error)))


def schema_problem(schema_json: str, *, why_object: str = "") -> str:
    """Return what is wrong with a schema of JSON objects, as a sentence; empty if nothing is.

    `why_object` is the reason, for the sentence, why only objects are accepted.
    """
    try:
        schema = json.loads(schema_json, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"must be JSON text: {error}."
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return f'must be a JSON Schema of "type": "object"{f": {why_object}" if why_object else ""}.'
    return value_schema_problem(schema)


def value_schema_problem(schema: Mapping[str, Any], *, is_bounded: bool = False) -> str:
    """Return what is wrong with a schema of any JSON value, as a sentence; empty if nothing is.

    `is_bounded`: its patterns have to be RE2's.
    """
    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for mistake in meta.iter_errors(schema):
        return f"is not a JSON Schema: {value_path(mistake.path) or 'it'}: {mistake.message[:_LONGEST_MISTAKE]}."
    try:
        _resolve_references(schema)
        if is_bounded:
            bounded_errors({}, json.dumps(schema))
            return pattern_problem(schema)
        _validator(json.dumps(schema)).is_valid({})  # a reference that leads back to itself shows only in use
    except (RecursionError, referencing.exceptions.Unresolvable):
        return "must hold only references to its own parts, such as #/$defs/name, and none that leads back to itself."
    except TooCostly as error:
        return f"cannot be used: {error}."
    return ""


def value_path(path: Sequence[str | int]) -> str:
    """Return a path in JSON in readable form, such as `items[0].name`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


@lru_cache(maxsize=512)
def _validator(schema_json: str) -> Any:
    # With an empty registry a reference to another address is never fetched.
    return LinearPatterns(json.loads(schema_json), registry=Registry())


def _resolve_references(schema: Mapping[str, Any]) -> None:
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(dict(schema)))
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("$ref", "$dynamicRef") and isinstance(inner, str):
                    resolver.lookup(inner)
                pending.append(inner)
        elif isinstance(value, list):
            pending.extend(value)


def _mistakes(error: ValidationError) -> list[str]:
    path = value_path(list(error.absolute_path))
    if error.validator == "required" and isinstance(error.instance, dict):
        required: list[str] = list(error.schema["required"]) if isinstance(error.schema, dict) else []
        missing = [name for name in required if name not in error.instance]
        return [f"{path}.{name} is missing" if path else f"{name} is missing" for name in missing]
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        extra = [name for name in error.instance if name not in known]
        return [f"{path}.{name} is not known" if path else f"{name} is not known" for name in extra]
    # jsonschema's message repeats the whole value, which may be long.
    message = (
        error.message if len(error.message) <= _LONGEST_MISTAKE else f"the value breaks the rule {error.validator!r}"
    )
    return [f"{path}: {message}" if path else message]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
