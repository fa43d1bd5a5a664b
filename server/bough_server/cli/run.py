"""`bough run`: starts a turn and shows it to its end; following itself is following.py's."""

import sys
from dataclasses import dataclass
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

AgentArgument = Annotated[
    str, typer.Argument(metavar="AGENT", help="The agent to run; `bough agents list` shows them.")
]
TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="What you say to it; - reads standard input.")]
SessionOption = Annotated[
    str, typer.Option("--session", metavar="ID", help="The session to go on with; a new one where left out.")
]
RequestIdOption = Annotated[
    str,
    typer.Option("--request-id", metavar="ID", help="The same id again follows the same run; made where left out."),
]
DeltaOption = Annotated[
    Delta | None,
    typer.Option("--delta", help="How streamed text is recorded; the agent's or the server's way where left out."),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", parser=seconds, metavar="DURATION", help="The run's deadline, such as 90s or 1h30m."),
]
OnDisconnectOption = Annotated[
    OnDisconnect | None,
    typer.Option("--on-disconnect", help="What happens when nobody follows the run; the server's way if left out."),
]
NoTreeOption = Annotated[bool, typer.Option("--no-tree", help="Leave out the tree after the answer.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn as the command line asks for it; `timeout` in seconds."""

    agent: str
    text: str
    session: str
    request_id: str
    view: View
    delta: Delta | None
    timeout: float
    on_disconnect: OnDisconnect | None


def run(
    context: typer.Context,
    agent: AgentArgument,
    text: TextArgument,
    session: SessionOption = "",
    request_id: RequestIdOption = "",
    view: ViewOption = View.FULL,
    delta: DeltaOption = None,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser makes seconds of it
    on_disconnect: OnDisconnectOption = None,
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: NoTreeOption = False,
) -> None:
    """Run an agent and follow its turn.

    The first line on standard error is "run RUN_ID". Ctrl-C cancels the run, a second one leaves at once. The exit code
    is 0 when it answered, 1 when it failed, 4 when it was cancelled, and 130 after Ctrl-C.
    """
    turn = Turn(
        agent=agent,
        text=text,
        session=session,
        request_id=request_id,
        view=view,
        delta=delta,
        timeout=timeout,
        on_disconnect=on_disconnect,
    )
    finish(_run(target_of(context), turn, default_model=default_model, output=output, tree=not no_tree))


def _read_input() -> str:
    from bough_server.errors import ConfigurationError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigurationError("Standard input is not UTF-8 text.") from None


async def _run(target: Target, turn: Turn, *, default_model: str | None, output: Output, tree: bool) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.following import conclude, follow_to_the_end, interruptible, sink_of
    from bough_server.cli.requests import policy_of, view_of

    text = _read_input() if turn.text == "-" else turn.text
    async with connected(target, default_model=default_model, is_silent=True) as connection:
        client = connection.client
        stream = client.run(
            turn.agent,
            text,
            session_id=turn.session,
            request_id=turn.request_id,
            policy=policy_of(turn.delta, turn.on_disconnect),
            view=view_of(turn.view),
            timeout=turn.timeout,
        )
        async with stream, interruptible(stream) as interrupted:
            say(f"run {await stream.started()}")
            if connection.note:
                say(connection.note)
            async with sink_of(output) as sink:
                ended = await follow_to_the_end(client, stream, sink, turn.view)
            code = await conclude(client, stream.run_id, ended, output, tree=tree)
        return ExitCode.INTERRUPTED if interrupted.is_set() else code
