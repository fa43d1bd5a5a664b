"""Chat Completions: request bodies, and the assembly of streamed responses.

Parts that the API has no field for are sent as text, so that nothing of a message is lost silently.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from bough.v1 import message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.model import (
    AttemptMeter,
    Delta,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
    finish_reason_of,
)
from bough_server.models.openai.annotations import (
    DONE,
    AnnotationCollector,
    BadChunk,
    Content,
    ContentPosition,
    ReportedError,
    count,
    is_object,
    json_object,
    objects,
    string,
)
from bough_server.models.structured_output import (
    Body,
    arguments_text,
    as_text,
    blob_as_text,
    chat_format,
    content,
    data_uri,
    further_settings,
    instruction_with_schema,
    result_text,
)

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
_READ: Final = frozenset({"id", "object", "created", "model", "choices", "usage", "obfuscation"})
"""Fields of every chunk; `obfuscation` is padding that hides the chunk's length."""
_NOTED: Final = frozenset({"prompt_filter_results", "citations", "error"})
"""Other fields that are read; all further ones are recorded as extra annotations."""
_ONLY_CONTENT: Final[Content] = ("message", 0)
"""Key of the answer's text, of which there is at most one."""

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


@dataclass(slots=True)
class _Call:
    """A tool call, as far as it has arrived."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Completion:
    """One streamed answer. Only the first choice is read."""

    def __init__(self, meter: AttemptMeter | None = None) -> None:
        self._meter = meter or AttemptMeter()
        self._done = False
        self._finish_reason = ""
        self._id = ""
        self._model = ""
        self._created = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[_Call] = []
        self._latest: dict[int, int] = {}
        self._usage_json: dict[str, object] | None = None
        self._annotations = AnnotationCollector()

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """Usage as the provider reported it so far; None if it reported none."""
        return self._meter.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider has announced the end of the stream."""
        return self._done

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete; a stream that ends before was cut off."""
        # Some servers send no [DONE]: a finish reason is enough. Usage may still follow it, so it is not the end.
        return self._done or bool(self._finish_reason)

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        if data == DONE:
            self._done = True
            return []
        chunk = json_object(data)
        if chunk.get("error"):
            raise ReportedError(chunk["error"])
        if not self._id:
            self._head(chunk)
        if chunk.keys() - _READ:
            self._note(chunk)
        usage = chunk.get("usage")
        if is_object(usage):
            self._usage_json = usage
            self._meter.usage = usage_of(usage)
        choices = chunk.get("choices")
        if not choices:
            return []
        if not isinstance(choices, list) or not is_object(choices[0]):
            raise BadChunk("without a list of choices")
        return self._choice(choices[0])

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer: reasoning, then text, then calls. `model` is used if the provider names none."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        if self._reasoning:
            message.parts.add().reasoning.text = "".join(self._reasoning)
        positions: dict[Content, ContentPosition] = {}
        if self._text:
            positions[_ONLY_CONTENT] = ContentPosition(part_index=len(message.parts))
            message.parts.add(text="".join(self._text))
        for call in self._calls:
            message.parts.add().tool_call.CopyFrom(
                message_pb2.ToolCall(name=call.name, arguments_json="".join(call.arguments), provider_call_id=call.id)
            )
        return step_pb2.LlmResponse(
            response_id=self._id,
            provider=provider,
            model=self._model or model,
            message=message,
            finish_reason=finish_reason_of(
                self._finish_reason, has_calls=bool(self._calls), is_refused=bool(self._refusal)
            ),
            provider_finish_reason=self._finish_reason,
            usage=self.usage,
            raw_json=self._raw(model),
            annotations=self._annotations.message(positions),
        )

    def _head(self, chunk: dict[str, object]) -> None:
        self._id = string(chunk.get("id"))
        self._model = string(chunk.get("model")) or self._model
        created = chunk.get("created")
        if isinstance(created, int):
            self._created = created

    def _note(self, chunk: dict[str, object]) -> None:
        self._annotations.prompt_filters(chunk.get("prompt_filter_results"))
        self._annotations.cite_addresses(chunk.get("citations"))
        for name in sorted(chunk.keys() - _READ - _NOTED):
            self._annotations.add(name, chunk[name])

    def _choice(self, choice: dict[str, object]) -> list[Delta]:
        if choice.get("index"):
            return []
        if finish := choice.get("finish_reason"):
            self._finish_reason = string(finish)
            if finish == "content_filter":
                self._annotations.filtered()
        if filters := choice.get("content_filter_results"):
            self._annotations.filters(filters)
        delta = choice.get("delta")
        deltas: list[Delta] = []
        if not is_object(delta):
            return deltas
        for name in _REASONING_FIELDS:
            if thought := string(delta.get(name)):
                self._reasoning.append(thought)
                deltas.append(ReasoningDelta(thought))
                break
        if text := string(delta.get("content")):
            self._text.append(text)
            deltas.append(TextDelta(text))
        if refusal := string(delta.get("refusal")):
            self._text.append(refusal)
            self._refusal.append(refusal)
            self._annotations.refused()
            deltas.append(TextDelta(refusal))
        for cited in objects(delta.get("annotations")):
            self._annotations.cite(cited, _ONLY_CONTENT)
        deltas.extend(self._call(call) for call in objects(delta.get("tool_calls")))
        return deltas

    def _call(self, piece: dict[str, object]) -> ToolCallDelta:
        """Apply a piece of a tool call."""
        value = piece.get("function")
        function = value if is_object(value) else {}
        name, arguments = string(function.get("name")), string(function.get("arguments"))
        call_id, index = string(piece.get("id")), piece.get("index")
        key = index if isinstance(index, int) else 0
        position = self._latest.get(key)
        # Some servers send no index, or the same one for all calls: a new id then begins a new call.
        if position is None or (call_id and name and self._calls[position].id != call_id):
            position = self._latest[key] = len(self._calls)
            self._calls.append(_Call(call_id, name, [arguments]))
            return ToolCallDelta(position, arguments, call_id, name)
        call = self._calls[position]
        call.arguments.append(arguments)
        late_name = name if not call.name else ""
        call.name = call.name or name
        return ToolCallDelta(position, arguments, name=late_name)

    def _raw(self, model: str) -> str:
        text = "".join(self._text)
        message: dict[str, object] = {"role": "assistant", "content": text if text and not self._refusal else None}
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self._calls
            ]
        whole: dict[str, object] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model or model,
            "choices": [{"index": 0, "message": message, "finish_reason": self._finish_reason or None}],
        }
        if self._usage_json is not None:
            whole["usage"] = self._usage_json
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def usage_of(usage: dict[str, object]) -> usage_pb2.Usage:
    """Convert a provider's usage; counts that are absent or of another type stay unset."""
    prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return usage_pb2.Usage(
        input_tokens=count(usage.get("prompt_tokens")),
        output_tokens=count(usage.get("completion_tokens")),
        total_tokens=count(usage.get("total_tokens")),
        cached_input_tokens=count(prompt.get("cached_tokens")) if is_object(prompt) else None,
        reasoning_tokens=count(completion.get("reasoning_tokens")) if is_object(completion) else None,
    )


