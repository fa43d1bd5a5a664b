"""A streamed answer of the Responses API put together: events in, deltas out, the answer at the end; it opens nothing.

What is shown is what was streamed. A server that says at an item's end what it did not stream is taken at its word.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.model import AttemptMeter, Delta, ReasoningDelta, TextDelta, ToolCallDelta, finish_reason_of
from bough_server.models.openai.annotations import (
    DONE,
    AnnotationCollector,
    Content,
    Place,
    ReportedError,
    count,
    is_object,
    json_object,
    objects,
    string,
)

_Event = dict[str, object]
_Key = int | str


@dataclass(slots=True)
class _Item:
    """One item of the output, as far as it has come."""

    kind: str
    id: str = ""
    name: str = ""
    call_id: str = ""
    encrypted: str = ""
    position: int = 0
    """A call's place among the calls."""
    pieces: list[str] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    """The characters of each content, by its number."""
    is_heard: bool = False
    """Whether anything of it was streamed."""

    def places(self, key: _Key, part_index: int) -> "dict[Content, Place]":
        """Where the contents of the item are in the answer, of which it is the part of that number."""
        places: dict[Content, Place] = {}
        offset = 0
        for index, length in sorted(self.lengths.items()):
            places[key, index] = Place(part_index=part_index, offset=offset)
            offset += length
        return places

    def part(self, model: str) -> message_pb2.Part | None:
        """The item in our words; None where there is nothing of it."""
        said = "".join(self.pieces)
        if self.kind == "function_call":
            call = message_pb2.ToolCall(name=self.name, arguments_json=said, provider_call_id=self.call_id)
            return message_pb2.Part(tool_call=call)
        if self.kind == "message":
            return message_pb2.Part(text=said) if said else None
        thought = message_pb2.Reasoning(text=said)
        if self.encrypted:
            thought.encrypted, thought.provider_id, thought.model = self.encrypted, self.id, model
        return message_pb2.Part(reasoning=thought) if said or self.encrypted else None


class Response:
    """One answer that is being streamed. `name` is the model's in the configuration."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "") -> None:
        self._meter = meter or AttemptMeter()
        self._name = name
        self._items: dict[_Key, _Item] = {}
        self._calls = 0
        self._is_refused = False
        self._notes = AnnotationCollector()
        self._said: _Event = {}
        self._is_done = False

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """What the provider reported; None where it said nothing."""
        return self._meter.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider said that nothing more comes."""
        return self._is_done

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its end."""
        return self._is_done

    def take(self, data: bytes) -> list[Delta]:
        """The deltas in the data of one event. Raises BadChunk or ReportedError."""
        if data == DONE:
            return []
        event = json_object(data)
        kind = string(event.get("type"))
        if kind == "error" or (not kind and event.get("error")):
            raise ReportedError(event.get("error") or event)
        reader = _READERS.get(kind)
        return reader(self, event) if reader is not None else []

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """The whole answer, its parts in the order of the output."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        places: dict[Content, Place] = {}
        for key, item in self._items.items():
            if (part := item.part(self._name)) is not None:
                places |= item.places(key, len(message.parts))
                message.parts.append(part)
        incomplete = self._said.get("incomplete_details")
        reason = string(incomplete.get("reason")) if is_object(incomplete) else ""
        return step_pb2.LlmResponse(
            response_id=string(self._said.get("id")),
            provider=provider,
            model=string(self._said.get("model")) or model,
            message=message,
            finish_reason=self._finish_reason(reason),
            provider_finish_reason=reason or string(self._said.get("status")),
            usage=self.usage,
            raw_json=json.dumps(self._said, ensure_ascii=False, separators=(",", ":")),
            annotations=self._notes.message(places),
        )

    def _finish_reason(self, incomplete: str) -> step_pb2.FinishReason.ValueType:
        return finish_reason_of(
            incomplete or string(self._said.get("status")), has_calls=self._calls > 0, is_refused=self._is_refused
        )

    def _begin(self, event: _Event) -> list[Delta]:
        said = event.get("response")
        if is_object(said):
            self._said = said
        return []

    def _end(self, event: _Event) -> list[Delta]:
        """The whole answer: whatever of it was not streamed is a delta now."""
        self._begin(event)
        said = self._said
        if is_object(used := said.get("usage")):
            self._meter.usage = usage_of(used)
        if string(event.get("type")) == "response.failed":
            raise ReportedError(said.get("error") or said)
        deltas = [
            delta
            for index, item in enumerate(objects(said.get("output")))
            if index not in self._items
            for delta in self._whole_item({"output_index": index, "item": item})
        ]
        self._note(said)
        self._is_done = True
        return deltas

    def _note(self, said: _Event) -> None:
        incomplete = said.get("incomplete_details")
        if is_object(incomplete) and incomplete.get("reason") == "content_filter":
            self._notes.filtered()
        for each in objects(said.get("content_filters")):
            self._notes.filters(each.get("content_filter_results"), of_prompt=each.get("source_type") == "prompt")
        for name in _EXTRAS:
            self._notes.add(name, said.get(name))
        foreign = [item for item in objects(said.get("output")) if string(item.get("type")) not in _SAID]
        self._notes.add("output", foreign or None)
        for index, item in enumerate(objects(said.get("output"))):
            self._cite(item, index)

    def _cite(self, item: _Event, key: _Key) -> None:
        for index, content in enumerate(objects(item.get("content"))):
            if string(content.get("type")) == "refusal":
                self._refuse()
            for cited in objects(content.get("annotations")):
                self._notes.cite(cited, (key, index))

    def _refuse(self) -> None:
        self._is_refused = True
        self._notes.refused()

    def _item(self, event: _Event, kind: str) -> _Item:
        """The item that an event is about; a new one where nobody announced it."""
        key = _key(event)
        if key not in self._items:
            self._items[key] = _Item(kind, position=self._calls)
            self._calls += kind == "function_call"
        return self._items[key]

    def _announced(self, event: _Event) -> list[Delta]:
        said = event.get("item")
        if not is_object(said) or string(said.get("type")) not in _SAID:
            return []
        item = self._item(event, string(said.get("type")))
        is_named = bool(item.name)
        item.id, item.call_id = string(said.get("id")) or item.id, string(said.get("call_id")) or item.call_id
        item.name = item.name or string(said.get("name"))
        if item.kind != "function_call" or is_named or not item.name:
            return []
        return [ToolCallDelta(item.position, "", item.call_id, item.name)]

    def _whole_item(self, event: _Event) -> list[Delta]:
        deltas = self._announced(event)
        said = event.get("item")
        if not is_object(said) or string(said.get("type")) not in _SAID:
            return deltas
        item = self._item(event, string(said.get("type")))
        self._cite(said, _key(event))
        item.encrypted = string(said.get("encrypted_content"))
        if not item.is_heard and (whole := _SAID[item.kind](said)):
            if item.kind == "message":
                item.lengths = dict(enumerate(len(_content_text(each)) for each in objects(said.get("content"))))
            deltas.append(self._piece(item, whole))
        return deltas

    def _text(self, event: _Event) -> list[Delta]:
        piece = string(event.get("delta"))
        if not piece:
            return []
        item, index = self._item(event, "message"), _content_index(event)
        item.lengths[index] = item.lengths.get(index, 0) + len(piece)
        return [self._piece(item, piece)]

    def _refusal(self, event: _Event) -> list[Delta]:
        self._refuse()
        return self._text(event)

    def _cited(self, event: _Event) -> list[Delta]:
        if is_object(cited := event.get("annotation")):
            self._notes.cite(cited, (_key(event), _content_index(event)))
        return []

    def _thought(self, event: _Event) -> list[Delta]:
        piece = string(event.get("delta"))
        return [self._piece(self._item(event, "reasoning"), piece)] if piece else []

    def _next_thought(self, event: _Event) -> list[Delta]:
        """A further part of a summary is a paragraph of its own."""
        item = self._item(event, "reasoning")
        return [self._piece(item, "\n\n")] if item.pieces else []

    def _arguments(self, event: _Event) -> list[Delta]:
        piece = string(event.get("delta"))
        return [self._piece(self._item(event, "function_call"), piece)] if piece else []

    def _piece(self, item: _Item, piece: str) -> Delta:
        item.is_heard = True
        if item.kind == "message":
            # Text belongs where it is heard: should messages ever take turns, the last one that began has it.
            item = next(each for each in reversed(self._items.values()) if each.kind == "message")
        item.pieces.append(piece)
        if item.kind == "function_call":
            return ToolCallDelta(item.position, piece)
        return TextDelta(piece) if item.kind == "message" else ReasoningDelta(piece)


