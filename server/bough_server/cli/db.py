"""`bough db`: status, upgrade, rebuild and copies of the database, for operators."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.commands import command
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import JsonOption, Target, target_of

if TYPE_CHECKING:
    from bough_server.store.sql.schema_version import DatabaseStatus, DatabaseUse

_PROGRESS_SECONDS: Final = 5.0
"""Between two lines about one table that is copied."""

_URL: Final = "a path, sqlite:/// and a path, or postgresql://USER@HOST:PORT/DATABASE"
FromArgument = Annotated[str, typer.Argument(metavar="FROM", help=f"The database to copy: {_URL}.")]
ToArgument = Annotated[str, typer.Argument(metavar="TO", help="The database to copy to, empty or not there yet.")]
NoBackupOption = Annotated[bool, typer.Option("--no-backup", help="Keep no copy of the SQLite file of before.")]

db = typer.Typer(help="Inspect, upgrade, rebuild and copy the database, without a server.", no_args_is_help=True)


@command(db, "status")
def status(context: typer.Context, json: JsonOption = False) -> None:
    """Report the revision of the database's schema, its size, who uses it, and how many runs are open.

    Exit with 1 if this version needs another revision.
    """
    finish(_status(target_of(context), json=json))


@command(db, "upgrade")
def upgrade(context: typer.Context, no_backup: NoBackupOption = False) -> None:
    """Create the database, or upgrade its schema to this version. Keep a copy of an older SQLite file beside it."""
    finish(_upgrade(target_of(context), keeps_backup=not no_backup))


@command(db, "rebuild")
def rebuild(context: typer.Context) -> None:
    """Rebuild messages, usage and the lists of runs from the logs, which are only read."""
    finish(_rebuild(target_of(context)))


@command(db, "copy")
def copy(source: FromArgument, target: ToArgument) -> None:
    """Copy a whole database into an empty one: a SQLite file to PostgreSQL, back, or to another of the same kind.

    All servers that use one of them have to be stopped. If the copy fails, the target stays empty. The first server at
    the target continues the open runs: start none on both. Passwords come from PGPASSWORD or a password file.
    """
    finish(_copy(source, target))


async def _status(target: Target, *, json: bool) -> ExitCode:
    from dataclasses import asdict

    from bough_server.cli.output import print_line, values_json
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
            **({} if found.use is None else asdict(found.use)),
        }
        print_line(values_json(known))
    else:
        print_line(verdict_text(found, target.command))
        for line in use_lines(found.use) if found.use is not None else ():
            print_line(line)
    return ExitCode.YES if found.is_current else ExitCode.FAILED


async def _upgrade(target: Target, *, keeps_backup: bool) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.observability.logs import configure_logging
    from bough_server.settings import Settings
    from bough_server.store.opening import upgrade_database

    settings = Settings.load(target.config)
    configure_logging("warning", settings.log_format)
    found = upgrade_database(settings.storage.url, keeps_backup=keeps_backup)
    print_line(verdict_text(found, target.command))
    return ExitCode.YES


async def _rebuild(target: Target) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import pluralize
    from bough_server.settings import Settings
    from bough_server.store.opening import rebuild_projections

    number = rebuild_projections(Settings.load(target.config).storage.url)
    print_line(f"{pluralize(number, 'run')} rebuilt")
    return ExitCode.YES


async def _copy(source: str, target: str) -> ExitCode:
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import pluralize
    from bough_server.store.opening import copy_database, display_database_url

    copied = copy_database(source, target, _Progress())
    tables = ", ".join(f"{name} {count:,}" for name, count in copied.items() if count)
    total = pluralize(sum(copied.values()), "row")
    print_line(f"{total} copied to {display_database_url(target)}{f': {tables}' if tables else ''}")
    return ExitCode.YES


class _Progress:
    """Prints how far a copy has come: when a table is begun, and now and then. Ends the copy at Ctrl-C."""

    def __init__(self) -> None:
        self._table, self._next = "", 0.0

    def __call__(self, table: str, rows: int) -> None:
        import asyncio

        from bough_server.cli.render.format import pluralize

        task = asyncio.current_task()
        if task is not None and task.cancelling():  # Ctrl-C, which a task notices only where it awaits something
            raise asyncio.CancelledError
        if table != self._table or time.monotonic() >= self._next:
            print_stderr(f"copying {table}: {pluralize(rows, 'row')} so far")
            self._table, self._next = table, time.monotonic() + _PROGRESS_SECONDS


def use_lines(use: "DatabaseUse") -> Iterator[str]:
    """Describe who uses a database: a line for all, then one for each lease."""
    from bough_server.cli.render.format import pluralize

    yield f"{pluralize(use.servers, 'server')}, {pluralize(use.open_runs, 'open run')}"
    for lease in use.leases:
        dead = ", dead: other servers, or the next one, continue its runs" if lease.open_runs else ", dead"
        state = dead if lease.is_dead else ""
        yield f"  lease {lease.worker}: {pluralize(lease.open_runs, 'open run')}{state}"


def verdict_text(status: "DatabaseStatus", command: str) -> str:
    """Describe a database's schema, and name the command to run if this version needs another one."""
    if status.revision is None:
        if status.size_bytes:  # PostgreSQL, where databases are made by others
            return f"{status.name}: has no tables yet; `{command} serve` and `{command} db upgrade` create them"
        return f"{status.name}: does not exist yet; `{command} serve` and `{command} db upgrade` create it"
    state = _state(status, status.revision, command)
    return f"{status.name}: revision {status.revision}, {state}, {status.size_bytes:,} bytes"


def _state(status: "DatabaseStatus", revision: str, command: str) -> str:
    if status.is_current:
        return "current"
    if revision > status.head:  # both are four digits, so they compare as text
        return f"newer than {status.head}, the newest that this version of bough supports: upgrade bough"
    return f"needs {status.head}: run `{command} db upgrade`"
