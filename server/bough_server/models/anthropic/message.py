"""Assembles a streamed message of Anthropic's Messages API: events in, deltas out, the whole response at the end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.annotations import AnnotationCollector, Content, ContentPosition
from bough_server.models.answer import ReportedError
from bough_server.models.model import AttemptMeter, Delta, ReasoningDelta, TextDelta, ToolCallDelta, finish_reason_of
from bough_server.models.provider_json import (
    TextPieces,
    compact_json,
    count,
    is_object,
    json_object,
    piece_of,
    string,
)

_Event = dict[str, object]

_WORDS: Final[Mapping[str, str]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
"""Stop reasons in the words that other providers use for them."""
_KINDS: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})


@dataclass(slots=True)
class _Block:
    """One content block, as far as it has arrived."""

    kind: str
    id: str = ""
    name: str = ""
    data: str = ""
    """The encrypted form of a redacted thought."""
    signature: str = ""
    position: int = 0
    """Index among the tool calls."""
    pieces: TextPieces = field(default_factory=TextPieces)

    def part(self, model: str) -> message_pb2.Part | None:
        """Return the block as a message part; None if it is empty."""
        text = str(self.pieces)
        if self.kind == "tool_use":
            call = message_pb2.ToolCall(name=self.name, arguments_json=text, provider_call_id=self.id)
            return message_pb2.Part(tool_call=call)
        if self.kind == "text":
            return message_pb2.Part(text=text) if text else None
        thought = message_pb2.Reasoning(text=text, signature=self.signature, encrypted=self.data)
        if self.signature or self.data:
            thought.model = model
        return message_pb2.Part(reasoning=thought) if thought.ByteSize() else None

    def raw(self) -> _Event:
        """Return the block in the API's format."""
        text = str(self.pieces)
        if self.kind == "tool_use":
            return {"type": self.kind, "id": self.id, "name": self.name, "input": text}
        if self.kind == "text":
            return {"type": self.kind, "text": text}
        if self.kind == "redacted_thinking":
            return {"type": self.kind, "data": self.data}
        return {"type": self.kind, "thinking": text, "signature": self.signature}


