"""Request bodies for the Responses API. They are stateless: each carries the whole history."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Final

from bough.v1 import message_pb2, model_pb2
from bough_server.models.model import JsonItems, ModelRequest, ToolSpec, forms_of
from bough_server.models.structured_output import (
    Body,
    arguments_text,
    blob_to_text,
    content,
    data_uri,
    error_text,
    further_settings,
    instruction_with_schema,
    part_to_text,
    responses_format,
    result_text,
)

_OURS: Final = frozenset(
    {
        "model",
        "input",
        "instructions",
        "stream",
        "store",
        "tools",
        "include",
        "background",
        "conversation",
        "previous_response_id",
        "prompt",
    }
)
"""Parameters that `extra_json` may not set."""


def responses_body(
    request: ModelRequest,
    *,
    model: str,
    name: str,
    encrypted_reasoning: bool = False,
    structured_output: bool = True,
) -> Body:
    """Build the body of a streamed response that the provider does not store. Raises BadSettings.

    `name` is the model's name in the configuration: only reasoning of that model is sent back. Without
    `structured_output` the instruction asks for the schema.
    """
    schema, instruction = request.output_schema_json, request.instruction
    if schema and not structured_output:
        instruction = instruction_with_schema(instruction, schema)
    body: Body = {"model": model, "input": _input_of(request, name), "stream": True, "store": False}
    if instruction:
        body["instructions"] = instruction
    if encrypted_reasoning:
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    body |= _settings(request.settings)
    if request.tool_choice == "required":
        body["tool_choice"] = "required"  # overrides extra_json: the caller cannot use a text answer
    if schema and structured_output:
        text = body.get("text")  # extra_json may have set other fields of it, such as the verbosity
        body["text"] = {**(text if isinstance(text, dict) else {}), "format": responses_format(schema)}
    return body


def _input_of(request: ModelRequest, name: str) -> list[Body] | JsonItems:
    """Return the input; as JSON that is kept from one request to the next if the request's forms keep it."""
    if not request.forms:
        return input_items(request.messages, name=name)
    make, format = partial(_items_of, name=name), ("responses", name)
    return JsonItems([item for form in forms_of(request) for item in form.json(format, make)])


def input_items(messages: Sequence[message_pb2.Message], *, name: str = "") -> list[Body]:
    """Return the messages as input items; each tool call and each result is a separate item."""
    return [item for message in messages for item in _items_of(message, name=name)]


def _items_of(message: message_pb2.Message, *, name: str) -> list[Body]:
    if message.role == message_pb2.ROLE_ASSISTANT:
        return _assistant(message.parts, name)
    if message.role == message_pb2.ROLE_TOOL:
        return [_result(part.tool_result) for part in message.parts if part.HasField("tool_result")]
    role = "system" if message.role == message_pb2.ROLE_SYSTEM else "user"
    return [{"role": role, "content": content(message.parts, text=_text, blob=_blob)}]


def _assistant(parts: Sequence[message_pb2.Part], name: str) -> list[Body]:
    """Return the items of an assistant message, without reasoning at the end."""
    items = list(_items(parts, name))
    # The API refuses reasoning that the item it led to does not follow.
    while items and items[-1].get("type") == "reasoning":
        items.pop()
    return items


def _items(parts: Sequence[message_pb2.Part], name: str) -> Iterator[Body]:
    for part in parts:
        if part.HasField("tool_call"):
            call = part.tool_call
            arguments = arguments_text(call.arguments_json)
            yield {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": arguments}
        elif part.HasField("reasoning"):
            if part.reasoning.encrypted and part.reasoning.model == name:
                yield _reasoning(part.reasoning)
        elif text := part_to_text(part):
            yield {"role": "assistant", "content": text}


def _reasoning(thought: message_pb2.Reasoning) -> Body:
    summary = [{"type": "summary_text", "text": thought.text}] if thought.text else []
    item: Body = {"type": "reasoning", "summary": summary, "encrypted_content": thought.encrypted}
    return {**item, "id": thought.provider_id} if thought.provider_id else item


def _result(result: message_pb2.ToolResult) -> Body:
    output: object = result_text(result)
    if any(part.HasField("blob") for part in result.parts):
        error = [_text(error_text(result))] if result.HasField("error") else []
        output = [*error, *content(result.parts, text=_text, blob=_blob)]
    return {"type": "function_call_output", "call_id": result.call.call_id, "output": output}


def _text(text: str) -> Body:
    return {"type": "input_text", "text": text}


def _blob(blob: message_pb2.Blob) -> Body:
    kind = blob.media_type
    if kind.startswith("image/"):
        return {"type": "input_image", "image_url": blob.uri or data_uri(blob), "detail": "auto"}
    if kind.startswith(("text/", "audio/", "video/")):
        return _text(blob_to_text(blob))
    if blob.uri:
        return {"type": "input_file", "file_url": blob.uri}
    return {"type": "input_file", "filename": blob.filename or "file", "file_data": data_uri(blob)}


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    """Return a tool with its schema as it is: `strict` would limit it to the few keywords that providers enforce."""
    # Cached, so shared by all requests with this tool: never modified.
    parameters: object = json.loads(spec.input_schema_json) if spec.input_schema_json else {"type": "object"}
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": parameters,
        "strict": False,
    }


def _settings(settings: model_pb2.ModelSettings) -> Body:
    body: Body = {}
    if settings.HasField("temperature"):
        body["temperature"] = settings.temperature
    if settings.HasField("top_p"):
        body["top_p"] = settings.top_p
    if settings.HasField("max_output_tokens"):
        body["max_output_tokens"] = settings.max_output_tokens
    return body | (further_settings(settings.extra_json, ours=_OURS) if settings.extra_json else {})
