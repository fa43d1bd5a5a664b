"""Names of tools that are expected of calls: one name, any, or all that a pattern matches in."""

from typing import Final

from bough.v1.eval_set_pb2 import ExpectedTool
from bough_server.matching.regexes import RegexProblem, is_found

ANY: Final = "*"
"""The name of an expected call that every tool has."""


def is_named(tool: ExpectedTool, name: str) -> bool:
    """Return whether an expected call names a tool, by its name or by a pattern that matches in it; ANY names none."""
    if not tool.name_regex:
        return tool.name == name
    try:
        return is_found(tool.name_regex, name)
    except RegexProblem:
        return False  # the name, which another system wrote, is too long for the pattern


def fits_name(tool: ExpectedTool, name: str) -> bool:
    """Return whether an expected call can be of a tool."""
    return tool.name == ANY or is_named(tool, name)


def name_words(tool: ExpectedTool) -> str:
    """Return the name that is expected, in words."""
    return f"tool that matches {tool.name_regex}" if tool.name_regex else tool.name
