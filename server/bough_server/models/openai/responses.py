"""Assembles a streamed answer of the Responses API: events in, deltas out, the whole response at the end.

The text is what was streamed. Only if nothing of an item was streamed is it taken from the item's end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.annotations import AnnotationCollector, Content, ContentPosition
from bough_server.models.answer import DONE, ReportedError
from bough_server.models.model import AttemptMeter, Delta, ReasoningDelta, TextDelta, ToolCallDelta, finish_reason_of
from bough_server.models.provider_json import (
    TextPieces,
    compact_json,
    count,
    is_object,
    json_object,
    objects,
    piece_of,
    string,
)

_Event = dict[str, object]
_Key = int | str


@dataclass(slots=True)
class _Item:
    """One item of the output, as far as it has arrived."""

    kind: str
    id: str = ""
    name: str = ""
    call_id: str = ""
    encrypted: str = ""
    position: int = 0
    """Index among the tool calls."""
    pieces: TextPieces = field(default_factory=TextPieces)
    lengths: dict[int, int] = field(default_factory=dict)
    """Characters of each content, by its index."""
    is_streamed: bool = False
    """Whether any piece of it was emitted."""

    def positions(self, key: _Key, part_index: int) -> "dict[Content, ContentPosition]":
        """Return the positions of the item's contents in the answer, whose part `part_index` is this item."""
        positions: dict[Content, ContentPosition] = {}
        offset = 0
        for index, length in sorted(self.lengths.items()):
            positions[key, index] = ContentPosition(part_index=part_index, offset=offset)
            offset += length
        return positions

    def part(self, model: str) -> message_pb2.Part | None:
        """Return the item as a message part; None if it is empty."""
        text = str(self.pieces)
        if self.kind == "function_call":
            call = message_pb2.ToolCall(name=self.name, arguments_json=text, provider_call_id=self.call_id)
            return message_pb2.Part(tool_call=call)
        if self.kind == "message":
            return message_pb2.Part(text=text) if text else None
        thought = message_pb2.Reasoning(text=text)
        if self.encrypted:
            thought.encrypted, thought.provider_id, thought.model = self.encrypted, self.id, model
        return message_pb2.Part(reasoning=thought) if text or self.encrypted else None


