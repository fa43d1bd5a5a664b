"""Output of commands: lines, JSON, and a live view in a terminal."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from pydantic.alias_generators import to_camel
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bough import text_of
from bough.v1 import event_pb2
from bough_server.cli.render.live import LiveView

_REDRAW_SECONDS = 0.1

M = TypeVar("M", bound=Message)


class Terminal(Console):
    """A Rich console that raises BrokenPipeError for a closed pipe instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal() -> Terminal:
    """Return a console on standard output: no control codes in a pipe, no colors with NO_COLOR."""
    forgive_encoding()
    return Terminal(highlight=False, markup=False, emoji=False)


def whole_width() -> int:
    """Return the width to cut lines to: the terminal's; lines in a pipe are whole."""
    console = terminal()
    return console.width if console.is_terminal else sys.maxsize


def forgive_encoding() -> None:
    """Let standard output replace characters that its encoding lacks, instead of failing in the middle of a run."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def print_lines(lines: Iterable[Text]) -> None:
    """Print styled lines without wrapping them."""
    console = terminal()
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def print_line(text: str) -> None:
    """Print a line and flush it, so that the reader of a pipe gets it at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json_line(message: Message) -> str:
    """Return a message as protobuf JSON on one line."""
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False)


def json_text(message: Message) -> str:
    """Return a message as indented protobuf JSON."""
    return json_format.MessageToJson(message, indent=2, ensure_ascii=False)


def values_json(values: Mapping[str, object]) -> str:
    """Return values that are no message as JSON on one line, with keys in the form that protobuf JSON has."""
    return json.dumps(_rename_keys(values), ensure_ascii=False)


def _rename_keys(value: object) -> object:
    if isinstance(value, Mapping):
        return {to_camel(str(key)): _rename_keys(each) for key, each in value.items()}
    return [_rename_keys(each) for each in value] if isinstance(value, list | tuple) else value


def print_table(found: Sequence[M], table: Callable[[Sequence[M], int], Iterable[Text]], *, json: bool) -> None:
    """Print messages as lines of JSON, or as the table that `table` makes of them for the terminal's width."""
    if json:
        for message in found:
            print_line(json_line(message))
    else:
        print_lines(table(found, terminal().width))


class Screen:
    """Live view of a run while it is open: finished lines, and in a terminal status lines below them."""

    def __init__(self) -> None:
        self._console = terminal()
        self._view = LiveView(self._console.width, is_pipe=not self._console.is_terminal)
        self._live: Live | None = None
        self._redrawing: asyncio.Task[None] | None = None
        self.shown_answer = ""
        """The text of the root's last answer on the screen."""

    async def __aenter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Rich prints redirected text above the status lines: wanted only if standard error is this screen too.
            is_shared = sys.stderr.isatty()
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=is_shared)
            self._live.start()
            self._redrawing = asyncio.create_task(self._redraw(self._live))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._redrawing is not None:
            self._redrawing.cancel()
            # wait() does not raise the task's own CancelledError.
            await asyncio.wait({self._redrawing})
        if self._live is not None:
            # stop() draws once more.
            self._live.update(Group())
            self._live.stop()

    @property
    def shown_errors(self) -> Sequence[str]:
        """The messages of the errors on the screen."""
        return self._view.shown_errors

    def show(self, event: event_pb2.AgentEvent) -> None:
        """Print the lines that an event completes."""
        if event.depth == 0 and event.HasField("llm_completed"):
            self.shown_answer = text_of(event.llm_completed.response.message)
        for line in self._view.feed(event, time.monotonic()):
            self._console.print(line, no_wrap=True, overflow="ignore", crop=False)
        self._console.file.flush()

    async def _redraw(self, live: Live) -> None:
        while True:
            live.update(Group(*self._view.status(time.monotonic())), refresh=True)
            await asyncio.sleep(_REDRAW_SECONDS)
