"""`bough run`: start a turn and follow it to its end."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import (
    DefaultModelOption,
    Delta,
    Display,
    NoTreeOption,
    OnBusy,
    OnDisconnect,
    Output,
    OutputOption,
    RequestIdOption,
    Target,
    TimeoutOption,
    View,
    ViewOption,
    target_of,
)

if TYPE_CHECKING:
    from bough.requests import MissingSession
    from bough_server.agents.definition import Source

AgentArgument = Annotated[
    str, typer.Argument(metavar="AGENT", help="The agent to run; `bough agents list` shows them.")
]
TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="What you say to it; - reads standard input.")]
SessionOption = Annotated[
    str, typer.Option("--session", metavar="ID", help="The session to go on with; a new one where left out.")
]
CreateSessionOption = Annotated[
    bool, typer.Option("--create-session", help="Create the session of --session if there is none of that id.")
]
DeltaOption = Annotated[
    Delta | None,
    typer.Option("--delta", help="How streamed text is recorded; the agent's or the server's way where left out."),
]
OnDisconnectOption = Annotated[
    OnDisconnect | None,
    typer.Option("--on-disconnect", help="What happens when nobody follows the run; the server's way if left out."),
]
OnBusyOption = Annotated[
    OnBusy | None,
    typer.Option(
        "--on-busy",
        help="Where another run holds the session: refuse this one, let it wait, or cancel one that waits for input.",
    ),
]
DefinitionsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--definitions",
        metavar="PATH",
        help="A file with agents, or a folder of *.yaml files, that come before the server's in this run alone.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn as the command line asks for it; `timeout` in seconds."""

    agent: str
    text: str
    session: str
    create_session: bool
    request_id: str
    delta: Delta | None
    timeout: float
    on_disconnect: OnDisconnect | None
    on_busy: OnBusy | None
    definitions: Sequence[Path] = ()


def run(
    context: typer.Context,
    agent: AgentArgument,
    text: TextArgument,
    session: SessionOption = "",
    create_session: CreateSessionOption = False,
    request_id: RequestIdOption = "",
    view: ViewOption = View.FULL,
    delta: DeltaOption = None,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser makes seconds of it
    on_disconnect: OnDisconnectOption = None,
    on_busy: OnBusyOption = None,
    definitions: DefinitionsOption = None,
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: NoTreeOption = False,
) -> None:
    """Run an agent and follow its turn.

    The first line on standard error is "run RUN_ID". Ctrl-C cancels the run, a second one leaves at once. The exit code
    is 0 when it answered, 1 when it failed, 3 when it waits for input, 4 when it was cancelled, and 130 after Ctrl-C.
    """
    turn = Turn(
        agent=agent,
        text=text,
        session=session,
        create_session=create_session,
        request_id=request_id,
        delta=delta,
        timeout=timeout,
        on_disconnect=on_disconnect,
        on_busy=on_busy,
        definitions=definitions or (),
    )
    display = Display(output=output, view=view, tree=not no_tree)
    finish(_run(target_of(context), turn, display, default_model=default_model))


def _read_input() -> str:
    from bough_server.errors import ConfigurationError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigurationError("Standard input is not UTF-8 text.") from None


async def _run(target: Target, turn: Turn, display: Display, *, default_model: str | None) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.follow import see_through
    from bough_server.cli.options import policy_of, view_of

    text = _read_input() if turn.text == "-" else turn.text
    sources = _sources(turn.definitions)
    async with connected(target, default_model=default_model, is_silent=True) as connection:
        stream = connection.client.run(
            turn.agent,
            text,
            session_id=turn.session,
            on_missing_session=_on_missing_session(turn),
            request_id=turn.request_id,
            definitions=[source.definition for source in sources],
            policy=policy_of(turn.delta, turn.on_disconnect, turn.on_busy),
            view=view_of(display.view),
            timeout=turn.timeout,
        )
        with _named_in(sources):
            return await see_through(connection, stream, display)


def _on_missing_session(turn: Turn) -> "MissingSession":
    from bough.v1 import agent_service_pb2
    from bough_server.errors import ConfigurationError

    if not turn.create_session:
        return agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED
    if not turn.session:
        raise ConfigurationError("--create-session needs the id of the session: add --session ID, or leave both out.")
    return agent_service_pb2.MISSING_SESSION_POLICY_CREATE


def _sources(paths: Sequence[Path]) -> "Sequence[Source]":
    """The definitions in files; without any, what reads them is not loaded."""
    if not paths:
        return ()
    from bough_server.cli.definitions import definitions_in

    return definitions_in(paths)


@contextmanager
def _named_in(sources: "Sequence[Source]") -> Iterator[None]:
    """Tells what is wrong with definitions by file and line."""
    from bough import InvalidRequest

    try:
        yield
    except InvalidRequest as error:
        if not sources:
            raise
        from bough_server.cli.definitions import in_files

        raise in_files(error, sources) from None
