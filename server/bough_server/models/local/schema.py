"""JSON Schemas reduced to what the embedded model's grammar can enforce, and example values for them.

Leaving out optional properties, patterns and formats makes calls shorter. The tool's own schema is checked later.
"""

import json
from collections.abc import Sequence
from typing import Final, TypeAlias

from pydantic import JsonValue

Schema: TypeAlias = dict[str, JsonValue]

_LONGEST_STRING: Final = 160
_MOST_OPTIONS: Final = 32
_DEEPEST: Final = 5
_TEXT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": _LONGEST_STRING}


def arguments_schema(schema_json: str) -> Schema:
    """Reduce the schema of a tool's arguments to its required properties or, if there are none, to its first one."""
    try:
        schema: JsonValue = json.loads(schema_json)
    except ValueError:
        schema = None
    root = schema if isinstance(schema, dict) else {}
    simple = _simplify(root, root, 0)
    if simple.get("type") != "object":
        return {"type": "object", "properties": {}, "additionalProperties": False}
    _share_length(simple)
    return simple


def call_schema(tools: Sequence[tuple[str, Schema]]) -> Schema:
    """Return the schema of a call of one of these tools: `{"tool": name, "arguments": {...}}`."""
    options: list[JsonValue] = [
        {
            "type": "object",
            "properties": {"tool": {"const": name}, "arguments": arguments},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for name, arguments in tools
    ]
    return {"oneOf": options}


def example(schema: Schema, text: str) -> JsonValue:
    """Return a value that matches a schema of this module, with `text` for its strings."""
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return options[0]
    match schema.get("type"):
        case "object":
            properties = schema.get("properties")
            inner = properties.items() if isinstance(properties, dict) else ()
            return {name: example(value, text) for name, value in inner if isinstance(value, dict)}
        case "array":
            items = schema.get("items")
            return [example(items, text)] if isinstance(items, dict) and schema.get("minItems") else []
        case "integer" | "number":
            return schema.get("minimum", schema.get("maximum", 1))
        case "boolean":
            return True
        case "null":
            return None
    length = schema.get("maxLength")
    return text[: length if isinstance(length, int) else _LONGEST_STRING]


def _simplify(schema: JsonValue, root: Schema, depth: int) -> Schema:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return dict(_TEXT)
    if isinstance(reference := schema.get("$ref"), str):
        return _simplify(_resolve_reference(reference, root), root, depth + 1)
    if "const" in schema:
        return {"enum": [schema["const"]]}
    if isinstance(options := schema.get("enum"), list) and options:
        return {"enum": options[:_MOST_OPTIONS]}
    for choice in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(choice), list) and several:
            return _simplify(_first_not_null(several), root, depth + 1)
    match _type_of(schema):
        case "object":
            return _simplify_object(schema, root, depth)
        case "array":
            least = schema.get("minItems")
            least = least if isinstance(least, int) and 0 < least <= 3 else 0
            items = _simplify(schema.get("items"), root, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": 3}
        case "integer" | "number" as kind:
            bounds = {name: schema[name] for name in ("minimum", "maximum") if isinstance(schema.get(name), int)}
            return {"type": kind, **bounds}
        case "boolean" | "null" as kind:
            return {"type": kind}
    return dict(_TEXT)


def _simplify_object(schema: Schema, root: Schema, depth: int) -> Schema:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    needed = [name for name in required if name in known] if isinstance(required, list) else []
    names = [str(name) for name in needed or list(known)[:1]]
    simple: dict[str, JsonValue] = {name: _simplify(known[name], root, depth + 1) for name in names}
    return {"type": "object", "properties": simple, "required": list(names), "additionalProperties": False}


def _type_of(schema: Schema) -> JsonValue:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((each for each in kind if each != "null"), "null")
    return kind if kind is not None or "properties" not in schema else "object"


def _first_not_null(options: list[JsonValue]) -> JsonValue:
    return next((each for each in options if not (isinstance(each, dict) and each.get("type") == "null")), options[0])


def _resolve_reference(reference: str, root: Schema) -> JsonValue:
    """Return the part of the schema that a reference names; None for references to anything else."""
    value: JsonValue = root
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _share_length(schema: Schema) -> None:
    """Limit the strings of a call so that together they are about as long as a single one may be."""
    # A call with longer strings would exceed the token limit, and JSON that is cut off cannot be parsed.
    strings = list(_strings(schema))
    for text in strings:
        text["maxLength"] = max(24, _LONGEST_STRING // len(strings))


def _strings(schema: Schema) -> list[Schema]:
    if schema.get("type") == "string":
        return [schema]
    inner = list(schema["properties"].values()) if isinstance(schema.get("properties"), dict) else []  # type: ignore[union-attr]
    if "items" in schema:
        inner.append(schema["items"])
    return [text for value in inner if isinstance(value, dict) for text in _strings(value)]
