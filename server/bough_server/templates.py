"""Templates with placeholders such as `{{input}}` and `{{state.name}}`.

Other braces are plain text, and so are substituted values: they are not searched for placeholders.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.log.session_state import is_path, json_text, value_at
from bough_server.truncation import MAX_TEXT_BYTES, size_of

# Possessive quantifiers do not backtrack, so matching takes time linear in the text.
_PLACEHOLDER: Final = re.compile(r"\{\{ *+([A-Za-z_][A-Za-z0-9_.:-]*+)(\??) *+\}\}")
_STATE: Final = "state."

MISSING: Final = object()
"""The value of a template that is one placeholder whose value may be missing, and is."""

_MOST_SHOWN: Final = 5


def names_in(template: str) -> set[str]:
    """Return the names of a template's placeholders; those of session state without their question marks."""
    return {found.group(1) for found in _PLACEHOLDER.finditer(template)}


def placeholders_in(template: str) -> list[tuple[str, bool]]:
    """Return the name of each placeholder in order, and whether a question mark says that its value may be missing."""
    return [(found.group(1), bool(found.group(2))) for found in _PLACEHOLDER.finditer(template)]


def fill(template: str, values: Mapping[str, Any]) -> Any:
    """Return the value of the placeholder that is the whole template, else the template with all of them as text.

    Values other than text become JSON text there. A missing value of a placeholder with a question mark is MISSING, or
    empty text in a longer template. Raises KeyError for a missing value of another one.
    """
    if found := _PLACEHOLDER.fullmatch(template):
        return values.get(found[1], MISSING) if found[2] else values[found[1]]

    def fill_in(found: re.Match[str]) -> str:
        value = values.get(found[1], "") if found[2] else values[found[1]]
        return value if isinstance(value, str) else json_text(value)

    return _PLACEHOLDER.sub(fill_in, template)


def template_mistake(template: str, known: Collection[str]) -> str:
    """Return the problem with a template's placeholders as a sentence; empty if there is none."""
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
        f"has unknown placeholders: {shown}. Known are {f'{names}, ' if names else ''}"
        "{{state.NAME}}, and {{state.NAME?}} for a value that may be missing."
    )


def change_text(template: str, change: Callable[[str], str]) -> str:
    """Return a template with the text around its placeholders changed."""
    pieces: list[str] = []
    end = 0
    for found in _PLACEHOLDER.finditer(template):
        pieces += [change(template[end : found.start()]), found.group()]
        end = found.end()
    return "".join([*pieces, change(template[end:])])


def render(template: str, known: Mapping[str, Callable[[], str]], state: Mapping[str, Any], *, what: str) -> str:
    """Return a template with its placeholders filled in; values other than text become JSON text.

    Each name in `known` is evaluated at most once. `what` names the template in errors. Raises RunError BAD_ARGUMENTS
    for a value that session state lacks and for a text of over 512 KiB, and the errors of evaluating names.
    """
    filled: dict[str, str] = {}
    pieces: list[str] = []
    size = end = 0
    for found in _PLACEHOLDER.finditer(template):
        place, name, mark = found.group(), *found.groups()
        if place not in filled:
            filled[place] = _fill_placeholder(name, known, state, is_optional=bool(mark), what=what)
        pieces += [template[end : found.start()], filled[place]]
        size += size_of(pieces[-1])
        end = found.end()
        if size > MAX_TEXT_BYTES:
            raise _build_error(f"{what} is longer than {MAX_TEXT_BYTES // 1024} KiB with its placeholders filled in.")
    return "".join([*pieces, template[end:]])


def _fill_placeholder(
    name: str, known: Mapping[str, Callable[[], str]], state: Mapping[str, Any], *, is_optional: bool, what: str
) -> str:
    if name in known:
        return known[name]()
    if not name.startswith(_STATE):
        raise _build_error(f"{what} names {{{{{name}}}}}, which is unknown there.")
    path = name.removeprefix(_STATE)
    try:
        value = value_at(state, path)
    except KeyError:
        if is_optional:
            return ""
        raise _build_error(
            f"{what} names {{{{{name}}}}}, and the session's state has no value {path!r}. Write {{{{{name}?}}}} if "
            "it may be missing."
        ) from None
    text = value if isinstance(value, str) else json_text(value)
    return text.encode(errors="replace").decode()  # JSON may contain unpaired surrogates, messages may not


def _build_error(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
