"""Tokens and other secrets of connections to tool servers, read when a connection is made."""

from collections.abc import Mapping
from pathlib import Path

from bough_server.tool_servers.config import GrpcSection, McpSection
from bough_server.tool_servers.connection import Unreachable


def read_token(section: McpSection | GrpcSection, variables: Mapping[str, str]) -> str:
    """Return the bearer token of a section; empty if it names none. Raises Unreachable if it cannot be read."""
    if section.token_file is None:
        return read_variable(section.token_env, variables) if section.token_env else ""
    try:
        return section.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise describe_file_error(error) from None
    except UnicodeError:
        raise Unreachable("The file of its token is no text in UTF-8.") from None


def describe_file_error(error: OSError) -> Unreachable:
    """Return the error of a file that the settings name: without its folder, which does not concern callers."""
    name = Path(str(error.filename or "")).name
    return Unreachable(f"The file {name!r} that its settings name cannot be used: {error.strerror or 'it is invalid'}.")


def read_variable(name: str, variables: Mapping[str, str]) -> str:
    """Return the value of an environment variable. Raises Unreachable if it is not set."""
    if name not in variables:
        raise Unreachable(f"Set the environment variable {name}, which its settings name.")
    return variables[name]
