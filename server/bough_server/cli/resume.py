"""`bough resume`: answer a run's open requests, by options or at the terminal, and follow the run."""

from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import (
    DefaultModelOption,
    Display,
    NoInputOption,
    NoTreeOption,
    Output,
    OutputOption,
    RequestIdOption,
    RunArgument,
    Target,
    TimeoutOption,
    View,
    ViewOption,
    target_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bough import AsyncClient
    from bough.v1 import input_pb2, run_pb2
    from bough_server.cli.connection import Connection

AnswerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--answer",
        metavar="INPUT_ID=JSON",
        help="An answer, given without asking; 6 characters of either end of the id are enough. An approval takes "
        'true, false or {"approved", "arguments", "note"}; a client\'s tool its result, {"error"} or {"error", '
        '"result"}; a question its value.',
    ),
]


def resume(
    context: typer.Context,
    run: RunArgument,
    answer: AnswerOption = None,
    request_id: RequestIdOption = "",
    view: ViewOption = View.FULL,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser converts it to seconds
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: NoTreeOption = False,
    no_input: NoInputOption = False,
) -> None:
    """Answer a run's open requests, and follow the run.

    Without --answer it asks at the terminal, also for what the run waits for later; without a terminal it prints the
    open requests and exits with 3. Otherwise the exit code is that of `bough run`: 3 if the run waits for input again.
    Ctrl-C cancels the run once it continues.
    """
    display = Display(output=output, view=view, tree=not no_tree, asks=not no_input, timeout=timeout)
    work = _resume(
        target_of(context),
        run,
        answer or [],
        display,
        request_id=request_id,
        timeout=timeout,
        default_model=default_model,
    )
    finish(work)


async def _resume(
    target: Target,
    run_text: str,
    texts: "Sequence[str]",
    display: Display,
    *,
    request_id: str,
    timeout: float,
    default_model: str | None,
) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.conversions import view_of
    from bough_server.cli.follow import follow_and_report

    async with connect(target, default_model=default_model, is_silent=True, needs_runs=True) as connection:
        client = connection.client
        run = await client.get_run(await resolve_run(client, run_text))
        answers = await _answers(connection, run, texts, asks=display.asks)
        if not answers:
            return ExitCode.INPUT_REQUIRED
        stream = client.resume(run.run_id, answers, request_id=request_id, view=view_of(display.view), timeout=timeout)
        return await follow_and_report(connection, stream, display)


async def _answers(
    connection: "Connection", run: "run_pb2.Run", texts: "Sequence[str]", *, asks: bool
) -> "list[input_pb2.InputAnswer]":
    """Return the answers that are given as options or typed; empty if there are none yet."""
    from bough_server.cli.output import print_line
    from bough_server.cli.prompts import TerminalDialog, answers_of, ask_all, is_terminal
    from bough_server.cli.render.format import state_text
    from bough_server.cli.render.questions import waiting_lines
    from bough_server.errors import ConfigurationError

    if texts:
        return answers_of(texts, await _answerable(connection.client, run, texts))
    if not run.open_requests:
        raise ConfigurationError(f"Run {run.run_id} has no open requests: its state is {state_text(run.state)}.")
    if not asks or not is_terminal():
        for line in waiting_lines(run.run_id, run.open_requests, connection.command):
            print_line(line)
        return []
    answers = await ask_all(run.open_requests, TerminalDialog())
    if not answers:
        print_stderr("No request was answered: the run still waits.")
    return answers


async def _answerable(
    client: "AsyncClient", run: "run_pb2.Run", texts: "Sequence[str]"
) -> "Sequence[input_pb2.InputRequest]":
    """Return the open requests, or all requests that the run ever made if an answer names another one.

    So a command can be repeated: the server accepts an equal answer again and changes nothing.
    """
    from bough.v1 import follow_pb2

    names = {text.partition("=")[0].strip() for text in texts}
    if names <= {request.input_id for request in run.open_requests}:
        return run.open_requests
    until = follow_pb2.WATCH_UNTIL_CURRENT
    asking = ("agent.control.input_requested",)
    async with client.watch(run.run_id, until=until, event_names=asking) as stream:
        return [event.input_requested.request async for event in stream if event.HasField("input_requested")]
