"""Structured output: JSON schemas as each provider accepts them, and content as text."""

import base64
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from bough.v1 import message_pb2

Body: TypeAlias = dict[str, object]
"""A JSON object of a request."""

_NAME: Final = "answer"
_MOST_NESTING: Final = 100
"""The most levels of arguments that are sent as an object."""
_STRICT: Final = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "anyOf",
        "$ref",
        "$defs",
        "title",
        "description",
    }
)
"""Keywords that every provider can enforce; a schema with any other is not sent as a strict one."""


class BadSettings(ValueError):
    """The `extra_json` of a model's settings cannot be sent; the message says why."""


def error_text(result: message_pb2.ToolResult) -> str:
    """Return the error of a tool's result as text for the model; empty if it did not fail."""
    return f"Error: {result.error.message}" if result.HasField("error") else ""


def result_text(result: message_pb2.ToolResult, *, apart: Callable[[message_pb2.Blob], bool] | None = None) -> str:
    """Return a tool's result as text for the model: its error if it failed, then its content.

    Files that are sent `apart` are said to be shown below.
    """
    texts = (
        _describe_file_below(part.blob) if apart and part.HasField("blob") and apart(part.blob) else part_to_text(part)
        for part in result.parts
    )
    return "\n".join(filter(None, (error_text(result), *texts)))


def _describe_file_below(blob: message_pb2.Blob) -> str:
    return f"[{_describe_file(blob)}, shown below]"


def content(
    parts: Sequence[message_pb2.Part], *, text: Callable[[str], Body], blob: Callable[[message_pb2.Blob], Body]
) -> str | list[Body]:
    """Return a message's content: one text or, if it has files, pieces in an API's format without empty texts."""
    if not any(part.HasField("blob") for part in parts):
        return "\n".join(filter(None, (part_to_text(part) for part in parts)))
    pieces = (blob(part.blob) if part.HasField("blob") else text(part_to_text(part)) for part in parts)
    return [piece for piece in pieces if piece != text("")]


def arguments_text(text: str) -> str:
    """Return arguments that every provider accepts: many refuse a request whose arguments are not a JSON object."""
    if not text.strip():
        return "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps({"invalid_json": text}, ensure_ascii=False)


def arguments_object(text: str) -> object:
    """Return arguments as an object, for APIs that have no text for them.

    Deeply nested ones are sent as text: `json` reads more levels than it writes, and requests nest them further.
    """
    arguments: object = json.loads(arguments_text(text))
    level = [arguments]
    for _ in range(_MOST_NESTING):
        level = [child for value in level for child in _children(value)]
        if not level:
            return arguments
    return {"invalid_json": text}


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def data_uri(blob: message_pb2.Blob) -> str:
    """Return a file's bytes as a data URI."""
    kind = blob.media_type or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(blob.data).decode()}"


def part_to_text(part: message_pb2.Part) -> str:
    """Return a part as text; empty for reasoning, tool calls and results, which APIs have other fields for, or none."""
    content = part.WhichOneof("content")
    if content == "text":
        return part.text
    if content == "data_json":
        return part.data_json
    if content == "blob":
        return blob_to_text(part.blob)
    return "" if content in ("reasoning", "tool_call", "tool_result") else "[content of an unknown kind]"


def blob_to_text(blob: message_pb2.Blob) -> str:
    """Return a file as text: its URI, its text, or its size."""
    if blob.uri:
        return f"[{_describe_file(blob)} at {blob.uri}]"
    if blob.media_type.startswith("text/") and not blob.sha256:
        return f"[{_describe_file(blob)}]\n{blob.data.decode('utf-8', 'replace')}"
    return f"[{_describe_file(blob)} of {len(blob.data) or blob.size_bytes} bytes, not shown]"


def _describe_file(blob: message_pb2.Blob) -> str:
    kind = blob.media_type or "file"
    return f"{kind} {blob.filename!r}" if blob.filename else kind


def further_settings(text: str, *, ours: Collection[str]) -> Body:
    """Parse `extra_json`. Raises BadSettings if it is not a JSON object or sets a parameter in `ours`."""
    try:
        further = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSettings("extra_json is not JSON.") from error
    if not isinstance(further, dict):
        raise BadSettings("extra_json is not one JSON object.")
    if forbidden := sorted(further.keys() & set(ours)):
        # Clients may send definitions: they must not choose another model than the operator's.
        raise BadSettings(f"extra_json may not set {', '.join(forbidden)}.")
    return further


def provider_data(text: str) -> Body:
    """Return the `provider_json` of a part, which the model's own adapter had recorded; empty for none."""
    value: object = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}


def is_strict(schema_json: str) -> bool:
    """Return whether every provider can enforce a schema."""
    return _is_strict_schema(json.loads(schema_json))


def chat_format(schema_json: str) -> Body:
    """Return the `response_format` of Chat Completions."""
    return {"type": "json_schema", "json_schema": _build_schema_format(schema_json)}


def responses_format(schema_json: str) -> Body:
    """Return the `text.format` of Responses."""
    return {"type": "json_schema", **_build_schema_format(schema_json)}


def instruction_with_schema(instruction: str, schema_json: str) -> str:
    """Return the instruction with the schema in it, for providers that accept no schema."""
    schema_request = (
        "Your final answer, when you call no tool, must be one JSON object and nothing around it. "
        f"It must fit this JSON Schema:\n{schema_json}"
    )
    return f"{instruction}\n\n{schema_request}" if instruction else schema_request


@lru_cache(maxsize=256)
def _build_schema_format(schema_json: str) -> Body:
    # Cached, so shared by all requests with this schema: never modified.
    schema: object = json.loads(schema_json)
    return {"name": _NAME, "schema": schema, "strict": _is_strict_schema(schema)}


def _is_strict_schema(schema: object) -> bool:
    """Return whether providers can enforce a schema: its objects are closed and require all of their properties."""
    if not isinstance(schema, dict) or not schema.keys() <= _STRICT:
        return False
    properties = schema.get("properties", {})
    is_object = schema.get("type") == "object" or "properties" in schema
    if is_object and (
        schema.get("additionalProperties") is not False or set(schema.get("required", [])) != {*properties}
    ):
        return False
    inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", [])]
    inner += [schema["items"]] if "items" in schema else []
    return all(_is_strict_schema(each) for each in inner)
