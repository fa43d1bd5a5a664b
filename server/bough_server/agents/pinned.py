"""The catalog that a run started with: definitions by revision, code and tools by version.

A run is parked, not executed, until this server has every version that the run started with.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from bough.v1 import agent_pb2, event_pb2
from bough_server.agents.registry import agent_of
from bough_server.agents.validation_bounds import models_of
from bough_server.agents.validation_links import find_missing_functions
from bough_server.functions import NodeFunction
from bough_server.runtime.agent import Agent, Resolver
from bough_server.tools.tool import Tool

REPLAY_VERSION: Final = 1
"""The version of the replay rules that new runs are recorded with."""

_READ_VERSIONS: Final = (REPLAY_VERSION,)


class MissingVersion(Exception):
    """Something that a run started with is missing or has another version; the message says what, and what to do."""


def restore_catalog(
    started: event_pb2.RunStarted,
    definitions: Mapping[str, agent_pb2.AgentDefinition],
    resolver: Resolver,
    server_tools: Mapping[str, Tool] = MappingProxyType({}),
) -> Resolver:
    """Return the catalog that a run started with; `definitions` are those it names, by name, as are `server_tools`.

    Raises MissingVersion.
    """
    versions = started.versions
    if versions.replay not in _READ_VERSIONS:
        raise MissingVersion(
            f"The run was recorded by version {versions.replay} of the replay rules, which this server does not know. "
            "Start the server that recorded it."
        )
    agents: dict[str, Agent] = {}
    for name, version in versions.agents.items():
        agents[name] = _code_agent(name, version, resolver)
    # A definition of kind `function` finds its code here, and so the version that was checked above.
    code = dict(agents)
    for name, definition in definitions.items():
        agents[name] = _agent(name, definition, resolver, code=code)
    for agent in agents.values():
        _check_functions(agent.definition, resolver)
    for name, version in versions.nodes.items():
        _check_node(name, version, resolver)
    for name, digest in versions.tools.items():
        if name not in server_tools:  # those are as they were when the run started
            _check_tool(name, digest, resolver)
    # Models may be configured differently now: recorded calls are not repeated, and new ones use today's settings.
    named = {name for each in definitions.values() for name in models_of(each)} - {""}
    for name in sorted({*versions.models, *named}):
        _check_model(name, resolver)
    return replace(resolver, agents=agents, tools={**resolver.tools, **server_tools})


def _agent(name: str, definition: agent_pb2.AgentDefinition, resolver: Resolver, *, code: Mapping[str, Agent]) -> Agent:
    current = resolver.agents.get(name)
    if current is not None and current.definition == definition:
        return current
    return agent_of(definition, code, resolver.functions)


def _code_agent(name: str, version: str, resolver: Resolver) -> Agent:
    agent = resolver.agents.get(name)
    if agent is None:
        raise MissingVersion(
            f"The agent {name!r} in Python, version {version!r}, is not configured on this server. "
            "Restore it and keep it until the run ends, or cancel the run."
        )
    found = agent.revision
    # A definition that has taken the name since is other code in any case.
    if agent.definition.WhichOneof("kind") or found != version:
        raise MissingVersion(
            f"The run started with version {version!r} of the agent {name!r}, but this server has {found!r}. "
            "Restore the code of that version and keep it until the run ends, or cancel the run."
        )
    return agent


def _check_functions(definition: agent_pb2.AgentDefinition, resolver: Resolver) -> None:
    for function in find_missing_functions(definition, resolver.functions):
        raise MissingVersion(
            f"The agent {definition.name!r} names {function}, which is not configured on this server. Restore "
            "it and keep it until the run ends, or cancel the run."
        )


def _check_node(name: str, version: str, resolver: Resolver) -> None:
    function = resolver.functions.get(name)
    # A missing one is reported with the agent that names it.
    if isinstance(function, NodeFunction) and function.version != version:
        raise MissingVersion(
            f"The run started with version {version!r} of the node function {name!r}, but this server has "
            f"{function.version!r}. Restore the code of that version and keep it until the run ends, or cancel the run."
        )


def _check_tool(name: str, digest: str, resolver: Resolver) -> None:
    tool = resolver.tools.get(name)
    if tool is None:
        raise MissingVersion(
            f"The tool {name!r} is not configured on this server. Restore it and keep it until the run ends, or "
            "cancel the run."
        )
    # The digest is of what models are told of a tool, not of its code: recorded calls are not repeated.
    if tool.digest != digest:
        raise MissingVersion(
            f"The tool {name!r} has another description or schema than when the run started. Restore the original "
            "and keep it until the run ends, or cancel the run."
        )


def _check_model(name: str, resolver: Resolver) -> None:
    if resolver.model(name) is None:
        raise MissingVersion(
            f"The model {name!r} is not configured on this server, or not for the run's tenant. Restore it and keep it "
            "until the run ends, or cancel the run."
        )
