"""`bough agents` and `bough models`: list, show and validate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.commands import command
from bough_server.cli.completion import complete_agents
from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import JsonOption, Target, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bough.v1 import agent_pb2
    from bough_server.agents.validation import Known
    from bough_server.settings import Settings

agents = typer.Typer(help="List, show and check agents.", no_args_is_help=True)

models = typer.Typer(help="List models.", no_args_is_help=True)


@command(agents, "list")
def list_agents(context: typer.Context, json: JsonOption = False) -> None:
    """List the agents that a server runs."""
    finish(_list_agents(target_of(context), json=json))


@command(agents, "show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The agent's name.", autocompletion=complete_agents)],
    revision: Annotated[
        str, typer.Option("--revision", metavar="R", help="A revision that a run names.  [default: the current one]")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Show an agent's definition as YAML, with its source, revision and times as comments."""
    finish(_show(target_of(context), name, revision=revision, json=json))


@command(agents, "validate")
def validate(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="Files with definitions, or folders of *.yaml files.  [default: those that bough.yaml names]",
        ),
    ] = None,
) -> None:
    """Check definition files against each other and the configuration; without files, the scripts of its models too.

    Prints each problem as "file:line: field: message" and exits with 1; exits with 0 if there are none.
    """
    finish(_validate(target_of(context), paths or []))


@command(agents, "draw")
def draw(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A graph's name.", autocompletion=complete_agents)],
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Draw the path of a run too, of the definition that it used.")
    ] = "",
) -> None:
    """Draw a graph as a Mermaid diagram, for a page that renders Mermaid."""
    finish(_draw(target_of(context), name, run=run))


async def _draw(target: Target, name: str, *, run: str) -> ExitCode:
    from bough.v1 import follow_pb2
    from bough_server.cli.connection import connect, resolve_run
    from bough_server.cli.output import print_line
    from bough_server.cli.render.graphs import GRAPH_EVENTS, GraphPath, mermaid_lines
    from bough_server.errors import ConfigurationError

    async with connect(target, is_reading=True) as connection:
        client, path, revision = connection.client, None, ""
        if run:
            run_id = await resolve_run(client, run)
            names = ("agent.run.started", *GRAPH_EVENTS)
            async with client.watch(run_id, until=follow_pb2.WATCH_UNTIL_CURRENT, event_names=names) as stream:
                log = [event async for event in stream]
            path = GraphPath(log, name)
            used = {ref.name: ref.revision for event in log for ref in event.run_started.definition_refs}
            if name not in used:
                raise ConfigurationError(f"The run {run_id} does not reach an agent {name!r}.")
            revision = used[name]
        agent = await client.catalog.get_agent(name, revision=revision)
    if not agent.definition.HasField("graph"):
        raise ConfigurationError(f"{name!r} is no graph: `bough agents show {name}` shows what it is.")
    for line in mermaid_lines(agent.definition, path):
        print_line(line)
    return ExitCode.YES


