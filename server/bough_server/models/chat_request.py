"""A model request in the words of the Chat Completions API; it sends nothing.

What the API has no field for is said in text, so that no part of a message is lost in silence.
"""

import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from bough.v1 import agent_pb2, message_pb2
from bough_server.models.forms import chat_format, told_in_words
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.models.wording import (
    Body,
    arguments_text,
    blob_in_words,
    content,
    data_uri,
    further_settings,
    in_words,
    result_text,
)

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


def chat_body(request: ModelRequest, *, model: str, structured_output: bool = True) -> Body:
    """The body of a streamed chat completion. Raises BadSettings.

    The form of the answer is asked for in words unless the provider can be asked for it.
    """
    schema, instruction = request.output_schema_json, request.instruction
    if schema and not structured_output:
        instruction = told_in_words(instruction, schema)
    body: Body = {
        "model": model,
        "messages": chat_messages(instruction, request.messages),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    body |= _settings(request.settings)
    if request.tool_choice == "required":
        body["tool_choice"] = "required"  # whatever the settings say: an answer in words is none
    return body | {"response_format": chat_format(schema)} if schema and structured_output else body


def chat_messages(instruction: str, messages: Sequence[message_pb2.Message]) -> list[Body]:
    """The instruction and the messages; each tool result is a message of its own."""
    said: list[Body] = [{"role": "system", "content": instruction}] if instruction else []
    for message in messages:
        if message.role == message_pb2.ROLE_ASSISTANT:
            said.extend(_assistant(message))
        elif message.role == message_pb2.ROLE_TOOL:
            said.extend(_result(part.tool_result) for part in message.parts if part.HasField("tool_result"))
        else:
            role = "system" if message.role == message_pb2.ROLE_SYSTEM else "user"
            said.append({"role": role, "content": content(message.parts, text=_text, blob=_blob)})
    return said


def _assistant(message: message_pb2.Message) -> list[Body]:
    text = "".join(in_words(part) for part in message.parts)
    calls = [part.tool_call for part in message.parts if part.HasField("tool_call")]
    if not calls:
        return [{"role": "assistant", "content": text}] if text else []
    return [{"role": "assistant", "content": text or None, "tool_calls": [_call(call) for call in calls]}]


def _call(call: message_pb2.ToolCall) -> Body:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments_text(call.arguments_json)},
    }


def _result(result: message_pb2.ToolResult) -> Body:
    return {"role": "tool", "tool_call_id": result.call.call_id, "content": result_text(result)}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _blob(blob: message_pb2.Blob) -> Body:
    kind = blob.media_type
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": blob.uri or data_uri(blob)}}
    if not blob.data or kind.startswith("text/"):
        return _text(blob_in_words(blob))
    if kind in _AUDIO_FORMATS:
        data = base64.b64encode(blob.data).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO_FORMATS[kind]}}
    if kind.startswith(("audio/", "video/")):
        return _text(blob_in_words(blob))
    return {"type": "file", "file": {"filename": blob.filename or "file", "file_data": data_uri(blob)}}


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    parameters: object = json.loads(spec.input_schema_json) if spec.input_schema_json else {"type": "object"}
    return {
        "type": "function",
        "function": {"name": spec.name, "description": spec.description, "parameters": parameters},
    }


def _settings(settings: agent_pb2.ModelSettings) -> Body:
    body: Body = {}
    if settings.HasField("temperature"):
        body["temperature"] = settings.temperature
    if settings.HasField("top_p"):
        body["top_p"] = settings.top_p
    if settings.HasField("max_output_tokens"):
        body["max_completion_tokens"] = settings.max_output_tokens
    return body | (further_settings(settings.extra_json, ours=_OURS) if settings.extra_json else {})
