"""What a run began with, found again: definitions by their revisions, code and tools by their versions; it makes none.

A run whose versions are not all here is not executed: it waits until they are.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bough.v1 import agent_pb2, event_pb2
from bough_server.agents.registry import agent_of
from bough_server.agents.validation_bounds import models_of
from bough_server.agents.validation_links import functions_gone
from bough_server.functions import Function
from bough_server.models.model import Model
from bough_server.runtime.agent import Agent, Resolver, VersionHashes
from bough_server.tools.tool import Tool

REPLAY_VERSION: Final = 1
"""The version of the replay rules that new runs are recorded by."""

_READ_VERSIONS: Final = (REPLAY_VERSION,)


class MissingVersion(Exception):
    """Something that a run began with is not here, or is another one; the message says what, and what to do."""


class PinnedResolver:
    """A catalog as it was when a run began; implements runtime.agent.Resolver."""

    def __init__(self, resolver: Resolver, agents: Mapping[str, Agent]) -> None:
        self._resolver = resolver
        self._agents = agents

    def agent(self, name: str) -> Agent:
        """The agent of a name, as the run knows it. Raises KeyError."""
        return self._agents[name]

    def tool(self, name: str) -> Tool:
        """The tool of a name. Raises KeyError."""
        return self._resolver.tool(name)

    def function(self, name: str) -> Function:
        """The operator's function of a name, as it is here now. Raises KeyError."""
        return self._resolver.function(name)

    def model(self, name: str) -> Model:
        """The model of a name, as it is configured now. Raises KeyError."""
        return self._resolver.model(name)

    def reachable(self, root: str) -> Sequence[agent_pb2.AgentDefinition]:
        """Every definition of the run, sorted by name."""
        return [self._agents[name].definition for name in sorted(self._agents)]

    def versions(self, root: str) -> VersionHashes:
        """Those of the catalog that is in force."""
        return self._resolver.versions(root)


def pinned(
    started: event_pb2.RunStarted, definitions: Mapping[str, agent_pb2.AgentDefinition], resolver: Resolver
) -> PinnedResolver:
    """The catalog that a run began with; `definitions` are those that it names, by name. Raises MissingVersion."""
    versions = started.versions
    if versions.replay not in _READ_VERSIONS:
        raise MissingVersion(
            f"The run was recorded by version {versions.replay} of the replay rules, which this server does not know. "
            "Start the server that recorded it."
        )
    agents: dict[str, Agent] = {}
    for name, version in versions.agents.items():
        agents[name] = _code_agent(name, version, resolver)
    code = dict(agents)
    for name, definition in definitions.items():
        agents[name] = _agent(name, definition, resolver, code)
    for agent in agents.values():
        _check_functions(agent.definition, resolver)
    for name, digest in versions.tools.items():
        _check_tool(name, digest, resolver)
    asked = {name for each in definitions.values() for name in models_of(each)} - {""}
    for name in sorted({*versions.models, *asked}):
        _check_model(name, resolver)
    return PinnedResolver(resolver, agents)


def _agent(name: str, definition: agent_pb2.AgentDefinition, resolver: Resolver, code: Mapping[str, Agent]) -> Agent:
    try:
        current = resolver.agent(name)
    except KeyError:
        return agent_of(definition, code.__getitem__)
    return current if current.definition == definition else agent_of(definition, code.__getitem__)


def _code_agent(name: str, version: str, resolver: Resolver) -> Agent:
    try:
        agent = resolver.agent(name)
    except KeyError:
        raise MissingVersion(
            f"The agent {name!r} in Python, version {version!r}, is not configured here. Bring it back until the run "
            "has ended, or cancel the run."
        ) from None
    found = agent.revision
    if agent.definition.WhichOneof("kind") or found != version:
        raise MissingVersion(
            f"The run began with version {version!r} of the agent {name!r}; here is {found!r}. Bring the code of that "
            "version back until the run has ended, or cancel the run."
        )
    return agent


def _check_functions(definition: agent_pb2.AgentDefinition, resolver: Resolver) -> None:
    for function in functions_gone(definition, resolver):
        raise MissingVersion(
            f"The agent {definition.name!r} names {function}, which is not configured here. Bring it back until the "
            "run has ended, or cancel the run."
        )


def _check_tool(name: str, digest: str, resolver: Resolver) -> None:
    try:
        tool = resolver.tool(name)
    except KeyError:
        raise MissingVersion(
            f"The tool {name!r} is not configured here. Bring it back until the run has ended, or cancel the run."
        ) from None
    if tool.digest != digest:
        raise MissingVersion(
            f"The tool {name!r} has another description or schema than when the run began. Bring that one back until "
            "the run has ended, or cancel the run."
        )


def _check_model(name: str, resolver: Resolver) -> None:
    try:
        resolver.model(name)
    except KeyError:
        raise MissingVersion(
            f"The model {name!r} is not configured here. Bring it back until the run has ended, or cancel the run."
        ) from None
