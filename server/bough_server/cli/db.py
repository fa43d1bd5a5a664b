"""`bough db`: the operator's view of the database file; the store does the work."""

from typing import TYPE_CHECKING

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, Target, target_of

if TYPE_CHECKING:
    from bough_server.store.sql.database import DatabaseStatus

db = typer.Typer(help="Look after the database, without a server.", no_args_is_help=True)


@db.command("status")
def status(context: typer.Context, json: JsonOption = False) -> None:
    """Say which schema the database has: 0 the one that this version needs, 1 another."""
    finish(_status(target_of(context), json=json))


@db.command("upgrade")
def upgrade(context: typer.Context) -> None:
    """Make the database, or bring its schema up to this version."""
    finish(_upgrade(target_of(context)))


@db.command("rebuild")
def rebuild(context: typer.Context) -> None:
    """Make messages, usage and the lists of runs again from the logs; the logs themselves are only read."""
    finish(_rebuild(target_of(context)))


async def _status(target: Target, *, json: bool) -> ExitCode:
    import json as json_module

    from bough_server.cli.output import print_line
    from bough_server.settings import Settings
    from bough_server.store.sql.database import database_status

    found = database_status(Settings.load(target.config).storage.url)
    if json:
        known = {"path": str(found.path), "revision": found.revision, "head": found.head, "bytes": found.size_bytes}
        print_line(json_module.dumps(known))
    else:
        print_line(status_text(found, target.command))
    return ExitCode.YES if found.is_current else ExitCode.FAILED


async def _upgrade(target: Target) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.settings import Settings
    from bough_server.store.sql.database import upgrade_database

    print_line(status_text(upgrade_database(Settings.load(target.config).storage.url), target.command))
    return ExitCode.YES


async def _rebuild(target: Target) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import counted
    from bough_server.settings import Settings
    from bough_server.store.sql.rebuild import rebuild_projections

    number = rebuild_projections(Settings.load(target.config).storage.url)
    print_line(f"{counted(number, 'run')} read again")
    return ExitCode.YES


def status_text(status: "DatabaseStatus", command: str) -> str:
    """Which schema a database has, and the command that helps if it is not the one that this version needs."""
    if status.revision is None:
        return f"{status.path}: not there yet; `{command} serve` and `{command} db upgrade` make it"
    state = _state(status, status.revision, command)
    return f"{status.path}: revision {status.revision}, {state}, {status.size_bytes:,} bytes"


def _state(status: "DatabaseStatus", revision: str, command: str) -> str:
    if status.is_current:
        return "current"
    if revision > status.head:  # revisions are numbers of four digits
        return f"newer than {status.head}, the newest that this version of bough knows: use the newer version"
    return f"needs {status.head}: run `{command} db upgrade`"
