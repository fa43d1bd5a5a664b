"""The command line as a whole: the global flags and the list of commands."""

import sys
from typing import Annotated

import typer

from bough_server.cli.agents import agents, models
from bough_server.cli.chat import chat
from bough_server.cli.commands import command
from bough_server.cli.db import db
from bough_server.cli.doctor import doctor
from bough_server.cli.fork import fork
from bough_server.cli.init import init
from bough_server.cli.options import AddressOption, ConfigOption, EmbeddedOption, Target
from bough_server.cli.prune import prune
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
    rich_markup_mode=None,
    # Typer's own tracebacks print local variables, which may hold secrets.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (
    init,
    serve,
    run,
    chat,
    resume,
    fork,
    replay,
    watch,
    tree,
    events,
    runs,
    cancel,
    prune,
    doctor,
    schema,
):
    command(program)(function)
for group, name in ((agents, "agents"), (models, "models"), (sessions, "sessions"), (db, "db")):
    program.add_typer(group, name=name)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version  # slow to import

        print(f"bough {version('bough')}")
        raise typer.Exit


@program.callback()
def flags(
    context: typer.Context,
    config: ConfigOption = None,
    address: AddressOption = None,
    embedded: EmbeddedOption = False,
    _: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Store the global flags for the command that follows, which may have them too."""
    context.obj = Target(config=config, address=address, embedded=embedded)


def run_program() -> None:
    """Run the command that the arguments name and exit with its code."""
    # An error message must be printed even if the terminal's encoding lacks a character of it.
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="replace")
    program()
