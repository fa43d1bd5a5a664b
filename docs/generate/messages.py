"""Messages of the schema as sections of a page, and as JSON Schemas."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from bough.v1 import input_pb2
from bough_server.documents.messages import DECISIONS, LIST_FORMS, SHORTHANDS
from bough_server.documents.yaml import DURATION
from docs.generate.definitions import Definitions, Enum, Field, Message
from docs.generate.text import Json, anchor, cell, wrap

_SCALARS: Final[Mapping[str, Json]] = {
    "text": {"type": "string"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "long": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^-?[0-9]+$"}]},
    "number": {"type": "number"},
    "duration": {"type": "string", "pattern": rf"^\s*{DURATION.pattern}\s*$"},
    "time": {"type": "string"},
    "bytes": {"type": "string"},
    "json": {},
    "mapping": {"type": "object"},
}
_VALUE_TEXTS: Final = {
    "text": "text",
    "boolean": "`true` or `false`",
    "integer": "whole number",
    "long": "whole number",
    "number": "number",
    "duration": "duration",
    "time": "time",
    "bytes": "bytes as base64",
    "json": "any JSON value",
    "mapping": "mapping",
}
_EXACTLY_ONE: Final = "Exactly one is set."


def sections(definitions: Definitions, places: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A section for each message, with the fields that hold it, and one for each enum, after its first use."""
    shown: set[str] = set()
    for message in definitions.messages.values():
        yield from _section(message, places[message.name])
        enums = dict.fromkeys(field.type for field in message.fields if field.kind == "enum")
        for name in enums:
            if name not in shown:
                yield from _values(definitions.enums[name])
                shown.add(name)


def message_schemas(definitions: Definitions, *, title: str) -> dict[str, Json]:
    """The JSON Schema of the first message, of draft 7, with those of the others as its definitions."""
    first, *others = definitions.messages.values()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **_message_schema(first, definitions),
        "definitions": {message.name: _message_schema(message, definitions) for message in others},
    }


_LIST_TEXTS: Final[Mapping[str, str]] = {
    "FieldMapping": "list of {}, a mapping of fields to paths, or one path",
    "GraphEdge": "list of {}, or of chains such as `[START, search, END]`",
    "BranchCase": "list of {}, or a mapping of texts to targets",
}


def _section(message: Message, places: Sequence[str]) -> Iterator[str]:
    yield f"## {message.name}"
    yield ""
    if places:
        yield from wrap(f"In {', '.join(f'`{place}`' for place in places)}.")
        yield ""
    yield from wrap(message.comment)
    yield ""
    for group, fields in groupby(message.fields, key=lambda field: field.group):
        if group:
            yield from wrap(message.groups[group])
            yield ""
        yield from _table(list(fields))


def _table(fields: Sequence[Field]) -> Iterator[str]:
    yield "| field | value | meaning |"
    yield "|---|---|---|"
    for field in fields:
        yield f"| `{field.name}` | {_describe_value(field)} | {cell(field.comment)} |"
    yield ""


def _describe_value(field: Field) -> str:
    shown = f"[{field.type}](#{anchor(field.type)})" if field.kind in ("enum", "message") else _VALUE_TEXTS[field.kind]
    if field.is_map:
        return f"mapping of texts to {shown}"
    if field.is_list and field.type in _LIST_TEXTS:
        return _LIST_TEXTS[field.type].format(shown)
    return f"list of {shown}" if field.is_list else shown


def _values(enum: Enum) -> Iterator[str]:
    yield f"### {enum.name}"
    yield ""
    yield "| value | meaning |"
    yield "|---|---|"
    yield f"| not set | {cell(enum.unset)} |"
    for name, comment in enum.values.items():
        yield f"| `{name}` | {cell(comment)} |"
    yield ""


