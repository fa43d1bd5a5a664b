"""Definitions laid over a catalog: a name is looked up in them first; whether they make sense is not asked here."""

from collections.abc import Iterable, Mapping, Sequence

from bough.v1 import agent_pb2
from bough_server.agents.kinds import agent_of
from bough_server.agents.reach import gone, reachable, versions_of
from bough_server.errors import AgentUnusable
from bough_server.functions import Function
from bough_server.models.model import Model
from bough_server.runtime.agent import Agent, Resolver, RunVersions
from bough_server.tools.tool import Tool


class Overlay:
    """A catalog with more agents than the one below it; implements runtime.agent.Resolver, and never changes."""

    def __init__(self, below: Resolver, definitions: Iterable[agent_pb2.AgentDefinition]) -> None:
        """The definitions carry their revisions."""
        self._below = below
        self._agents: Mapping[str, Agent] = {each.name: agent_of(each, below.agent) for each in definitions}
        self._versions: dict[str, RunVersions] = {}

    def agent(self, name: str) -> Agent:
        """The agent of a name. Raises KeyError."""
        return self._agents[name] if name in self._agents else self._below.agent(name)

    def tool(self, name: str) -> Tool:
        """The tool of a name. Raises KeyError."""
        return self._below.tool(name)

    def function(self, name: str) -> Function:
        """The operator's function of a name. Raises KeyError."""
        return self._below.function(name)

    def model(self, name: str) -> Model:
        """The model of a name; aliases are followed, empty is the default. Raises KeyError."""
        return self._below.model(name)

    def reachable(self, root: str) -> Sequence[agent_pb2.AgentDefinition]:
        """The definitions that a run of `root` can reach by links, sorted by name, the root's among them."""
        return reachable(self, root)

    def versions(self, root: str) -> RunVersions:
        """Hashes of the tools and models that those definitions name, of their prices, and agents' code versions.

        Raises AgentUnusable where something that they name is gone.
        """
        if root not in self._versions:
            if missing := list(gone(self, root)):
                raise AgentUnusable(" ".join([*missing, "Change what names it, or bring it back."]))
            self._versions[root] = versions_of(self, root)
        return self._versions[root]
