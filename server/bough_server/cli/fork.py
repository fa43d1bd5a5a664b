"""`bough fork`: start a run from an event of another run, with changes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough.v1 import event_pb2, fork_pb2, message_pb2
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
from bough_server.errors import ConfigurationError

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
InputOption = Annotated[str | None, typer.Option("--input", metavar="TEXT", help="Another input; only with --after 1.")]
OpenEffectsOption = Annotated[
    bool,
    typer.Option(
        "--allow-open-effects",
        help="Fork even if a tool is running there that must not be run again without permission.",
    ),
]

_CALL_EVENTS: Final = ("agent.tool.started", "agent.tool.completed", "agent.tool.failed")

_CALL_OF_INVOCATION: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkArguments:
    """The arguments of `bough fork`; `timeout` is in seconds."""

    run: str
    after: int
    models: list[str]
    instructions: list[str]
    tool_results: list[str]
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
        input_text=input,
        allow_open_effects=allow_open_effects,
        request_id=request_id,
        timeout=timeout,
    )
    display = Display(output=output, view=view, tree=not no_tree, asks=not no_input, timeout=timeout)
    finish(_fork(target_of(context), arguments, display, default_model=default_model))


async def _fork(target: Target, arguments: ForkArguments, display: Display, *, default_model: str | None) -> ExitCode:
    from bough_server.cli.connection import connected, resolve_run
    from bough_server.cli.follow import follow_and_report
    from bough_server.cli.options import view_of

    changes = changes_of(
        models=arguments.models,
        instructions=arguments.instructions,
        tool_results=arguments.tool_results,
        input_text=arguments.input_text,
    )
    async with connected(target, default_model=default_model, is_silent=True, needs_runs=True) as connection:
        client = connection.client
        origin_id = await resolve_run(client, arguments.run)
        await _find_calls(client, origin_id, changes)
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


async def _find_calls(client: "AsyncClient", origin_id: str, changes: fork_pb2.ForkChanges) -> None:
    """Replace the sequences that name tool calls by the calls. Raises ConfigurationError for one that is no call's."""
    from bough.v1 import follow_pb2

    by_sequence = [edited for edited in changes.tool_results if edited.call_id.isdecimal() and not edited.invocation_id]
    if not by_sequence:
        return
    calls: dict[int, tuple[str, str]] = {}
    until = follow_pb2.WATCH_UNTIL_CURRENT
    async with client.watch(origin_id, until=until, event_names=_CALL_EVENTS) as stream:
        async for event in stream:
            if call := _call_of(event):
                calls[event.sequence] = (event.invocation_id, call.call_id)
    ids = {call_id for _, call_id in calls.values()}
    for edited in by_sequence:
        if edited.call_id in ids:
            continue  # a provider's ids may be numbers, too
        if int(edited.call_id) not in calls:
            raise ConfigurationError(
                f"Event {edited.call_id} of run {origin_id} is not of a tool call: "
                f"`bough events {origin_id} --types 'tool.*'` shows which are."
            )
        edited.invocation_id, edited.call_id = calls[int(edited.call_id)]


def _call_of(event: event_pb2.AgentEvent) -> message_pb2.ToolCall | None:
    """Return the tool call that an event is about; None for other events."""
    match event.WhichOneof("payload"):
        case "tool_started":
            return event.tool_started.call
        case "tool_completed":
            return event.tool_completed.result.call
        case "tool_failed":
            return event.tool_failed.result.call
    return None


async def _print_both(client: "AsyncClient", origin_id: str, fork_id: str) -> None:
    from bough import CallFailed
    from bough_server.cli.follow import TREE_OPTIONS
    from bough_server.cli.output import print_lines, terminal
    from bough_server.cli.render.tree import trees_beside

    try:
        origin, forked = [await client.get_tree(each, options=TREE_OPTIONS) for each in (origin_id, fork_id)]
    except CallFailed as error:
        print_stderr(f"The trees could not be read: {error.message}")
        return
    titled = (f"origin {origin_id}", origin), (f"fork {fork_id}", forked)
    console = terminal()
    print_lines(trees_beside(*titled, width=console.width, is_pipe=not console.is_terminal))


def changes_of(
    *, models: Iterable[str], instructions: Iterable[str], tool_results: Iterable[str], input_text: str | None
) -> fork_pb2.ForkChanges:
    """Parse `--model AGENT=M`, `--instruction AGENT=@FILE`, `--tool-result CALL=JSON` and `--input TEXT`.

    Raises ConfigurationError for a value that cannot be parsed, or is given twice.
    """
    from bough import user_message
    from bough_server.cli.prompts import outcome_of

    changes = fork_pb2.ForkChanges()
    for agent, model in _pairs("--model", models, "AGENT=MODEL").items():
        changes.agents[agent].model = model
    for agent, instruction in _pairs("--instruction", instructions, "AGENT=@FILE or AGENT=TEXT").items():
        changes.agents[agent].instruction = _content(instruction)
    for call, text in _pairs("--tool-result", tool_results, "CALL=JSON").items():
        edited = changes.tool_results.add(call_id=call, outcome=outcome_of(text))
        if found := _CALL_OF_INVOCATION.fullmatch(call):
            edited.invocation_id, edited.call_id = found.group(1).lower(), found.group(2)
    if input_text is not None:
        changes.input.CopyFrom(user_message(input_text))
    return changes


def _pairs(flag: str, texts: Iterable[str], shape: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigurationError(f"{flag} {text!r} cannot be parsed: write {shape}.")
        if name in pairs:
            raise ConfigurationError(f"{flag} names {name!r} twice: give one value.")
        pairs[name] = value
    return pairs


def _content(text: str) -> str:
    """Return a text as it is, or the content of the file for @FILE."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: The file is not UTF-8 text.") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror or error}.") from None
