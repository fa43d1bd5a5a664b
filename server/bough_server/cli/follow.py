"""Follow a run to its end and print its outcome."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

from rich.text import Text

from bough import (
    AsyncClient,
    CallFailed,
    CollectedRun,
    DeadlineExceeded,
    RunStream,
    Unavailable,
    collect_sync,
    text_of,
)
from bough.v1 import event_pb2, execution_pb2, follow_pb2, input_pb2, invocation_pb2
from bough_server.cli.connection import Connection
from bough_server.cli.conversions import view_of
from bough_server.cli.exit_codes import ExitCode, print_stderr
from bough_server.cli.loop import on_interrupt
from bough_server.cli.options import Display, Output, View
from bough_server.cli.output import Screen, forgive_encoding, json_line, print_line, print_lines, terminal
from bough_server.cli.prompts import Dialog, TerminalDialog, ask_all, is_terminal
from bough_server.cli.render.format import error_text
from bough_server.cli.render.notes import cancellation_text, file_texts
from bough_server.cli.render.plain import plain_line
from bough_server.cli.render.questions import waiting_lines
from bough_server.cli.render.tree import tree_lines
from bough_server.errors import BoughError
from bough_server.plain_text import printable

_CODES: Final = {
    execution_pb2.EXECUTION_STATE_SUCCEEDED: ExitCode.YES,
    execution_pb2.EXECUTION_STATE_FAILED: ExitCode.FAILED,
    execution_pb2.EXECUTION_STATE_CANCELLED: ExitCode.CANCELLED,
    execution_pb2.EXECUTION_STATE_INPUT_REQUIRED: ExitCode.INPUT_REQUIRED,
}
_FINAL_EVENTS_SECONDS: Final = 10.0
TREE_OPTIONS: Final = invocation_pb2.InvocationOptions(include_steps=True)
"""Options of a record to be shown as a tree: finish reasons are in the steps."""
_ENDS: Final = frozenset({"run_completed", "run_failed", "run_cancelled", "run_interrupted"})


class Sink(Protocol):
    """Destination of events."""

    def show(self, event: event_pb2.AgentEvent) -> None:
        """Show an event."""
        ...


class PlainLines:
    """Events as lines of text."""

    def show(self, event: event_pb2.AgentEvent) -> None:
        """Print an event as a line of text."""
        print_line(plain_line(event))


class JsonLines:
    """Events as lines of protobuf JSON."""

    def show(self, event: event_pb2.AgentEvent) -> None:
        """Print an event as a line of JSON."""
        print_line(json_line(event))


class NoEvents:
    """No events, for output of the answer only."""

    def show(self, event: event_pb2.AgentEvent) -> None:
        """Ignore an event."""


def sink_of(output: Output) -> AbstractAsyncContextManager[Sink]:
    """Return the sink for a kind of output; enter it before the first event."""
    forgive_encoding()
    match output:
        case Output.LIVE:
            return Screen()
        case Output.PLAIN:
            return nullcontext(PlainLines())
        case Output.JSON:
            return nullcontext(JsonLines())
        case Output.ANSWER:
            return nullcontext(NoEvents())


async def follow(stream: RunStream, sink: Sink) -> CollectedRun:
    """Show a stream's events to its end. Return how the run ended, or its open requests; empty if it did neither."""
    last: list[event_pb2.AgentEvent] = []
    async for event in stream:
        sink.show(event)
        # An interruption that another event follows is over.
        last = [event] if event.WhichOneof("payload") in _ENDS else []
    return collect_sync(last)


async def follow_to_the_end(client: AsyncClient, stream: RunStream, sink: Sink, view: View) -> CollectedRun:
    """Follow a run that shares the stream's deadline; if it passes, read the end that is recorded just after it."""
    try:
        return await follow(stream, sink)
    except DeadlineExceeded:
        rest = client.watch(
            stream.run_id,
            after_sequence=stream.through_sequence,
            until=follow_pb2.WATCH_UNTIL_INTERRUPTED,
            view=view_of(view),
            timeout=_FINAL_EVENTS_SECONDS,
        )
        async with rest:
            return await follow(rest, sink)


async def follow_and_report(connection: Connection, stream: RunStream, display: Display) -> ExitCode:
    """Follow a run that this command started or resumed, and print its outcome; Ctrl-C cancels the run."""
    dialog = TerminalDialog() if display.asks and is_terminal() else None
    followed = await follow_turn(connection, stream, display, dialog, note=connection.note)
    code = await print_turn_outcome(connection, followed, display)
    return ExitCode.INTERRUPTED if followed.is_interrupted else code


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedTurn:
    """A run up to its end or to where it waits for input that the user did not give."""

    run_id: str
    session_id: str
    run: CollectedRun
    is_interrupted: bool
    """Whether the user pressed Ctrl-C while it was followed."""
    sink: Sink
    """Where its events were shown."""


async def follow_turn(
    connection: Connection, stream: RunStream, display: Display, dialog: Dialog | None, *, note: str | None = None
) -> FollowedTurn:
    """Follow a run; with a dialog, ask for what it waits for and continue to follow it. Ctrl-C cancels the run.

    `note` is printed below the id of the run; None: neither is printed.
    """
    sinks = sink_of(display.output)
    while True:
        async with stream, cancel_on_interrupt(stream) as interrupted:
            if note is not None:
                _print_ids(await stream.started(), note)
            with explain_connection_loss(connection, stream):
                async with sinks as sink:
                    live = display.output is Output.LIVE
                    announcing = _SessionSink(sink) if live and note is not None else sink
                    run = await follow_to_the_end(connection.client, stream, announcing, display.view)
        answers = await _answers(run, dialog) if dialog is not None and not interrupted.is_set() else []
        if not answers:
            break
        view = view_of(display.view)
        note, stream = None, connection.client.resume(stream.run_id, answers, view=view, timeout=display.timeout)
    return FollowedTurn(
        run_id=stream.run_id,
        session_id=stream.session_id,
        run=run,
        is_interrupted=interrupted.is_set(),
        sink=sink,
    )


