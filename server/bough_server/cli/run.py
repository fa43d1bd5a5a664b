"""`bough run`: starts a turn and shows it to its end; following itself is following.py's."""

import sys
from typing import Annotated

import typer

from bough_server.cli.choices import (
    DefaultModelOption,
    Delta,
    OnDisconnect,
    Output,
    OutputOption,
    Target,
    View,
    ViewOption,
    seconds,
    target_of,
)
from bough_server.cli.outcome import ExitCode, finish, say


def run(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent to run; `bough agents list` shows them.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What you say to it; - reads standard input.")],
    session: Annotated[
        str, typer.Option("--session", metavar="ID", help="The session to go on with; a new one where left out.")
    ] = "",
    request_id: Annotated[
        str,
        typer.Option("--request-id", metavar="ID", help="The same id again follows the same run; made where left out."),
    ] = "",
    view: ViewOption = View.FULL,
    delta: Annotated[
        Delta | None,
        typer.Option("--delta", help="How streamed text is recorded; the agent's or the server's way where left out."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", parser=seconds, metavar="DURATION", help="The run's deadline, such as 90s or 1h30m."),
    ] = "10m",  # type: ignore[assignment] # the parser makes seconds of it
    on_disconnect: Annotated[
        OnDisconnect | None,
        typer.Option("--on-disconnect", help="What happens when nobody follows the run; the server's way if left out."),
    ] = None,
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: Annotated[bool, typer.Option("--no-tree", help="Leave out the tree after the answer.")] = False,
) -> None:
    """Run an agent and follow its turn.

    The first line on standard error is "run RUN_ID". Ctrl-C cancels the run, a second one leaves at once. The exit code
    is 0 when it answered, 1 when it failed, 4 when it was cancelled, and 130 after Ctrl-C.
    """
    finish(
        _run(
            target_of(context),
            agent,
            text,
            session=session,
            request_id=request_id,
            view=view,
            delta=delta,
            timeout=timeout,
            on_disconnect=on_disconnect,
            default_model=default_model,
            output=output,
            tree=not no_tree,
        )
    )


def _read_input() -> str:
    from bough_server.errors import ConfigurationError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigurationError("Standard input is not UTF-8 text.") from None


async def _run(
    target: Target,
    agent: str,
    text: str,
    *,
    session: str,
    request_id: str,
    view: View,
    delta: Delta | None,
    timeout: float,
    on_disconnect: OnDisconnect | None,
    default_model: str | None,
    output: Output,
    tree: bool,
) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.following import conclude, follow_to_the_end, interruptible, sink_of
    from bough_server.cli.requests import policy_of, view_of

    said = _read_input() if text == "-" else text
    async with connected(target, default_model=default_model, is_silent=True) as connection:
        client = connection.client
        stream = client.run(
            agent,
            said,
            session_id=session,
            request_id=request_id,
            policy=policy_of(delta, on_disconnect),
            view=view_of(view),
            timeout=timeout,
        )
        async with stream, interruptible(stream) as interrupted:
            say(f"run {await stream.started()}")
            if connection.note:
                say(connection.note)
            async with sink_of(output) as sink:
                ended = await follow_to_the_end(client, stream, sink, view)
            code = await conclude(client, stream.run_id, ended, output, tree=tree)
        return ExitCode.INTERRUPTED if interrupted.is_set() else code
