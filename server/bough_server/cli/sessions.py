"""`bough sessions`: conversations and what was said in them; nothing is changed."""

from typing import Annotated

import typer

from bough_server.cli.choices import JsonOption, LimitOption, SessionArgument, Target, target_of
from bough_server.cli.outcome import ExitCode, finish

sessions = typer.Typer(help="List and show sessions and their messages.", no_args_is_help=True)


@sessions.command("list")
def list_sessions(context: typer.Context, limit: LimitOption = 20, json: JsonOption = False) -> None:
    """List sessions, the newest first."""
    finish(_list(target_of(context), limit=limit, json=json))


@sessions.command("show")
def show(context: typer.Context, session: SessionArgument, json: JsonOption = False) -> None:
    """Show one session and its runs."""
    finish(_show(target_of(context), session, json=json))


@sessions.command("messages")
def messages(
    context: typer.Context,
    session: SessionArgument,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="The most messages, the last ones.")] = 100,
    json: JsonOption = False,
) -> None:
    """Print a session's messages, main and sub-agents' in one order, the oldest first."""
    finish(_messages(target_of(context), session, limit=limit, json=json))


async def _list(target: Target, *, limit: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.printing import json_line, print_line, print_lines, terminal
    from bough_server.cli.render.tables import sessions_table

    found = []
    async with connected(target, is_reading=True) as connection:
        async for session in connection.client.sessions.all(page_size=min(limit, 1000)):
            found.append(session)
            if len(found) == limit:
                break
    if json:
        for session in found:
            print_line(json_line(session))
    else:
        print_lines(sessions_table(found, width=terminal().width))
    return ExitCode.YES


async def _show(target: Target, session_id: str, *, json: bool) -> ExitCode:
    from bough import RunQuery
    from bough_server.cli.connection import connected
    from bough_server.cli.printing import json_text, print_line, print_lines, terminal
    from bough_server.cli.render.tables import runs_table, session_lines

    async with connected(target, is_reading=True) as connection:
        session = await connection.client.sessions.get(session_id)
        runs = [run async for run in connection.client.list_runs(RunQuery(session_id=session_id))]
    if json:
        print_line(json_text(session))
    else:
        width = terminal().width
        print_lines([*session_lines(session, width=width), *runs_table(runs, width=width)])
    return ExitCode.YES


async def _messages(target: Target, session_id: str, *, limit: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.printing import json_line, print_line, print_lines, terminal
    from bough_server.cli.render.tables import message_lines

    found = []
    async with connected(target, is_reading=True) as connection:
        async for message in connection.client.sessions.messages(session_id):
            found.append(message)
            if len(found) == limit:
                break
    found.reverse()
    if json:
        for message in found:
            print_line(json_line(message))
    else:
        print_lines([line for message in found for line in message_lines(message, width=terminal().width)])
    return ExitCode.YES
