"""Paths into a session's values, such as `review.approved`; what becomes of a value that is missing is the reader's."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

PATH: Final = re.compile(r"[A-Za-z][A-Za-z0-9_:-]*(?:\.[A-Za-z0-9_:-]+)*")
"""A value's name, then members of objects by name and items of lists by number, from 0, each after a dot."""

_LONGEST: Final = 512


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
