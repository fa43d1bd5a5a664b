"""What is computed from a message of a history, kept from one request to the next: its tokens, and its JSON."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final

from bough.v1 import message_pb2
from bough_server.log.blobs import blobs_in

_MOST_FORMATS: Final = 2
"""The most formats that are kept: a message is usually sent to one model, or to it and its fallback."""
_MOST_BYTES: Final = 64 * 1024
"""The most bytes of JSON that are kept of a message: a longer one has a file, and few messages have."""


class JsonItems:
    """A list in a request's body, each of its items JSON already."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[bytes]) -> None:
        self.items = items


class MessageForms:
    """The forms of one message, which must not change."""

    __slots__ = ("_has_files", "_json", "message", "tokens")

    def __init__(self, message: message_pb2.Message) -> None:
        self.message = message
        self.tokens: int | None = None
        """Its estimated tokens; None until they have been counted."""
        self._has_files: bool | None = None
        self._json: dict[Hashable, Sequence[bytes]] = {}

    @property
    def has_files(self) -> bool:
        """True if the message or a tool result in it has a file."""
        if self._has_files is None:
            self._has_files = any(True for _ in blobs_in(self.message.parts))
        return self._has_files

    def json(
        self, format: Hashable, make: Callable[[message_pb2.Message], Iterable[Mapping[str, object]]]
    ) -> Sequence[bytes]:
        """Return the message as items of JSON in a format of requests; `make` returns the items."""
        found = self._json.get(format)
        if found is None:
            found = [encode_body(item) for item in make(self.message)]
            if sum(map(len, found)) <= _MOST_BYTES:
                if len(self._json) == _MOST_FORMATS:
                    del self._json[next(iter(self._json))]
                self._json[format] = found
        return found


def encode_body(body: Mapping[str, object]) -> bytes:
    """Return the body of a request as bytes."""
    if not any(isinstance(value, JsonItems) for value in body.values()):
        return json.dumps(body, ensure_ascii=False).encode()
    return b"{" + b", ".join(b"%b: %b" % (_json(key), _json(value)) for key, value in body.items()) + b"}"


def _json(value: object) -> bytes:
    if isinstance(value, JsonItems):
        return b"[" + b", ".join(value.items) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()
