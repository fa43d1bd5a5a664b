"""The reference of agent fields and the JSON Schema of agent files, both made from the schema."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from bough_server.agents.definition import SHORTHANDS
from bough_server.documents import DURATION
from docs.generate.definitions import Definitions, Enum, Field, Message
from docs.generate.text import Json, anchor, cell, link_to_editors

_SCALARS: Final[Mapping[str, Json]] = {
    "text": {"type": "string"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "duration": {"type": "string", "pattern": rf"^\s*{DURATION.pattern}\s*$"},
    "json": {},
}
_SHOWN: Final = {
    "text": "text",
    "boolean": "`true` or `false`",
    "integer": "whole number",
    "number": "number",
    "duration": "duration",
    "json": "any JSON value",
}
_EXACTLY_ONE: Final = "Exactly one is set."

_INTRODUCTION: Final = """# Agent fields

Every field of an agent file. This page is generated from [the schema](../../proto/bough/v1/agent.proto) by `make docs`.

A file holds one definition, or several with `---` between them, as YAML or JSON:

```yaml
# agents/lead.yaml
# yaml-language-server: $schema=../agent.schema.json
name: lead
description: Answers questions with the help of a researcher.
llm:
  instruction: Ask the researcher for facts, then answer in two sentences.
  max_steps: 5
sub_agents:
  - {agent: researcher, on_failure: ABORT}
limits: {tokens: 20000, wall_duration: 2m}
---
name: researcher
description: Knows facts about a topic.
llm: {instruction: Answer with facts only.}
history: {scope: NONE}
```

- A field that is left out, or has no value, is not set.
- A duration is a text such as `10m`, `50ms` or `1h30m`.
- A tool in `tools` and an agent in `sub_agents` can be its name alone: `search` is `{name: search}`, or
  `{agent: search}`.
- The values of an enum can be written with or without their prefix: `NONE` or `HISTORY_SCOPE_NONE`.
- `output_schema`, `input_schema` and `extra` hold JSON values as plain YAML. Under the names that the schema
  has, such as `output_schema_json`, they hold the same as text.
- Names in camelCase, as in JSON that protobuf writes, are accepted as well.
"""


def reference(definitions: Definitions) -> str:
    """The page docs/reference/agent-fields.md."""
    places = _places(definitions)
    lines = [_INTRODUCTION, *link_to_editors("agent", "agent"), ""]
    shown: set[str] = set()
    for message in definitions.messages.values():
        lines += _section(message, places[message.name])
        enums = dict.fromkeys(field.type for field in message.fields if field.kind == "enum")
        for name in enums:
            if name not in shown:
                lines += _values(definitions.enums[name])
                shown.add(name)
    return "\n".join(lines)


def json_schema(definitions: Definitions) -> Json:
    """The JSON Schema of a document of an agent file, of draft 7, which editors read."""
    first, *others = definitions.messages.values()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A definition of a Bough agent",
        **_message_schema(first, definitions),
        "definitions": {message.name: _message_schema(message, definitions) for message in others},
    }


def _places(definitions: Definitions) -> dict[str, list[str]]:
    """The fields that hold each message, as paths from the definition down; none for the definition itself."""
    first = next(iter(definitions.messages))
    places: dict[str, list[str]] = {name: [] for name in definitions.messages}
    waiting = [(first, "")]
    while waiting:
        name, prefix = waiting.pop(0)
        for field in definitions.messages[name].fields:
            if field.kind == "message":
                place = f"{prefix}{field.name}{'[]' if field.is_list else ''}"
                places[field.type].append(place)
                waiting.append((field.type, f"{place}."))
    return places


def _section(message: Message, places: Sequence[str]) -> Iterator[str]:
    yield f"## {message.name}"
    yield ""
    if places:
        yield f"In {', '.join(f'`{place}`' for place in places)}."
        yield ""
    yield message.comment
    yield ""
    for group, fields in groupby(message.fields, key=lambda field: field.group):
        if group:
            yield message.groups[group]
            yield ""
        yield from _table(list(fields))


def _table(fields: Sequence[Field]) -> Iterator[str]:
    yield "| field | value | meaning |"
    yield "|---|---|---|"
    for field in fields:
        yield f"| `{field.name}` | {_shown(field)} | {cell(field.comment)} |"
    yield ""


def _shown(field: Field) -> str:
    shown = f"[{field.type}](#{anchor(field.type)})" if field.type and field.kind != "duration" else _SHOWN[field.kind]
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
        schema = {"description": field.comment, **_or_null(_field_schema(field, definitions))}
        properties[field.name] = schema
        # As patterns, the other spellings are accepted, and editors do not offer them.
        if others := [name for name in field.names if name != field.name]:
            patterns[f"^({'|'.join(others)})$"] = schema
        if field.text_names:
            patterns[f"^({'|'.join(field.text_names)})$"] = _or_null({"type": "string"})
    made: dict[str, Json] = {
        "description": message.comment,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if patterns:
        made["patternProperties"] = patterns
    if rules := [*_required(message), *_groups(message)]:
        made["allOf"] = rules
    return made


def _field_schema(field: Field, definitions: Definitions) -> dict[str, Json]:
    if field.kind == "message":
        reference: Json = {"$ref": f"#/definitions/{field.type}"}
        schema: Json = {"anyOf": [{"type": "string"}, reference]} if field.type in SHORTHANDS else reference
    elif field.kind == "enum":
        schema = _enum_schema(definitions.enums[field.type])
    else:
        schema = _SCALARS[field.kind]
    assert isinstance(schema, dict)
    return {"type": "array", "items": schema} if field.is_list else dict(schema)


def _enum_schema(enum: Enum) -> Json:
    names = [*enum.values, "UNSPECIFIED"]
    spelled = f"^(UNSPECIFIED|{enum.prefix}({'|'.join(names)}))$"
    return {
        "anyOf": [
            {"enum": list(enum.values), "enumDescriptions": list(enum.values.values())},
            {"type": "string", "pattern": spelled},
        ]
    }


def _or_null(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The same, or nothing: a key without a value counts as a field that is not set."""
    match schema:
        case {"type": str(name)}:
            return {**schema, "type": [name, "null"]}
        case {"anyOf": list(alternatives)}:
            return {**schema, "anyOf": [*alternatives, {"type": "null"}]}
        case {}:
            return {"anyOf": [dict(schema), {"type": "null"}]} if schema else {}


def _required(message: Message) -> Iterator[Json]:
    for field in message.fields:
        if field.is_required:
            yield _is_set(field)


def _groups(message: Message) -> Iterator[Json]:
    for group, comment in message.groups.items():
        alternatives = [_is_set(field) for field in message.fields if field.group == group]
        none: list[Json] = [] if _EXACTLY_ONE in comment else [{"not": {"anyOf": list(alternatives)}}]
        yield {"oneOf": [*alternatives, *none]}


def _is_set(field: Field) -> Json:
    given: list[Json] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in (*field.names, *field.text_names)
    ]
    return given[0] if len(given) == 1 else {"anyOf": given}
