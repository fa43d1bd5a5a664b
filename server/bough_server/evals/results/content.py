"""Reduce what a result quotes of conversations: cut texts, leave them out, and remove secrets."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from bough.v1 import eval_result_pb2
from bough_server.matching.secrets import RedactionRules, Redactor
from bough_server.messages import copy_of

MAX_CHARACTERS: Final = 2_000
"""The most characters of a text in a file, unless full texts are asked for."""

_IDS: Final = frozenset(
    {
        "evaluation_id",
        "run_id",
        "user_run_id",
        "trace_id",
        "invocation_id",
        "invocation_id_before",
        "invocation_id_after",
        "eval_set_digest",
        "prices",
        "code_digest",
        "server_version",
        "currency_code",
        "cost_currency_code",
        "run_ids",
        "revision",
    }
)
"""Fields that this server makes: they quote nothing, and no pattern changes them."""

_NAMES: Final = frozenset(
    {
        *(
            "eval_set_name",
            "case_id",
            "cell",
            "case_ids",
            "id",
            "name",
            "agent",
            "expected_parent",
            "actual_parent",
            "rubric_id",
            "gate",
            "number",
            "forbidden",
        ),
        *("flaky_cases", "pins_changed", "agent_path", "input_id", "call_id", "labels"),
    }
)
"""Fields that name things. They are left if the content is left out, as ids are; patterns are searched in them."""

_TEXT_MAPS: Final = frozenset({"labels", "values"})
"""Maps whose values are texts of callers: labels, and what a cell of a matrix changes. Others hold hashes."""

_Message = TypeVar("_Message", bound=Message)

_Change: TypeAlias = Callable[[FieldDescriptor, bool, str], str]
"""Takes a field, whether its message is about names only, and the text; returns the text that is shown."""


def reduce_result(
    result: eval_result_pb2.EvalResult,
    comparison: eval_result_pb2.EvalComparison | None,
    content: str,
    *,
    fields: Sequence[str] = (),
    patterns: Sequence[str] = (),
) -> tuple[eval_result_pb2.EvalResult, eval_result_pb2.EvalComparison | None]:
    """Return copies of a result and of its comparison with fewer texts of conversations.

    `content` is "full", "cut" (each text to MAX_CHARACTERS) or "none": then no texts of conversations remain, and no
    sentences that may quote them; names of agents and tools, scores and the differences of trees remain. `fields` are
    paths of members in JSON, and `patterns` regular expressions, whose values and matches become "[redacted]" in every
    text, names included. A JSON text that was cut cannot be searched for members, so it is replaced as a whole if there
    are `fields`. Files that users sent are left out unless all is shown.

    Raises ConfigurationError for a pattern that is no regular expression.
    """
    shown, compared = copy_of(result), None if comparison is None else copy_of(comparison)
    both = [one for one in (shown, compared) if one is not None]
    redactor = build_redactor(both, RedactionRules(fields=fields, patterns=patterns))
    _reduce_all(both, content, redactor, keeps_files=content == "full" and not (fields or patterns))
    return shown, compared


def remove_secrets(message: _Message, *, fields: Sequence[str] = (), patterns: Sequence[str] = ()) -> _Message:
    """Return a copy of a message in which values and matches are "[redacted]", see `reduce_result`; but not in files.

    Raises ConfigurationError for a pattern that is no regular expression.
    """
    return redact_copy(message, build_redactor([message], RedactionRules(fields=fields, patterns=patterns)))


def build_redactor(messages: Sequence[Message], rules: RedactionRules) -> Redactor:
    """Return a redactor that knows the secrets of these messages. Raises ConfigurationError as `reduce_result`."""
    redactor = Redactor(fields=rules.fields, patterns=rules.patterns)
    if not rules.is_empty:
        for message in _messages(messages):
            for text in _texts(message):
                redactor.collect(text)
    return redactor


def redact_copy(message: _Message, redactor: Redactor) -> _Message:
    """Return a copy of a message without secrets; files are kept."""
    shown = copy_of(message)
    _reduce_all([shown], "full", redactor, keeps_files=True)
    return shown


def _reduce_all(messages: Sequence[Message], content: str, redactor: Redactor, *, keeps_files: bool) -> None:
    change = _build_change(content, redactor)
    for message in list(_messages(messages)):
        _reduce(message, change, keeps_files=keeps_files)


def _build_change(content: str, redactor: Redactor) -> _Change:
    def change_text(field: FieldDescriptor, is_name: bool, text: str) -> str:
        if content == "none" and not is_name and field.name not in _NAMES:
            return ""
        text = redactor.redact(text, is_json=_is_json(field))
        # After the secrets: one that is cut in two would no longer match.
        if content == "cut" and len(text) > MAX_CHARACTERS:
            text = text[: MAX_CHARACTERS - 1] + "…"
        return text

    return change_text


def _reduce(message: Message, change: _Change, *, keeps_files: bool) -> None:
    """Change the texts of one message in place."""
    is_name = _names_agents_only(message)
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_BYTES:
            if not keeps_files:
                message.ClearField(field.name)
        elif _is_map(field):
            _reduce_map(value, field, change)
        elif not _is_text(field):
            continue
        elif field.is_repeated:
            value[:] = [change(field, is_name, text) for text in value]
        else:
            setattr(message, field.name, change(field, is_name, value))


def _reduce_map(values: MutableMapping[str, Any], field: FieldDescriptor, change: _Change) -> None:
    """Change the keys of a map, which are names, and its values if they are texts of callers."""
    changed = {
        change(field, True, key): change(field, True, value) if field.name in _TEXT_MAPS else value
        for key, value in values.items()
    }
    values.clear()
    values.update(changed)


def _names_agents_only(message: Message) -> bool:
    """Return whether the texts of a message are about names: differences of tool calls quote arguments and results."""
    return isinstance(message, eval_result_pb2.TreeDifference) and message.kind != eval_result_pb2.DIFFERENCE_KIND_TOOLS


def _texts(message: Message) -> Iterator[str]:
    """Yield the texts of one message."""
    for field, value in message.ListFields():
        if _is_map(field):
            yield from value
            if field.name in _TEXT_MAPS:
                yield from value.values()
        elif _is_text(field):
            yield from value if field.is_repeated else [value]


def _is_text(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_STRING and field.name not in _IDS


def _is_json(field: FieldDescriptor) -> bool:
    return field.name.endswith("_json")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _messages(first: Sequence[Message]) -> Iterator[Message]:
    """Yield messages and all messages in them."""
    waiting = list(first)
    while waiting:
        one = waiting.pop()
        yield one
        for field, value in one.ListFields():
            if field.message_type is not None and not _is_map(field):
                waiting.extend(value if field.is_repeated else [value])
