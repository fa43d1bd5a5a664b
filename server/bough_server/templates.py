"""Texts with placeholders such as `{{input}}` and `{{state.name}}`; what the names stand for is whoever renders them's.

Any other brace is text, and so is what a placeholder stands for: it is not looked at again.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.session_state import is_path, json_text, value_at
from bough_server.truncation import MAX_TEXT_BYTES, size_of

# Possessive, so that a match takes time linear in the text.
_PLACEHOLDER: Final = re.compile(r"\{\{ *+([A-Za-z_][A-Za-z0-9_.:-]*+)(\??) *+\}\}")
_STATE: Final = "state."
_MOST_SHOWN: Final = 5


def names_in(template: str) -> set[str]:
    """The names that a template has placeholders for, those of the state without their question marks."""
    return {found.group(1) for found in _PLACEHOLDER.finditer(template)}


def template_mistake(template: str, known: Collection[str]) -> str:
    """What is wrong with the placeholders of a template, in a sentence; empty where nothing is."""
    wrong: dict[str, None] = {}
    for found in _PLACEHOLDER.finditer(template):
        name, mark = found.groups()
        is_of_state = name.startswith(_STATE) and is_path(name.removeprefix(_STATE))
        if not is_of_state and (mark or name not in known):
            wrong[found.group()[:80]] = None
    if not wrong:
        return ""
    shown = ", ".join([*list(wrong)[:_MOST_SHOWN], *(["..."] if len(wrong) > _MOST_SHOWN else [])])
    names = ", ".join(f"{{{{{name}}}}}" for name in known)
    return (
        f"has placeholders that stand for nothing here: {shown}. There is {f'{names}, ' if names else ''}"
        "{{state.NAME}}, and {{state.NAME?}} for a value that may be missing."
    )


def render(template: str, known: Mapping[str, Callable[[], str]], state: Mapping[str, Any], *, what: str) -> str:
    """A template with its placeholders filled in; each name is asked for once. A value that is no text is JSON text.

    `what` names the template in errors. Raises RunError BAD_ARGUMENTS for a value that is not in the state and for a
    text of over 512 KiB, and what asking for a name raises.
    """
    filled: dict[str, str] = {}
    pieces: list[str] = []
    size = end = 0
    for found in _PLACEHOLDER.finditer(template):
        place, name, mark = found.group(), *found.groups()
        if place not in filled:
            filled[place] = _filled(name, known, state, is_optional=bool(mark), what=what)
        pieces += [template[end : found.start()], filled[place]]
        size += size_of(pieces[-1])
        end = found.end()
        if size > MAX_TEXT_BYTES:
            raise _refused(f"{what} is longer than {MAX_TEXT_BYTES // 1024} KiB with what its placeholders stand for.")
    return "".join([*pieces, template[end:]])


def _filled(
    name: str, known: Mapping[str, Callable[[], str]], state: Mapping[str, Any], *, is_optional: bool, what: str
) -> str:
    if name in known:
        return known[name]()
    if not name.startswith(_STATE):
        raise _refused(f"{what} names {{{{{name}}}}}, which stands for nothing there.")
    path = name.removeprefix(_STATE)
    try:
        value = value_at(state, path)
    except KeyError:
        if is_optional:
            return ""
        raise _refused(
            f"{what} names {{{{{name}}}}}, and the session's state has no value {path!r}. Write {{{{{name}?}}}} where "
            "it may be missing."
        ) from None
    text = value if isinstance(value, str) else json_text(value)
    return text.encode(errors="replace").decode()  # JSON may hold half a surrogate pair, and no message may


def _refused(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
