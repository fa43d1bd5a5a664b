"""`bough sessions`: list, show and delete sessions, their messages and their session state, and change that state."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.commands import command
from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, LimitOption, SessionArgument, Target, target_of

if TYPE_CHECKING:
    from bough import AsyncClient

_HASH_DIGITS: Final = 64

FileArgument = Annotated[
    str,
    typer.Argument(metavar="SHA256", help="The file's hash or its beginning; `bough sessions messages` shows it."),
]
OutputFileOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="PATH", help="Where to write it.  [default: standard output]"),
]
StateJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_JSON_SPACE: Final = str.maketrans("\r\n\t", "   ")
"""White space that JSON allows between tokens, but not inside strings: replacing it keeps the value."""

sessions = typer.Typer(help="List, show and delete sessions, their messages and their state.", no_args_is_help=True)


@command(sessions, "list")
def list_sessions(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also the sessions of evaluations' trials.")] = False,
    limit: LimitOption = 20,
    json: JsonOption = False,
) -> None:
    """List sessions, newest first; those of evaluations' trials with --all only."""
    finish(_list(target_of(context), everything=everything, limit=limit, json=json))


@command(sessions, "show")
def show(context: typer.Context, session: SessionArgument, json: JsonOption = False) -> None:
    """Show one session and its runs."""
    finish(_show(target_of(context), session, json=json))


@command(sessions, "messages")
def messages(
    context: typer.Context,
    session: SessionArgument,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="How many of the last messages to print.")
    ] = 100,
    json: JsonOption = False,
) -> None:
    """Print a session's messages, main and sub-agents' in one order, oldest first."""
    finish(_messages(target_of(context), session, limit=limit, json=json))


@command(sessions, "state")
def state(context: typer.Context, session: SessionArgument, json: StateJsonOption = False) -> None:
    """Print the session state, including the changes of a run in progress."""
    finish(_state(target_of(context), session, json=json))


@command(sessions, "set")
def set_state(
    context: typer.Context,
    session: SessionArgument,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=JSON", help="A value to set; a string needs quotes: 'name=\"x\"'."),
    ] = None,
    delete: Annotated[list[str] | None, typer.Option("--delete", metavar="KEY", help="A value to delete.")] = None,
    json: StateJsonOption = False,
) -> None:
    """Set or delete values of the session state, all or none, and print it; refused while a run holds the session."""
    finish(_set(target_of(context), session, values=values or [], deleted=delete or [], json=json))


