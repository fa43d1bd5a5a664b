"""`bough fork`: start a run from an event of another run, with changes."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import (
    DefaultModelOption,
    Display,
    NoInputOption,
    NoTreeOption,
    Output,
    OutputOption,
    RequestIdOption,
    RunArgument,
    Target,
    TimeoutOption,
    View,
    ViewOption,
    target_of,
)

if TYPE_CHECKING:
    from bough import AsyncClient

AfterOption = Annotated[
    int, typer.Option("--after", min=1, metavar="N", help="The last sequence that both runs share.")
]
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", metavar="AGENT=M", help="The model that an agent uses from there on.")
]
InstructionOption = Annotated[
    list[str] | None,
    typer.Option("--instruction", metavar="AGENT=@F", help="An agent's instruction from there on: @FILE, or a text."),
]
ToolResultOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tool-result",
        metavar="CALL=JSON",
        help='Another result of a call, or {"error": "…"}, or both as {"error": "…", "result": …}. CALL is the '
        "sequence of one of its events, or its id; INVOCATION/CALL if the id is not unique. The fork begins right "
        "before the first of these results.",
    ),
]
NodeOutputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node-output",
        metavar="N=JSON",
        help="Another output of a visit of a graph's node. N is the sequence of its node_completed or node_failed; the "
        "fork begins right before the first of them.",
    ),
]
InputOption = Annotated[str | None, typer.Option("--input", metavar="TEXT", help="Another input; only with --after 1.")]
OpenEffectsOption = Annotated[
    bool,
    typer.Option(
        "--allow-open-effects",
        help="Fork even if a tool is running there that must not be run again without permission.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkArguments:
    """The arguments of `bough fork`; `timeout` is in seconds."""

    run: str
    after: int
    models: list[str]
    instructions: list[str]
    tool_results: list[str]
    node_outputs: list[str]
    input_text: str | None
    allow_open_effects: bool
    request_id: str
    timeout: float


def fork(
    context: typer.Context,
    run: RunArgument,
    after: AfterOption,
    model: ModelOption = None,
    instruction: InstructionOption = None,
    tool_result: ToolResultOption = None,
    node_output: NodeOutputOption = None,
    input: InputOption = None,
    allow_open_effects: OpenEffectsOption = False,
    request_id: RequestIdOption = "",
    view: ViewOption = View.FULL,
    timeout: TimeoutOption = "10m",  # type: ignore[assignment] # the parser converts it to seconds
    default_model: DefaultModelOption = None,
    output: OutputOption = Output.LIVE,
    no_tree: NoTreeOption = False,
    no_input: NoInputOption = False,
) -> None:
    """Start a run that shares the beginning of another run's log, and follow it.

    Work recorded up to that event is not done again. Afterwards both trees are shown, side by side if they fit. The
    exit code is that of `bough run`.
    """
    arguments = ForkArguments(
        run=run,
        after=after,
        models=model or [],
        instructions=instruction or [],
        tool_results=tool_result or [],
        node_outputs=node_output or [],
        input_text=input,
        allow_open_effects=allow_open_effects,
        request_id=request_id,
        timeout=timeout,
    )
    display = Display(output=output, view=view, tree=not no_tree, asks=not no_input, timeout=timeout)
    finish(_fork(target_of(context), arguments, display, default_model=default_model))


async def _fork(target: Target, arguments: ForkArguments, display: Display, *, default_model: str | None) -> ExitCode:
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.conversions import view_of
    from bough_server.cli.follow import follow_and_report
    from bough_server.cli.fork_changes import changes_of, find_calls

    changes = changes_of(
        models=arguments.models,
        instructions=arguments.instructions,
        tool_results=arguments.tool_results,
        node_outputs=arguments.node_outputs,
        input_text=arguments.input_text,
    )
    async with connect(target, default_model=default_model, is_silent=True, needs_runs=True) as connection:
        client = connection.client
        origin_id = await resolve_run(client, arguments.run)
        await find_calls(client, origin_id, changes)
        stream = client.fork(
            origin_id,
            arguments.after,
            changes=changes,
            allow_open_effects=arguments.allow_open_effects,
            request_id=arguments.request_id,
            view=view_of(display.view),
            timeout=arguments.timeout,
        )
        # The tree is shown below, beside the origin's.
        code = await follow_and_report(connection, stream, replace(display, tree=False))
        if display.tree and display.output is Output.LIVE:
            await _print_both(client, origin_id, stream.run_id)
        return code


async def _print_both(client: "AsyncClient", origin_id: str, fork_id: str) -> None:
    from bough import CallFailed
    from bough_server.cli.follow import TREE_OPTIONS
    from bough_server.cli.output import print_lines, terminal
    from bough_server.cli.render.tree import trees_beside

    try:
        origin, forked = [await client.get_invocation(each, options=TREE_OPTIONS) for each in (origin_id, fork_id)]
    except CallFailed as error:
        print_stderr(f"The trees could not be read: {error.message}")
        return
    titled = (f"origin {origin_id}", origin), (f"fork {fork_id}", forked)
    console = terminal()
    print_lines(trees_beside(*titled, width=console.width, is_pipe=not console.is_terminal))
