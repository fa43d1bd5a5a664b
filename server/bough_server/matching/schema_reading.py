"""Read JSON Schemas: what a reference leads to, which types there are, and a few values that fit."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import referencing.exceptions

from bough_server.matching.schemas import build_check
from bough_server.matching.work import spend

MESSAGE_TITLE: Final = "bough.v1.Message"
"""The title of the schema of a Message in protobuf's JSON mapping."""

DEEPEST: Final = 40
"""How far references are followed, and schemas are read into their depth."""

WITHOUT_RULE: Final = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions"),
    )
)
"""Keywords that no value can break."""

_SAMPLE_STEPS: Final = 300
_CHECK_STEPS: Final = 2_000
"""The steps of reading a schema to check values with it, beside one for each byte."""

Schema = Any
"""A schema as JSON: an object, or true or false."""


def resolve(schema: Schema, root: Schema) -> Schema:
    """Follow local references; any value if one cannot be followed, or has rules beside it."""
    for _ in range(DEEPEST):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        if not schema.keys() - {"$ref"} <= WITHOUT_RULE:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            return {"allOf": [{"$ref": schema["$ref"]}, rest]}
        schema = _look_up(str(schema["$ref"]), root)
    return {}


def _look_up(reference: str, root: Schema) -> Schema:
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return {}
    found = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return {}
    return found


def types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the types that a schema names; None if it names none."""
    named = schema.get("type")
    if named is None:
        return None
    types = {named} if isinstance(named, str) else set(named)
    return types | {"integer"} if "number" in types else types


def build_fit_check(schema: Schema) -> Callable[[Any], bool | None]:
    """Return what says whether a value fits a schema: None if that cannot be determined.

    As all that reads schemas here, it counts its steps, and raises TooMuchWork.
    """
    spend(_CHECK_STEPS)
    check = build_check(schema)

    def is_fitting(value: Any) -> bool | None:
        spend(_SAMPLE_STEPS)
        try:
            return check(value)
        except (RecursionError, referencing.exceptions.Unresolvable, TypeError, ValueError, AttributeError):
            return None

    return is_fitting


def write(schema: Schema) -> str:
    """Return a schema as JSON text."""
    text = json.dumps(schema)
    spend(len(text))
    return text


def samples(schema: Schema, root: Schema, depth: int) -> Iterator[Any]:
    """Yield a few values that probably fit a schema."""
    spend(_SAMPLE_STEPS)
    schema = resolve(schema, root)
    if schema is True or schema == {}:
        yield from (None, "", 0, {}, [])
        return
    if not isinstance(schema, dict) or depth < 0:
        return
    if "const" in schema:
        yield schema["const"]
        return
    if isinstance(schema.get("enum"), list):
        yield from schema["enum"][:DEEPEST]
        return
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key, ()):
            yield from samples(each, root, depth - 1)
    for name in sorted(types_of(schema) or ()):
        yield from samples_of_type(name, schema, root, depth)


def samples_of_type(name: str, schema: Mapping[str, Any], root: Schema, depth: int) -> Iterator[Any]:
    match name:
        case "null":
            yield None
        case "boolean":
            yield from (True, False)
        case "integer":
            yield from (0, 1, -1, schema.get("minimum", 2), schema.get("maximum", 3))
        case "number":
            yield from (0.5, -0.5, schema.get("minimum", 2.5))
        case "string":
            yield from ("", "a", "a" * min(int(schema.get("minLength", 2)), 1_000))
        case "array":
            least = max(int(schema.get("minItems", 0)), len(schema.get("prefixItems", ())))
            yield [first_sample(item_at(schema, index), root, depth) for index in range(min(least, 100))]
        case "object":
            yield {
                key: first_sample(schema.get("properties", {}).get(key, {}), root, depth)
                for key in schema.get("required", ())
            }


def first_sample(schema: Schema, root: Schema, depth: int) -> Any:
    """Return a value that fits a schema as far as that needs none of its surroundings; None if none is found."""
    found = samples(schema, root, depth - 1)
    if "$ref" in write(schema):
        return next(found, None)
    is_fitting = build_fit_check(schema)
    return next((value for value in found if is_fitting(value) is True), None)


def item_at(schema: Mapping[str, Any], index: int) -> Schema:
    before = schema.get("prefixItems", ())
    return before[index] if index < len(before) else schema.get("items", {})


def is_message(schema: Schema) -> bool:
    """Return whether a schema is that of a Message."""
    return isinstance(schema, dict) and schema.get("title") == MESSAGE_TITLE and schema.get("type") == "object"
