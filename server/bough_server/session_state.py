"""Values of a session's state as JSON text, and paths into them.

Each value stays the text that it was written as. The order of writes is decided in session_state_fold.py.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bough.v1 import event_pb2, session_pb2
from bough_server.truncation import size_of

MAX_STATE_BYTES: Final = 256 * 1024
"""The most bytes of a session's state as JSON; a write beyond it is refused, and one in a log that is has no effect."""

MAX_DEPTH: Final = 100
"""How deep lists and objects of a value may be nested: what was written must be read from any stack."""

LIMITS: Final = f"it may be nested {MAX_DEPTH} deep and have numbers that a double can hold"
"""What a value that is JSON has to keep to, as people are told."""

KEY: Final = r"[A-Za-z][A-Za-z0-9_.:-]{0,127}"
"""What a value may be called."""

Write = Sequence[tuple[str, str | None]]
"""Changes that are recorded together, JSON text by name and None to delete: all of them count, in order, or none."""

_NESTING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|([\[{])|[\]}]')
"""Texts, whose brackets are none, and brackets; the group is of those that open."""
_LONG_NUMBER: Final = re.compile(r"[0-9]{309}")
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

PATH: Final = re.compile(r"[A-Za-z][A-Za-z0-9_:-]*(?:\.[A-Za-z0-9_:-]+)*")
"""A value's name, then members of objects by name and items of lists by number, from 0, each after a dot."""

_LONGEST: Final = 512


def values_of(state_json: str) -> dict[str, str]:
    """A state as JSON text of each value, by name; empty text is an empty state.

    Raises ValueError for what is no JSON object.
    """
    if not state_json:
        return {}
    values: dict[str, str] = {}
    at = _after(state_json, 0, "{")
    if state_json[at : at + 1] == "}":
        return _whole(state_json, at + 1, values)
    while True:
        name, end = _decoded(state_json, at)
        if not isinstance(name, str):
            raise ValueError("a state is a JSON object")
        at = _after(state_json, end, ":")
        _, end = _decoded(state_json, at)
        values[name] = state_json[at:end]
        at = _SPACE.match(state_json, end).end()  # type: ignore[union-attr]  # it matches nothing as well
        if state_json[at : at + 1] == "}":
            return _whole(state_json, at + 1, values)
        at = _after(state_json, at, ",")


def _after(text: str, at: int, mark: str) -> int:
    """Where the next thing begins behind a mark."""
    found = _SPACE.match(text, at)
    if found is None or text[found.end() : found.end() + 1] != mark:
        raise ValueError(f"a state is a JSON object: {mark} is missing")
    return _SPACE.match(text, found.end() + 1).end()  # type: ignore[union-attr]


def _decoded(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None


def _whole(text: str, at: int, values: dict[str, str]) -> dict[str, str]:
    if text[at:].strip():
        raise ValueError("a state is one JSON object")
    return values


def json_of(values: Mapping[str, str]) -> str:
    """A state as one JSON object, in the order of its values' names; an empty one is empty text."""
    return "{" + ",".join(f"{json_text(key)}:{values[key]}" for key in sorted(values)) + "}" if values else ""


def json_text(value: object) -> str:
    """A value as JSON text. Raises TypeError or ValueError for what JSON cannot hold."""
    return _ENCODER.encode(value)


def value_text(value: object) -> str:
    """A value as JSON text that the state may hold. Raises TypeError or ValueError for one that it may not."""
    text = json_text(value)
    text.encode()
    if not is_value(text):
        raise ValueError(LIMITS)
    return text


def is_value(text: str) -> bool:
    """Whether a text is a JSON value that the state may hold: nested at most MAX_DEPTH deep, without a number beyond a
    double, NaN and infinities among them."""
    if _is_too_deep(text):
        return False
    try:
        json_text(json.loads(text, parse_int=_integer if _LONG_NUMBER.search(text) else None)).encode()
    except (ValueError, OverflowError, RecursionError):
        return False
    return True


def _integer(text: str) -> int:
    number = int(text)
    float(number)
    return number


def _is_too_deep(text: str) -> bool:
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
    """Whether a value may be called so."""
    return re.fullmatch(KEY, name) is not None


def fits(values: Mapping[str, str]) -> bool:
    """Whether a state is within its bound."""
    return not values or state_size(values) <= MAX_STATE_BYTES


def state_size(values: Mapping[str, str]) -> int:
    """Bytes of a state that is not empty, as one JSON object."""
    return 1 + sum(value_size(name, text) for name, text in values.items())


def value_size(name: str, text: str | None) -> int:
    """Bytes of a value in its state, with its name and what parts them from the next; 0 of one that is not there."""
    return 0 if text is None else size_of(_ENCODER.encode(name)) + size_of(text) + 2


def applied(values: Mapping[str, str], write: Write) -> dict[str, str]:
    """Values after changes, however large that makes them."""
    after = dict(values)
    for name, text in write:
        if text is None:
            after.pop(name, None)
        else:
            after[name] = text
    return after


def changed(values: Mapping[str, str], writes: Iterable[Write]) -> dict[str, str]:
    """Values after writes, in order. A write that would make them larger than they may be has no effect."""
    after = dict(values)
    size = state_size(after)
    for write in writes:
        last = dict(write)
        grown = size + sum(value_size(name, text) - value_size(name, after.get(name)) for name, text in last.items())
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
    """Changes as they are applied."""
    return [(change.key, change.value_json if change.HasField("value_json") else None) for change in changes]


def changes_of(event: event_pb2.AgentEvent) -> Write:
    """What an event changes of its session's state."""
    kind = event.WhichOneof("payload")
    if kind == "session_state_changed":
        return write_of(event.session_state_changed.state_changes)
    return write_of(event.tool_completed.state_changes) if kind == "tool_completed" else ()


def is_path(text: str) -> bool:
    """Whether a text is a path, of at most 512 characters."""
    return len(text) <= _LONGEST and PATH.fullmatch(text) is not None


def value_at(state: Mapping[str, Any], path: str) -> Any:
    """The value at a path. Names may hold dots: the longest name that is there counts. Raises KeyError."""
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
