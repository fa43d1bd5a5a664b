"""`bough models`: the models that definitions may name, and who answers where one cannot; none is asked."""

import typer

from bough_server.cli.choices import JsonOption, Target, target_of
from bough_server.cli.outcome import ExitCode, finish

models = typer.Typer(help="List models.", no_args_is_help=True)


@models.callback()
def _group() -> None:
    """List models."""


@models.command("list")
def list_models(context: typer.Context, json: JsonOption = False) -> None:
    """List the models that definitions may name, each with its fallbacks in order."""
    finish(_list(target_of(context), json=json))


async def _list(target: Target, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connected
    from bough_server.cli.printing import json_line, print_line, print_lines, terminal
    from bough_server.cli.render.tables import models_table

    async with connected(target, is_reading=True) as connection:
        found = [model async for model in connection.client.catalog.models()]
    if json:
        for model in found:
            print_line(json_line(model))
    else:
        print_lines(models_table(found, width=terminal().width))
    return ExitCode.YES
