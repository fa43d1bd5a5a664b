"""The catalog of one request as a value: agents, tools, models and functions by name.

Definitions can be laid over another catalog; reachability finds the agents that a run can call.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from bough.v1 import agent_pb2, model_pb2, tool_pb2
from bough_server.agents.definition import Source
from bough_server.agents.flow import LoopAgent, ParallelAgent, SequenceAgent
from bough_server.agents.function import DefinedFunctionAgent
from bough_server.agents.graph.agent import GraphAgent
from bough_server.agents.llm import LlmAgent
from bough_server.agents.loading import source_problems
from bough_server.agents.plan_execute import PlanExecuteAgent
from bough_server.agents.team import SupervisorAgent, SwarmAgent
from bough_server.agents.validation import Known, validate_code_agent
from bough_server.agents.validation_bounds import models_of
from bough_server.agents.validation_links import find_missing_functions
from bough_server.documents.yaml import raise_problems
from bough_server.errors import AgentUnusable, ConfigurationError, Problem
from bough_server.functions import Function, NodeFunction
from bough_server.log.session_state import is_key
from bough_server.models.model import Model, ToolSpec
from bough_server.runtime.agent import Agent, Models, Resolver
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


class ListedModels(Models, Protocol):
    """The configured models."""

    def list(self) -> Sequence[model_pb2.ModelInfo]:
        """Return every name that a definition may use, including aliases."""
        ...


class SelectedModels:
    """Some of the configured models, with the aliases of them; the others do not exist."""

    def __init__(self, models: ListedModels, names: Iterable[str]) -> None:
        """Raises ConfigurationError for a name of no model."""
        self._models = models
        try:
            self._selected = frozenset(models.get(name).name for name in names)
        except KeyError as error:
            raise ConfigurationError(f"`tenants` names the model {error}, which is not configured.") from None

    def get(self, name: str) -> Model:
        """Return the model of a name, following aliases. Raises KeyError."""
        model = self._models.get(name)
        if model.name not in self._selected:
            raise KeyError(name)
        return model

    def list(self) -> Sequence[model_pb2.ModelInfo]:
        """Return every name that a definition may use, including aliases; fallbacks are selected ones."""
        return [
            model_pb2.ModelInfo(
                name=info.name,
                provider=info.provider,
                model=info.model,
                fallbacks=[name for name in info.fallbacks if name in self._selected],
            )
            for info in self._models.list()
            if self._models.get(info.name).name in self._selected
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionHashes:
    """Content hashes of tools and models by name, declared versions of agents in code, and the price list's hash."""

    tools: Mapping[str, str]
    models: Mapping[str, str]
    agents: Mapping[str, str]
    prices: str
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Declared versions of the functions of graphs' nodes, by name."""


