"""Prompts of judges and of simulated users: quotations that no text can end, and how long a prompt may be."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from bough.v1 import error_pb2
from bough_server.errors import RunError

_MAX_BYTES: Final = 250 * 1024
"""The most bytes of a prompt, a little less than an input may have."""


def build_mark(texts: Mapping[str, str] | Sequence[str]) -> str:
    """Return the mark of quotations of these texts.

    No text can hold the mark that depends on it, so none can end itself; and equal texts have equal marks.
    """
    return f"text-{hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]}"


def quote(text: str, mark: str) -> str:
    """Return a text between two lines that only its mark makes."""
    return f"<{mark}>\n{text}\n</{mark}>"


def check_size(prompt: str) -> None:
    """Raise RunError for a prompt that is too long; the message is the end of a sentence."""
    if (size := len(prompt.encode())) > _MAX_BYTES:
        message = f"its prompt would have {size:,} bytes, and {_MAX_BYTES:,} are the most."
        raise RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
