"""Assembles streamed answers of Chat Completions: chunks in, deltas out, the whole response at the end."""

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.annotations import AnnotationCollector, Content, ContentPosition
from bough_server.models.answer import DONE, ReportedError
from bough_server.models.model import (
    AttemptMeter,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    finish_reason_of,
)
from bough_server.models.provider_json import (
    BadChunk,
    TextPieces,
    compact_json,
    count,
    is_object,
    json_object,
    objects,
    piece_of,
    string,
)

_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
_DETAIL_TEXTS: Final = frozenset({"text", "summary", "data"})
"""Fields of `reasoning_details` that come in pieces."""
_READ: Final = frozenset({"id", "object", "created", "model", "choices", "usage", "obfuscation"})
"""Fields of every chunk; `obfuscation` is padding that hides the chunk's length."""
_NOTED: Final = frozenset({"prompt_filter_results", "citations", "error"})
"""Other fields that are read; all further ones are recorded as extra annotations."""
_ONLY_CONTENT: Final[Content] = ("message", 0)
"""Key of the answer's text, of which there is at most one."""

_CALL_FIELDS: Final = frozenset({"index", "id", "type", "function"})
"""Fields of every tool call; what a server adds to them is sent back to it."""


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    role: str | None = None
    refusal: None = None
    tool_calls: None = None


class _PlainChoice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _PlainDelta
    index: Literal[0] = 0
    finish_reason: None = None
    logprobs: None = None


class _PlainChunk(msgspec.Struct, forbid_unknown_fields=True):
    """A chunk that holds a piece of text and nothing else that is read, as nearly all are.

    It is decoded in a sixth of the time that the general way takes. Any other field or type makes the decoder refuse
    it, and the chunk is read in the general way, which loses nothing.
    """

    choices: tuple[_PlainChoice]
    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    usage: None = None
    obfuscation: str = ""
    service_tier: str | None = None
    system_fingerprint: str | None = None


_plain_chunks: Final = msgspec.json.Decoder(_PlainChunk)


@dataclass(slots=True)
class _Call:
    """A tool call, as far as it has arrived."""

    id: str
    name: str
    arguments: TextPieces = field(default_factory=TextPieces)
    further: dict[str, object] = field(default_factory=dict)
    """Fields that the API does not have, such as `extra_content` with a signature."""

    def message(self, model: str) -> message_pb2.ToolCall:
        """Return the call as a message, whose provider data is for `model` alone."""
        call = message_pb2.ToolCall(name=self.name, arguments_json=str(self.arguments), provider_call_id=self.id)
        if model and self.further:
            call.provider_json, call.model = compact_json(self.further), model
        return call


