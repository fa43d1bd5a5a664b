"""Request bodies for Chat Completions, and how servers of that API differ.

Parts that the API has no field for are sent as text, so that nothing of a message is lost silently.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, Literal, TypeAlias

from bough.v1 import message_pb2, model_pb2
from bough_server.models.model import JsonItems, ModelRequest, ToolSpec, encode_body, forms_of
from bough_server.models.structured_output import (
    Body,
    arguments_text,
    blob_to_text,
    chat_format,
    content,
    data_uri,
    further_settings,
    instruction_with_schema,
    part_to_text,
    provider_data,
    result_text,
)

MaxTokensField: TypeAlias = Literal["max_completion_tokens", "max_tokens"]
ToolChoice: TypeAlias = Literal["required", "any", "auto"]
SentReasoning: TypeAlias = Literal["as_sent", "required", "none"]

_AUDIO_FORMATS: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}
_OURS: Final = frozenset(
    {
        "model",
        "models",
        "route",
        "provider",
        "plugins",
        "messages",
        "stream",
        "stream_options",
        "tools",
        "functions",
        "n",
    }
)
"""Parameters that `extra_json` may not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDialect:
    """How a server's requests differ from OpenAI's, which are the defaults."""

    structured_output: bool = True
    """Whether the provider accepts a JSON schema for its answer; if not, the instruction asks for it."""
    max_tokens_field: MaxTokensField = "max_completion_tokens"
    tool_choice: ToolChoice = "required"
    """How to say that the model must call a tool; `auto` leaves it to the model, for servers that refuse the others."""
    reasoning: SentReasoning = "as_sent"
    """Which reasoning is sent back to the model that wrote it: `required` adds an empty one to calls without any."""
    stream_usage: bool = True
    """Whether to ask for usage; servers that report it unasked may refuse the question."""


OPENAI: Final = ChatDialect()


def chat_body(request: ModelRequest, *, model: str, name: str = "", dialect: ChatDialect = OPENAI) -> Body:
    """Build the body of a streamed chat completion. Raises BadSettings.

    `name` is the model's name in the configuration: only what that model sent for itself is sent back.
    """
    schema, instruction = request.output_schema_json, request.instruction
    if schema and not dialect.structured_output:
        instruction = instruction_with_schema(instruction, schema)
    body: Body = {
        "model": model,
        "messages": _messages_of(request, instruction, name, dialect.reasoning),
        "stream": True,
    }
    if dialect.stream_usage:
        body["stream_options"] = {"include_usage": True}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    body |= _settings(request.settings, dialect)
    if request.tool_choice == "required":
        body.pop("tool_choice", None)  # what extra_json says: the caller cannot use a text answer
        if dialect.tool_choice != "auto":
            body["tool_choice"] = dialect.tool_choice
    return body | {"response_format": chat_format(schema)} if schema and dialect.structured_output else body


def _messages_of(
    request: ModelRequest, instruction: str, name: str, reasoning: SentReasoning
) -> list[Body] | JsonItems:
    """Return the messages; as JSON that is kept from one request to the next if the request's forms keep it."""
    if not request.forms:
        return chat_messages(instruction, request.messages, name=name, reasoning=reasoning)
    make, format = partial(_bodies, name=name, reasoning=reasoning), ("chat", name, reasoning)
    items = [encode_body(body) for body in chat_messages(instruction, ())]
    for form in forms_of(request):
        items.extend(form.json(format, make))
    return JsonItems(items)


def chat_messages(
    instruction: str,
    messages: Sequence[message_pb2.Message],
    *,
    name: str = "",
    reasoning: SentReasoning = "as_sent",
) -> list[Body]:
    """Return the instruction and the messages in the API's format; each tool result is a separate message.

    The API takes no files in results, and no other message between those of one answer's calls: a message of the user
    after the last of them has their files.
    """
    bodies: list[Body] = [{"role": "system", "content": instruction}] if instruction else []
    files: list[Body] = []
    for message in messages:
        if files and message.role != message_pb2.ROLE_TOOL:
            bodies.append({"role": "user", "content": files})
            files = []
        bodies.extend(_bodies(message, name=name, reasoning=reasoning))
        if message.role == message_pb2.ROLE_TOOL:
            files += [piece for part in message.parts for piece in _files(part.tool_result)]
    return [*bodies, {"role": "user", "content": files}] if files else bodies


