"""Parse a call's arguments as a model wrote them, and validate them against a JSON Schema."""

import json
from collections.abc import Sequence
from typing import Any, Final

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.matching.schemas import LONGEST_MISTAKE, schema_mistakes, value_schema_problem

_MOST_MISTAKES: Final = 5


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
    shown = [mistake[:LONGEST_MISTAKE] for mistake in mistakes[:_MOST_MISTAKES]]
    if len(mistakes) > len(shown):
        shown.append(f"and {len(mistakes) - len(shown)} more")
    message = f"The arguments do not fit: {'; '.join(shown)}."
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)


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


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
