"""What every API is told alike: parts and results in words, data URIs, arguments, further settings; it knows no API."""

import base64
import json
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from bough.v1 import message_pb2

Body: TypeAlias = dict[str, object]
"""A JSON object as it is sent."""


class BadSettings(ValueError):
    """The further parameters of a model's settings cannot be sent; the message says why."""


def result_text(result: message_pb2.ToolResult) -> str:
    """A tool's result as a model reads it."""
    if result.HasField("error"):
        return f"Error: {result.error.message}"
    return "\n".join(filter(None, (in_words(part) for part in result.parts)))


def content(
    parts: Sequence[message_pb2.Part], *, text: Callable[[str], Body], blob: Callable[[message_pb2.Blob], Body]
) -> str | list[Body]:
    """What a message says: one text or, where there are files, pieces as an API words them, empty texts left out."""
    if not any(part.HasField("blob") for part in parts):
        return "\n".join(filter(None, (in_words(part) for part in parts)))
    pieces = (blob(part.blob) if part.HasField("blob") else text(in_words(part)) for part in parts)
    return [piece for piece in pieces if piece != text("")]


def arguments_text(text: str) -> str:
    """Arguments that every provider takes back: many refuse a request in which they are not a JSON object."""
    if not text.strip():
        return "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps({"invalid_json": text}, ensure_ascii=False)


def data_uri(blob: message_pb2.Blob) -> str:
    """A file's bytes as a URI."""
    kind = blob.media_type or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(blob.data).decode()}"


def in_words(part: message_pb2.Part) -> str:
    """A part as text; reasoning and calls, which have their own place or none, are empty."""
    content = part.WhichOneof("content")
    if content == "text":
        return part.text
    if content == "data_json":
        return part.data_json
    if content == "blob":
        return blob_in_words(part.blob)
    return "" if content in ("reasoning", "tool_call", "tool_result") else "[content of an unknown kind]"


def blob_in_words(blob: message_pb2.Blob) -> str:
    """A file as text: where it is, what it says, or how large it is."""
    name = f" {blob.filename!r}" if blob.filename else ""
    kind = blob.media_type or "file"
    if blob.uri:
        return f"[{kind}{name} at {blob.uri}]"
    if kind.startswith("text/"):
        return f"[{kind}{name}]\n{blob.data.decode('utf-8', 'replace')}"
    return f"[{kind}{name} of {len(blob.data)} bytes, not shown]"


def further_settings(text: str, *, ours: Collection[str]) -> Body:
    """The parameters of `extra_json`; those in `ours` it may not set. Raises BadSettings."""
    try:
        further = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSettings("extra_json is not JSON.") from error
    if not isinstance(further, dict):
        raise BadSettings("extra_json is not one JSON object.")
    if taken := sorted(further.keys() & set(ours)):
        # A definition may come over the wire: it must not choose another model than the operator's.
        raise BadSettings(f"extra_json may not set {', '.join(taken)}.")
    return further
