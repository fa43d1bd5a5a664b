"""Find and remove secrets in results: members of JSON at configured paths, and matches of configured patterns."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bough_server.errors import ConfigurationError

REDACTED: Final = "[redacted]"

_SHORTEST: Final = 4
"""Shorter values are removed only if they stand alone: a "1" is in too many texts."""

_LONGEST_PREFIX: Final = 512
"""How far back from an ellipsis the beginning of a secret is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionRules:
    """What is secret: paths of members of JSON, and regular expressions.

    Raises ConfigurationError for a pattern that is no regular expression.
    """

    fields: Sequence[str] = ()
    patterns: Sequence[str] = ()

    def __post_init__(self) -> None:
        _compile_patterns(self.patterns)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is secret."""
        return not any(self.fields) and not any(self.patterns)


class Redactor:
    """Removes secrets. Texts are collected first: a sentence may quote a secret that a call has at a path."""

    def __init__(self, *, fields: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        """Raise ConfigurationError for a pattern that is no regular expression."""
        self._paths = [path.split(".") for path in fields if path]
        self._patterns = _compile_patterns(patterns)
        self._values: set[str] = set()
        self._known: re.Pattern[str] | None = None
        self._sorted: list[str] = []

    @property
    def has_fields(self) -> bool:
        """Whether members at some paths are secrets."""
        return bool(self._paths)

    def collect(self, text: str) -> None:
        """Note the secrets in a text, so that `redact` finds them in others too.

        Members are looked for in every text: an answer can be JSON as well, and a sentence can quote some.
        """
        if not text:
            return
        self._known = None
        if self._paths:
            self._collect_members(text)
        for pattern in self._patterns:
            self._values.update(match for match in _matches(pattern, text) if len(match) >= _SHORTEST)

    def redact(self, text: str, *, is_json: bool) -> str:
        """Return a text without secrets; JSON that was cut cannot be searched for members, and is replaced."""
        if not text or not (self._paths or self._patterns):
            return text
        if is_json or (self._paths and _is_container(text)):
            text = self._redact_json(text, otherwise=json.dumps(REDACTED) if is_json and self._paths else text)
        redacted = self._redact_text(text)
        # What matches across the members of JSON, such as a comma, would leave none.
        breaks_json = is_json and redacted != text and is_json_text(text) and not is_json_text(redacted)
        return json.dumps(redacted, ensure_ascii=False) if breaks_json else redacted

    def _redact_text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(_replace_match, text)
        if self._values:
            text = self._without_beginnings(self._literals().sub(REDACTED, text))
        return text

    def _redact_json(self, text: str, *, otherwise: str) -> str:
        """Return JSON without secrets, or another text if it is none."""
        try:
            value = json.loads(text)
            for path in self._paths:
                for holder, key in list(_members(value, path)):
                    holder[key] = REDACTED
            # Escapes hide what patterns look for: strings are searched as they are meant.
            text = json.dumps(self._redact_strings(value), ensure_ascii=False, separators=(",", ":"))
            # JSON can escape unpaired surrogates, which messages cannot hold.
            return text.encode(errors="replace").decode()
        except (ValueError, RecursionError):
            return otherwise

    def _redact_strings(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.redact(value, is_json=False)
        if isinstance(value, list):
            return [self._redact_strings(item) for item in value]
        if isinstance(value, dict):
            return {self._redact_strings(name): self._redact_strings(item) for name, item in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            # As a whole: a part of a number that is a text would leave no JSON.
            text = json.dumps(value)
            return value if self.redact(text, is_json=False) == text else REDACTED
        return value

    def _collect_members(self, text: str) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict | list | str):
            for path in self._paths:
                self._values.update(_find_quoted_values(text, path[-1]))
            return
        for path in self._paths:
            for holder, key in list(_members(value, path)):
                self._values.update(_scalars(holder[key]))
        for inner in _strings(value):
            self._collect_members(inner)

    def _literals(self) -> re.Pattern[str]:
        if self._known is None:
            self._sorted = sorted({form for value in self._values for form in _forms(value)})
            longest_first = sorted(self._sorted, key=len, reverse=True)
            self._known = re.compile("|".join(_literal(value) for value in longest_first))
        return self._known

    def _without_beginnings(self, text: str) -> str:
        """Remove the beginning of a secret before an ellipsis or the end of a text: there it was cut in two."""
        pieces = re.split("(…)", text)
        return "".join(piece if piece == "…" else self._without_beginning(piece) for piece in pieces)

    def _without_beginning(self, text: str) -> str:
        # The longest is looked for first.
        for start in range(max(0, len(text) - _LONGEST_PREFIX), len(text) - _SHORTEST + 1):
            tail = text[start:]
            index = _first_from(self._sorted, tail)
            if index < len(self._sorted) and self._sorted[index].startswith(tail):
                return text[:start] + REDACTED
        return text


def is_json_text(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _compile_patterns(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in patterns if pattern]
    except re.error as error:
        raise ConfigurationError(
            f"evaluation.redact.patterns: {error.pattern!r} is no regular expression: {error.msg}."
        ) from None


def _matches(pattern: re.Pattern[str], text: str) -> Iterable[str]:
    return (match[0] for match in pattern.finditer(text))


def _replace_match(match: re.Match[str]) -> str:
    # A pattern that matches nothing, as `x*` does, must not fill a text with words.
    return REDACTED if match[0] else ""


def _forms(value: str) -> Iterator[str]:
    """Yield a value as it is, and as JSON and Python quote it."""
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]


def _literal(value: str) -> str:
    literal = re.escape(value)
    return literal if len(value) >= _SHORTEST else rf"(?<!\w){literal}(?!\w)"


def _first_from(values: Sequence[str], text: str) -> int:
    """Return the index of the first sorted value that is not less than a text."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if values[middle] < text else (low, middle)
    return low


def _is_container(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def _find_quoted_values(text: str, name: str) -> Iterator[str]:
    """Yield the values of members of a name in a text that quotes JSON, or a part of it, or a dict of Python."""
    member = rf"""(["']){re.escape(name)}\1\s*:\s*(?:(["'])((?:(?!\2)[^\\]|\\.)*)|([^"'\[{{,}}\]\s]+))"""
    return (match[3] or match[4] for match in re.finditer(member, text, re.DOTALL) if match[3] or match[4])


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a value that can be JSON or quote some."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, str) and ":" in leaf)


def _scalars(value: Any) -> Iterator[str]:
    """Yield the texts and numbers in a value."""
    for leaf in _leaves(value):
        if isinstance(leaf, str):
            if leaf and leaf != REDACTED:
                yield leaf
        elif leaf is not None and not isinstance(leaf, bool):
            yield json.dumps(leaf)


def _leaves(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)
        else:
            yield inner


def _members(value: Any, path: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the holder and key of each member at a path, wherever in the value the path begins."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield from _members_at(one, path)
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _members_at(value: Any, path: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    holders = [value]
    for number, name in enumerate(path, start=1):
        found = [(holder, key) for holder in holders for key in _keys(holder, name)]
        if number == len(path):
            yield from found
        holders = [holder[key] for holder, key in found]


def _keys(holder: Any, name: str) -> Sequence[Any]:
    if isinstance(holder, list):
        return range(len(holder)) if name == "*" else ()
    if isinstance(holder, dict):
        return list(holder) if name == "*" else [name] if name in holder else []
    return ()
