"""Type-checked reads of a provider's JSON, and texts that arrive in pieces."""

import json
import re
from typing import Final, TypeGuard

import msgspec

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_decoder: Final = msgspec.json.Decoder()
_encoder: Final = msgspec.json.Encoder()


class BadChunk(ValueError):
    """The data of an event is not a piece of an answer."""


def json_object(data: bytes) -> dict[str, object]:
    """Parse the data of an event as a JSON object. Raises BadChunk."""
    try:
        value: object = _decoder.decode(data)
    except (ValueError, RecursionError):
        value = _parse_halves(data)
    if not is_object(value):
        raise BadChunk("not a JSON object")
    return value


def _parse_halves(data: bytes) -> object:
    """Parse JSON whose texts may have halves of surrogate pairs, which the faster parser refuses. Raises BadChunk."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadChunk("not JSON") from error


def compact_json(value: object) -> str:
    """Return a value as JSON text without spaces."""
    try:
        return _encoder.encode(value).decode()
    except (ValueError, RecursionError):  # halves of surrogate pairs, and numbers of more than 64 bits
        return whole_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Return whether a JSON value is an object."""
    return isinstance(value, dict)


def objects(value: object) -> list[dict[str, object]]:
    """Return the objects of a list; none if the value is no list."""
    return [each for each in value if is_object(each)] if isinstance(value, list) else []


def string(value: object) -> str:
    """Return a value that is a string; empty for any other."""
    return whole_text(value) if isinstance(value, str) else ""


def piece_of(value: object) -> str:
    """Return a value that is a string, in which halves of surrogate pairs are kept; empty for any other."""
    return value if isinstance(value, str) else ""


def whole_text(text: str) -> str:
    """Return a text whose surrogate pairs are characters; halves without the other become U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextPieces:
    """A text that arrives in pieces. A surrogate pair may be split over two of them: the half waits for the other."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._half = ""

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __str__(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> str:
        """Append a piece and return what can be shown of it now; may be empty."""
        if not piece:
            return ""
        piece, self._half = self._half + piece, ""
        if "\ud800" <= piece[-1] <= "\udbff":
            piece, self._half = piece[:-1], piece[-1]
        piece = whole_text(piece)
        if piece:
            self._pieces.append(piece)
        return piece


def count(value: object) -> int | None:
    """Return a value that is a non-negative int64; None for any other."""
    # JSON's true and false are ints in Python.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        return None
    return value
