"""What matches the placeholders that redaction leaves in expectations and mocks, such as those of recorded cases."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from bough_server.matching.secrets import REDACTED, Redactor, is_json_text
from bough_server.matching.work import spend


class _Placeholders:
    """How placeholders are matched; without a redactor any value does."""

    def __init__(self, redactor: Redactor | None) -> None:
        self.redactor = redactor
        # A member can have had any value, and any text can have quoted it.
        self.match_anything = redactor is None or redactor.has_fields
        self.redacted: dict[str, str] = {}


_current: Final[ContextVar[_Placeholders | None]] = ContextVar("bough_placeholders", default=None)


@contextmanager
def match_placeholders(redactor: Redactor | None) -> Iterator[None]:
    """Match placeholders in everything that is compared inside; outside they are compared as any other text.

    With a redactor, that has collected the secrets of what is compared, a placeholder matches what it removes there; if
    it has paths of members, any text. Without one, a placeholder matches any value: for what chooses an answer, and is
    no verdict.
    """
    token = _current.set(_Placeholders(redactor))
    try:
        yield
    finally:
        _current.reset(token)


def redact_like(expected: str, text: str) -> str:
    """Return a text as it would have been recorded, if what is expected of it has placeholders; else unchanged."""
    current = _current.get()
    if current is None or current.redactor is None or REDACTED not in expected:
        return text
    if text not in current.redacted:
        spend(len(text))
        current.redacted[text] = current.redactor.redact(text, is_json=is_json_text(text))
    return current.redacted[text]


def matches_anything(expected: object) -> bool:
    """Return whether an expected value is a placeholder that any value matches."""
    current = _current.get()
    return expected == REDACTED and current is not None and current.match_anything


def is_text(expected: str, text: str) -> bool:
    """Return whether a text is as expected, with something for each placeholder that any text matches."""
    return expected == text or (_has_open_placeholder(expected) and _covers(expected, text, is_whole=True))


def has_text(expected: str, text: str) -> bool:
    """Return whether a text contains an expected one, with something for each placeholder that any text matches."""
    return expected in text or (_has_open_placeholder(expected) and _covers(expected, text, is_whole=False))


def _has_open_placeholder(expected: str) -> bool:
    current = _current.get()
    return current is not None and current.match_anything and REDACTED in expected


def _covers(expected: str, text: str, *, is_whole: bool) -> bool:
    """Return whether the texts between placeholders follow one another, each with something in between.

    The first place of each is the best, so this takes no longer than a search.
    """
    first, *rest = expected.split(REDACTED)
    start = (0 if text.startswith(first) else -1) if is_whole else text.find(first)
    if start < 0:
        return False
    position, last = start + len(first), rest.pop()
    for piece in rest:
        found = text.find(piece, position + 1)
        if found < 0:
            return False
        position = found + len(piece)
    if is_whole:
        return text.endswith(last) and len(text) - len(last) > position
    return position < len(text) and text.find(last, position + 1) >= 0
