"""Standard output: plain lines, styled lines for a terminal, messages as JSON; what they say is not its own."""

import sys
from collections.abc import Iterable

from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text


class Terminal(Console):
    """Rich's console, which leaves a closed pipe to its caller instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal() -> Terminal:
    """Standard output for styled lines: no control codes in a pipe, no colors with NO_COLOR."""
    forgive_encoding()
    return Terminal(highlight=False, markup=False, emoji=False)


def forgive_encoding() -> None:
    """Lets standard output replace what its encoding lacks, instead of failing in mid-run."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def print_lines(lines: Iterable[Text]) -> None:
    """Prints styled lines as they are, without wrapping."""
    console = terminal()
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def print_line(text: str) -> None:
    """Prints a line at once, so that a pipe sees it as it happens."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json_line(message: Message) -> str:
    """A message as protobuf JSON on one line."""
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False)


def json_text(message: Message) -> str:
    """A message as protobuf JSON, indented."""
    return json_format.MessageToJson(message, indent=2, ensure_ascii=False)
