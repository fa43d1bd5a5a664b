"""`bough resume`: answer the requests of a run, by options or at the terminal, and follow it on."""

from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish, say
from bough_server.cli.options import (
    DefaultModelOption,
    Display,
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
        help="An answer, without asking; 6 characters of either end of the id do. An approval takes true, false or "
        '{"approved", "arguments", "note"}; a tool of the client its result, {"error"} or {"error", "result"}; a '
        "question its value.",
    ),
]


def resume(
    context: typer.Context,
    run: RunArgument,
    answer: AnswerOption = None,
    request_id: RequestIdOption = "",
    view: ViewOption = View.FULL,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser makes seconds of it
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: NoTreeOption = False,
) -> None:
    """Answer what a run asks, and follow it on.

    Asks in a terminal where no answer is given; without a terminal it prints what is open and exits with 3. Then the
    exit code is that of `bough run`: 3 when the run waits for input again. Ctrl-C cancels the run once it goes on.
    """
    display = Display(output=output, view=view, tree=not no_tree)
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
    text: str,
    given: "Sequence[str]",
    display: Display,
    *,
    request_id: str,
    timeout: float,
    default_model: str | None,
) -> ExitCode:
    from bough_server.cli.connection import connected, resolve_run
    from bough_server.cli.follow import see_through
    from bough_server.cli.options import view_of

    async with connected(target, default_model=default_model, is_silent=True) as connection:
        client = connection.client
        run = await client.get_run(await resolve_run(client, text))
        answers = await _answers(connection, run, given)
        if not answers:
            return ExitCode.INPUT_REQUIRED
        stream = client.resume(run.run_id, answers, request_id=request_id, view=view_of(display.view), timeout=timeout)
        return await see_through(connection, stream, display)


async def _answers(
    connection: "Connection", run: "run_pb2.Run", given: "Sequence[str]"
) -> "list[input_pb2.InputAnswer]":
    """The answers that are given or typed; none where somebody has yet to be asked."""
    from bough_server.cli.output import print_line
    from bough_server.cli.prompts import TerminalDialog, answers_of, ask_all, is_terminal
    from bough_server.cli.render.format import state_text
    from bough_server.cli.render.questions import waiting_lines
    from bough_server.errors import ConfigurationError

    if given:
        return answers_of(given, await _asked(connection.client, run, given))
    if not run.open_requests:
        raise ConfigurationError(f"Run {run.run_id} asks nothing, and its state is {state_text(run.state)}.")
    if not is_terminal():
        for line in waiting_lines(run.run_id, run.open_requests, connection.command):
            print_line(line)
        return []
    answers = await ask_all(run.open_requests, TerminalDialog())
    if not answers:
        say("Nothing is answered: the run goes on waiting.")
    return answers


async def _asked(
    client: "AsyncClient", run: "run_pb2.Run", given: "Sequence[str]"
) -> "Sequence[input_pb2.InputRequest]":
    """What is open; where an answer names something else, everything that the run ever asked.

    The same command twice is harmless that way: the server takes an equal answer again and changes nothing.
    """
    from bough.v1 import follow_pb2

    names = {text.partition("=")[0].strip() for text in given}
    if names <= {request.input_id for request in run.open_requests}:
        return run.open_requests
    until = follow_pb2.WATCH_UNTIL_CURRENT
    asking = ("agent.control.input_requested",)
    async with client.watch(run.run_id, until=until, event_names=asking) as stream:
        return [event.input_requested.request async for event in stream if event.HasField("input_requested")]
