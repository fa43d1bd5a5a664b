"""What a streamed answer is, by whatever API it comes, and readings of JSON that nobody vouches for; no stream."""

from typing import Final, Protocol, TypeGuard

from pydantic_core import from_json

from bough.v1 import message_pb2, step_pb2
from bough_server.models.model import Delta

DONE: Final = b"[DONE]"
"""The data of the event after which nothing more comes."""


class BadChunk(ValueError):
    """What came is not a piece of an answer."""


class ReportedError(Exception):
    """The provider put an error into its stream; `value` is what it said."""

    def __init__(self, value: object) -> None:
        super().__init__("The stream carries an error.")
        self.value = value


class Answer(Protocol):
    """One answer that is being put together: the data of events in, deltas out, the whole at the end."""

    @property
    def usage(self) -> message_pb2.Usage | None:
        """What the provider reported so far; None where it said nothing."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the provider said that nothing more comes."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its end; a stream that stops before was cut."""
        ...

    def take(self, data: bytes) -> list[Delta]:
        """The deltas in the data of one event. Raises BadChunk or ReportedError."""
        ...

    def response(self, *, provider: str, model: str) -> step_pb2.LlmResponse:
        """The whole answer; `model` stands in where the provider names none."""
        ...


def json_object(data: bytes) -> dict[str, object]:
    """The JSON object in the data of an event. Raises BadChunk."""
    try:
        value: object = from_json(data)
    except ValueError as error:
        raise BadChunk("not JSON") from error
    if not is_object(value):
        raise BadChunk("not a JSON object")
    return value


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a JSON value is an object."""
    return isinstance(value, dict)


def objects(value: object) -> list[dict[str, object]]:
    """The objects in a list; none where it is no list."""
    return [each for each in value if is_object(each)] if isinstance(value, list) else []


def string(value: object) -> str:
    """A text; empty where it is none."""
    return value if isinstance(value, str) else ""


def count(value: object) -> int | None:
    """A number of things; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        return None
    return value
