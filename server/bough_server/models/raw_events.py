"""An answer whose provider's events are kept as they came, up to a bound; it reads none of them."""

from typing import Final

from bough.v1 import message_pb2, step_pb2
from bough_server.models.answer import DONE, Answer
from bough_server.models.model import Delta

MAX_RAW_BYTES: Final = 256 * 1024
"""The most bytes of events that are kept of an answer; those that come later are counted only."""


class RawAnswer:
    """Another answer, with its events beside it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events: list[str] = []
        self._size = 0
        self._left_out = 0

    @property
    def usage(self) -> message_pb2.Usage | None:
        """What the provider reported so far; None where it said nothing."""
        return self._answer.usage

    @property
    def is_done(self) -> bool:
        """Whether the provider said that nothing more comes."""
        return self._answer.is_done

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its end."""
        return self._answer.is_whole

    def take(self, data: bytes) -> list[Delta]:
        """The deltas in the data of one event. Raises BadChunk or ReportedError."""
        deltas = self._answer.take(data)
        if data != DONE:
            self._keep(data)
        return deltas

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """The whole answer, and its events as a JSON array; `{"left_out": 7}` at the end stands for seven more."""
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
