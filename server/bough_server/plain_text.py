"""Free text of models and tools as it may be shown: without control characters, and on one line."""

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SPACE: Final = re.compile(r"\s+")


def printable(text: str) -> str:
    """Remove control characters and expand tabs, but keep newlines: a model's text must not control the terminal."""
    return _CONTROL.sub("", text.replace("\r\n", "\n")).expandtabs(4)


def one_line(text: str) -> str:
    """Return a text on one line, with each sequence of white space replaced by a space."""
    return _SPACE.sub(" ", printable(text)).strip()
