"""A streamed answer that is being assembled, and the raw events that it is made of."""

from typing import Final, Protocol

from bough.v1 import step_pb2, usage_pb2
from bough_server.models.model import Delta

DONE: Final = b"[DONE]"
"""Data of the event that ends a stream."""

MAX_RAW_BYTES: Final = 256 * 1024
"""The most bytes of raw events kept per answer; later events are only counted."""


class ReportedError(Exception):
    """The provider sent an error in its stream; `value` is its JSON."""

    def __init__(self, value: object) -> None:
        super().__init__("The provider sent an error in its stream.")
        self.value = value


class Answer(Protocol):
    """A streamed answer that is being assembled: data of events in, deltas out, the whole response at the end."""

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """Usage as the provider reported it so far; None if it reported none."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the provider has announced the end of the stream."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete; a stream that ends before was cut off."""
        ...

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        ...

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer. `model` is used if the provider names none."""
        ...


class RawAnswer:
    """Wraps an answer and adds its raw events."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events: list[str] = []
        self._size = 0
        self._left_out = 0

    @property
    def usage(self) -> usage_pb2.Usage | None:
        """Usage as the provider reported it so far; None if it reported none."""
        return self._answer.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider has announced the end of the stream."""
        return self._answer.is_done

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete."""
        return self._answer.is_whole

    def apply(self, data: bytes) -> list[Delta]:
        """Apply the data of one event and return its deltas. Raises BadChunk or ReportedError."""
        deltas = self._answer.apply(data)
        if data != DONE:
            self._keep(data)
        return deltas

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """Return the whole answer with its events as a JSON array; `{"left_out": 7}` at the end counts dropped ones."""
        response = self._answer.response(provider=provider, model=model)
        rest = [f'{{"left_out":{self._left_out}}}'] if self._left_out else []
        response.raw_events_json = f"[{','.join([*self._events, *rest])}]"
        return response

    def _keep(self, data: bytes) -> None:
        self._size += len(data) + 1
        if self._left_out or self._size > MAX_RAW_BYTES:
            self._left_out += 1
        else:
            self._events.append(data.decode(errors="replace"))