class Registry:
    """The server's own catalog: its resolver, and lists of everything for the CatalogService."""

    def __init__(
        self,
        definitions: Iterable[agent_pb2.AgentDefinition | Source],
        *,
        models: ListedModels,
        code_agents: Iterable[Agent] = (),
        tools: Iterable[Tool] = (),
        functions: Iterable[Function] = (),
    ) -> None:
        """Check everything together. Raises ConfigurationError with every problem, by file, line and field."""
        sources = [each if isinstance(each, Source) else Source(definition=each, path="agents") for each in definitions]
        self._models = models
        self._tools = _unique("tools", ((each.name, each) for each in tools))
        if taken := sorted(RESERVED & self._tools.keys()):
            raise ConfigurationError(f"{taken[0]!r} is a built-in tool; choose another name for yours.")
        self._functions = _unique("functions", ((each.name, each) for each in functions))
        self._code_agents = _unique("agents", ((each.definition.name, each) for each in code_agents))
        self.resolver = Resolver(  # collect_known_names() reads it before the agents can be built
            agents={}, tools=self._tools, functions=self._functions, models=models
        )
        bare = [source.definition for source in sources]
        known = self.collect_known_names(bare)
        raise_problems([*source_problems(sources, known), *self._code_problems(bare, known)])
        # The name alone: it is shown to callers, whom the folders of the server do not concern.
        self._files = {source.definition.name: Path(source.path).name for source in sources}
        made = {each.name: agent_of(each, self._code_agents, self._functions) for each in bare}
        agents = dict(sorted([*made.items(), *self._code_agents.items()]))
        self.resolver = replace(self.resolver, agents=agents)

    def select_models(self, names: Iterable[str]) -> "Registry":
        """Return this catalog with some of the models, and the aliases of them. Raises ConfigurationError."""
        selected = copy(self)
        selected._models = SelectedModels(self._models, names)
        selected.resolver = replace(self.resolver, models=selected._models)
        return selected

    def list_agents(self) -> Sequence[agent_pb2.Agent]:
        """Return every agent, sorted by name."""
        return [describe_agent(agent, self.source(name)) for name, agent in self.resolver.agents.items()]

    def list_tools(self) -> Sequence[tool_pb2.ToolInfo]:
        """Return every tool that a definition may name, including the built-in ones, sorted by name."""
        listed = [*map(_describe_tool, self._tools.values()), *map(_describe_built_in_tool, SPECS.values())]
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

    def collect_known_names(
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
            models=listed | {name for name in named if self.resolver.model(name) is not None},
            has_default_model=self.resolver.model("") is not None,
            definitions=[*(agent.definition for agent in self.resolver.agents.values()), *stored],
            code_agents=[agent.definition for agent in self._code_agents.values()],
            functions={name: function.kind for name, function in self._functions.items()},
            tool_schemas=schemas_of(self._tools.values()),
            node_functions={name: each for name, each in self._functions.items() if isinstance(each, NodeFunction)},
        )

    def _code_problems(self, definitions: Sequence[agent_pb2.AgentDefinition], known: Known) -> list[Problem]:
        return [
            Problem(path=f"agent {name}", line=0, field=problem.field, description=problem.description)
            for name, agent in self._code_agents.items()
            for problem in validate_code_agent(agent.definition, agent.tool_links, definitions, known)
        ]


def schemas_of(tools: Iterable[Tool]) -> dict[str, str]:
    """Return the JSON Schemas of the arguments of tools and of the built-in ones, by name."""
    return {
        **{tool.name: tool.input_schema_json for tool in tools},
        **{name: built_in.input_schema_json for name, built_in in SPECS.items()},
    }


def describe_agent(agent: Agent, source: agent_pb2.AgentSource.ValueType) -> agent_pb2.Agent:
    """Return an agent as the catalog lists it, without times: only stored agents have them."""
    return agent_pb2.Agent(definition=agent.definition, revision=agent.revision, source=source, kind=agent.kind)


def _describe_tool(tool: Tool) -> tool_pb2.ToolInfo:
    described = spec(tool)
    return tool_pb2.ToolInfo(
        name=described.name,
        description=described.description,
        input_schema_json=described.input_schema_json,
        source=tool_pb2.TOOL_SOURCE_CLIENT if tool.is_client_side else tool_pb2.TOOL_SOURCE_CODE,
        requires_approval=tool.approval is True,
    )


def _describe_built_in_tool(described: ToolSpec) -> tool_pb2.ToolInfo:
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


def overlay_definitions(below: Resolver, definitions: Iterable[agent_pb2.AgentDefinition]) -> Resolver:
    """Return a resolver that adds the agents of definitions on top of another one."""
    made = {each.name: agent_of(each, below.agents, below.functions) for each in definitions}
    return replace(below, agents={**below.agents, **made})


def find_reachable(resolver: Resolver, root: str) -> Sequence[agent_pb2.AgentDefinition]:
    """Return the definitions that a run of `root` can reach by links, including the root's, sorted by name.

    Links to missing agents are skipped. Raises KeyError if there is no `root`.
    """
    found = {root: resolver.agents[root].definition}
    pending = [root]
    while pending:
        for link in found[pending.pop()].sub_agents:
            # A missing agent is reported by gone(), with the agent that links to it.
            if link.agent not in found and link.agent in resolver.agents:
                found[link.agent] = resolver.agents[link.agent].definition
                pending.append(link.agent)
    return [found[name] for name in sorted(found)]


