"""The catalog of one request as a value: agents, tools, models and functions by name.

An overlay adds definitions on top of another catalog; reachability finds the agents that a run can call.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, Protocol, TypeVar

from bough.v1 import agent_pb2, model_pb2, tool_pb2
from bough_server.agents.definition import Source
from bough_server.agents.flow import LoopAgent, ParallelAgent, SequenceAgent
from bough_server.agents.function import DefinedFunctionAgent
from bough_server.agents.llm import LlmAgent
from bough_server.agents.loading import source_problems
from bough_server.agents.plan_execute import PlanExecuteAgent
from bough_server.agents.team import SupervisorAgent, SwarmAgent
from bough_server.agents.validation import Known, validate_code_agent
from bough_server.agents.validation_bounds import models_of
from bough_server.agents.validation_links import functions_gone
from bough_server.documents import raise_problems
from bough_server.errors import AgentUnusable, ConfigurationError, Problem
from bough_server.functions import Function
from bough_server.models.model import Model, ToolSpec
from bough_server.runtime.agent import Agent, Resolver, VersionHashes
from bough_server.session_state import is_key
from bough_server.tools.builtin import RESERVED, SPECS
from bough_server.tools.tool import Tool, spec

T = TypeVar("T")

_KINDS: Final[Mapping[str, Callable[[agent_pb2.AgentDefinition], Agent]]] = {
    "llm": LlmAgent,
    "sequence": SequenceAgent,
    "parallel": ParallelAgent,
    "loop": LoopAgent,
    "supervisor": SupervisorAgent,
    "swarm": SwarmAgent,
    "plan_execute": PlanExecuteAgent,
}


class Models(Protocol):
    """The configured models."""

    def get(self, name: str) -> Model:
        """Return the model with this name: aliases are followed, empty means the default model. Raises KeyError."""
        ...

    def list(self) -> Sequence[model_pb2.ModelInfo]:
        """Return every name that a definition may use, including aliases."""
        ...


class Registry:
    """The server's own catalog; implements runtime.agent.Resolver, and lists everything for the CatalogService."""

    def __init__(
        self,
        definitions: Iterable[agent_pb2.AgentDefinition | Source],
        *,
        models: Models,
        code_agents: Iterable[Agent] = (),
        tools: Iterable[Tool] = (),
        functions: Iterable[Function] = (),
    ) -> None:
        """Check everything together. Raises ConfigurationError with every problem, by file, line and field."""
        sources = [each if isinstance(each, Source) else Source(definition=each, path="agents") for each in definitions]
        self._models = models
        self._agents: dict[str, Agent] = {}  # known() reads it before the agents can be built
        self._tools = _unique("tools", ((each.name, each) for each in tools))
        if taken := sorted(RESERVED & self._tools.keys()):
            raise ConfigurationError(f"{taken[0]!r} is a built-in tool; choose another name for yours.")
        self._functions = _unique("functions", ((each.name, each) for each in functions))
        self._code_agents = _unique("agents", ((each.definition.name, each) for each in code_agents))
        bare = [source.definition for source in sources]
        known = self.known(bare)
        raise_problems([*source_problems(sources, known), *self._code_problems(bare, known)])
        self._files = {source.definition.name: Path(source.path).name for source in sources}
        made = {each.name: agent_of(each, self._code_agents.__getitem__) for each in bare}
        self._agents = dict(sorted([*made.items(), *self._code_agents.items()]))
        self._versions: dict[str, VersionHashes] = {}

    def agent(self, name: str) -> Agent:
        """Return the agent with this name. Raises KeyError."""
        return self._agents[name]

    def tool(self, name: str) -> Tool:
        """Return the tool with this name. Raises KeyError."""
        return self._tools[name]

    def function(self, name: str) -> Function:
        """Return the operator's function with this name. Raises KeyError."""
        return self._functions[name]

    def model(self, name: str) -> Model:
        """Return the model with this name; aliases are followed, empty means the default. Raises KeyError."""
        return self._models.get(name)

    def reachable(self, root: str) -> Sequence[agent_pb2.AgentDefinition]:
        """Return the definitions that a run of `root` can reach by links, including the root's, sorted by name."""
        return reachable(self, root)

    def versions(self, root: str) -> VersionHashes:
        """Return the versions of everything that the definitions reachable from `root` name; see versions_of."""
        if root not in self._versions:
            self._versions[root] = versions_of(self, root)
        return self._versions[root]

    def list_agents(self) -> Sequence[agent_pb2.Agent]:
        """Return every agent, sorted by name."""
        return [shown(agent, self.source(name)) for name, agent in self._agents.items()]

    def list_tools(self) -> Sequence[tool_pb2.ToolInfo]:
        """Return every tool that a definition may name, including the built-in ones, sorted by name."""
        listed = [*map(_tool_info, self._tools.values()), *map(_built_in_info, SPECS.values())]
        return sorted(listed, key=lambda info: info.name)

    def list_models(self) -> Sequence[model_pb2.ModelInfo]:
        """Return every model, sorted by name."""
        return sorted(self._models.list(), key=lambda info: info.name)

    def source(self, name: str) -> agent_pb2.AgentSource.ValueType:
        """Return the source of the agent with this name; AGENT_SOURCE_UNSPECIFIED if there is none."""
        if name in self._code_agents:
            return agent_pb2.AGENT_SOURCE_CODE
        return agent_pb2.AGENT_SOURCE_FILE if name in self._files else agent_pb2.AGENT_SOURCE_UNSPECIFIED

    def place(self, name: str) -> str:
        """Return the place of an agent's definition as text, with the file's name; empty if there is no such agent."""
        if name in self._code_agents:
            return "Python code"
        return f"the file {self._files[name]}" if name in self._files else ""

    def known(
        self,
        definitions: Iterable[agent_pb2.AgentDefinition],
        stored: Iterable[agent_pb2.AgentDefinition] = (),
    ) -> Known:
        """Return the names that definitions may refer to in this catalog and the stored agents on top of it."""
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
            Problem(path=f"agent {name}", line=0, field=problem.field, description=problem.description)
            for name, agent in self._code_agents.items()
            for problem in validate_code_agent(agent.definition, agent.tool_links, definitions, known)
        ]

    def _has_model(self, name: str) -> bool:
        try:
            self._models.get(name)
        except KeyError:
            return False
        return True


