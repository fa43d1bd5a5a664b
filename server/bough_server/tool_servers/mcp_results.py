"""Tools and results of MCP as the project has them."""

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Final

import mcp_types as types

from bough.v1 import message_pb2, tool_pb2
from bough_server.errors import RunError
from bough_server.tool_servers.connection import ListedTool

_LONGEST_MESSAGE: Final = 2_000

_NO_TASKS: Final = (
    "It can only be called as an experimental task of MCP 2025-11-25, which Bough does not speak: use a version of its "
    "server that answers calls, or that speaks MCP 2026-07-28."
)


def to_listed_tool(tool: types.Tool) -> ListedTool:
    """Return a tool as all kinds of tool servers list them."""
    hints, given = tool_pb2.ToolHints(), tool.annotations
    for name in ("read_only", "destructive", "idempotent", "open_world"):
        if given is not None and (value := getattr(given, f"{name}_hint")) is not None:
            setattr(hints, name, value)
    is_task = tool.execution is not None and tool.execution.task_support == "required"
    return ListedTool(
        name=tool.name,
        title=tool.title or (given.title if given is not None else None) or "",
        description=tool.description or "",
        input_schema_json=json.dumps(tool.input_schema),
        output_schema_json=json.dumps(tool.output_schema) if tool.output_schema else "",
        hints=hints,
        problem=_NO_TASKS if is_task else "",
    )


def to_parts(result: types.CallToolResult) -> Sequence[message_pb2.Part]:
    """Return a result as parts. Raises RunError TOOL_FAILED with its text if it is an error."""
    if result.is_error:
        text = " ".join(" ".join(each.text for each in result.content if isinstance(each, types.TextContent)).split())
        raise RunError(text[:_LONGEST_MESSAGE] or "The tool failed, and did not say why.")
    parts: list[message_pb2.Part] = []
    structured = result.structured_content
    if structured is not None:
        parts.append(message_pb2.Part(data_json=json.dumps(structured, ensure_ascii=False)))
    for block in result.content:
        if structured is not None and isinstance(block, types.TextContent) and _is_json_of(block.text, structured):
            continue  # servers repeat it for clients that know no structured content
        parts.append(_to_part(block))
    return parts


def _is_json_of(text: str, value: object) -> bool:
    if value == {"result": text}:  # servers wrap what is no object
        return True
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return value in (parsed, {"result": parsed})


def _to_part(block: types.ContentBlock) -> message_pb2.Part:
    match block:
        case types.TextContent():
            return message_pb2.Part(text=block.text)
        case types.ImageContent() | types.AudioContent():
            return _to_file(block.data, block.mime_type)
        case types.ResourceLink():
            return message_pb2.Part(
                blob=message_pb2.Blob(uri=str(block.uri), media_type=block.mime_type or "application/octet-stream")
            )
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return message_pb2.Part(text=resource.text)
        case types.EmbeddedResource(resource=types.BlobResourceContents() as resource):
            return _to_file(resource.blob, resource.mime_type or "application/octet-stream")
    raise RunError(f"The tool returned content of the unknown type {block.type!r}.")


def _to_file(data: str, media_type: str) -> message_pb2.Part:
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RunError("The tool returned a file that is no valid base64.") from None
    return message_pb2.Part(blob=message_pb2.Blob(data=decoded, media_type=media_type))
