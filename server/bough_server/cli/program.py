"""The command line as a whole: the global flags and the list of commands."""

import sys
from collections.abc import Collection
from importlib import import_module
from typing import Annotated, Final

import typer

from bough_server.cli.commands import command
from bough_server.cli.options import AddressOption, AsOption, ConfigOption, EmbeddedOption, Target, VerboseOption
from bough_server.distribution import version

_COMMANDS: Final = {
    "init": "init",
    "serve": "serve",
    "run": "run",
    "chat": "chat",
    "resume": "resume",
    "fork": "fork",
    "replay": "replay",
    "watch": "watch",
    "tree": "runs",
    "events": "watch",
    "runs": "runs",
    "cancel": "runs",
    "usage": "usage",
    "quotas": "quotas",
    "account": "account",
    "prune": "prune",
    "doctor": "doctor",
    "health": "health",
    "whoami": "whoami",
    "keys": "keys",
    "schema": "schema",
    "agents": "agents",
    "models": "agents",
    "tools": "tools",
    "eval": "eval.program",
    "sessions": "sessions",
    "db": "db",
}
"""The commands and groups of commands in the order of the help, each with the module that defines it."""


def make_program(words: Collection[str] = ()) -> typer.Typer:
    """Return the command line with the commands that the words name, or with all of them if they name none.

    To load and prepare all commands takes longer than most of them run.
    """
    program = typer.Typer(
        name="bough",
        help="Run agents, follow their runs, and show the tree of who called whom.",
        no_args_is_help=True,
        rich_markup_mode=None,
        # Typer's own tracebacks print local variables, which may hold secrets.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.callback()(flags)
    for name in [name for name in _COMMANDS if name in words] or _COMMANDS:
        defined = getattr(import_module(f"bough_server.cli.{_COMMANDS[name]}"), name)
        if isinstance(defined, typer.Typer):
            program.add_typer(defined, name=name)
        else:
            command(program)(defined)
    return program


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"bough {version()}")
        raise typer.Exit


def flags(
    context: typer.Context,
    config: ConfigOption = None,
    address: AddressOption = None,
    embedded: EmbeddedOption = False,
    as_caller: AsOption = None,
    verbose: VerboseOption = False,
    _: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Store the global flags for the command that follows, which may have them too."""
    context.obj = Target(config=config, address=address, embedded=embedded, as_caller=as_caller, verbose=verbose)


def run_program() -> None:
    """Run the command that the arguments name and exit with its code."""
    # An error message must be printed even if the terminal's encoding lacks a character of it.
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="replace")
    make_program(sys.argv[1:])()
