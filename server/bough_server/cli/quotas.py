"""`bough quotas`: how much of each quota is used."""

from typing import Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, Target, target_of


def quotas(
    context: typer.Context,
    user: Annotated[
        str,
        typer.Argument(
            metavar="[USER]", help="The user whose quotas are printed.  [default: the caller]", show_default=False
        ),
    ] = "",
    json: JsonOption = False,
) -> None:
    """Print the quotas in force: your own, or with READ those of the tenant and of any user."""
    finish(_quotas(target_of(context), user, json=json))


async def _quotas(target: Target, user: str, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import print_line, print_table
    from bough_server.cli.render.usage import quotas_table

    async with connect(target, is_reading=True) as connection:
        found = await connection.client.usage.list_quotas(user)
    if found or json:
        print_table(found, quotas_table, json=json)
    else:
        print_line("There are no quotas.")
    return ExitCode.YES