def shown(agent: Agent, source: agent_pb2.AgentSource.ValueType) -> agent_pb2.Agent:
    """Return an agent as the catalog shows it, without times: those exist for stored agents only."""
    return agent_pb2.Agent(definition=agent.definition, revision=agent.revision, source=source, kind=agent.kind)


def _tool_info(tool: Tool) -> tool_pb2.ToolInfo:
    described = spec(tool)
    return tool_pb2.ToolInfo(
        name=described.name,
        description=described.description,
        input_schema_json=described.input_schema_json,
        source=tool_pb2.TOOL_SOURCE_CLIENT if tool.is_client_side else tool_pb2.TOOL_SOURCE_CODE,
        requires_approval=tool.approval is True,
    )


def _built_in_info(described: ToolSpec) -> tool_pb2.ToolInfo:
    return tool_pb2.ToolInfo(
        name=described.name,
        description=described.description,
        input_schema_json=described.input_schema_json,
        source=tool_pb2.TOOL_SOURCE_BUILT_IN,
    )


def _unique(kind: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, item in items:
        if found.setdefault(name, item) is not item:
            raise ConfigurationError(f"There are two {kind} named {name!r}; names must be unique.")
    return found


class Overlay:
    """An immutable catalog that adds definitions on top of another one; implements runtime.agent.Resolver."""

    def __init__(self, below: Resolver, definitions: Iterable[agent_pb2.AgentDefinition]) -> None:
        self._below = below
        self._agents: Mapping[str, Agent] = {each.name: agent_of(each, below.agent) for each in definitions}
        self._versions: dict[str, VersionHashes] = {}

    def agent(self, name: str) -> Agent:
        """Return the agent with this name. Raises KeyError."""
        return self._agents[name] if name in self._agents else self._below.agent(name)

    def tool(self, name: str) -> Tool:
        """Return the tool with this name. Raises KeyError."""
        return self._below.tool(name)

    def function(self, name: str) -> Function:
        """Return the operator's function with this name. Raises KeyError."""
        return self._below.function(name)

    def model(self, name: str) -> Model:
        """Return the model with this name; aliases are followed, empty means the default. Raises KeyError."""
        return self._below.model(name)

    def reachable(self, root: str) -> Sequence[agent_pb2.AgentDefinition]:
        """Return the definitions that a run of `root` can reach by links, including the root's, sorted by name."""
        return reachable(self, root)

    def versions(self, root: str) -> VersionHashes:
        """Return the versions of everything that the definitions reachable from `root` name; see versions_of.

        Raises AgentUnusable if something that they name no longer exists.
        """
        if root not in self._versions:
            if missing := list(gone(self, root)):
                raise AgentUnusable(" ".join([*missing, "Change the agents that name it, or restore it."]))
            self._versions[root] = versions_of(self, root)
        return self._versions[root]


def reachable(resolver: Resolver, root: str) -> Sequence[agent_pb2.AgentDefinition]:
    """Return the definitions that a run of `root` can reach by links, including the root's, sorted by name.

    Links to missing agents are skipped. Raises KeyError if there is no `root`.
    """
    found = {root: resolver.agent(root).definition}
    pending = [root]
    while pending:
        for link in found[pending.pop()].sub_agents:
            if link.agent not in found and _has(resolver.agent, link.agent):
                found[link.agent] = resolver.agent(link.agent).definition
                pending.append(link.agent)
    return [found[name] for name in sorted(found)]


def versions_of(resolver: Resolver, root: str) -> VersionHashes:
    """Return the versions of everything that the definitions reachable from `root` name.

    These are hashes of tools, of models with their fallbacks and of their prices, and the versions of agents in code.
    Raises KeyError if there is no `root`, or a tool is missing.
    """
    definitions = reachable(resolver, root)
    agents = [resolver.agent(definition.name) for definition in definitions]
    names = {link.name for agent in agents for link in agent.tool_links} - SPECS.keys()
    tools = {name: resolver.tool(name).digest for name in names}
    models = _models(resolver, {name for definition in definitions for name in models_of(definition)})
    code = {each.name for each in definitions if each.WhichOneof("kind") is None}
    code |= {each.function.function for each in definitions if each.HasField("function")}
    prices = [(name, asdict(model.price)) for name, model in sorted(models.items()) if model.price]
    return VersionHashes(
        tools=dict(sorted(tools.items())),
        models={name: model.config_digest for name, model in sorted(models.items())},
        agents={name: resolver.agent(name).revision for name in sorted(code)},
        prices=hashlib.sha256(json.dumps(prices).encode()).hexdigest(),
    )


def _models(resolver: Resolver, names: Collection[str]) -> dict[str, Model]:
    """Return the models with these names and their fallbacks, by canonical name; missing ones are left out."""
    found: dict[str, Model] = {}
    for name in names:
        if _has(resolver.model, name):
            model = resolver.model(name)
            found[model.name] = model
            found |= {each: resolver.model(each) for each in model.fallbacks if _has(resolver.model, each)}
    return found


def gone(resolver: Resolver, root: str) -> Iterator[str]:
    """Yield a sentence for each thing that the reachable definitions name and that is missing.

    Stored agents were validated when they were stored. If a rule was added since, a run that breaks it is refused
    before it starts. Raises KeyError if there is no `root`.
    """
    for definition in reachable(resolver, root):
        if definition.output_key and not is_key(definition.output_key):
            key = definition.output_key
            yield f"The agent {definition.name!r} has the output_key {key!r}, which is no valid key of session state."
        if definition.HasField("function") and not is_code(resolver, definition.function.function):
            code = definition.function.function
            yield f"The agent {definition.name!r} names the code {code!r}, which no longer exists."
            continue
        for function in functions_gone(definition, resolver):
            yield f"The agent {definition.name!r} names {function}, which no longer exists."
        agent = resolver.agent(definition.name)
        for link in definition.sub_agents:
            if not _has(resolver.agent, link.agent):
                yield f"The agent {definition.name!r} links to the agent {link.agent!r}, which no longer exists."
        for tool in agent.tool_links:
            if tool.name not in SPECS and not _has(resolver.tool, tool.name):
                yield f"The agent {definition.name!r} names the tool {tool.name!r}, which no longer exists."
        for model in sorted(models_of(definition) - {""}):
            if _has(resolver.model, model):
                continue
            yield f"The agent {definition.name!r} names the model {model!r}, which no longer exists."


def is_code(resolver: Resolver, name: str) -> bool:
    """Return whether an agent with this name exists and is code."""
    return _has(resolver.agent, name) and resolver.agent(name).definition.WhichOneof("kind") is None


def _has(find: Callable[[str], object], name: str) -> bool:
    try:
        find(name)
    except KeyError:
        return False
    return True


def agent_of(definition: agent_pb2.AgentDefinition, code: Callable[[str], Agent]) -> Agent:
    """Return the agent of a validated definition; `code` finds agents in code and raises KeyError."""
    if definition.HasField("function"):
        return DefinedFunctionAgent(definition, code)
    return _KINDS[definition.WhichOneof("kind") or "llm"](definition)