class Response:
    """One streamed answer. `name` is the model's name in the configuration."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "") -> None:
        self._meter = meter or AttemptMeter()
        self._name = name
        self._items: dict[_Key, _Item] = {}
        self._calls = 0
        self._is_refused = False
        self._annotations = AnnotationCollector()
        self._response: _Event = {}
        self._is_done = False

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """Usage as the provider reported it; None if it reported none."""
        return self._meter.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider has announced the end of the stream."""
        return self._is_done

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete."""
        return self._is_done

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        if data == DONE:
            return []
        event = json_object(data)
        kind = string(event.get("type"))
        # Some servers send an error without a type, as Chat Completions do.
        if kind == "error" or (not kind and event.get("error")):
            raise ReportedError(event.get("error") or event)
        reader = _READERS.get(kind)
        return reader(self, event) if reader is not None else []

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer, with its parts in the order of the output."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        positions: dict[Content, ContentPosition] = {}
        for key, item in self._items.items():
            if (part := item.part(self._name)) is not None:
                positions |= item.positions(key, len(message.parts))
                message.parts.append(part)
        incomplete = self._response.get("incomplete_details")
        reason = string(incomplete.get("reason")) if is_object(incomplete) else ""
        return step_pb2.LlmResponse(
            response_id=string(self._response.get("id")),
            provider=provider,
            model=string(self._response.get("model")) or model,
            message=message,
            finish_reason=self._finish_reason(reason),
            provider_finish_reason=reason or string(self._response.get("status")),
            usage=self.usage,
            raw_json=compact_json(self._response),
            annotations=self._annotations.build(positions),
        )

    def _finish_reason(self, incomplete: str) -> step_pb2.FinishReason.ValueType:
        return finish_reason_of(
            incomplete or string(self._response.get("status")), has_calls=self._calls > 0, is_refused=self._is_refused
        )

    def _begin(self, event: _Event) -> list[Delta]:
        response = event.get("response")
        if is_object(response):
            self._response = response
        return []

    def _end(self, event: _Event) -> list[Delta]:
        """Apply the final event; items of the answer that were not streamed become deltas."""
        self._begin(event)
        response = self._response
        if is_object(used := response.get("usage")):
            self._meter.usage = usage_of(used)
        if string(event.get("type")) == "response.failed":
            raise ReportedError(response.get("error") or response)
        deltas = [
            delta
            for index, item in enumerate(objects(response.get("output")))
            if index not in self._items
            for delta in self._complete_item({"output_index": index, "item": item})
        ]
        self._note(response)
        self._is_done = True
        return deltas

    def _note(self, response: _Event) -> None:
        incomplete = response.get("incomplete_details")
        if is_object(incomplete) and incomplete.get("reason") == "content_filter":
            self._annotations.add_content_filter()
        for each in objects(response.get("content_filters")):
            self._annotations.add_filter_results(
                each.get("content_filter_results"), of_prompt=each.get("source_type") == "prompt"
            )
        for name in _EXTRAS:
            self._annotations.add(name, response.get(name))
        foreign = [item for item in objects(response.get("output")) if string(item.get("type")) not in _CONTENT_OF]
        self._annotations.add("output", foreign or None)
        # Citations may come in events, in items and in the final answer; repeated ones are recorded once.
        for index, item in enumerate(objects(response.get("output"))):
            self._cite(item, index)

    def _cite(self, item: _Event, key: _Key) -> None:
        for index, content in enumerate(objects(item.get("content"))):
            if string(content.get("type")) == "refusal":
                self._refuse()
            for cited in objects(content.get("annotations")):
                self._annotations.cite(cited, (key, index))

    def _refuse(self) -> None:
        self._is_refused = True
        self._annotations.add_refusal()

    def _get_item(self, event: _Event, kind: str) -> _Item:
        """Return the item that an event is about, created if the server did not announce it."""
        key = _key(event)
        if key not in self._items:
            self._items[key] = _Item(kind, position=self._calls)
            self._calls += kind == "function_call"
        return self._items[key]

    def _apply_item(self, event: _Event) -> list[Delta]:
        data = event.get("item")
        if not is_object(data) or string(data.get("type")) not in _CONTENT_OF:
            return []
        item = self._get_item(event, string(data.get("type")))
        is_named = bool(item.name)
        item.id, item.call_id = string(data.get("id")) or item.id, string(data.get("call_id")) or item.call_id
        item.name = item.name or string(data.get("name"))
        if item.kind != "function_call" or is_named or not item.name:
            return []
        return [ToolCallDelta(item.position, "", item.call_id, item.name)]

    def _complete_item(self, event: _Event) -> list[Delta]:
        deltas = self._apply_item(event)
        data = event.get("item")
        if not is_object(data) or string(data.get("type")) not in _CONTENT_OF:
            return deltas
        item = self._get_item(event, string(data.get("type")))
        self._cite(data, _key(event))
        item.encrypted = string(data.get("encrypted_content"))
        if not item.is_streamed and (whole := _CONTENT_OF[item.kind](data)):
            if item.kind == "message":
                item.lengths = dict(enumerate(len(_content_text(each)) for each in objects(data.get("content"))))
            deltas += self._append_piece(item, whole)[0]
        return deltas

    def _apply_text(self, event: _Event) -> list[Delta]:
        delta = piece_of(event.get("delta"))
        if not delta:
            return []
        item, index = self._get_item(event, "message"), _content_index(event)
        deltas, piece = self._append_piece(item, delta)
        item.lengths[index] = item.lengths.get(index, 0) + len(piece)
        return deltas

    def _apply_refusal(self, event: _Event) -> list[Delta]:
        self._refuse()
        return self._apply_text(event)

    def _apply_citation(self, event: _Event) -> list[Delta]:
        if is_object(cited := event.get("annotation")):
            self._annotations.cite(cited, (_key(event), _content_index(event)))
        return []

    def _apply_reasoning(self, event: _Event) -> list[Delta]:
        piece = piece_of(event.get("delta"))
        return self._append_piece(self._get_item(event, "reasoning"), piece)[0] if piece else []

    def _begin_paragraph(self, event: _Event) -> list[Delta]:
        """Begin a new paragraph for a further part of a summary."""
        item = self._get_item(event, "reasoning")
        return self._append_piece(item, "\n\n")[0] if item.pieces else []

    def _apply_arguments(self, event: _Event) -> list[Delta]:
        piece = piece_of(event.get("delta"))
        return self._append_piece(self._get_item(event, "function_call"), piece)[0] if piece else []

    def _append_piece(self, item: _Item, value: str) -> tuple[list[Delta], str]:
        """Append a piece and return its delta, if anything of it can be shown now, and its text."""
        item.is_streamed = True
        if item.kind == "message":
            # The response's text must equal the text deltas in their order: should two messages ever stream in
            # alternation, all further text goes to the one that began last.
            item = next(each for each in reversed(self._items.values()) if each.kind == "message")
        piece = item.pieces.add(value)
        if not piece:
            return [], ""
        if item.kind == "function_call":
            return [ToolCallDelta(item.position, piece)], piece
        return [TextDelta(piece) if item.kind == "message" else ReasoningDelta(piece)], piece


def usage_of(usage: Mapping[str, object]) -> usage_pb2.Usage:
    """Convert a provider's usage; counts that are absent or of another type stay unset."""
    sent, written = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    return usage_pb2.Usage(
        input_tokens=count(usage.get("input_tokens")),
        output_tokens=count(usage.get("output_tokens")),
        total_tokens=count(usage.get("total_tokens")),
        cached_input_tokens=count(sent.get("cached_tokens")) if is_object(sent) else None,
        reasoning_tokens=count(written.get("reasoning_tokens")) if is_object(written) else None,
    )