def _files(result: message_pb2.ToolResult) -> list[Body]:
    files = [_blob(part.blob) for part in result.parts if part.HasField("blob") and _is_sent(part.blob)]
    return [_text(f"[files of {result.call.name}]"), *files] if files else []


def _is_sent(blob: message_pb2.Blob) -> bool:
    """Return whether the API has a place for a file; else it is said in words."""
    kind = blob.media_type
    if kind.startswith("image/") or kind in _AUDIO_FORMATS:
        return kind.startswith("image/") or blob.WhichOneof("source") == "data"
    return blob.WhichOneof("source") == "data" and not kind.startswith(("text/", "audio/", "video/"))


def _bodies(message: message_pb2.Message, *, name: str, reasoning: SentReasoning) -> list[Body]:
    if message.role == message_pb2.ROLE_ASSISTANT:
        return _assistant(message, name, reasoning)
    if message.role == message_pb2.ROLE_TOOL:
        return [_result(part.tool_result) for part in message.parts if part.HasField("tool_result")]
    role = "system" if message.role == message_pb2.ROLE_SYSTEM else "user"
    return [{"role": role, "content": content(message.parts, text=_text, blob=_blob)}]


def _assistant(message: message_pb2.Message, name: str, reasoning: SentReasoning) -> list[Body]:
    text = "".join(part_to_text(part) for part in message.parts)
    calls = [part.tool_call for part in message.parts if part.HasField("tool_call")]
    if not calls and not text:
        return []
    body: Body = {"role": "assistant", "content": text or None}
    if calls:
        body["tool_calls"] = [_call(call, name) for call in calls]
    if reasoning != "none":
        body |= _reasoning(message.parts, name)
    if reasoning == "required" and calls:
        body.setdefault("reasoning_content", "")
    return [body]


def _reasoning(parts: Sequence[message_pb2.Part], name: str) -> Body:
    """Return the fields of a message in which this model had sent its reasoning."""
    fields: Body = {}
    texts: dict[str, str] = {}
    for part in parts:
        thought = part.reasoning
        if not name or thought.model != name:
            continue
        if thought.provider_field:
            texts[thought.provider_field] = texts.get(thought.provider_field, "") + thought.text
        fields |= provider_data(thought.provider_json)
    return {**texts, **fields}


def _call(call: message_pb2.ToolCall, name: str) -> Body:
    function: Body = {"name": call.name, "arguments": arguments_text(call.arguments_json)}
    body: Body = {"id": call.call_id, "type": "function", "function": function}
    if call.provider_json and call.model == name:
        body = {**provider_data(call.provider_json), **body}
    return body


def _result(result: message_pb2.ToolResult) -> Body:
    return {"role": "tool", "tool_call_id": result.call.call_id, "content": result_text(result, apart=_is_sent)}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _blob(blob: message_pb2.Blob) -> Body:
    kind = blob.media_type
    if not _is_sent(blob):
        return _text(blob_to_text(blob))
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": blob.uri or data_uri(blob)}}
    if kind in _AUDIO_FORMATS:
        data = base64.b64encode(blob.data).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO_FORMATS[kind]}}
    return {"type": "file", "file": {"filename": blob.filename or "file", "file_data": data_uri(blob)}}


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    # Cached, so shared by all requests with this tool: never modified.
    parameters: object = json.loads(spec.input_schema_json) if spec.input_schema_json else {"type": "object"}
    return {
        "type": "function",
        "function": {"name": spec.name, "description": spec.description, "parameters": parameters},
    }


def _settings(settings: model_pb2.ModelSettings, dialect: ChatDialect) -> Body:
    body: Body = {}
    if settings.HasField("temperature"):
        body["temperature"] = settings.temperature
    if settings.HasField("top_p"):
        body["top_p"] = settings.top_p
    if settings.HasField("max_output_tokens"):
        body[dialect.max_tokens_field] = settings.max_output_tokens
    return body | (further_settings(settings.extra_json, ours=_OURS) if settings.extra_json else {})
