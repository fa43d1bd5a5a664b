"""Regular expressions that callers bring: matching takes a bounded time, whatever the pattern.

The syntax is RE2's: that of Python without lookaround and back references, which no engine matches in linear time.
"""

from functools import lru_cache
from typing import Final

import re2

from bough_server.matching.work import spend

MAX_PATTERN: Final = 4_096
"""The most characters of a pattern."""

MAX_WORK: Final = 100_000_000
"""The most work of a search: the size of the compiled pattern times the bytes of the text. They take half a second."""


_PER_STEP: Final = 10
"""How much of that is as long as a step of other comparisons."""


class RegexProblem(ValueError):
    """A pattern that cannot be used, or not on this text; the message continues a sentence about the pattern."""


def check_pattern(pattern: str) -> None:
    """Raise RegexProblem for a pattern that cannot be compiled."""
    _compile(pattern, False)


def is_found(pattern: str, text: str, *, ignore_case: bool = False) -> bool:
    """Return whether a pattern matches anywhere in a text. Raises RegexProblem."""
    compiled = _compile(pattern, ignore_case)
    data = text.encode(errors="replace")
    if compiled.programsize * len(data) > MAX_WORK:
        raise RegexProblem(f"is too costly for a text of {len(data):,} bytes")
    spend(compiled.programsize * len(data) // _PER_STEP)
    # The engine does not hold Python's lock while it searches.
    return compiled.search(data.decode()) is not None


def escape(text: str) -> str:
    """Return a pattern that matches just a text."""
    pattern: str = re2.escape(text)
    return pattern


@lru_cache(maxsize=256)
def _compile(pattern: str, ignore_case: bool) -> "re2._Regexp":
    if len(pattern) > MAX_PATTERN:
        raise RegexProblem(f"is longer than {MAX_PATTERN:,} characters")
    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise RegexProblem(f"is not a regular expression of RE2: {_why(error)}") from None
    except UnicodeEncodeError:
        raise RegexProblem("is not Unicode text") from None


def _why(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)
