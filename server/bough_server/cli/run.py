"""`bough run`: start a run and follow it to its end."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.chat import session_of
from bough_server.cli.completion import complete_agents
from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import (
    ContinueOption,
    DefaultModelOption,
    Delta,
    Display,
    ModelOption,
    NoInputOption,
    NoTreeOption,
    OnBusy,
    OnDisconnect,
    Output,
    OutputOption,
    RequestIdOption,
    SessionOption,
    Target,
    TimeoutOption,
    View,
    ViewOption,
    target_of,
)

if TYPE_CHECKING:
    from bough import AsyncClient
    from bough.requests import MissingSession
    from bough.v1 import agent_pb2, policy_pb2
    from bough_server.agents.definition import Source

AgentArgument = Annotated[
    str,
    typer.Argument(
        metavar="AGENT", help="The agent to run; `bough agents list` shows them.", autocompletion=complete_agents
    ),
]
TextArgument = Annotated[
    str, typer.Argument(metavar="TEXT", help="The message to the agent; - reads it from standard input.")
]
CreateSessionOption = Annotated[
    bool, typer.Option("--create-session", help="Create the session of --session if it does not exist.")
]
DeltaOption = Annotated[
    Delta | None,
    typer.Option("--delta", help="How streamed text is recorded.  [default: the agent's or the server's policy]"),
]
OnDisconnectOption = Annotated[
    OnDisconnect | None,
    typer.Option("--on-disconnect", help="What happens if no stream follows the run.  [default: the server's policy]"),
]
OnBusyOption = Annotated[
    OnBusy | None,
    typer.Option(
        "--on-busy",
        help="If another run holds the session: refuse this run, queue it, or cancel the other if it waits for input.",
    ),
]
DefinitionsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--definitions",
        metavar="PATH",
        help="A file with agents, or a folder of *.yaml files, that this run uses before the server's.",
    ),
]


FileOption = Annotated[
    list[Path] | None,
    typer.Option("--file", metavar="PATH", help="An image or another file to send with the message."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """The arguments of `bough run`."""

    agent: str
    text: str
    session: str
    create_session: bool
    request_id: str
    policy: "policy_pb2.RunPolicy"
    files: Sequence[Path] = ()
    definitions: Sequence[Path] = ()
    model: str = ""


def run(
    context: typer.Context,
    agent: AgentArgument,
    text: TextArgument,
    file: FileOption = None,
    session: SessionOption = "",
    continues: ContinueOption = False,
    create_session: CreateSessionOption = False,
    request_id: RequestIdOption = "",
    view: ViewOption = View.FULL,
    delta: DeltaOption = None,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser converts it to seconds
    on_disconnect: OnDisconnectOption = None,
    on_busy: OnBusyOption = None,
    definitions: DefinitionsOption = None,
    model: ModelOption = "",
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: NoTreeOption = False,
    no_input: NoInputOption = False,
) -> None:
    """Run an agent and follow the run.

    The first line on standard error is "run RUN_ID". At a terminal it asks for what the run waits for. Ctrl-C cancels
    the run, twice leaves at once. Exit code: 0 it answered, 1 failed, 3 waits for input, 4 was cancelled, 130 Ctrl-C.
    """
    from bough_server.cli.conversions import policy_of

    arguments = RunArguments(
        agent=agent,
        text=text,
        session=session_of(session, continues=continues),
        create_session=create_session,
        request_id=request_id,
        policy=policy_of(delta, on_disconnect, on_busy),
        files=file or (),
        definitions=definitions or (),
        model=model,
    )
    display = Display(output=output, view=view, tree=not no_tree, asks=not no_input, timeout=timeout)
    finish(_run(target_of(context), arguments, display, default_model=default_model))


def _read_input() -> str:
    from bough_server.errors import ConfigurationError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigurationError("Standard input is not UTF-8 text.") from None


async def _run(target: Target, arguments: RunArguments, display: Display, *, default_model: str | None) -> ExitCode:
    from bough import file_part, user_message
    from bough_server.cli.connection import connect
    from bough_server.cli.conversions import view_of
    from bough_server.cli.follow import follow_and_report

    text = _read_input() if arguments.text == "-" else arguments.text
    message = user_message(text, *map(file_part, arguments.files))
    sources = _sources(arguments.definitions)
    async with connect(target, default_model=default_model, is_silent=True) as connection:
        client = connection.client
        stream = client.run(
            arguments.agent,
            message,
            session_id=await _session_id(client, arguments),
            on_missing_session=_on_missing_session(arguments),
            request_id=arguments.request_id,
            definitions=await _definitions(client, arguments, sources),
            policy=arguments.policy,
            view=view_of(display.view),
            timeout=display.timeout,
        )
        with _locate_errors(sources):
            return await follow_and_report(connection, stream, display)


async def _session_id(client: "AsyncClient", arguments: RunArguments) -> str:
    from bough_server.cli.connection import resolve_session

    if not arguments.session or arguments.create_session:
        return arguments.session
    return await resolve_session(client, arguments.session)


async def _definitions(
    client: "AsyncClient", arguments: RunArguments, sources: "Sequence[Source]"
) -> "list[agent_pb2.AgentDefinition]":
    """Return the definitions to send; those of files come first, so that violations can be located in the files."""
    definitions = [source.definition for source in sources]
    if not arguments.model:
        return definitions
    from bough_server.cli.definitions import with_model

    return await with_model(client, arguments.agent, arguments.model, definitions)


def _on_missing_session(arguments: RunArguments) -> "MissingSession":
    from bough.v1 import agent_service_pb2
    from bough_server.errors import ConfigurationError

    if not arguments.create_session:
        return agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED
    if not arguments.session:
        raise ConfigurationError("--create-session needs the id of the session: add --session ID, or omit both.")
    return agent_service_pb2.MISSING_SESSION_POLICY_CREATE


def _sources(paths: Sequence[Path]) -> "Sequence[Source]":
    """Read definition files; without any, nothing is imported for it."""
    if not paths:
        return ()
    from bough_server.cli.definitions import read_definitions

    return read_definitions(paths)


@contextmanager
def _locate_errors(sources: "Sequence[Source]") -> Iterator[None]:
    """Report what is wrong with these definitions by file and line."""
    from bough import InvalidRequest

    try:
        yield
    except InvalidRequest as error:
        if not sources:
            raise
        from bough_server.cli.definitions import locate_in_files

        raise locate_in_files(error, sources) from None