def _print_ids(run_id: str, note: str) -> None:
    print_stderr(f"run {run_id}")
    if note:
        print_stderr(note)


async def _answers(run: CollectedRun, dialog: Dialog) -> list[input_pb2.InputAnswer]:
    if run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
        return []
    answers = await ask_all(run.open_requests, dialog)
    return [] if dialog.is_interrupted else answers


class _SessionSink:
    """Shows events on a sink, and names the session before the first one."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._is_named = sink, False

    def show(self, event: event_pb2.AgentEvent) -> None:
        if event.session_id and not self._is_named:
            print_stderr(f"session {event.session_id}")
        self._is_named = True
        self._sink.show(event)


async def print_turn_outcome(connection: Connection, followed: FollowedTurn, display: Display) -> ExitCode:
    """Print the outcome of a followed run; see print_outcome."""
    return await print_outcome(
        connection, followed.run_id, followed.run, display.output, tree=display.tree, sink=followed.sink
    )


class ConnectionLost(BoughError):
    """The connection to a run's server, which did not come back."""


@contextmanager
def explain_connection_loss(connection: Connection, stream: RunStream) -> Iterator[None]:
    """Raise ConnectionLost, with the command that rejoins the run, if an accepted run's server does not come back."""
    try:
        yield
    except Unavailable as error:
        if not stream.run_id:
            raise
        what = error.message if error.reason else "The connection to the server was lost, and it did not come back."
        after = f" --after {stream.through_sequence}" if stream.through_sequence else ""
        raise ConnectionLost(
            f"{what}\n  run: {stream.run_id}\nThe run may continue there. To rejoin it: "
            f"{connection.command} watch {stream.run_id}{after}"
        ) from error


def _is_one_place() -> bool:
    """Return whether standard output and standard error are the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


async def print_outcome(
    connection: Connection,
    run_id: str,
    run: CollectedRun,
    output: Output,
    *,
    tree: bool,
    sink: Sink,
) -> ExitCode:
    """Print the answer, or on standard error why there is none yet, then the tree; return the exit code.

    An answer and errors that the sink has shown are not repeated.
    """
    shown_answer, shown_errors = (sink.shown_answer, sink.shown_errors) if isinstance(sink, Screen) else (None, ())
    is_new = run.message is not None and shown_answer != text_of(run.message)
    if run.message is not None and is_new and output in (Output.LIVE, Output.ANSWER):
        answer_text = "\n".join(filter(None, (text_of(run.message), *file_texts(run.message))))
        _print_answer(answer_text, apart=output is Output.LIVE)
    if run.state == execution_pb2.EXECUTION_STATE_FAILED and run.error is not None:
        print_stderr(f"The run failed: {error_text(run.error, shown_errors if _is_one_place() else ())}")
    if run.state == execution_pb2.EXECUTION_STATE_CANCELLED:
        print_stderr(f"The run was {cancellation_text(run.cancel_reason)}.")
    if run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
        for line in waiting_lines(run_id, run.open_requests, connection.command):
            print_stderr(line)
    if tree and output is Output.LIVE:
        if not is_new:
            print_line("")
        await print_tree(connection.client, run_id, shown_errors)
    return code_of(run.state)


def code_of(state: execution_pb2.ExecutionState.ValueType) -> ExitCode:
    """Return the exit code for a run's state; a run that has not ended is not a failure."""
    return _CODES.get(state, ExitCode.YES)


def _print_answer(text: str, *, apart: bool) -> None:
    if apart:
        print_line("")
    if sys.stdout.isatty():
        terminal().print(Text(printable(text)))
    else:
        # Control characters are removed only for a terminal: a file or a program gets the answer unchanged.
        print_line(text)
    if apart:
        print_line("")


async def print_tree(client: AsyncClient, run_id: str, shown_errors: Sequence[str]) -> None:
    try:
        invocation = await client.get_invocation(run_id, options=TREE_OPTIONS)
    except CallFailed as error:
        print_stderr(f"The tree could not be read: {error.message}")
        return
    console = terminal()
    print_lines(tree_lines(invocation, width=console.width, is_pipe=not console.is_terminal, shown_errors=shown_errors))


@asynccontextmanager
async def cancel_on_interrupt(stream: RunStream) -> AsyncIterator[asyncio.Event]:
    """Cancel the stream's run on the first Ctrl-C, and leave on the second. Yields an event that the first one sets."""
    main = asyncio.current_task()
    assert main is not None, "a command runs in a task"
    interrupted = asyncio.Event()
    cancelling: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        # Before the run has an id there is nothing to cancel.
        if interrupted.is_set() or not stream.run_id:
            interrupted.set()
            main.cancel()
            return
        interrupted.set()
        print_stderr("Cancelling the run; Ctrl-C again to leave at once.")
        cancelling.append(asyncio.create_task(_cancel(stream)))

    try:
        with on_interrupt(interrupt):
            yield interrupted
    except asyncio.CancelledError:
        if not interrupted.is_set():
            raise
        # Our own cancellation of the command's task: report it as the interrupt that caused it.
        raise KeyboardInterrupt from None
    finally:
        # The stream can end before the Cancel call returns; no task may outlive the command.
        for task in cancelling:
            task.cancel()
            await asyncio.wait({task})


async def _cancel(stream: RunStream) -> None:
    try:
        await stream.cancel()
    except CallFailed as error:
        print_stderr(f"The run could not be cancelled: {error.message}")
