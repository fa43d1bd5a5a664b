"""`bough runs`, `bough tree` and `bough cancel`: list runs, show a run's tree, cancel a run."""

from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, LimitOption, RunArgument, Target, target_of

if TYPE_CHECKING:
    from bough import AsyncClient


def runs(
    context: typer.Context,
    session: Annotated[
        str,
        typer.Option("--session", metavar="SESSION", help="Only runs of this session; `last`: of the newest run's."),
    ] = "",
    state: Annotated[
        str, typer.Option("--state", metavar="S", help="Only runs in this state, such as running or input_required.")
    ] = "",
    evaluation: Annotated[
        str,
        typer.Option(
            "--evaluation", metavar="EVALUATION", help="Only runs of this evaluation, as for `bough eval show`."
        ),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Also the runs of evaluations.")] = False,
    limit: LimitOption = 20,
    json: JsonOption = False,
) -> None:
    """List runs, newest first; those of evaluations with --all or --evaluation only."""
    finding = _runs(
        target_of(context),
        session=session,
        state=state,
        evaluation=evaluation,
        everything=everything,
        limit=limit,
        json=json,
    )
    finish(finding)


def tree(
    context: typer.Context,
    run: RunArgument,
    json: JsonOption = False,
    html: Annotated[
        bool, typer.Option("--html", help="Print one HTML page with inputs, answers and tool calls.")
    ] = False,
    max_agents: Annotated[
        int | None,
        typer.Option("--max-agents", min=0, metavar="N", help="How many agents of the tree to show.  [default: 1000]"),
    ] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="Show the visits of graphs' nodes below the tree.")] = False,
) -> None:
    """Show a run's agent tree.

    It says who called whom, how each agent ended, and what each used itself; the last line has the totals.
    """
    if json and html:
        raise typer.BadParameter("--json and --html exclude each other: omit one of them.")
    if nodes and (json or html):
        raise typer.BadParameter(
            "--nodes is for the tree as text: `bough events RUN --types 'graph.*'` has the events."
        )
    finish(_tree(target_of(context), run, json=json, html=html, max_agents=max_agents, nodes=nodes))


def cancel(context: typer.Context, run: RunArgument) -> None:
    """Cancel a run.

    The cancellation is durable when this returns. A run that has already ended does not change.
    """
    finish(_cancel(target_of(context), run))


async def _runs(
    target: Target, *, session: str, state: str, evaluation: str, everything: bool, limit: int, json: bool
) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_session
    from bough_server.cli.conversions import state_of
    from bough_server.cli.eval.follow import resolve_evaluation
    from bough_server.cli.output import print_table
    from bough_server.cli.render.tables import runs_table

    states = [state_of(state)] if state else []
    found = []
    async with connect(target, is_reading=True) as connection:
        client = connection.client
        session_id = await resolve_session(client, session) if session else ""
        evaluation_id = await resolve_evaluation(client, evaluation) if evaluation else ""
        listed = client.list_runs(
            session_id=session_id,
            states=states,
            evaluation_id=evaluation_id,
            include_evaluation_runs=everything,
            page_size=min(limit, 1000),
        )
        async for run in listed:
            found.append(run)
            if len(found) == limit:
                break
    print_table(found, runs_table, json=json)
    return ExitCode.YES


async def _tree(target: Target, text: str, *, json: bool, html: bool, max_agents: int | None, nodes: bool) -> ExitCode:
    from bough.v1 import invocation_pb2
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.output import json_text, print_line, print_lines, terminal
    from bough_server.cli.render.format import clip
    from bough_server.cli.render.html import tree_page
    from bough_server.cli.render.questions import open_request_lines
    from bough_server.cli.render.tree import tree_lines

    async with connect(target, is_reading=True) as connection:
        run_id = await resolve_run(connection.client, text)
        # The table shows finish reasons, which are in the steps.
        options = invocation_pb2.InvocationOptions(max_agents=max_agents, include_steps=not json)
        invocation = await connection.client.get_invocation(run_id, options=options)
        # Open requests and the parked reason are fields of the run, not of its record.
        run = None if invocation.complete else await connection.client.get_run(run_id)
        visits = await _read_visits(connection.client, run_id) if nodes else []
    if json:
        print_line(json_text(invocation))
        return ExitCode.YES
    if html:
        print_line(tree_page(invocation))
        return ExitCode.YES
    console = terminal()
    print_lines(tree_lines(invocation, width=console.width, is_pipe=not console.is_terminal))
    for line in visits:
        print_line(clip(line, console.width) if console.is_terminal else line)
    for line in open_request_lines(run) if run is not None else ():
        print_line(clip(line, console.width) if console.is_terminal else line)
    return ExitCode.YES


async def _read_visits(client: "AsyncClient", run_id: str) -> list[str]:
    from bough.v1 import follow_pb2
    from bough_server.cli.render.graphs import GRAPH_EVENTS, visit_lines

    until = follow_pb2.WATCH_UNTIL_CURRENT
    async with client.watch(run_id, until=until, event_names=GRAPH_EVENTS) as stream:
        return visit_lines([event async for event in stream])


async def _cancel(target: Target, text: str) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import state_text

    async with connect(target, needs_runs=True) as connection:
        run_id = await resolve_run(connection.client, text)
        before = await connection.client.get_run(run_id)
        run = await connection.client.cancel(run_id)
    if before.HasField("end_time"):
        print_line(f"{run_id} had already ended: {state_text(before.state)}")
    elif run.HasField("end_time"):
        # A run that waits for input ends at once; one that was about to end may have any final state.
        print_line(f"{run_id} is {state_text(run.state)}")
    else:
        print_line(f"{run_id} is being cancelled")
    return ExitCode.YES
