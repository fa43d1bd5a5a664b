"""Values of session state as JSON text, and paths into them.

Each value keeps the text it was written with. session_state_fold.py decides the order of writes.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bough.v1 import event_pb2, session_pb2
from bough_server.truncation import size_of

MAX_STATE_BYTES: Final = 256 * 1024
"""The most bytes of a session's state as JSON. A write beyond it is refused; one that a log holds has no effect."""

MAX_DEPTH: Final = 100
"""The most levels of nested lists and objects in a value: every written value must be readable from any stack depth."""

LIMITS: Final = f"it may be nested {MAX_DEPTH} deep and have numbers that a double can hold"
"""Rules for a JSON value, for error messages."""

KEY: Final = r"[A-Za-z][A-Za-z0-9_.:-]{0,127}"
"""Pattern of a value's key."""

Write = Sequence[tuple[str, str | None]]
"""Changes recorded together, JSON text by key and None to delete: all of them apply, in order, or none."""

_NESTING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|([\[{])|[\]}]')
"""Strings, so that brackets in them do not count, and brackets; the group matches opening ones."""
_LONG_NUMBER: Final = re.compile(r"[0-9]{309}")
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

PATH: Final = re.compile(r"[A-Za-z][A-Za-z0-9_:-]*(?:\.[A-Za-z0-9_:-]+)*")
"""A value's key, then members of objects by name and items of lists by index, from 0, each after a dot."""

_LONGEST: Final = 512


def values_of(state_json: str) -> dict[str, str]:
    """Split a state into the JSON text of each value by key; empty text is an empty state.

    Raises ValueError if the text is not a JSON object.
    """
    if not state_json:
        return {}
    values: dict[str, str] = {}
    at = _after(state_json, 0, "{")
    if state_json[at : at + 1] == "}":
        return _check_end(state_json, at + 1, values)
    while True:
        name, end = _decode(state_json, at)
        if not isinstance(name, str):
            raise ValueError("a state is a JSON object")
        at = _after(state_json, end, ":")
        _, end = _decode(state_json, at)
        values[name] = state_json[at:end]
        at = _SPACE.match(state_json, end).end()  # type: ignore[union-attr]  # the pattern matches empty text too
        if state_json[at : at + 1] == "}":
            return _check_end(state_json, at + 1, values)
        at = _after(state_json, at, ",")


def _after(text: str, at: int, mark: str) -> int:
    """Return the position of the next token after `mark`. Raises ValueError if `mark` is missing."""
    found = _SPACE.match(text, at)
    if found is None or text[found.end() : found.end() + 1] != mark:
        raise ValueError(f"a state is a JSON object: {mark} is missing")
    return _SPACE.match(text, found.end() + 1).end()  # type: ignore[union-attr]


def _decode(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None


def _check_end(text: str, at: int, values: dict[str, str]) -> dict[str, str]:
    if text[at:].strip():
        raise ValueError("a state is one JSON object")
    return values


def json_of(values: Mapping[str, str]) -> str:
    """Return a state as one JSON object, sorted by key; an empty state is empty text."""
    return "{" + ",".join(f"{json_text(key)}:{values[key]}" for key in sorted(values)) + "}" if values else ""


def json_text(value: object) -> str:
    """Return a value as JSON text. Raises TypeError or ValueError for values that JSON cannot represent."""
    return _ENCODER.encode(value)


def value_text(value: object) -> str:
    """Return a value as JSON text. Raises TypeError or ValueError if session state may not hold the value."""
    text = json_text(value)
    text.encode()  # raises UnicodeEncodeError, a ValueError, for unpaired surrogates
    if not is_value(text):
        raise ValueError(LIMITS)
    return text


def is_value(text: str) -> bool:
    """Return whether a text is a JSON value that session state may hold.

    It is nested at most MAX_DEPTH deep and has no number beyond a double, which excludes NaN and infinities.
    """
    if _is_too_deep(text):
        return False
    try:
        json_text(json.loads(text, parse_int=_integer if _LONG_NUMBER.search(text) else None)).encode()
    except (ValueError, OverflowError, RecursionError):
        return False
    return True


def _integer(text: str) -> int:
    number = int(text)
    float(number)  # raises OverflowError beyond a double
    return number


def _is_too_deep(text: str) -> bool:
    # Cheap, and enough for nearly every value.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for found in _NESTING.finditer(text):
        if found[1]:
            depth += 1
        elif found[0] in "]}":
            depth -= 1
        if depth > MAX_DEPTH:
            return True
    return False


def is_key(name: str) -> bool:
    """Return whether a text is a valid key."""
    return re.fullmatch(KEY, name) is not None


def fits(values: Mapping[str, str]) -> bool:
    """Return whether a state is within its bound."""
    return not values or state_size(values) <= MAX_STATE_BYTES


def state_size(values: Mapping[str, str]) -> int:
    """Return the bytes of a state as one JSON object; correct only for a state that is not empty."""
    return 1 + sum(value_size(name, text) for name, text in values.items())


def value_size(name: str, text: str | None) -> int:
    """Return the bytes of a value in its state, with its key and separators; 0 for a value that is not there."""
    return 0 if text is None else size_of(_ENCODER.encode(name)) + size_of(text) + 2


def apply_write(values: Mapping[str, str], write: Write) -> dict[str, str]:
    """Return the values after one write, however large they become."""
    after = dict(values)
    for name, text in write:
        if text is None:
            after.pop(name, None)
        else:
            after[name] = text
    return after


def apply_bounded_writes(values: Mapping[str, str], writes: Iterable[Write]) -> dict[str, str]:
    """Return the values after writes, in order. A write that would exceed the bound has no effect."""
    after = dict(values)
    size = state_size(after)
    for write in writes:
        last = dict(write)
        grown = size + sum(value_size(name, text) - value_size(name, after.get(name)) for name, text in last.items())
        # A state that is too large already may still shrink.
        if grown > max(MAX_STATE_BYTES, size):
            continue
        size = grown
        for name, text in last.items():
            if text is None:
                after.pop(name, None)
            else:
                after[name] = text
    return after


def write_of(changes: Iterable[session_pb2.SessionStateChange]) -> Write:
    """Return changes as a Write."""
    return [(change.key, change.value_json if change.HasField("value_json") else None) for change in changes]


def changes_of(event: event_pb2.AgentEvent) -> Write:
    """Return the changes of session state that an event records."""
    kind = event.WhichOneof("payload")
    if kind == "session_state_changed":
        return write_of(event.session_state_changed.state_changes)
    return write_of(event.tool_completed.state_changes) if kind == "tool_completed" else ()


def is_path(text: str) -> bool:
    """Return whether a text is a path, of at most 512 characters."""
    return len(text) <= _LONGEST and PATH.fullmatch(text) is not None


def value_at(state: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path. Keys may contain dots: the longest existing key is used. Raises KeyError."""
    names = path.split(".")
    for cut in range(len(names), 0, -1):
        name = ".".join(names[:cut])
        if name in state:
            return _below(state[name], names[cut:], path)
    raise KeyError(path)


def _below(value: Any, names: Sequence[str], path: str) -> Any:
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and name.isascii() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise KeyError(path)
    return value
