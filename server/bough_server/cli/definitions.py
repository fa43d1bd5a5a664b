"""Definition files named on the command line, and a project's catalog without a server."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from bough import AsyncClient, InvalidRequest, NotFound
from bough.v1 import agent_pb2
from bough_server.agents.definition import Source
from bough_server.agents.loading import definition_files, load_python, load_sources, read_sources
from bough_server.agents.registry import Registry, describe_owners, schemas_of
from bough_server.agents.validation import Known
from bough_server.errors import ConfigurationError
from bough_server.functions import NodeFunction
from bough_server.models.registry import build_models
from bough_server.settings import Settings

_FIELD: Final = re.compile(r"definitions\[(\d+)\]\.?(.*)")


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files that paths name, each once; for a folder, its definition files.

    Raises ConfigurationError for a folder without any.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted([*path.glob("*.yaml"), *path.glob("*.yml"), *path.glob("*.json")]) if path.is_dir() else [path]
        if not inside:
            raise ConfigurationError(f"{path}: The folder has no *.yaml, *.yml or *.json file.")
        files += inside
    return list(dict.fromkeys(files))


def read_definitions(paths: Sequence[Path]) -> list[Source]:
    """Read the definitions to send with a run. Raises ConfigurationError with every problem of their syntax."""
    return load_sources(files_of(paths))


def locate_in_files(error: InvalidRequest, sources: Sequence[Source]) -> ConfigurationError | InvalidRequest:
    """Rewrite the violations of a request as "file:line: field: message" for definitions that came from files.

    Returns the error itself if none of its violations is about such a definition.
    """
    lines: list[str] = []
    is_in_files = False
    for violation in error.violations:
        match = _FIELD.fullmatch(violation.field)
        if match is None or int(match[1]) >= len(sources):
            lines.append(f"{violation.field}: {violation.description}" if violation.field else violation.description)
            continue
        is_in_files = True
        lines.append(str(sources[int(match[1])].problem(match[2], violation.description)))
    return ConfigurationError("\n".join(lines)) if is_in_files else error


def load_known_names(settings: Settings, *, without: Collection[Path] = ()) -> Known:
    """Return the tools, models and agents of a configuration, except the definitions in some files.

    Raises ConfigurationError if a Python module or a file cannot be read.
    """
    python = load_python(settings.python, settings.folder)
    excluded = {path.resolve() for path in without}
    files = [path for path in definition_files(settings.agents, settings.folder) if path.resolve() not in excluded]
    # Problems of other files are ignored here: the caller checks only the files that it excluded.
    sources, _ = read_sources(files)
    offers = settings.build_tool_servers(describe_owners(tool.name for tool in python.tools)).offers
    return Known(
        tools=[*(tool.name for tool in python.tools), *offers.tools_for(None)],
        tool_servers=offers.servers,
        client_tools=[tool.name for tool in python.tools if tool.is_client_side],
        models=list(settings.models),
        has_default_model="default" in settings.models,
        definitions=[source.definition for source in (*sources, *python.graphs)],
        code_agents=[agent.definition for agent in python.agents],
        functions={function.name: function.kind for function in python.functions},
        tool_schemas=schemas_of(python.tools),
        node_functions={each.name: each for each in python.functions if isinstance(each, NodeFunction)},
    )


def registry_of(settings: Settings) -> Registry:
    """Build the catalog of a configuration as a server would, without calling a provider or starting a model.

    Raises ConfigurationError if any part of the configuration is invalid.
    """
    python = load_python(settings.python, settings.folder)
    return Registry(
        [*load_sources(definition_files(settings.agents, settings.folder)), *python.graphs],
        models=build_models(
            settings.models, folder=settings.folder, secrets=settings.secrets, currency=settings.currency
        ),
        code_agents=python.agents,
        tools=python.tools,
        functions=python.functions,
        tool_servers=settings.build_tool_servers,
    )


async def with_model(
    client: AsyncClient, agent: str, model: str, definitions: Sequence[agent_pb2.AgentDefinition] = ()
) -> list[agent_pb2.AgentDefinition]:
    """Return the definitions to send with a run of `agent` so that every agent that it can reach uses a model.

    `definitions` are those that are sent anyway. Agents that call no model by their definition, such as those in code,
    keep the catalog's. Raises ConfigurationError if no agent would change.
    """
    sent = {each.name: each for each in definitions}
    reached = await _fetch_reachable(client, agent, sent)
    changed = {each.name: other for each in reached if (other := _replace_model(each, model)) is not None}
    if not changed:
        raise ConfigurationError(f"No agent that {agent!r} reaches names a model: omit --model.")
    return list({**sent, **changed}.values())


async def _fetch_reachable(
    client: AsyncClient, agent: str, sent: dict[str, agent_pb2.AgentDefinition]
) -> Iterable[agent_pb2.AgentDefinition]:
    found: dict[str, agent_pb2.AgentDefinition] = {}
    pending = [agent]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = sent[name] if name in sent else (await client.catalog.get_agent(name)).definition
        except NotFound:
            continue  # the server refuses the run and says so better
        pending += [link.agent for link in found[name].sub_agents]
    return found.values()


def _replace_model(definition: agent_pb2.AgentDefinition, model: str) -> agent_pb2.AgentDefinition | None:
    changed = agent_pb2.AgentDefinition()
    changed.CopyFrom(definition)
    if changed.HasField("llm"):
        changed.llm.model = model
    elif changed.HasField("supervisor"):
        changed.supervisor.llm.model = model
    elif any(node.HasField("model") for node in changed.graph.nodes):
        for node in changed.graph.nodes:
            if node.HasField("model"):
                node.model.model = model
    else:
        return None
    return changed