@command(sessions, "delete")
def delete(
    context: typer.Context,
    session: SessionArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a session with its runs, their logs and its messages; refused while a run holds it.

    The ledger of usage stays. Asks first; without a terminal, --yes has to be given.
    """
    finish(_delete(target_of(context), session, is_sure=yes))


@command(sessions, "file")
def read_file(
    context: typer.Context,
    session: SessionArgument,
    sha256: FileArgument,
    output: OutputFileOption = None,
) -> None:
    """Write an image or another file of a session's messages to a file or to standard output."""
    finish(_read_file(target_of(context), session, sha256, output=output))


async def _delete(target: Target, text: str, *, is_sure: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session
    from bough_server.cli.output import print_line
    from bough_server.cli.prompts import TerminalDialog, is_terminal
    from bough_server.cli.render.format import pluralize
    from bough_server.errors import ConfigurationError

    if not is_sure and not is_terminal():
        raise ConfigurationError("Nothing can be asked without a terminal: add --yes to delete the session.")
    async with connect(target, is_reading=True) as connection:
        client = connection.client
        session_id = await resolve_session(client, text)
        session = await client.sessions.get(session_id)
        if not is_sure:
            runs = pluralize(len([run async for run in client.list_runs(session_id=session_id)]), "run")
            answer = await TerminalDialog().ask(f"Delete the session {session.session_id} with {runs}? y or n:")
            if answer is None or answer.casefold() not in ("y", "yes"):
                return ExitCode.FAILED
        await client.sessions.delete(session_id)
        print_line(session_id)
    return ExitCode.YES


async def _read_file(target: Target, text: str, sha256: str, *, output: Path | None) -> ExitCode:
    from asyncio import to_thread

    from bough_server.cli.connection import connect, resolve_session
    from bough_server.errors import ConfigurationError

    if output is None and sys.stdout.isatty():
        raise ConfigurationError("A terminal cannot show a file: name one with --output, or redirect the output.")
    async with connect(target, is_reading=True) as connection:
        session_id = await resolve_session(connection.client, text)
        whole = await _whole_hash(connection.client, session_id, sha256)
        data = await connection.client.sessions.read_blob(session_id, whole)
    if output is not None:
        await to_thread(output.write_bytes, data)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return ExitCode.YES


async def _whole_hash(client: "AsyncClient", session_id: str, sha256: str) -> str:
    """Return the hash that begins like this among those of a session's messages; a whole one as it is."""
    from bough_server.errors import ConfigurationError
    from bough_server.log.blobs import blobs_in

    if len(sha256) == _HASH_DIGITS:
        return sha256
    messages = client.sessions.list_messages(session_id)
    hashes = {blob.sha256 async for message in messages for blob in blobs_in(message.parts)}
    found = sorted(each for each in hashes if each and each.startswith(sha256))
    if len(found) != 1:
        problem = f"{len(found)} files" if found else "no file"
        raise ConfigurationError(
            f"The messages of the session {session_id} have {problem} whose hash begins with {sha256!r}: "
            "`bough sessions messages` shows them; a whole hash also finds files that are only in events."
        )
    return found[0]


async def _list(target: Target, *, everything: bool, limit: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import print_table
    from bough_server.cli.render.tables import sessions_table

    found = []
    async with connect(target, is_reading=True) as connection:
        listed = connection.client.sessions.list(include_evaluation_sessions=everything, page_size=min(limit, 1000))
        async for session in listed:
            found.append(session)
            if len(found) == limit:
                break
    print_table(found, sessions_table, json=json)
    return ExitCode.YES


async def _show(target: Target, text: str, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session
    from bough_server.cli.output import json_text, print_line, print_lines, terminal
    from bough_server.cli.render.tables import runs_table, session_lines

    async with connect(target, is_reading=True) as connection:
        session_id = await resolve_session(connection.client, text)
        session = await connection.client.sessions.get(session_id)
        runs = [run async for run in connection.client.list_runs(session_id=session_id)]
    if json:
        print_line(json_text(session))
    else:
        width = terminal().width
        print_lines([*session_lines(session, width=width), *runs_table(runs, width=width)])
    return ExitCode.YES


async def _messages(target: Target, text: str, *, limit: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session
    from bough_server.cli.output import json_line, print_line, print_lines, terminal
    from bough_server.cli.render.tables import message_lines

    found = []
    async with connect(target, is_reading=True) as connection:
        session_id = await resolve_session(connection.client, text)
        async for message in connection.client.sessions.list_messages(session_id):
            found.append(message)
            if len(found) == limit:
                break
    # The server lists the newest first.
    found.reverse()
    if json:
        for message in found:
            print_line(json_line(message))
    else:
        print_lines([line for message in found for line in message_lines(message, width=terminal().width)])
    return ExitCode.YES


async def _state(target: Target, text: str, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session

    async with connect(target, is_reading=True) as connection:
        session_id = await resolve_session(connection.client, text)
        state_json = await connection.client.sessions.get_state(session_id)
    _print_state(state_json, json=json)
    return ExitCode.YES


async def _set(target: Target, text: str, *, values: Sequence[str], deleted: Sequence[str], json: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session

    changes = _changes(values, deleted)
    async with connect(target, is_reading=True) as connection:
        session_id = await resolve_session(connection.client, text)
        state_json = await connection.client.sessions.update_state(session_id, state_json=changes)
    _print_state(state_json, json=json)
    return ExitCode.YES


def _changes(values: Sequence[str], deleted: Sequence[str]) -> dict[str, str | None]:
    """Parse changes of the session state by name, None to delete. Raises ConfigurationError for an invalid change."""
    from bough_server.cli.prompts import json_of
    from bough_server.errors import ConfigurationError

    changes: dict[str, str | None] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"{text!r} has no value: write KEY=JSON, or --delete {text}.")
        json_of(value, what=f"The value of {name!r}")
        _add(changes, name, value)
    for name in deleted:
        _add(changes, name, None)
    if not changes:
        raise ConfigurationError("There is nothing to change: give KEY=JSON, or --delete KEY.")
    return changes


def _add(changes: dict[str, str | None], name: str, value: str | None) -> None:
    from bough_server.errors import ConfigurationError

    if name in changes:
        raise ConfigurationError(f"The value {name!r} is changed twice: change it once.")
    changes[name] = value


def _print_state(state_json: str, *, json: bool) -> None:
    from bough_server.cli.output import print_line
    from bough_server.log.session_state import values_of
    from bough_server.plain_text import printable

    if json:
        print_line(state_json)
        return
    for name, value in values_of(state_json).items():
        print_line(f"{name}={printable(value.translate(_JSON_SPACE))}")