def _message_schema(message: Message, definitions: Definitions) -> dict[str, Json]:
    properties: dict[str, Json] = {}
    patterns: dict[str, Json] = {}
    for field in message.fields:
        schema = {"description": field.comment, **_allow_null(_field_schema(field, definitions))}
        properties[field.name] = schema
        # As patterns, the other spellings are accepted, and editors do not offer them.
        if others := [name for name in field.names if name != field.name]:
            patterns[f"^({'|'.join(others)})$"] = schema
        if field.text_names:
            patterns[f"^({'|'.join(field.text_names)})$"] = _allow_null({"type": "string"})
    made: dict[str, Json] = {
        "description": message.comment,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if patterns:
        made["patternProperties"] = patterns
    if rules := [*_build_required_rules(message), *_build_group_rules(message)]:
        made["allOf"] = rules
    return made


def _field_schema(field: Field, definitions: Definitions) -> dict[str, Json]:
    if field.kind == "message":
        schema = _reference(field.type)
    elif field.kind == "enum":
        schema = _enum_schema(definitions.enums[field.type])
    else:
        schema = _SCALARS[field.kind]
    assert isinstance(schema, dict)
    if field.is_map:
        return {"type": "object", "additionalProperties": schema}
    if field.is_list and field.type in LIST_FORMS:
        return _list_schema(field.type, schema)
    return {"type": "array", "items": schema} if field.is_list else dict(schema)


def _list_schema(message: str, schema: Json) -> dict[str, Json]:
    """The schema of a list that has shorter forms."""
    text: Json = {"type": "string"}
    match message:
        case "GraphEdge":
            chain: Json = {"type": "array", "items": text, "minItems": 2}
            return {"type": "array", "items": {"anyOf": [schema, chain]}}
        case "BranchCase":
            return {"anyOf": [{"type": "array", "items": schema}, {"type": "object", "additionalProperties": text}]}
    source: Json = {"anyOf": [text, schema]}
    mapping: Json = {"type": "object", "additionalProperties": source}
    return {"anyOf": [{"type": "array", "items": schema}, mapping, text]}


def _reference(message: str) -> Json:
    """The schema of a message, and of the texts that may stand for it."""
    reference: Json = {"$ref": f"#/definitions/{message}"}
    if message in SHORTHANDS:
        return {"anyOf": [{"type": "string"}, reference]}
    if message == input_pb2.ApprovalDecision.DESCRIPTOR.name:
        return {"anyOf": [{"enum": list(DECISIONS)}, reference]}
    return reference


def _enum_schema(enum: Enum) -> Json:
    names = [*enum.values, "UNSPECIFIED"]
    spelled = f"^(UNSPECIFIED|{enum.prefix}({'|'.join(names)}))$"
    return {
        "anyOf": [
            {"enum": list(enum.values), "enumDescriptions": list(enum.values.values())},
            {"type": "string", "pattern": spelled},
        ]
    }


def _allow_null(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The same, or nothing: a key without a value counts as a field that is not set."""
    match schema:
        case {"type": str(name)}:
            return {**schema, "type": [name, "null"]}
        case {"anyOf": list(alternatives)}:
            return {**schema, "anyOf": [*alternatives, {"type": "null"}]}
        case {}:
            return {"anyOf": [dict(schema), {"type": "null"}]} if schema else {}


def _build_required_rules(message: Message) -> Iterator[Json]:
    for field in message.fields:
        if field.is_required:
            yield _is_set(field)


def _build_group_rules(message: Message) -> Iterator[Json]:
    for group, comment in message.groups.items():
        alternatives = [_is_set(field) for field in message.fields if field.group == group]
        none: list[Json] = [] if _EXACTLY_ONE in comment else [{"not": {"anyOf": list(alternatives)}}]
        yield {"oneOf": [*alternatives, *none]}


def _is_set(field: Field) -> Json:
    given: list[Json] = [
        {"required": [name]}
        if field.null_is_json and name not in field.text_names
        else {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in (*field.names, *field.text_names)
    ]
    return given[0] if len(given) == 1 else {"anyOf": given}
