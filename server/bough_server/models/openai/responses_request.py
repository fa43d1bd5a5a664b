"""Body of a request to the Responses API, stateless: it carries the whole history."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from bough.v1 import message_pb2, model_pb2
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.models.structured_output import (
    Body,
    arguments_text,
    as_text,
    blob_in_words,
    content,
    data_uri,
    further_settings,
    responses_format,
    result_text,
    told_in_words,
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


def responses_body(
    request: ModelRequest,
    *,
    model: str,
    name: str,
    encrypted_reasoning: bool = False,
    structured_output: bool = True,
) -> Body:
    """The body of a streamed response that the provider does not keep. Raises BadSettings.

    `name` is the model's in the configuration: its own reasoning is sent back, other models' is not. The form of the
    answer is asked for in words unless the provider can be asked for it.
    """
    schema, instruction = request.output_schema_json, request.instruction
    if schema and not structured_output:
        instruction = told_in_words(instruction, schema)
    body: Body = {"model": model, "input": input_items(request.messages, name=name), "stream": True, "store": False}
    if instruction:
        body["instructions"] = instruction
    if encrypted_reasoning:
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    body |= _settings(request.settings)
    if request.tool_choice == "required":
        body["tool_choice"] = "required"  # whatever the settings say: an answer in words is none
    if schema and structured_output:
        told = body.get("text")
        body["text"] = {**(told if isinstance(told, dict) else {}), "format": responses_format(schema)}
    return body


def input_items(messages: Sequence[message_pb2.Message], *, name: str = "") -> list[Body]:
    """The messages as items of an input, calls and results each as one of its own."""
    items: list[Body] = []
    for message in messages:
        if message.role == message_pb2.ROLE_ASSISTANT:
            items.extend(_assistant(message.parts, name))
        elif message.role == message_pb2.ROLE_TOOL:
            items.extend(_result(part.tool_result) for part in message.parts if part.HasField("tool_result"))
        else:
            role = "system" if message.role == message_pb2.ROLE_SYSTEM else "user"
            items.append({"role": role, "content": content(message.parts, text=_text, blob=_blob)})
    return items


def _assistant(parts: Sequence[message_pb2.Part], name: str) -> list[Body]:
    """What the model itself said. Reasoning is refused without what it led to, so at the end it is left out."""
    items = list(_said(parts, name))
    while items and items[-1].get("type") == "reasoning":
        items.pop()
    return items


def _said(parts: Sequence[message_pb2.Part], name: str) -> Iterator[Body]:
    for part in parts:
        if part.HasField("tool_call"):
            call = part.tool_call
            arguments = arguments_text(call.arguments_json)
            yield {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": arguments}
        elif part.HasField("reasoning"):
            if part.reasoning.encrypted and part.reasoning.model == name:
                yield _reasoning(part.reasoning)
        elif said := as_text(part):
            yield {"role": "assistant", "content": said}


def _reasoning(thought: message_pb2.Reasoning) -> Body:
    summary = [{"type": "summary_text", "text": thought.text}] if thought.text else []
    item: Body = {"type": "reasoning", "summary": summary, "encrypted_content": thought.encrypted}
    return {**item, "id": thought.provider_id} if thought.provider_id else item


def _result(result: message_pb2.ToolResult) -> Body:
    return {"type": "function_call_output", "call_id": result.call.call_id, "output": result_text(result)}


def _text(text: str) -> Body:
    return {"type": "input_text", "text": text}


def _blob(blob: message_pb2.Blob) -> Body:
    kind = blob.media_type
    if kind.startswith("image/"):
        return {"type": "input_image", "image_url": blob.uri or data_uri(blob), "detail": "auto"}
    if kind.startswith(("text/", "audio/", "video/")):
        return _text(blob_in_words(blob))
    if blob.uri:
        return {"type": "input_file", "file_url": blob.uri}
    return {"type": "input_file", "filename": blob.filename or "file", "file_data": data_uri(blob)}


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    """A tool whose schema is taken as it is: a strict one would have to be of the few forms that providers hold."""
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
