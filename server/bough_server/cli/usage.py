"""`bough usage`: what runs used, and what that is charged."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, Target, parse_seconds, target_of

_DIMENSIONS: Final = ("user", "session", "run", "agent", "invocation", "model", "day")


def _parse_dimensions(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _DIMENSIONS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(_DIMENSIONS)}.")
    if len({*names}) < len(names):
        raise typer.BadParameter("a dimension is named twice: name each once.")
    return names


def usage(
    context: typer.Context,
    by: Annotated[
        str,
        typer.Option("--by", metavar="DIMENSIONS", help=f"By what to group, of {', '.join(_DIMENSIONS)}, with commas."),
    ] = "user,model",
    since: Annotated[
        str, typer.Option("--since", metavar="DURATION", help="Only what was used for so long, such as 12h or 30d.")
    ] = "30d",
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Only what this run used, at any time.", show_default=False)
    ] = "",
    json: JsonOption = False,
) -> None:
    """Print what runs used, with the charges: your own, or with READ those of the tenant."""
    dimensions, seconds = _parse_dimensions(by), parse_seconds(since)
    if "invocation" in dimensions and not run:
        raise typer.BadParameter("invocations are those of one run: add --run RUN.", param_hint="--by")
    finish(_usage(target_of(context), dimensions, seconds=seconds, run=run, json=json))


async def _usage(target: Target, dimensions: list[str], *, seconds: float, run: str, json: bool) -> ExitCode:
    from bough.v1 import usage_pb2
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.output import print_table
    from bough_server.cli.render.usage import usage_table

    group_by = [usage_pb2.UsageDimension.Value(f"USAGE_DIMENSION_{name.upper()}") for name in dimensions]
    async with connect(target, is_reading=True) as connection:
        run_id = await resolve_run(connection.client, run) if run else ""
        since = None if run else datetime.now(UTC) - timedelta(seconds=seconds)
        listed = connection.client.usage.list_groups(group_by, run_id=run_id, time_from=since, page_size=1000)
        groups = [group async for group in listed]
    fields = [name if name in ("agent", "model", "day") else f"{name}_id" for name in _DIMENSIONS if name in dimensions]
    print_table(groups, lambda found, width: usage_table(found, fields, width), json=json)
    return ExitCode.YES