def versions_of(resolver: Resolver, root: str) -> VersionHashes:
    """Return the versions of everything that the definitions reachable from `root` name.

    These are hashes of tools, of models with their fallbacks and of their prices, and the versions of agents in code.
    Raises KeyError if there is no `root`, or a tool is missing.
    """
    definitions = find_reachable(resolver, root)
    agents = [resolver.agents[definition.name] for definition in definitions]
    names = {link.name for agent in agents for link in agent.tool_links} - SPECS.keys()
    tools = {name: resolver.tools[name].digest for name in names}
    models = _models(resolver, {name for definition in definitions for name in models_of(definition)})
    code = {each.name for each in definitions if each.WhichOneof("kind") is None}
    # Under its own name too: the definition runs with the code as it was when the run started.
    code |= {each.function.function for each in definitions if each.HasField("function")}
    prices = [(name, asdict(model.price)) for name, model in sorted(models.items()) if model.price]
    return VersionHashes(
        tools=dict(sorted(tools.items())),
        models={name: model.config_digest for name, model in sorted(models.items())},
        agents={name: resolver.agents[name].revision for name in sorted(code)},
        prices=hashlib.sha256(json.dumps(prices).encode()).hexdigest(),
        nodes=dict(sorted(_node_versions(resolver, definitions))),
    )


def _node_versions(resolver: Resolver, definitions: Iterable[agent_pb2.AgentDefinition]) -> Iterator[tuple[str, str]]:
    """Yield the functions of the nodes of graphs, each with its version."""
    for definition in definitions:
        for node in definition.graph.nodes:
            function = resolver.functions.get(node.function)
            if isinstance(function, NodeFunction):
                yield function.name, function.version


def _models(resolver: Resolver, names: Collection[str]) -> dict[str, Model]:
    """Return the models with these names and their fallbacks, by canonical name; missing ones are left out."""
    found: dict[str, Model] = {}
    for name in names:
        if (model := resolver.model(name)) is not None:
            found[model.name] = model
            found |= {each: other for each in model.fallbacks if (other := resolver.model(each)) is not None}
    return found


def resolve_versions(resolver: Resolver, root: str) -> VersionHashes:
    """Return the versions of everything that a run of `root` can reach. Raises AgentUnusable if something of it no
    longer exists.
    """
    if missing := list(describe_missing(resolver, root)):
        raise AgentUnusable(" ".join([*missing, "Change the agents that name it, or restore it."]))
    return versions_of(resolver, root)


def describe_missing(resolver: Resolver, root: str) -> Iterator[str]:
    """Yield a sentence for each thing that the reachable definitions name and that is missing.

    Stored agents were validated when they were stored. If a rule was added since, a run that breaks it is refused
    before it starts. Raises KeyError if there is no `root`.
    """
    for definition in find_reachable(resolver, root):
        if definition.output_key and not is_key(definition.output_key):
            key = definition.output_key
            yield f"The agent {definition.name!r} has the output_key {key!r}, which is no valid key of session state."
        if definition.HasField("function") and not is_code(resolver, definition.function.function):
            code = definition.function.function
            yield f"The agent {definition.name!r} names the code {code!r}, which no longer exists."
            # Its tools are those of the code, so they cannot be listed.
            continue
        for function in find_missing_functions(definition, resolver.functions):
            yield f"The agent {definition.name!r} names {function}, which no longer exists."
        agent = resolver.agents[definition.name]
        for link in definition.sub_agents:
            if link.agent not in resolver.agents:
                yield f"The agent {definition.name!r} links to the agent {link.agent!r}, which no longer exists."
        for tool in agent.tool_links:
            if tool.name not in SPECS and tool.name not in resolver.tools:
                yield f"The agent {definition.name!r} names the tool {tool.name!r}, which no longer exists."
        for model in sorted(models_of(definition) - {""}):
            if resolver.model(model) is None:
                yield f"The agent {definition.name!r} names the model {model!r}, which does not exist for this tenant."


def is_code(resolver: Resolver, name: str) -> bool:
    """Return whether an agent with this name exists and is code."""
    return name in resolver.agents and resolver.agents[name].definition.WhichOneof("kind") is None


def agent_of(
    definition: agent_pb2.AgentDefinition, code: Mapping[str, Agent], functions: Mapping[str, Function]
) -> Agent:
    """Return the agent of a validated definition; `code` has the agents in code, `functions` the operator's."""
    if definition.HasField("graph"):
        return GraphAgent(definition, functions)
    if definition.HasField("function"):
        return DefinedFunctionAgent(definition, code.__getitem__)
    return _KINDS[definition.WhichOneof("kind") or "llm"](definition)
