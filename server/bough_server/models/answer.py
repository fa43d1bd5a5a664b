"""A streamed answer that is being assembled: data of events in, deltas out, the whole response at the end."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from bough.v1 import message_pb2, step_pb2, usage_pb2
from bough_server.models.annotations import AnnotationCollector, Content, ContentPosition
from bough_server.models.model import AttemptMeter, Delta, ReasoningDelta, TextDelta, ToolCallDelta, finish_reason_of
from bough_server.models.provider_json import TextPieces, compact_json

DONE: Final = b"[DONE]"
"""Data of the event that ends a stream."""

MAX_RAW_BYTES: Final = 256 * 1024
"""The most bytes of raw events kept per answer; later events are only counted."""


class ReportedError(Exception):
    """The provider sent an error in its stream; `value` is its JSON."""

    def __init__(self, value: object) -> None:
        super().__init__("The provider sent an error in its stream.")
        self.value = value


@dataclass(slots=True)
class StreamedPart:
    """A part of an answer, as far as it has arrived."""

    kind: Literal["text", "thought", "call"]
    position: int = 0
    """Index among the tool calls."""
    call: message_pb2.ToolCall = field(default_factory=message_pb2.ToolCall)
    """What a call has besides its arguments, which are the pieces."""
    thought: message_pb2.Reasoning = field(default_factory=message_pb2.Reasoning)
    """What a thought has besides its text, such as a signature."""
    pieces: TextPieces = field(default_factory=TextPieces)

    def add(self, value: str) -> list[Delta]:
        """Append a piece and return its delta, if anything of it can be shown now."""
        piece = self.pieces.add(value)
        if not piece:
            return []
        if self.kind == "call":
            return [ToolCallDelta(self.position, piece)]
        return [TextDelta(piece) if self.kind == "text" else ReasoningDelta(piece)]

    def message_part(self) -> message_pb2.Part | None:
        """Return the part of the message; None if it is empty."""
        text = str(self.pieces)
        if self.kind == "call":
            self.call.arguments_json = text
            return message_pb2.Part(tool_call=self.call)
        if self.kind == "text":
            return message_pb2.Part(text=text) if text else None
        self.thought.text = text
        return message_pb2.Part(reasoning=self.thought) if self.thought.ByteSize() else None


class _RawEvents:
    """The first events of an answer as they came."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._size = 0
        self._left_out = 0

    def add(self, data: bytes) -> None:
        self._size += len(data) + 1
        if self._left_out or self._size > MAX_RAW_BYTES:
            self._left_out += 1
        else:
            self._events.append(data.decode(errors="replace"))

    def json(self) -> str:
        """Return the events as a JSON array; `{"left_out": 7}` at the end counts those that were not kept."""
        rest = [f'{{"left_out":{self._left_out}}}'] if self._left_out else []
        return f"[{','.join([*self._events, *rest])}]"


class Answer(ABC):
    """What the answers of all APIs have in common; a subclass reads the events of one API."""

    words: ClassVar[Mapping[str, str]] = {}
    """The provider's finish reasons in the words that other providers use for them."""

    def __init__(self, meter: AttemptMeter | None = None, *, name: str = "", keeps_raw: bool = False) -> None:
        """`meter` receives the usage; `name` is the model's name in the configuration.

        With `keeps_raw` the response has the provider's events as they came.
        """
        self._meter = meter or AttemptMeter()
        self._name = name
        self._raw_events = _RawEvents() if keeps_raw else None
        self._id = ""
        self._model = ""
        self._finish_reason = ""
        """As the provider names it; empty until it does."""
        self._is_done = False
        self._is_refused = False
        self._calls = 0
        """The number of tool calls that have begun."""
        self._annotations = AnnotationCollector()

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
        # Some servers announce no end: a finish reason is enough. Usage may still follow it, so it is not the end.
        return self._is_done or bool(self._finish_reason)

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        deltas = self._read(data)
        if self._raw_events is not None and data != DONE:
            self._raw_events.add(data)
        return deltas

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer. `model` is used if the provider names none."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
        positions: dict[Content, ContentPosition] = {}
        for key, streamed in self._parts():
            if (part := streamed.message_part()) is not None:
                positions |= self._positions(key, len(message.parts))
                message.parts.append(part)
        word = self.words.get(self._finish_reason, self._finish_reason)
        return step_pb2.LlmResponse(
            response_id=self._id,
            provider=provider,
            model=self._model or model,
            message=message,
            finish_reason=finish_reason_of(word, has_calls=self._calls > 0, is_refused=self._is_refused),
            provider_finish_reason=self._finish_reason,
            usage=self.usage,
            raw_json=compact_json(self._whole(self._model or model)),
            raw_events_json=self._raw_events.json() if self._raw_events is not None else "",
            annotations=self._annotations.build(positions),
        )

    def _begin_call(self, name: str, call_id: str) -> StreamedPart:
        call = message_pb2.ToolCall(name=name, provider_call_id=call_id)
        part = StreamedPart("call", position=self._calls, call=call)
        self._calls += 1
        return part

    def _positions(self, key: int | str, part_index: int) -> Mapping[Content, ContentPosition]:
        """Return the positions of a part's contents, which citations name."""
        return {(key, 0): ContentPosition(part_index=part_index)}

    @abstractmethod
    def _read(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""

    @abstractmethod
    def _parts(self) -> Iterable[tuple[int | str, StreamedPart]]:
        """Return the parts in their order in the answer, each with a key, by which citations name it."""

    @abstractmethod
    def _whole(self, model: str) -> Mapping[str, object]:
        """Return the whole answer in the provider's format."""
