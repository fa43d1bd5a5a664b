"""Assembles a streamed message of Anthropic's Messages API: events in, deltas out, the whole response at the end."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.answer import Answer, ReportedError, StreamedPart
from bough_server.models.model import AttemptMeter, Delta, ToolCallDelta
from bough_server.models.provider_json import (
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
_KINDS: Final = frozenset({"text", "thinking", "redacted_thinking"})
"""Kinds of blocks that are read, besides calls."""
_PIECES: Final[Mapping[str, str]] = {"text": "text", "thought": "thinking", "call": "partial_json"}
"""Fields of deltas that hold the next piece of a block."""


class StreamedMessage(Answer):
    """One streamed answer of the Messages API."""

    words = _WORDS

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "", keeps_raw: bool = False) -> None:
        super().__init__(meter, name=name, keeps_raw=keeps_raw)
        self._blocks: dict[int, StreamedPart] = {}
        self._foreign: list[object] = []
        self._counts: _Event = {}

    def _read(self, data: bytes) -> list[Delta]:
        event = json_object(data)
        kind = string(event.get("type"))
        if kind == "error":
            raise ReportedError(event.get("error") or event)
        reader = _READERS.get(kind)
        return reader(self, event) if reader is not None else []

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer. `model` is used if the provider names none."""
        self._annotations.add("content", self._foreign or None)
        return super().response(provider=provider, model=model)

    def _parts(self) -> Iterable[tuple[int, StreamedPart]]:
        return self._blocks.items()

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
        if kind == "tool_use":
            block = self._blocks[index] = self._begin_call(string(value.get("name")), string(value.get("id")))
            return [ToolCallDelta(block.position, "", block.call.provider_call_id, block.call.name)]
        if kind not in _KINDS:
            self._foreign.append(value)
            return []
        block = self._blocks[index] = StreamedPart("text" if kind == "text" else "thought")
        self._sign(block.thought, signature=string(value.get("signature")), encrypted=string(value.get("data")))
        return block.add(piece_of(value.get(kind)))

    def _delta(self, event: _Event) -> list[Delta]:
        index = count(event.get("index")) or 0
        delta, block = event.get("delta"), self._blocks.get(index)
        if not is_object(delta) or block is None:
            return []
        if is_object(cited := delta.get("citation")):
            self._annotations.cite(_citation(cited), (index, 0))
        self._sign(block.thought, signature=string(delta.get("signature")))
        if block.kind == "thought" and block.thought.encrypted:
            return []  # a redacted thought has no text
        return block.add(piece_of(delta.get(_PIECES[block.kind])))

    def _sign(self, thought: message_pb2.Reasoning, *, signature: str, encrypted: str = "") -> None:
        """Add what the API wants back with a thought, and which model wrote it."""
        if signature or encrypted:
            thought.signature += signature
            thought.encrypted += encrypted
            thought.model = self._name

    def _end(self, event: _Event) -> list[Delta]:
        delta = event.get("delta")
        if is_object(delta):
            self._finish_reason = string(delta.get("stop_reason")) or self._finish_reason
            self._annotations.add("stop_details", delta.get("stop_details"))
            if self._finish_reason == "refusal":
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

    def _whole(self, model: str) -> _Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [_raw_block(block) for block in self._blocks.values()],
            "stop_reason": self._finish_reason or None,
            "usage": self._counts,
        }


def _raw_block(block: StreamedPart) -> _Event:
    """Return a block in the API's format."""
    text = str(block.pieces)
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call.provider_call_id, "name": block.call.name, "input": text}
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.thought.encrypted:
        return {"type": "redacted_thinking", "data": block.thought.encrypted}
    return {"type": "thinking", "thinking": text, "signature": block.thought.signature}


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
