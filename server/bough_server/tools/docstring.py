"""What a docstring in Google's style says of a function and its parameters; nothing else of it reaches a model."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_SECTION: Final = re.compile(
    r"(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Yield|Example|Examples|Note|Notes):\s*$"
)
_PARAMETERS: Final = {"Args", "Arguments", "Parameters"}
_PARAMETER: Final = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Documentation:
    """The text before the first section, and what is said of each parameter."""

    summary: str
    parameters: Mapping[str, str]


def parse_docstring(docstring: str) -> Documentation:
    """Reads a docstring; what it does not understand it leaves out."""
    summary: list[str] = []
    parameters: dict[str, list[str]] = {}
    section = ""
    current: list[str] | None = None
    parameter_indent = 0
    for line in inspect.cleandoc(docstring).splitlines():
        header = _SECTION.match(line)
        if header:
            section, current = header[1], None
        elif not section:
            summary.append(line)
        elif section in _PARAMETERS and line.strip():
            indent = len(line) - len(line.lstrip())
            named = _PARAMETER.match(line.strip())
            if named and (current is None or indent <= parameter_indent):
                parameter_indent = indent
                current = parameters.setdefault(named[1], [named[2]])
            elif current is not None:
                current.append(line.strip())
    return Documentation(
        summary="\n".join(summary).strip(),
        parameters={name: " ".join(lines).strip() for name, lines in parameters.items()},
    )
