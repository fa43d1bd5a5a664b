"""Tokens and other secrets of connections to tool servers, read when a connection is made."""

from collections.abc import Mapping

from bough_server.tool_servers.config import GrpcSection, McpSection
from bough_server.tool_servers.connection import Unreachable


def read_token(section: McpSection | GrpcSection, variables: Mapping[str, str]) -> str:
    """Return the bearer token of a section; empty if it names none. Raises Unreachable if it cannot be read."""
    if section.token_file is None:
        return read_variable(section.token_env, variables) if section.token_env else ""
    try:
        return section.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"The file of its token cannot be read: {error}.") from None


def read_variable(name: str, variables: Mapping[str, str]) -> str:
    """Return the value of an environment variable. Raises Unreachable if it is not set."""
    if name not in variables:
        raise Unreachable(f"Set the environment variable {name}, which its settings name.")
    return variables[name]
