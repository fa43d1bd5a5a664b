"""`bough watch` and `bough events`: follow a run, or print its events."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import (
    AfterOption,
    JsonOption,
    Output,
    OutputOption,
    RunArgument,
    Target,
    View,
    ViewOption,
    target_of,
)

if TYPE_CHECKING:
    from bough import CollectedRun
    from bough_server.cli.connection import Connection
    from bough_server.cli.follow import Sink


def watch(
    context: typer.Context,
    run: RunArgument,
    after: AfterOption = 0,
    view: ViewOption = View.FULL,
    output: OutputOption = Output.LIVE,
    no_follow: Annotated[
        bool, typer.Option("--no-follow", help="Show the events so far, and do not wait for more.")
    ] = False,
) -> None:
    """Follow a run, live or past, to its end or its next interruption.

    The exit code is that of `bough run`. Ctrl-C does not cancel the run.
    """
    finish(_watch(target_of(context), run, after=after, view=view, output=output, is_following=not no_follow))


def events(
    context: typer.Context,
    run: RunArgument,
    json: JsonOption = False,
    after: AfterOption = 0,
    view: ViewOption = View.FULL,
    types: Annotated[
        str,
        typer.Option(
            "--types", metavar="A,B", help="Only events with these names, such as agent.tool.started,agent.llm.*"
        ),
    ] = "",
) -> None:
    """Print the events that a run has so far."""
    finish(_events(target_of(context), run, json=json, after=after, view=view, types=types))


async def _watch(target: Target, text: str, *, after: int, view: View, output: Output, is_following: bool) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.follow import print_outcome, sink_of

    async with connect(target, is_reading=not is_following, needs_runs=True) as connection:
        client = connection.client
        run_id = await resolve_run(client, text)
        async with sink_of(output) as sink:
            ended = await _show(connection, run_id, sink, after=after, view=view, is_following=is_following)
        if not ended.events:
            # The run ended before `after`, or has not ended: its state is in the run, not in these events.
            run = await client.get_run(run_id)
            error = run.error if run.HasField("error") else None
            ended = replace(ended, state=run.state, error=error, open_requests=tuple(run.open_requests))
        return await print_outcome(connection, run_id, ended, output, tree=True, sink=sink)


async def _show(
    connection: "Connection", run_id: str, sink: "Sink", *, after: int, view: View, is_following: bool
) -> "CollectedRun":
    """Show a run to its end or its open interruption, continuing past interruptions that have been answered."""
    from bough.v1 import follow_pb2
    from bough_server.cli.conversions import view_of
    from bough_server.cli.follow import explain_connection_loss, follow

    until = follow_pb2.WATCH_UNTIL_INTERRUPTED if is_following else follow_pb2.WATCH_UNTIL_CURRENT
    async with connection.client.watch(run_id, after_sequence=after, until=until, view=view_of(view)) as stream:
        with explain_connection_loss(connection, stream):
            return await follow(stream, sink)


async def _events(target: Target, text: str, *, json: bool, after: int, view: View, types: str) -> ExitCode:
    from bough.v1 import follow_pb2
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.conversions import event_names_of, is_named, view_of
    from bough_server.cli.follow import JsonLines, PlainLines
    from bough_server.cli.output import forgive_encoding
    from bough_server.log.events import name_of

    forgive_encoding()
    names = event_names_of(types)
    sink = JsonLines() if json else PlainLines()
    async with connect(target, is_reading=True) as connection:
        stream = connection.client.watch(
            await resolve_run(connection.client, text),
            after_sequence=after,
            until=follow_pb2.WATCH_UNTIL_CURRENT,
            view=view_of(view),
            event_names=names,
        )
        async with stream:
            async for event in stream:
                # The server always sends the run's own events, whatever `event_names` says.
                if is_named(name_of(event), names):
                    sink.show(event)
    return ExitCode.YES
