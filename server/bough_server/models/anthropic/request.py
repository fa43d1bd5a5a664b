"""Anthropic's Messages API: where its requests go, and their bodies.

The API has rules that others lack: user and assistant alternate, a call's result is in the message after it, thinking
comes back with its signature and before the calls it led to, and no text is blank.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

from bough.v1 import message_pb2
from bough_server.models.answer import Answer
from bough_server.models.anthropic.message import StreamedMessage
from bough_server.models.http import Address
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.models.structured_output import (
    Body,
    arguments_object,
    blob_to_text,
    further_settings,
    instruction_with_schema,
    is_strict,
    part_to_text,
    result_text,
)

DEFAULT_MAX_TOKENS: Final = 8192
"""Tokens of an answer, which the API requires to be bounded; those of a thinking budget come on top."""

_VERSION: Final = "2026-10-21"
"""The version of the API that requests are written for; a provider keeps one for years."""
_OURS: Final = frozenset({"model", "messages", "system", "stream", "tools", "container", "mcp_servers"})
"""Parameters that `extra_json` may not set."""
_IMAGES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_NOT_OF_IDS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_CACHED: Final = {"type": "ephemeral"}
_LEFT_OUT: Final = "[Earlier messages are left out.]"
_GO_ON: Final = "Continue."
_EMPTY: Final = "[empty]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesApi:
    """The Messages API."""

    path: ClassVar[str] = "/v1/messages"
    base_url: ClassVar[str] = "https://api.anthropic.com"
    answer: ClassVar[type[Answer]] = StreamedMessage
    structured_output: bool = True
    """Whether the model accepts a JSON schema for its answer; if not, the instruction asks for it."""
    caches: bool = True
    """Whether requests are marked so that the provider caches what the next one repeats."""

    def address(self, base_url: str, key: str) -> Address:
        """Return where requests go, with the key if there is one."""
        signed = {"Authorization": f"Bearer {key}"} if key else {}
        return Address(base_url=base_url, headers={"anthropic-version": _VERSION, **signed})

    def body(self, request: ModelRequest, *, model: str, name: str) -> Body:
        """Build the body of a request. Raises BadSettings."""
        return messages_body(
            request, model=model, name=name, caches=self.caches, structured_output=self.structured_output
        )


def messages_body(
    request: ModelRequest, *, model: str, name: str, caches: bool = True, structured_output: bool = True
) -> Body:
    """Build the body of a streamed message. Raises BadSettings.

    `name` is the model's name in the configuration: only thinking of that model is sent back. `caches` marks the
    instruction and the last message, so that the provider caches what the next request repeats.
    """
    schema, instruction = request.output_schema_json, request.instruction
    has_format = bool(schema) and structured_output and is_strict(schema)
    if schema and not has_format:
        instruction = instruction_with_schema(instruction, schema)
    messages = api_messages(request.messages, name=name)
    body: Body = {"model": model, "max_tokens": DEFAULT_MAX_TOKENS, "messages": messages, "stream": True}
    if instruction.strip():
        body["system"] = [{"type": "text", "text": instruction}]
    body |= _tools(request, messages)
    _apply_settings(body, request)
    if has_format:
        config = body.get("output_config")  # extra_json may have set other fields of it, such as the effort
        own = config if isinstance(config, dict) else {}
        body["output_config"] = {**own, "format": {"type": "json_schema", "schema": json.loads(schema)}}
    if caches:
        _mark(body)
    return body


def api_messages(messages: Sequence[message_pb2.Message], *, name: str = "") -> list[Body]:
    """Return messages with alternating roles, the first and the last the user's; neighbors of one role are joined."""
    bodies: list[Body] = []
    blocks: list[Body] = []
    for message in messages:
        is_models = message.role == message_pb2.ROLE_ASSISTANT
        role = "assistant" if is_models else "user"
        own = list(_assistant(message.parts, name) if is_models else _user(message))
        if not own:
            continue
        if bodies and bodies[-1]["role"] == role:
            blocks.extend(own)
            continue
        blocks = own
        bodies.append({"role": role, "content": blocks})
    if not bodies or bodies[0]["role"] != "user":
        bodies.insert(0, {"role": "user", "content": [_text(_LEFT_OUT)]})
    if bodies[-1]["role"] != "user":
        bodies.append({"role": "user", "content": [_text(_GO_ON)]})
    return bodies


def _assistant(parts: Sequence[message_pb2.Part], name: str) -> Iterator[Body]:
    for part in parts:
        thought = part.reasoning
        if part.HasField("tool_call"):
            call = part.tool_call
            arguments = arguments_object(call.arguments_json)
            yield {"type": "tool_use", "id": _id(call.call_id), "name": call.name, "input": arguments}
        elif thought.encrypted and thought.model == name:
            yield {"type": "redacted_thinking", "data": thought.encrypted}
        elif thought.signature and thought.model == name:
            yield {"type": "thinking", "thinking": thought.text, "signature": thought.signature}
        elif (text := part_to_text(part)).strip():
            yield _text(text)