class StreamedMessage:
    """One streamed answer. `name` is the model's name in the configuration."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "") -> None:
        self._meter = meter or AttemptMeter()
        self._name = name
        self._id = ""
        self._model = ""
        self._blocks: dict[int, _Block] = {}
        self._foreign: list[object] = []
        self._calls = 0
        self._stop_reason = ""
        self._counts: _Event = {}
        self._annotations = AnnotationCollector()
        self._is_done = False

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """Usage as the provider reported it so far; None if it reported none."""
        return self._meter.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider has announced the end of the stream."""
        return self._is_done

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete; a stream that ends before was cut off."""
        return self._is_done or bool(self._stop_reason)

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        event = json_object(data)
        kind = string(event.get("type"))
        if kind == "error":
            raise ReportedError(event.get("error") or event)
        reader = _READERS.get(kind)
        return reader(self, event) if reader is not None else []

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer, with its parts in the order of the blocks."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        positions: dict[Content, ContentPosition] = {}
        for index, block in self._blocks.items():
            if (part := block.part(self._name)) is not None:
                positions[index, 0] = ContentPosition(part_index=len(message.parts))
                message.parts.append(part)
        word = _WORDS.get(self._stop_reason, self._stop_reason)
        self._annotations.add("content", self._foreign or None)
        return step_pb2.LlmResponse(
            response_id=self._id,
            provider=provider,
            model=self._model or model,
            message=message,
            finish_reason=finish_reason_of(word, has_calls=self._calls > 0),
            provider_finish_reason=self._stop_reason,
            usage=self.usage,
            raw_json=self._raw(model),
            annotations=self._annotations.build(positions),
        )

    def _begin(self, event: _Event) -> list[Delta]:
        message = event.get("message")
        if is_object(message):
            self._id, self._model = string(message.get("id")), string(message.get("model"))
            self._count(message.get("usage"))
        return []

    def _begin_block(self, event: _Event) -> list[Delta]:
        value, index = event.get("content_block"), count(event.get("index"))
        if not is_object(value) or index is None:
            return []
        kind = string(value.get("type"))
        if kind not in _KINDS:
            self._foreign.append(value)
            return []
        block = self._blocks[index] = _Block(
            kind,
            id=string(value.get("id")),
            name=string(value.get("name")),
            data=string(value.get("data")),
            signature=string(value.get("signature")),
            position=self._calls,
        )
        if kind == "tool_use":
            self._calls += 1
            return [ToolCallDelta(block.position, "", block.id, block.name)]
        return self._piece(block, piece_of(value.get(kind)))

    def _delta(self, event: _Event) -> list[Delta]:
        delta, block = event.get("delta"), self._blocks.get(count(event.get("index")) or 0)
        if not is_object(delta) or block is None:
            return []
        if is_object(cited := delta.get("citation")):
            self._annotations.cite(_citation(cited), (count(event.get("index")) or 0, 0))
        block.signature += string(delta.get("signature"))
        name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}.get(block.kind, "")
        return self._piece(block, piece_of(delta.get(name)))

    def _piece(self, block: _Block, value: str) -> list[Delta]:
        piece = block.pieces.add(value)
        if not piece:
            return []
        if block.kind == "tool_use":
            return [ToolCallDelta(block.position, piece)]
        return [TextDelta(piece) if block.kind == "text" else ReasoningDelta(piece)]

    def _end(self, event: _Event) -> list[Delta]:
        delta = event.get("delta")
        if is_object(delta):
            self._stop_reason = string(delta.get("stop_reason")) or self._stop_reason
            self._annotations.add("stop_details", delta.get("stop_details"))
            if self._stop_reason == "refusal":
                self._annotations.add_refusal()
        self._count(event.get("usage"))
        return []

    def _stop(self, event: _Event) -> list[Delta]:
        self._is_done = True
        return []

    def _count(self, usage: object) -> None:
        """Apply counts, which are cumulative: an absent one keeps its value."""
        if is_object(usage):
            self._counts |= {name: value for name, value in usage.items() if value is not None}
            self._meter.usage = usage_of(self._counts)

    def _raw(self, model: str) -> str:
        return compact_json(
            {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "model": self._model or model,
                "content": [block.raw() for block in self._blocks.values()],
                "stop_reason": self._stop_reason or None,
                "usage": self._counts,
            }
        )


def usage_of(usage: Mapping[str, object]) -> usage_pb2.Usage:
    """Convert a provider's usage, whose input tokens leave out those that were read from or written to its cache."""
    fresh, written = count(usage.get("input_tokens")), count(usage.get("output_tokens"))
    read, stored = count(usage.get("cache_read_input_tokens")), count(usage.get("cache_creation_input_tokens"))
    details = usage.get("output_tokens_details")
    sent = None if fresh is None else fresh + (read or 0) + (stored or 0)
    return usage_pb2.Usage(
        input_tokens=sent,
        output_tokens=written,
        total_tokens=None if sent is None or written is None else sent + written,
        cached_input_tokens=read,
        cache_write_tokens=stored,
        reasoning_tokens=count(details.get("thinking_tokens")) if is_object(details) else None,
    )


def _citation(cited: _Event) -> _Event:
    """Return a citation in the format of OpenAI's."""
    if url := string(cited.get("url")):
        return {"type": "url_citation", "url": url, "title": cited.get("title"), "content": cited.get("cited_text")}
    return {
        "type": "file_citation",
        "file_id": cited.get("file_id") or cited.get("source"),
        "filename": cited.get("document_title") or cited.get("title"),
        "quote": cited.get("cited_text"),
    }


_READERS: Final[Mapping[str, Callable[[StreamedMessage, _Event], list[Delta]]]] = {
    "message_start": StreamedMessage._begin,
    "content_block_start": StreamedMessage._begin_block,
    "content_block_delta": StreamedMessage._delta,
    "message_delta": StreamedMessage._end,
    "message_stop": StreamedMessage._stop,
}