def _key(event: _Event) -> _Key:
    """Return the key of an output item: its index, or its id if the server sends no indexes."""
    index = count(event.get("output_index"))
    return index if index is not None else string(event.get("item_id"))


def _content_index(event: _Event) -> int:
    return count(event.get("content_index")) or 0


def _message_text(item: _Event) -> str:
    return "".join(map(_content_text, objects(item.get("content"))))


def _content_text(content: _Event) -> str:
    return string(content.get("text")) or string(content.get("refusal"))


def _reasoning_text(item: _Event) -> str:
    parts = objects(item.get("summary")) or objects(item.get("content"))
    return "\n\n".join(filter(None, (string(each.get("text")) for each in parts)))


def _call_arguments(item: _Event) -> str:
    return string(item.get("arguments"))


_CONTENT_OF: Final[Mapping[str, Callable[[_Event], str]]] = {
    "message": _message_text,
    "reasoning": _reasoning_text,
    "function_call": _call_arguments,
}
"""Content of a whole item, by the kinds that are read. Other kinds are the provider's own tools."""

_EXTRAS: Final = ("service_tier", "moderation")
"""Fields of a response that are neither the answer nor an echo of the request."""

_READERS: Final[Mapping[str, Callable[[Response, _Event], list[Delta]]]] = {
    "response.created": Response._begin,
    "response.in_progress": Response._begin,
    "response.output_item.added": Response._apply_item,
    "response.output_item.done": Response._complete_item,
    "response.output_text.delta": Response._apply_text,
    "response.output_text.annotation.added": Response._apply_citation,
    "response.refusal.delta": Response._apply_refusal,
    "response.reasoning_summary_part.added": Response._begin_paragraph,
    "response.reasoning_summary_text.delta": Response._apply_reasoning,
    "response.reasoning_text.delta": Response._apply_reasoning,
    "response.function_call_arguments.delta": Response._apply_arguments,
    "response.completed": Response._end,
    "response.incomplete": Response._end,
    "response.failed": Response._end,
}
