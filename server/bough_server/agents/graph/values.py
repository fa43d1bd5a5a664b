"""Values of graphs: JSON values of at most 512 KiB, paths into them, and how several become one input."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import json_format

from bough.v1 import agent_pb2, error_pb2, message_pb2
from bough_server.agents.graph.topology import START
from bough_server.errors import Reason, RunError
from bough_server.log.session_state import LIMITS, value_at, value_text
from bough_server.matching.json_types import parse
from bough_server.matching.schema_reading import MESSAGE_TITLE, is_message
from bough_server.matching.schemas import schema_mistakes
from bough_server.truncation import MAX_TEXT_BYTES, size_of

CHANNELS: Final = "channels"
STATE: Final = "state"
HISTORY: Final = "history"

RESERVED: Final = (START, "END", CHANNELS, STATE, HISTORY)
"""Names that no node can have: those of places, and the first names of paths."""

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Names of nodes and channels."""

MISSING: Final = object()
"""What is at a path of a value that has nothing there."""

_MOST_MISTAKES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path: the name that it begins with, the names below, and whether there may be nothing."""

    root: str
    names: tuple[str, ...]
    is_optional: bool


def parse_path(text: str) -> Path:
    """Return a path of a mapping. Raises ValueError if it is none."""
    is_optional = text.endswith("?")
    names = text.removesuffix("?").split(".")
    if not all(names):
        raise ValueError("must be a path such as START.question or review.critique?")
    root = names.pop(0)
    if root in (CHANNELS, STATE):
        if not names:
            raise ValueError(f"must name a value, such as {root}.notes")
        root = f"{root}.{names.pop(0)}"
    elif root == HISTORY and names:
        raise ValueError("must be `history` alone: a list of messages")
    return Path(root=root, names=tuple(names), is_optional=is_optional)


def parse_inner_path(text: str) -> Path:
    """Return a path into an output; the empty text is the output itself. Raises ValueError if it is none."""
    is_optional = text.endswith("?")
    bare = text.removesuffix("?")
    names = tuple(bare.split(".")) if bare else ()
    if not all(names):
        raise ValueError("must be a path such as verdict or review.verdict")
    return Path(root="", names=names, is_optional=is_optional)


def walk(value: Any, names: Sequence[str]) -> Any:
    """Return what is at a path below a value, or MISSING; items of lists are named by their numbers from 0."""
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and name.isascii() and int(name) < len(value):
            value = value[int(name)]
        else:
            return MISSING
    return value


def read_state(values: Mapping[str, Any], path: Path) -> Any:
    """Return what is at a path into the session state, or MISSING."""
    try:
        return value_at(values, ".".join((path.root.removeprefix(f"{STATE}."), *path.names)))
    except KeyError:
        return MISSING


def to_text(value: object, what: str, reason: Reason = error_pb2.ERROR_REASON_INVALID_OUTPUT) -> str:
    """Return a value as JSON text; `what` begins the message of its error.

    Raises RunError with that reason if it is no JSON, and OUTPUT_TOO_LARGE.
    """
    try:
        text = value_text(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        why = LIMITS if isinstance(error, RecursionError) else str(error)
        raise RunError(f"{what} is not JSON that a graph can pass on: {why}.", reason=reason) from None
    check_size(size_of(text), what)
    return text


def check_size(size: int, what: str) -> None:
    """Raise RunError OUTPUT_TOO_LARGE for a value of too many bytes as JSON; `what` begins the message."""
    if size > MAX_TEXT_BYTES:
        raise RunError(
            f"{what} is longer than {MAX_TEXT_BYTES // 1024} KiB as JSON. Keep large content elsewhere and pass a "
            "reference to it.",
            reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
        )


def check_type(value: Any, schema_json: str, what: str) -> None:
    """Raise RunError TYPE_MISMATCH if a value does not fit a type; `what` begins the message."""
    mistakes = schema_mistakes(value, schema_json)
    if not mistakes and MESSAGE_TITLE in schema_json and is_message(parse(schema_json)):
        mistakes = [] if to_message(value) is not None else [f"{str(value)[:80]} is no Message"]
    if mistakes:
        raise mismatch(f"{what}: {'; '.join(mistakes[:_MOST_MISTAKES])}.")


def mismatch(message: str) -> RunError:
    """Return the error of a value that does not fit."""
    return RunError(message, reason=error_pb2.ERROR_REASON_TYPE_MISMATCH)


def merge(deliveries: Sequence[tuple[str, Any]], target: str) -> Any:
    """Return the one value, or the merged objects, that senders delivered to a node. Raises RunError TYPE_MISMATCH."""
    if len(deliveries) == 1:
        return deliveries[0][1]
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for sender, value in deliveries:
        if not isinstance(value, dict):
            others = " and ".join(repr(name) for name, _ in deliveries)
            raise mismatch(
                f"{target!r} got values of {others}, and only objects can be merged: that of {sender!r} is "
                f"{_type_name(value)}. Give {target!r} an `input`."
            )
        for key, item in value.items():
            if key in owner:
                raise mismatch(
                    f"{target!r} got the key {key!r} of both {owner[key]!r} and {sender!r}. Give {target!r} an `input`."
                )
            merged[key], owner[key] = item, sender
    return merged


def _type_name(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else "a number"


_MESSAGE_NAMES: Final = frozenset(
    name for each in message_pb2.Message.DESCRIPTOR.fields for name in (each.name, each.json_name)
)


def from_message(message: message_pb2.Message) -> dict[str, Any]:
    """Return a message as a value."""
    value: dict[str, Any] = json_format.MessageToDict(message)
    return value


def to_message(value: Any) -> message_pb2.Message | None:
    """Return the message that a value is; None if it is none."""
    if not isinstance(value, dict) or not value.keys() <= _MESSAGE_NAMES or "parts" not in value:
        return None
    try:
        return json_format.ParseDict(value, message_pb2.Message())
    except json_format.ParseError:
        return None


def copy_value(value: Any) -> Any:
    """Return a copy that operators' code may change."""
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


def json_key(value: Any) -> str:
    """Return what is equal for equal JSON values: 1 is 1.0, also inside of them, but true is not 1."""
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: _normalize_numbers(each) for name, each in value.items()}
    return [_normalize_numbers(each) for each in value] if isinstance(value, list) else value


def find_whole_source(mappings: Sequence[agent_pb2.FieldMapping]) -> str:
    """Return the node whose output alone is the value of mappings; empty if there is none."""
    if len(mappings) != 1 or mappings[0].field or not mappings[0].path:
        return ""
    path = parse_path(mappings[0].path)
    return "" if path.names else path.root