async def _list_agents(target: Target, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import print_table
    from bough_server.cli.render.tables import agents_table

    async with connect(target, is_reading=True) as connection:
        found = [agent async for agent in connection.client.catalog.list_agents()]
    print_table(found, agents_table, json=json)
    return ExitCode.YES


async def _show(target: Target, name: str, *, revision: str, json: bool) -> ExitCode:
    from bough_server.agents.definition import definition_yaml
    from bough_server.cli.connection import connect
    from bough_server.cli.output import json_text, print_line
    from bough_server.cli.render.tables import agent_lines

    async with connect(target, is_reading=True) as connection:
        agent = await connection.client.catalog.get_agent(name, revision=revision)
    if json:
        print_line(json_text(agent))
    else:
        # Fields set by the server are comments, so the output is a valid definition file.
        for line in agent_lines(agent):
            print_line(f"# {line}")
        print_line(definition_yaml(agent.definition).removesuffix("\n"))
    return ExitCode.YES


async def _validate(target: Target, paths: list[Path]) -> ExitCode:
    from bough_server.agents.graph.validation import graph_notes
    from bough_server.agents.loading import (
        definition_files,
        drop_reported_problems,
        load_python,
        read_sources,
        source_problems,
    )
    from bough_server.agents.validation import names_of_catalog
    from bough_server.agents.validation_links import find_call_cycles
    from bough_server.cli.definitions import files_of, load_known_names
    from bough_server.cli.output import print_line
    from bough_server.cli.render.format import pluralize
    from bough_server.settings import Settings

    settings = Settings.load(target.config)
    files = files_of(paths) if paths else definition_files(settings.agents, settings.folder)
    sources, problems = read_sources(files)
    if not paths:
        sources += load_python(settings.python, settings.folder).graphs
    known = load_known_names(settings, without=files)
    further = drop_reported_problems(source_problems(sources, known), problems)
    order = {str(path): index for index, path in enumerate(files)}
    in_order = sorted([*problems, *further], key=lambda problem: (order.get(problem.path, len(order)), problem.line))
    named = {each.name: each for each in (*known.definitions, *(source.definition for source in sources))}
    wrong, notes = _check_scripts(settings, {*named, *(agent.name for agent in known.code_agents)}, is_whole=not paths)
    # Two checks can report the same problem.
    found = list(dict.fromkeys([*(str(problem) for problem in in_order), *wrong]))
    for problem in found:
        print_line(problem)
    if found:
        print_stderr(f"{pluralize(len(found), 'problem')} in {pluralize(len(files), 'file')}.")
        return ExitCode.FAILED
    notes += _find_unchecked_tools([source.definition for source in sources], known)
    notes += [
        f"{' -> '.join(path)}: they can call each other in turn, until `limits.depth` ends it."
        for path in find_call_cycles(named)
    ]
    notes += [
        str(source.problem(*note))
        for source in sources
        if source.definition.HasField("graph")
        for note in graph_notes(source.definition, names_of_catalog(known, named))
    ]
    for note in notes:
        print_stderr(f"note: {note}")
    print_stderr(f"{pluralize(len(sources), 'agent')} in {pluralize(len(files), 'file')}: no problems found.")
    return ExitCode.YES


def _find_unchecked_tools(definitions: "Sequence[agent_pb2.AgentDefinition]", known: "Known") -> list[str]:
    """Return notes on tools of tool servers that are not in the lock: nothing is connected to."""
    from bough_server.agents.validation import is_unlisted
    from bough_server.runtime.agent import llm_of

    return [
        f"{definition.name}: the tool {link.name!r} was not checked: run `bough tools lock`."
        for definition in definitions
        for link in llm_of(definition).tools
        if link.name and link.name not in known.tools and is_unlisted(link.name, known)
    ]


def _check_scripts(settings: "Settings", agents: set[str], *, is_whole: bool) -> tuple[list[str], list[str]]:
    """Return the problems of the scripts of scripted models, and notes on agents of scripts that are not there.

    They may be in a definition that a run brings along.
    """
    from bough_server.documents.yaml import suggestion
    from bough_server.errors import ConfigurationError
    from bough_server.models.scripted.script import read_script

    problems: list[str] = []
    notes: list[str] = []
    scripts = {settings.folder / model.script: None for model in settings.models.values() if model.script and is_whole}
    for path in scripts:
        try:
            script = read_script(path)
        except ConfigurationError as error:
            problems += str(error).splitlines()
            continue
        missing = [
            name for name in script.agents if name.removesuffix(".summary") not in {"*", "judge", "user", *agents}
        ]
        notes += [f"{path}: agents.{name}: There is no agent {name!r}.{suggestion(name, agents)}" for name in missing]
    return problems, notes


# Without a callback, Typer would turn the group of one command into that command: `bough models`.
@models.callback()
def _group() -> None:
    """List models."""


@command(models, "list")
def list_models(context: typer.Context, json: JsonOption = False) -> None:
    """List the models that definitions may name, each with its fallbacks in order."""
    finish(_list_models(target_of(context), json=json))


async def _list_models(target: Target, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import print_table
    from bough_server.cli.render.tables import models_table

    async with connect(target, is_reading=True) as connection:
        found = [model async for model in connection.client.catalog.list_models()]
    print_table(found, models_table, json=json)
    return ExitCode.YES