def chat_body(request: ModelRequest, *, model: str, structured_output: bool = True) -> Body:
    """Build the body of a streamed chat completion. Raises BadSettings.

    Without `structured_output` the instruction asks for the schema.
    """
    schema, instruction = request.output_schema_json, request.instruction
    if schema and not structured_output:
        instruction = instruction_with_schema(instruction, schema)
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
        body["tool_choice"] = "required"  # overrides extra_json: the caller cannot use a text answer
    return body | {"response_format": chat_format(schema)} if schema and structured_output else body


def chat_messages(instruction: str, messages: Sequence[message_pb2.Message]) -> list[Body]:
    """Return the instruction and the messages in the API's format; each tool result is a separate message."""
    bodies: list[Body] = [{"role": "system", "content": instruction}] if instruction else []
    for message in messages:
        if message.role == message_pb2.ROLE_ASSISTANT:
            bodies.extend(_assistant(message))
        elif message.role == message_pb2.ROLE_TOOL:
            bodies.extend(_result(part.tool_result) for part in message.parts if part.HasField("tool_result"))
        else:
            role = "system" if message.role == message_pb2.ROLE_SYSTEM else "user"
            bodies.append({"role": role, "content": content(message.parts, text=_text, blob=_blob)})
    return bodies


def _assistant(message: message_pb2.Message) -> list[Body]:
    text = "".join(as_text(part) for part in message.parts)
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
        return _text(blob_as_text(blob))
    if kind in _AUDIO_FORMATS:
        data = base64.b64encode(blob.data).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO_FORMATS[kind]}}
    if kind.startswith(("audio/", "video/")):
        return _text(blob_as_text(blob))
    return {"type": "file", "file": {"filename": blob.filename or "file", "file_data": data_uri(blob)}}


@lru_cache(maxsize=1024)
def _tool(spec: ToolSpec) -> Body:
    # Cached, so shared by all requests with this tool: never modified.
    parameters: object = json.loads(spec.input_schema_json) if spec.input_schema_json else {"type": "object"}
    return {
        "type": "function",
        "function": {"name": spec.name, "description": spec.description, "parameters": parameters},
    }


def _settings(settings: model_pb2.ModelSettings) -> Body:
    body: Body = {}
    if settings.HasField("temperature"):
        body["temperature"] = settings.temperature
    if settings.HasField("top_p"):
        body["top_p"] = settings.top_p
    if settings.HasField("max_output_tokens"):
        body["max_completion_tokens"] = settings.max_output_tokens
    return body | (further_settings(settings.extra_json, ours=_OURS) if settings.extra_json else {})
