"""The catalog of one request as a value: agents, tools, models and functions by name.

Definitions can be laid over another catalog; reachability finds the agents that a run can call.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar

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
from bough_server.engine.open_invocations import to_duration
from bough_server.errors import AgentUnusable, ConfigurationError, Problem
from bough_server.functions import Function, NodeFunction
from bough_server.log.session_state import is_key
from bough_server.models.model import Model, ToolSpec
from bough_server.runtime.agent import Agent, Models, Resolver
from bough_server.runtime.toolset import name_linked_tools
from bough_server.tool_servers.offers import MOST_TOOLS, derive_name, revision_of
from bough_server.tool_servers.servers import ToolServers
from bough_server.tools.builtin import RESERVED, SPECS
from bough_server.tools.remote import RECOVERIES, tool_of
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


def describe_owners(tools: Iterable[str]) -> Mapping[str, str]:
    """Return the names that no tool of a tool server can have, each with what has it; `tools` are those in Python."""
    return dict.fromkeys(tools, "a tool in Python") | dict.fromkeys(RESERVED, "a built-in tool")


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
    server_tools: Mapping[str, tool_pb2.ToolInfo] = field(default_factory=dict)
    """The tools of tool servers by the revisions under which they are stored, in the order of their names."""
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
        tool_servers: Callable[[Mapping[str, str]], ToolServers] = ToolServers.none,
    ) -> None:
        """Check everything together. Raises ConfigurationError with every problem, by file, line and field.

        `tool_servers` returns the tool servers, given the names of the other tools, each with what has it.
        """
        sources = [each if isinstance(each, Source) else Source(definition=each, path="agents") for each in definitions]
        self._models = models
        self._tools = _unique("tools", ((each.name, each) for each in tools))
        if taken := sorted(RESERVED & self._tools.keys()):
            raise ConfigurationError(f"{taken[0]!r} is a built-in tool; choose another name for yours.")
        self.tool_servers = tool_servers(describe_owners(self._tools))
        """The tool servers, whose tools come on top of those of the resolver."""
        self._built: tuple[int, Mapping[str, Tool]] | None = None
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

    def list_tools(self, tenant_id: str | None = None, *, server: str = "") -> Sequence[tool_pb2.ToolInfo]:
        """Return every tool that a tenant's definitions may name, including the built-in ones, sorted by name.

        With `server` only those of that tool server; None for the tools of all tenants.
        """
        own = [*map(_describe_tool, self._tools.values()), *map(_describe_built_in_tool, SPECS.values())]
        served = self.tool_servers.offers.tools_for(tenant_id).values()
        listed = [info for info in served if info.server == server] if server else [*own, *served]
        return sorted(listed, key=lambda info: info.name)

    def add_server_tools(self, tenant_id: str) -> Resolver:
        """Return the resolver with the tools of tool servers that a tenant may use, as they are offered now."""
        if not self.tool_servers.names:
            return self.resolver
        offers = self.tool_servers.offers
        if self._built is None or self._built[0] != offers.version:  # once for all tenants
            self._built = offers.version, self.build_server_tools(offers.tools_for(None))
        built = self._built[1]
        return replace(
            self.resolver, tools={**self._tools, **{name: built[name] for name in offers.tools_for(tenant_id)}}
        )

    def explain_missing_tool(self, tenant_id: str, name: str) -> str:
        """Return why a tool, or the tools of a tool server, are missing for a tenant, as a clause."""
        for server, offer in self.tool_servers.offers.visible_to(tenant_id).items():
            if name == server or name.startswith(offer.section.prefix_of(server)):
                reasons = {
                    derive_name(offer.section.prefix_of(server), each.name): each.reason for each in offer.refused
                }
                why = reasons.get(name) or (self.tool_servers.problem(server) if not offer.is_listed else "")
                what = "which offers no tools now" if name == server else f"which {server!r} does not offer now"
                return f"{what} ({why.removesuffix('.')})" if why else what
        return "which no longer exists"

    def build_server_tools(self, infos: Mapping[str, tool_pb2.ToolInfo]) -> Mapping[str, Tool]:
        """Return tools of tool servers that call these, by the same names."""
        return {name: tool_of(info, self.tool_servers) for name, info in infos.items()}

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
        *,
        tenant_id: str | None = None,
    ) -> Known:
        """Return the names that definitions may refer to in this catalog and the stored agents on top of it.

        None for the tool servers of all tenants.
        """
        offers = self.tool_servers.offers
        named = {name for definition in definitions for name in models_of(definition)} - {""}
        listed = {info.name for info in self._models.list()}
        return Known(
            tools={*self._tools, *offers.tools_for(tenant_id)},
            tool_servers=offers.visible_to(tenant_id),
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
        on_recovery=tool_pb2.TOOL_RECOVERY_UNSPECIFIED if tool.is_client_side else RECOVERIES[tool.on_recovery],
        digest=tool.digest,
        timeout=None if tool.timeout is None else to_duration(round(tool.timeout * 1e9)),
        approver_group=tool.approvers or "",
    )


def _describe_built_in_tool(described: ToolSpec) -> tool_pb2.ToolInfo:
    return tool_pb2.ToolInfo(
        name=described.name,
        description=described.description,
        input_schema_json=described.input_schema_json,
        source=tool_pb2.TOOL_SOURCE_BUILT_IN,
        on_recovery=tool_pb2.TOOL_RECOVERY_RETRY,
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
    names = {name for agent in agents for _, name in name_linked_tools(agent.tool_links, resolver)} - SPECS.keys()
    tools = {name: resolver.tools[name].digest for name in names}
    infos = [info for name in sorted(names) if (info := resolver.tools[name].info) is not None]
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
        server_tools={revision_of(info): info for info in infos},
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


Explain: TypeAlias = Callable[[str], str]
"""Returns why a tool, or the tools of a tool server, of this name are missing, as a clause."""


def _explain_nothing(name: str) -> str:
    return "which no longer exists"


def resolve_versions(resolver: Resolver, root: str, explain: Explain = _explain_nothing) -> VersionHashes:
    """Return the versions of everything that a run of `root` can reach; `explain` says why a tool is missing.

    Raises AgentUnusable if something of it no longer exists.
    """
    if missing := list(describe_missing(resolver, root, explain)):
        raise AgentUnusable(" ".join([*missing, "Change the agents that name it, or restore it."]))
    return versions_of(resolver, root)


def describe_missing(resolver: Resolver, root: str, explain: Explain = _explain_nothing) -> Iterator[str]:
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
        yield from _describe_missing_tools(agent, resolver, explain)
        for model in sorted(models_of(definition) - {""}):
            if resolver.model(model) is None:
                yield f"The agent {definition.name!r} names the model {model!r}, which does not exist for this tenant."


def _describe_missing_tools(agent: Agent, resolver: Resolver, explain: Explain) -> Iterator[str]:
    """Yield a sentence for each tool that an agent names and that is missing, and one if it has too many."""
    name = agent.definition.name
    for link in agent.tool_links:
        if link.server and not any(tool.server == link.server for tool in resolver.tools.values()):
            why = explain(link.server)
            yield f"The agent {name!r} links the tool server {link.server!r}, {why}."
        elif not link.server and link.name not in SPECS and link.name not in resolver.tools:
            yield f"The agent {name!r} names the tool {link.name!r}, {explain(link.name)}."
    count = sum(1 for _ in name_linked_tools(agent.tool_links, resolver)) + len(agent.definition.sub_agents)
    if count > MOST_TOOLS:
        yield (
            f"The agent {name!r} has {count} tools, linked agents included, and at most {MOST_TOOLS} are possible: "
            "link fewer by name, or select some by `tools` of the tool server."
        )


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
