"""Reduce what a result quotes of conversations: cut texts, leave them out, and remove secrets."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from bough.v1 import eval_result_pb2
from bough_server.errors import ConfigurationError
from bough_server.messages import copy_of

MAX_CHARACTERS: Final = 2_000
"""The most characters of a text in a file, unless full texts are asked for."""

REDACTED: Final = "[redacted]"

_JSON_TEXTS: Final = frozenset(
    {"arguments_json", "result_json", "equals_json", "subset_json", "value_json", "data_json", "details_json"}
)
"""Fields that quote JSON of a conversation."""

_TEXTS: Final = frozenset(
    {"user", "answer", "reason", "message", "text", "exact", "contains", "excludes", "regex", "prompt", "summary"}
)
"""Fields that quote texts of a conversation, or sentences that may."""

_OF_THE_TREE: Final = frozenset({"TreeDifference"})
"""Messages whose sentences name agents only."""


def reduced(
    result: eval_result_pb2.EvalResult, content: str, *, fields: Sequence[str] = (), patterns: Sequence[str] = ()
) -> eval_result_pb2.EvalResult:
    """Return a copy of a result with less of what was said in it.

    `content` is "full", "cut" (each text to MAX_CHARACTERS) or "none": then nothing that was said is left, nor any
    sentence that may quote it; names of agents and tools, scores and the differences of trees remain. `fields` are
    paths of members in JSON, and `patterns` regular expressions, whose values and matches become "[redacted]". A JSON
    text that was cut cannot be searched for members, so it is replaced as a whole if there are `fields`. Raises
    ConfigurationError for a pattern that is no regular expression.
    """
    shown = copy_of(result)
    change = _change(content, [path.split(".") for path in fields], _compiled(patterns))
    for message in _messages(shown):
        _reduce(message, change)
    return shown


def _compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ConfigurationError(
            f"evaluation.redact.patterns: {error.pattern!r} is no regular expression: {error.msg}."
        ) from None


def _change(
    content: str, fields: Sequence[Sequence[str]], patterns: Sequence[re.Pattern[str]]
) -> Callable[[str, str], str]:
    """Return a function from a field's name and text to the text that is shown."""

    def changed(name: str, text: str) -> str:
        if content == "none":
            return ""
        if fields and name in _JSON_TEXTS:
            text = _without_members(text, fields)
        for pattern in patterns:
            text = pattern.sub(REDACTED, text)
        # After the patterns: a secret that is cut in two would no longer match.
        if content == "cut" and len(text) > MAX_CHARACTERS:
            text = text[: MAX_CHARACTERS - 1] + "…"
        return text

    return changed


def _reduce(message: Message, change: Callable[[str, str], str]) -> None:
    """Change the texts of one message in place."""
    if message.DESCRIPTOR.name in _OF_THE_TREE:
        return
    for field, value in message.ListFields():
        if field.name not in _TEXTS and field.name not in _JSON_TEXTS:
            continue
        if field.message_type is not None:
            continue
        if not field.is_repeated:
            setattr(message, field.name, change(field.name, value))
        else:
            value[:] = [change(field.name, text) for text in value]


def _messages(message: Message) -> Iterator[Message]:
    """Yield a message and all messages in it."""
    waiting = [message]
    while waiting:
        one = waiting.pop()
        yield one
        for field, value in one.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            waiting.extend(value if field.is_repeated else [value])


def _without_members(text: str, fields: Sequence[Sequence[str]]) -> str:
    if not text:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return json.dumps(REDACTED)
    for path in fields:
        _hide(value, path)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _hide(value: Any, path: Sequence[str]) -> None:
    """Replace the members at a path, in place, wherever in the value it begins; `*` is any member or item."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        _hide_at(one, path)
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _hide_at(value: Any, path: Sequence[str]) -> None:
    if isinstance(value, list):
        if path[0] == "*":
            _hide_in(value, range(len(value)), path)
        return
    if isinstance(value, dict):
        _hide_in(value, list(value) if path[0] == "*" else [path[0]] if path[0] in value else [], path)


def _hide_in(value: Any, keys: Any, path: Sequence[str]) -> None:
    for key in keys:
        if len(path) == 1:
            value[key] = REDACTED
        else:
            _hide_at(value[key], path[1:])
