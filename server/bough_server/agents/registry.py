"""Finds agents, tools, functions and models by name, as files, modules and settings have them; it never changes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from bough.v1 import agent_pb2, catalog_service_pb2
from bough_server.agents.definition import Source, with_revision
from bough_server.agents.histories import models_of
from bough_server.agents.kinds import agent_of
from bough_server.agents.reach import reachable, versions_of
from bough_server.agents.sources import source_problems
from bough_server.agents.validation import Known, judge_code_agent
from bough_server.documents import raise_problems
from bough_server.errors import ConfigurationError, Problem
from bough_server.functions import Function
from bough_server.models.model import Model
from bough_server.runtime.agent import Agent, RunVersions
from bough_server.tools.builtin import RESERVED, SPECS
from bough_server.tools.tool import Tool, spec

T = TypeVar("T")


class Models(Protocol):
    """The configured models."""

    def get(self, name: str) -> Model:
        """Aliases are followed; empty is the default model. Raises KeyError where there is none."""
        ...

    def list(self) -> Sequence[catalog_service_pb2.ModelInfo]:
        """Every name that a definition may give, aliases among them."""
        ...


class Registry:
    """A catalog in force: implements runtime.agent.Resolver, and what the CatalogService shows."""

    def __init__(
        self,
        definitions: Iterable[agent_pb2.AgentDefinition | Source],
        *,
        models: Models,
        code_agents: Iterable[Agent] = (),
        tools: Iterable[Tool] = (),
        functions: Iterable[Function] = (),
    ) -> None:
        """Judges everything together. Raises ConfigurationError with all that is wrong, by file, line and field."""
        sources = [each if isinstance(each, Source) else Source(definition=each, path="agents") for each in definitions]
        self._models = models
        self._agents: dict[str, Agent] = {}
        self._tools = _unique("tools", ((each.name, each) for each in tools))
        if taken := sorted(RESERVED & self._tools.keys()):
            raise ConfigurationError(f"{taken[0]!r} is a tool that the server brings itself; give yours another name.")
        self._functions = _unique("functions", ((each.name, each) for each in functions))
        self._code_agents = _unique("agents", ((each.definition.name, each) for each in code_agents))
        bare = [source.definition for source in sources]
        known = self.known(bare)
        raise_problems([*source_problems(sources, known), *self._code_problems(bare, known)])
        self._files = {source.definition.name: Path(source.path).name for source in sources}
        made = {each.name: agent_of(with_revision(each), self._code_agents.__getitem__) for each in bare}
        self._agents = dict(sorted([*made.items(), *self._code_agents.items()]))
        self._versions: dict[str, RunVersions] = {}

    def agent(self, name: str) -> Agent:
        """The agent of a name. Raises KeyError."""
        return self._agents[name]

    def tool(self, name: str) -> Tool:
        """The tool of a name. Raises KeyError."""
        return self._tools[name]

    def function(self, name: str) -> Function:
        """The operator's function of a name. Raises KeyError."""
        return self._functions[name]

    def model(self, name: str) -> Model:
        """The model of a name; aliases are followed, empty is the default. Raises KeyError."""
        return self._models.get(name)

    def reachable(self, root: str) -> Sequence[agent_pb2.AgentDefinition]:
        """The definitions that a run of `root` can reach by links, sorted by name, the root's among them."""
        return reachable(self, root)

    def versions(self, root: str) -> RunVersions:
        """Hashes of the tools, models and fallbacks that those definitions name, of prices; agents' code versions."""
        if root not in self._versions:
            self._versions[root] = versions_of(self, root)
        return self._versions[root]

    def list_agents(self) -> Sequence[agent_pb2.AgentDefinition]:
        """Every definition in force, by name."""
        return [agent.definition for agent in self._agents.values()]

    def list_tools(self) -> Sequence[catalog_service_pb2.ToolInfo]:
        """Every tool that a definition may name, by name: the server's own among them."""
        specs = [*(spec(tool) for tool in self._tools.values()), *SPECS.values()]
        return [
            catalog_service_pb2.ToolInfo(
                name=each.name,
                description=each.description,
                input_schema_json=each.input_schema_json,
                is_built_in=each.name in SPECS,
            )
            for each in sorted(specs, key=lambda each: each.name)
        ]

    def list_models(self) -> Sequence[catalog_service_pb2.ModelInfo]:
        """Every model, by name."""
        return sorted(self._models.list(), key=lambda info: info.name)

    def place(self, name: str) -> str:
        """What the agent of a name stands in, in words; empty where there is none."""
        if name in self._code_agents:
            return "Python code"
        return f"the file {self._files[name]}" if name in self._files else ""

    def known(
        self,
        definitions: Iterable[agent_pb2.AgentDefinition],
        stored: Iterable[agent_pb2.AgentDefinition] = (),
    ) -> Known:
        """What definitions may name in this catalog, with those that are stored beside it."""
        named = {name for definition in definitions for name in models_of(definition)} - {""}
        listed = {info.name for info in self._models.list()}
        return Known(
            tools=self._tools.keys(),
            client_tools={name for name, tool in self._tools.items() if tool.is_client_side},
            models=listed | {name for name in named if self._has_model(name)},
            has_default_model=self._has_model(""),
            definitions=[*(agent.definition for agent in self._agents.values()), *stored],
            code_agents=[agent.definition for agent in self._code_agents.values()],
            functions={name: function.kind for name, function in self._functions.items()},
        )

    def _code_problems(self, definitions: Sequence[agent_pb2.AgentDefinition], known: Known) -> list[Problem]:
        return [
            Problem(path=f"agent {name}", line=0, field=mistake.field, description=mistake.description)
            for name, agent in self._code_agents.items()
            for mistake in judge_code_agent(agent.definition, agent.tool_links, definitions, known)
        ]

    def _has_model(self, name: str) -> bool:
        try:
            self._models.get(name)
        except KeyError:
            return False
        return True


def _unique(kind: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, item in items:
        if found.setdefault(name, item) is not item:
            raise ConfigurationError(f"There are two {kind} named {name!r}; names are unique.")
    return found
