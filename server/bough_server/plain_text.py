"""Free text of models and tools as it may be shown: without control characters, and on one line."""

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Also those that change the direction of text, and what is no character."""
_SPACE: Final = re.compile(r"\s+")


def escape_controls(text: str) -> str:
    """Replace control characters, but for white space, by their numbers, such as `\\u202e`."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable(text: str) -> str:
    """Remove control characters and expand tabs, but keep newlines: a model's text must not control the terminal."""
    return _CONTROL.sub("", text.replace("\r\n", "\n")).expandtabs(4)


def one_line(text: str) -> str:
    """Return a text on one line, with each sequence of white space replaced by a space."""
    return _SPACE.sub(" ", printable(text)).strip()
