"""Tool results as message parts that fit an event; a text that is too long keeps its head and its tail.

Contract, law 7: a text is at most 512 KiB; one that was cut has `truncated` and `original_bytes` set.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final

from pydantic_core import PydanticSerializationError, to_json

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.messages import constant_in
from bough_server.truncation import MAX_TEXT_BYTES, truncate_text

_PARTS_LIMIT: Final = 1024 * 1024
"""The most bytes of a result's parts without the data of files.

So the event with them, and the step's, stay under 2 MiB.
"""
_LEAST_BYTES: Final = 64
_WITHOUT_CALLS: Final = ("text", "reasoning", "blob", "data_json")


class Excerpt:
    """Head and tail of a text that grows: memory stays bounded however much is added."""

    def __init__(self, limit: int = MAX_TEXT_BYTES) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self.original_bytes = 0

    def add(self, text: str) -> None:
        """Append a text. Lone surrogates, which protobuf strings cannot hold, become question marks."""
        data = text.encode("utf-8", "replace")
        self.original_bytes += len(data)
        room = self._limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]  # only at twice the limit: trimming on every call would copy it every time

    def part(self) -> message_pb2.Part:
        """Return the text as a part; if it is longer than the limit, its head and tail, marked as truncated."""
        if self.original_bytes <= self._limit:
            return message_pb2.Part(text=self._head.decode())
        # A character may be split where the tail was trimmed and between head and tail: its bytes are dropped.
        kept = (self._head + self._tail).decode(errors="ignore")
        return message_pb2.Part(
            text=truncate_text(kept, self._limit), truncated=True, original_bytes=self.original_bytes
        )


def text_part(text: str, limit: int = MAX_TEXT_BYTES) -> message_pb2.Part:
    """Return a text as a part of at most `limit` bytes."""
    excerpt = Excerpt(limit)
    excerpt.add(text)
    return excerpt.part()


def result_parts(value: object) -> list[message_pb2.Part]:
    """Return a tool's return value as parts.

    A str is a text, None an empty text, parts are kept, and any other value is JSON or, if that is too long, a
    truncated text. Raises TypeError for values that are not JSON, such as NaN, and RunError OUTPUT_TOO_LARGE for parts
    that do not fit. The data of files does not count; its bound is that of a message.
    """
    if isinstance(value, message_pb2.Part):
        return _fit_parts([value])
    if isinstance(value, list) and value and all(isinstance(each, message_pb2.Part) for each in value):
        return _fit_parts(value)
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return [message_pb2.Part(text="")]
    if isinstance(value, str):
        return [text_part(value)]
    try:
        data_json = to_json(value).decode()
    except (PydanticSerializationError, ValueError) as error:
        raise TypeError(f"a {type(value).__name__} is neither text nor JSON ({error})") from error
    _check_json(data_json)
    if len(data_json) <= MAX_TEXT_BYTES and len(data_json.encode()) <= MAX_TEXT_BYTES:
        return [message_pb2.Part(data_json=data_json)]
    return [text_part(data_json)]


def _check_json(data_json: str) -> None:
    if constant := constant_in(data_json):
        raise TypeError(f"{constant} is not JSON; return null or a text instead")


def _fit_parts(parts: Sequence[message_pb2.Part]) -> list[message_pb2.Part]:
    fitted: list[message_pb2.Part] = []
    room = MAX_TEXT_BYTES
    for part in parts:
        content = part.WhichOneof("content")
        if content not in _WITHOUT_CALLS:
            raise TypeError(f"a part of a result holds text, data or a blob, not {content or 'nothing'}")
        if content == "data_json":
            _check_json(part.data_json)
        if content in ("text", "data_json"):
            text = part.text if content == "text" else part.data_json
            size = len(text.encode())
            if size > room:
                cut = text_part(text, max(room, _LEAST_BYTES))
                cut.metadata_json = part.metadata_json
                part, size = cut, len(cut.text.encode())
            room = max(room - size, 0)
        fitted.append(part)
    total = sum(part.ByteSize() - len(part.blob.data) for part in fitted)
    if total > _PARTS_LIMIT:
        raise RunError(
            f"The tool returned {total} bytes of parts besides the data of files, and at most {_PARTS_LIMIT} fit. "
            "It should return large content as a file.",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )
    return fitted