def usage_of(said: Mapping[str, object]) -> usage_pb2.Usage:
    """A provider's usage in our words; what it leaves out, or says in another type, stays absent."""
    sent, written = said.get("input_tokens_details"), said.get("output_tokens_details")
    return usage_pb2.Usage(
        input_tokens=count(said.get("input_tokens")),
        output_tokens=count(said.get("output_tokens")),
        total_tokens=count(said.get("total_tokens")),
        cached_input_tokens=count(sent.get("cached_tokens")) if is_object(sent) else None,
        reasoning_tokens=count(written.get("reasoning_tokens")) if is_object(written) else None,
    )


def _key(event: _Event) -> _Key:
    """What an item of the output is known by: its number, or its id if a server counts nothing."""
    index = count(event.get("output_index"))
    return index if index is not None else string(event.get("item_id"))


def _content_index(event: _Event) -> int:
    return count(event.get("content_index")) or 0


def _message_text(said: _Event) -> str:
    return "".join(map(_content_text, objects(said.get("content"))))


def _content_text(content: _Event) -> str:
    return string(content.get("text")) or string(content.get("refusal"))


def _reasoning_text(said: _Event) -> str:
    parts = objects(said.get("summary")) or objects(said.get("content"))
    return "\n\n".join(filter(None, (string(each.get("text")) for each in parts)))


def _call_arguments(said: _Event) -> str:
    return string(said.get("arguments"))


_SAID: Final[Mapping[str, Callable[[_Event], str]]] = {
    "message": _message_text,
    "reasoning": _reasoning_text,
    "function_call": _call_arguments,
}
"""The kinds of items that are read, and what a whole one says. Others are the provider's own tools."""

_EXTRAS: Final = ("service_tier", "moderation")
"""Of a response, what is neither the answer nor an echo of the request."""

_READERS: Final[Mapping[str, Callable[[Response, _Event], list[Delta]]]] = {
    "response.created": Response._begin,
    "response.in_progress": Response._begin,
    "response.output_item.added": Response._announced,
    "response.output_item.done": Response._whole_item,
    "response.output_text.delta": Response._text,
    "response.output_text.annotation.added": Response._cited,
    "response.refusal.delta": Response._refusal,
    "response.reasoning_summary_part.added": Response._next_thought,
    "response.reasoning_summary_text.delta": Response._thought,
    "response.reasoning_text.delta": Response._thought,
    "response.function_call_arguments.delta": Response._arguments,
    "response.completed": Response._end,
    "response.incomplete": Response._end,
    "response.failed": Response._end,
}
