"""The command line as a whole: the global flags and the list of commands."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from bough_server.cli.agents import agents, models
from bough_server.cli.db import db
from bough_server.cli.doctor import doctor
from bough_server.cli.fork import fork
from bough_server.cli.options import Target
from bough_server.cli.replay import replay
from bough_server.cli.resume import resume
from bough_server.cli.run import run
from bough_server.cli.runs import cancel, runs, tree
from bough_server.cli.schema import schema
from bough_server.cli.serve import serve
from bough_server.cli.sessions import sessions
from bough_server.cli.watch import events, watch

program = typer.Typer(
    name="bough",
    help="Run agents, follow their runs, and show the tree of who called whom.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    # Typer's own tracebacks print local variables, which may hold secrets.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, run, resume, fork, replay, watch, tree, events, runs, cancel, doctor, schema):
    program.command()(command)
for group, name in ((agents, "agents"), (models, "models"), (sessions, "sessions"), (db, "db")):
    program.add_typer(group, name=name)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"bough {version('bough')}")
        raise typer.Exit


@program.callback()
def flags(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="PATH",
            help="The configuration file.  [default: BOUGH_CONFIG, else bough.yaml here or in a folder above]",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="The server to use.  [default: BOUGH_ADDRESS; the one that serves the database; 127.0.0.1:50051 if "
            "Bough answers there; --embedded]",
        ),
    ] = None,
    embedded: Annotated[
        bool,
        typer.Option("--embedded", help="Use a server inside this command, unless one serves the configured database."),
    ] = False,
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Store the global flags for the command that follows."""
    context.obj = Target(config=config, address=address, embedded=embedded)


def run_program() -> None:
    """Run the command that the arguments name and exit with its code."""
    # An error message must be printed even if the terminal's encoding lacks a character of it.
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="replace")
    program()
