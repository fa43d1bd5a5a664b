"""`bough db`: status, upgrade and rebuild of the database, for operators."""

from typing import TYPE_CHECKING

import typer

from bough_server.cli.commands import command
from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, Target, target_of

if TYPE_CHECKING:
    from bough_server.store.sql.status import DatabaseStatus

db = typer.Typer(help="Inspect, upgrade and rebuild the database, without a server.", no_args_is_help=True)


@command(db, "status")
def status(context: typer.Context, json: JsonOption = False) -> None:
    """Report the revision of the database's schema; exit with 1 if this version needs another one."""
    finish(_status(target_of(context), json=json))


@command(db, "upgrade")
def upgrade(context: typer.Context) -> None:
    """Create the database, or upgrade its schema to this version."""
    finish(_upgrade(target_of(context)))


@command(db, "rebuild")
def rebuild(context: typer.Context) -> None:
    """Rebuild messages, usage and the lists of runs from the logs, which are only read."""
    finish(_rebuild(target_of(context)))


async def _status(target: Target, *, json: bool) -> ExitCode:
    import json as json_module

    from bough_server.cli.output import print_line
    from bough_server.settings import Settings
    from bough_server.store.opening import database_status
    from bough_server.store.sqlite.database_path import is_postgres

    url = Settings.load(target.config).storage.url
    found = database_status(url)
    if json:
        known = {
            "url" if is_postgres(url) else "path": found.name,
            "revision": found.revision,
            "head": found.head,
            "bytes": found.size_bytes,
        }
        print_line(json_module.dumps(known))
    else:
        print_line(status_text(found, target.command))
    return ExitCode.YES if found.is_current else ExitCode.FAILED


async def _upgrade(target: Target) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.settings import Settings
    from bough_server.store.opening import upgrade_database

    print_line(status_text(upgrade_database(Settings.load(target.config).storage.url), target.command))
    return ExitCode.YES


async def _rebuild(target: Target) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import counted
    from bough_server.settings import Settings
    from bough_server.store.opening import rebuild_projections

    number = rebuild_projections(Settings.load(target.config).storage.url)
    print_line(f"{counted(number, 'run')} rebuilt")
    return ExitCode.YES


def status_text(status: "DatabaseStatus", command: str) -> str:
    """Describe a database's schema, and name the command to run if this version needs another one."""
    if status.revision is None:
        return f"{status.name}: does not exist yet; `{command} serve` and `{command} db upgrade` create it"
    state = _state(status, status.revision, command)
    return f"{status.name}: revision {status.revision}, {state}, {status.size_bytes:,} bytes"


def _state(status: "DatabaseStatus", revision: str, command: str) -> str:
    if status.is_current:
        return "current"
    if revision > status.head:  # both are four digits, so they compare as text
        return f"newer than {status.head}, the newest that this version of bough supports: upgrade bough"
    return f"needs {status.head}: run `{command} db upgrade`"
