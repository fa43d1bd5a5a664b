"""What is computed from a message of a history, kept from one request to the next: its tokens, and its JSON."""

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from bough.v1 import message_pb2

_MOST_TEXTS: Final = 2
"""The most forms of JSON that are kept: a message is usually sent to one model, or to it and its fallback."""


class MessageForms:
    """The forms of one message, which must not change."""

    __slots__ = ("_texts", "message", "tokens")

    def __init__(self, message: message_pb2.Message) -> None:
        self.message = message
        self.tokens: int | None = None
        """Its estimated tokens; None until they have been counted."""
        self._texts: dict[Hashable, Sequence[str]] = {}

    def texts(self, format: Hashable, make: Callable[[message_pb2.Message], Sequence[str]]) -> Sequence[str]:
        """Return the message as JSON texts in a format, which is made once."""
        found = self._texts.get(format)
        if found is None:
            found = make(self.message)
            if len(self._texts) == _MOST_TEXTS:
                del self._texts[next(iter(self._texts))]
            self._texts[format] = found
        return found