def _user(message: message_pb2.Message) -> Iterator[Body]:
    results = [part.tool_result for part in message.parts if part.HasField("tool_result")]
    if results:
        yield from map(_result, results)
        return
    blocks = _blocks(message.parts)
    yield from blocks or [_text(_EMPTY)]


def _result(result: message_pb2.ToolResult) -> Body:
    content: object = result_text(result)
    if any(part.HasField("blob") for part in result.parts):
        error = [_text(f"Error: {result.error.message}")] if result.HasField("error") else []
        content = [*error, *_blocks(result.parts)]
    body: Body = {"type": "tool_result", "tool_use_id": _id(result.call.call_id), "content": content}
    return body | {"is_error": True} if result.HasField("error") else body


def _blocks(parts: Sequence[message_pb2.Part]) -> list[Body]:
    blocks = (_blob(part.blob) if part.HasField("blob") else _text(part_to_text(part)) for part in parts)
    return [block for block in blocks if block["type"] != "text" or str(block["text"]).strip()]


def _blob(blob: message_pb2.Blob) -> Body:
    kind = {"application/pdf": "document"}.get(blob.media_type, "image" if blob.media_type in _IMAGES else "")
    if not kind:
        return _text(blob_to_text(blob))
    if blob.uri:
        return {"type": kind, "source": {"type": "url", "url": blob.uri}}
    data = base64.b64encode(blob.data).decode()
    return {"type": kind, "source": {"type": "base64", "media_type": blob.media_type, "data": data}}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _id(call_id: str) -> str:
    """Return a call's id in the characters that the API accepts; other providers' ids may have more."""
    return _NOT_OF_IDS.sub("_", call_id)


def _tools(request: ModelRequest, messages: Sequence[Body]) -> Body:
    """Return the tools; those that the history calls if there are none, because calls without tools are refused."""
    if request.tools:
        return {"tools": [_tool(tool) for tool in request.tools]}
    called = {str(block["name"]): None for block in _all_blocks(messages) if block["type"] == "tool_use"}
    if not called:
        return {}
    stubs = [{"name": name, "input_schema": {"type": "object"}} for name in called]
    return {"tools": stubs, "tool_choice": {"type": "none"}}


def _all_blocks(messages: Sequence[Body]) -> Iterator[Body]:
    for message in messages:
        content = message["content"]
        yield from content if isinstance(content, list) else ()


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    # Cached, so shared by all requests with this tool: never modified.
    schema: object = json.loads(spec.input_schema_json) if spec.input_schema_json else {"type": "object"}
    return {"name": spec.name, "description": spec.description, "input_schema": schema}


def _apply_settings(body: Body, request: ModelRequest) -> None:
    settings = request.settings
    further = further_settings(settings.extra_json, ours=_OURS) if settings.extra_json else {}
    thinking = further.get("thinking")
    mode = thinking if isinstance(thinking, dict) else {}
    if mode.get("type") == "enabled" and not _begins_with_thinking(body["messages"]):
        # The API refuses to think in a turn whose calls came without thinking, from another model.
        del further["thinking"]
        mode = {}
    if settings.HasField("temperature"):
        body["temperature"] = settings.temperature
    if settings.HasField("top_p"):
        body["top_p"] = settings.top_p
    budget = mode.get("budget_tokens")
    body["max_tokens"] = DEFAULT_MAX_TOKENS + (budget if isinstance(budget, int) else 0)
    if settings.HasField("max_output_tokens"):
        body["max_tokens"] = settings.max_output_tokens
    body |= further
    if request.tool_choice == "required":
        # Thinking and a forced call exclude each other; the caller asks again if no tool is called.
        body.pop("tool_choice", None)
        if mode.get("type") not in ("enabled", "adaptive"):
            body["tool_choice"] = {"type": "any"}


def _begins_with_thinking(messages: object) -> bool:
    """Return whether every message of the current turn that calls tools begins with thinking."""
    for message in reversed(messages if isinstance(messages, list) else []):
        blocks = message["content"]
        if message["role"] == "user" and not any(block["type"] == "tool_result" for block in blocks):
            break
        calls = message["role"] == "assistant" and any(block["type"] == "tool_use" for block in blocks)
        if calls and blocks[0]["type"] not in ("thinking", "redacted_thinking"):
            return False
    return True


def _mark(body: Body) -> None:
    """Mark the end of what is the same in every request, and the end of this one."""
    for name in ("system", "tools"):
        blocks = body.get(name)
        if isinstance(blocks, list) and blocks:
            body[name] = [*blocks[:-1], {**blocks[-1], "cache_control": _CACHED}]
            break
    messages = body["messages"]
    if isinstance(messages, list) and messages[-1]["role"] == "user":
        *before, last = messages[-1]["content"]
        body["messages"] = [*messages[:-1], {"role": "user", "content": [*before, {**last, "cache_control": _CACHED}]}]