class Completion:
    """One streamed answer. Only the first choice is read. `name` is the model's name in the configuration."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "") -> None:
        self._name = name
        self._meter = meter or AttemptMeter()
        self._done = False
        self._finish_reason = ""
        self._id = ""
        self._model = ""
        self._created = 0
        self._text = TextPieces()
        self._reasoning = TextPieces()
        self._reasoning_field = ""
        self._reasoning_details: list[dict[str, object]] = []
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
        try:
            return self._apply_plain(_plain_chunks.decode(data))
        except ValueError:
            return self._apply_general(json_object(data))

    def _apply_plain(self, chunk: _PlainChunk) -> list[Delta]:
        if not self._id:
            self._id, self._model = chunk.id, chunk.model or self._model
            self._created = chunk.created or self._created
        self._annotations.add("service_tier", chunk.service_tier)
        self._annotations.add("system_fingerprint", chunk.system_fingerprint)
        text = self._text.add(chunk.choices[0].delta.content or "")
        return [TextDelta(text)] if text else []

    def _apply_general(self, chunk: dict[str, object]) -> list[Delta]:
        if chunk.get("error"):
            raise ReportedError(chunk["error"])
        if not self._id:
            self._read_head(chunk)
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
        return self._apply_choice(choices[0])

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer: reasoning, then text, then calls. `model` is used if the provider names none."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        if self._reasoning or self._reasoning_details:
            message.parts.add().reasoning.CopyFrom(self._build_reasoning())
        positions: dict[Content, ContentPosition] = {}
        if self._text:
            positions[_ONLY_CONTENT] = ContentPosition(part_index=len(message.parts))
            message.parts.add(text=str(self._text))
        for call in self._calls:
            message.parts.add().tool_call.CopyFrom(call.message(self._name))
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
            annotations=self._annotations.build(positions),
        )

    def _build_reasoning(self) -> message_pb2.Reasoning:
        thought = message_pb2.Reasoning(text=str(self._reasoning))
        if self._name:
            thought.provider_field, thought.model = self._reasoning_field, self._name
            if self._reasoning_details:
                thought.provider_json = compact_json({"reasoning_details": self._reasoning_details})
        return thought

    def _read_head(self, chunk: dict[str, object]) -> None:
        self._id = string(chunk.get("id"))
        self._model = string(chunk.get("model")) or self._model
        created = chunk.get("created")
        if isinstance(created, int):
            self._created = created

    def _note(self, chunk: dict[str, object]) -> None:
        self._annotations.add_prompt_filter_results(chunk.get("prompt_filter_results"))
        self._annotations.cite_addresses(chunk.get("citations"))
        for name in sorted(chunk.keys() - _READ - _NOTED):
            self._annotations.add(name, chunk[name])

    def _apply_choice(self, choice: dict[str, object]) -> list[Delta]:
        if choice.get("index"):
            return []
        if finish := choice.get("finish_reason"):
            self._finish_reason = string(finish)
            if finish == "content_filter":
                self._annotations.add_content_filter()
        if filters := choice.get("content_filter_results"):
            self._annotations.add_filter_results(filters)
        delta = choice.get("delta")
        return self._apply_delta(delta) if is_object(delta) else []

    def _apply_delta(self, delta: dict[str, object]) -> list[Delta]:
        deltas: list[Delta] = []
        self._apply_reasoning(delta, deltas)
        for thought, text in content_pieces(delta.get("content")):
            if shown := self._reasoning.add(thought):
                deltas.append(ReasoningDelta(shown))
            if shown := self._text.add(text):
                deltas.append(TextDelta(shown))
        if refusal := self._text.add(piece_of(delta.get("refusal"))):
            self._refusal.append(refusal)
            self._annotations.add_refusal()
            deltas.append(TextDelta(refusal))
        for cited in objects(delta.get("annotations")):
            self._annotations.cite(cited, _ONLY_CONTENT)
        deltas.extend(self._apply_call(call) for call in objects(delta.get("tool_calls")))
        return deltas

    def _apply_reasoning(self, delta: dict[str, object], deltas: list[Delta]) -> None:
        for name in _REASONING_FIELDS:
            if thought := piece_of(delta.get(name)):
                self._reasoning_field = name
                if thought := self._reasoning.add(thought):
                    deltas.append(ReasoningDelta(thought))
                break
        for detail in objects(delta.get("reasoning_details")):
            _join_detail(self._reasoning_details, detail)

    def _apply_call(self, piece: dict[str, object]) -> ToolCallDelta:
        """Apply a piece of a tool call."""
        value = piece.get("function")
        function = value if is_object(value) else {}
        name, arguments = string(function.get("name")), piece_of(function.get("arguments"))
        call_id, index = string(piece.get("id")), piece.get("index")
        further = {name: value for name, value in piece.items() if name not in _CALL_FIELDS and value is not None}
        key = index if isinstance(index, int) else 0
        position = self._latest.get(key)
        # Some servers send no index, or the same one for all calls: a new id then begins a new call.
        if position is None or (call_id and name and self._calls[position].id != call_id):
            position = self._latest[key] = len(self._calls)
            self._calls.append(_Call(call_id, name, further=further))
            arguments = self._calls[position].arguments.add(arguments)
            return ToolCallDelta(position, arguments, call_id, name)
        call = self._calls[position]
        arguments = call.arguments.add(arguments)
        call.further |= further
        late_name = name if not call.name else ""
        call.name = call.name or name
        return ToolCallDelta(position, arguments, name=late_name)

    def _raw(self, model: str) -> str:
        text = str(self._text)
        message: dict[str, object] = {"role": "assistant", "content": text if text and not self._refusal else None}
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        if self._reasoning:
            message["reasoning_content"] = str(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": str(call.arguments)},
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
        return compact_json(whole)


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


def content_pieces(content: object) -> list[tuple[str, str]]:
    """Return the reasoning and the text of a delta's content: a string, or Mistral's list of `thinking` and `text`."""
    if not isinstance(content, list):
        return [("", piece_of(content))]
    return [
        ("".join(piece_of(each.get("text")) for each in objects(piece.get("thinking"))), piece_of(piece.get("text")))
        for piece in objects(content)
    ]


def _join_detail(details: list[dict[str, object]], piece: dict[str, object]) -> None:
    """Join a streamed piece of OpenRouter's `reasoning_details` to the one of its type and index before it."""
    before = details[-1] if details else {}
    if "index" not in piece or any(before.get(name) != piece.get(name) for name in ("type", "index")):
        details.append(dict(piece))
        return
    for name, value in piece.items():
        joined = string(before.get(name)) + string(value) if name in _DETAIL_TEXTS else value
        if value is not None:
            before[name] = joined
