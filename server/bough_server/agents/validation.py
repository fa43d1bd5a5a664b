"""Validation of agent definitions, together and with all problems at once; definition.py checks how they are written.

The same list of violations answers ValidateAgents, `bough agents validate` and the start of a server.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bough.v1 import agent_pb2, catalog_service_pb2, error_pb2
from bough_server.agents.graph.structure import schema_problem as graph_schema_problem
from bough_server.agents.graph.structure import tool_places
from bough_server.agents.graph.types import Names
from bough_server.agents.graph.validation import graph_problems
from bough_server.agents.validation_bounds import (
    MAX_SCHEMA_BYTES,
    bound_problems,
    history_problems,
    is_too_large,
    settings_problems,
    tool_link_problems,
    unknown_models,
)
from bough_server.agents.validation_links import naming_problems, rule_circles, structure_problems
from bough_server.documents.yaml import suggestion
from bough_server.errors import Reason
from bough_server.functions import NodeFunction
from bough_server.ids import AGENT_NAME
from bough_server.runtime.agent import llm_of
from bough_server.tool_servers.offers import MOST_TOOLS, ServerOffer
from bough_server.tools.arguments import schema_problem
from bough_server.tools.builtin import FINAL_ANSWER, OF_STATE, SPECS

_INVALID: Final = error_pb2.ERROR_REASON_INVALID_REQUEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The names that definitions may refer to."""

    tools: Collection[str] = ()
    client_tools: Collection[str] = ()
    """The tools that run in the client."""
    tool_servers: Mapping[str, ServerOffer] = field(default_factory=dict)
    """The tool servers, whose tools are among `tools` if they are known."""
    models: Collection[str] = ()
    has_default_model: bool = True
    definitions: Sequence[agent_pb2.AgentDefinition] = ()
    """The catalog's definitions, which validated ones replace by name."""
    code_agents: Sequence[agent_pb2.AgentDefinition] = ()
    """The definitions of agents in code, whose names are taken."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """The operator's functions, each with its kind."""
    tool_schemas: Mapping[str, str] = field(default_factory=dict)
    """The JSON Schema of the arguments of each tool."""
    node_functions: Mapping[str, NodeFunction] = field(default_factory=dict)
    """The operator's functions of graphs' nodes."""


@dataclass(frozen=True, slots=True)
class DefinitionProblem:
    """A problem with one field of one definition."""

    field: str
    description: str
    reason: Reason = _INVALID


def violations(
    definitions: Sequence[agent_pb2.AgentDefinition], known: Known
) -> list[catalog_service_pb2.DefinitionViolation]:
    """Return every problem of definitions, in their order, and of the agents that they reach."""
    validated = [*zip(definitions, validate(definitions, known), strict=True), *validate_reachable(definitions, known)]
    return [
        catalog_service_pb2.DefinitionViolation(
            agent=definition.name, field=problem.field, description=problem.description, reason=problem.reason
        )
        for definition, problems in validated
        for problem in problems
    ]


def validate(definitions: Sequence[agent_pb2.AgentDefinition], known: Known) -> list[list[DefinitionProblem]]:
    """Return the problems of each definition."""
    world = _world(definitions, known)
    circle_of = rule_circles(world.agents)
    seen: set[str] = set()
    validated: list[list[DefinitionProblem]] = []
    for definition in definitions:
        problems = [*_identity(definition, world, seen), *_llm(definition, world), *_links(definition, world)]
        problems += [DefinitionProblem(*each) for each in bound_problems(definition)]
        problems += [DefinitionProblem(*each) for each in structure_problems(definition, world.agents, circle_of)]
        problems += [
            DefinitionProblem(*each) for each in naming_problems(definition, known.functions, known.code_agents)
        ]
        problems += [DefinitionProblem(*each) for each in unknown_models(definition, known.models)]
        if problem := _schema_problem(definition.input_schema_json, why_object="arguments have names"):
            problems.append(DefinitionProblem("input_schema_json", problem))
        problems += [*_output(definition), *_graph(definition, world)]
        seen.add(definition.name)
        validated.append([_prefix_supervisor_field(problem, definition) for problem in problems])
    return validated


def _prefix_supervisor_field(problem: DefinitionProblem, definition: agent_pb2.AgentDefinition) -> DefinitionProblem:
    """Return the problem with its field inside `supervisor` if the definition is one."""
    is_inside = definition.HasField("supervisor") and problem.field.startswith("llm.")
    return replace(problem, field=f"supervisor.{problem.field}") if is_inside else problem


def validate_reachable(
    definitions: Sequence[agent_pb2.AgentDefinition], known: Known
) -> list[tuple[agent_pb2.AgentDefinition, list[DefinitionProblem]]]:
    """Return the catalog's agents that the definitions reach and give new problems, with those problems.

    A field that already has a problem is not reported again.
    """
    before, after = _world([], known), _world(definitions, known)
    validated: list[tuple[agent_pb2.AgentDefinition, list[DefinitionProblem]]] = []
    for name in sorted(_below({each.name for each in definitions}, after.agents)):
        reached = after.agents[name]
        # An agent that was invalid before, as after a change of the rules, must not block every later change.
        had = {problem.field for problem in _relations(reached, before)}
        if made := [problem for problem in _relations(reached, after) if problem.field not in had]:
            validated.append((reached, made))
    return validated


def _relations(definition: agent_pb2.AgentDefinition, world: "_World") -> list[DefinitionProblem]:
    """Return those of a definition's problems that depend on other agents."""
    return [
        _prefix_supervisor_field(problem, definition)
        for problem in (*_llm(definition, world), *_links(definition, world))
    ]


def _schema_problem(schema_json: str, *, why_object: str = "") -> str:
    if len(schema_json) > MAX_SCHEMA_BYTES:
        return f"is larger than {MAX_SCHEMA_BYTES // 1024} KiB."
    return schema_problem(schema_json, why_object=why_object) if schema_json else ""


def _output(definition: agent_pb2.AgentDefinition) -> Iterator[DefinitionProblem]:
    schema = definition.output_schema_json
    if not schema:
        return
    if definition.HasField("graph"):
        if problem := graph_schema_problem(schema):
            yield DefinitionProblem("output_schema_json", problem)
        return
    if problem := _schema_problem(schema):  # an object too, as for arguments: providers accept no other output schema
        yield DefinitionProblem("output_schema_json", problem)
    if llm_of(definition).final_answer_tool:
        yield DefinitionProblem(
            "llm.final_answer_tool", "is for answers in text; remove it if there is an output schema."
        )


def validate_code_agent(
    agent: agent_pb2.AgentDefinition,
    tool_links: Sequence[agent_pb2.ToolLink],
    definitions: Sequence[agent_pb2.AgentDefinition],
    known: Known,
) -> list[DefinitionProblem]:
    """Return the problems of an agent in code, whose tools are not in its definition."""
    # Checked by the rules of definitions; the paths lose the `llm.`, which such an agent does not have, below.
    tools = agent_pb2.AgentDefinition(llm=agent_pb2.LlmAgent(tools=tool_links), sub_agents=agent.sub_agents)
    problems = [*_tools(tools, known), *_links(agent, _world(definitions, known))]
    problems += [DefinitionProblem(*each) for each in naming_problems(agent, known.functions, known.code_agents)]
    problems += [DefinitionProblem(*each) for each in (*history_problems(agent), *unknown_models(agent, known.models))]
    return [
        DefinitionProblem(problem.field.removeprefix("llm."), problem.description, problem.reason)
        for problem in problems
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """All agents as they are once the definitions take effect."""

    known: Known
    agents: Mapping[str, agent_pb2.AgentDefinition]
    taken: Collection[str]
    with_model: Collection[str] = field(default_factory=set)
    """Agents that have a model in some run: their own, or one inherited from a caller."""


def _world(definitions: Sequence[agent_pb2.AgentDefinition], known: Known) -> _World:
    by_name = {each.name: each for each in (*known.definitions, *known.code_agents, *definitions)}
    own = {name for name, each in by_name.items() if llm_of(each).model}
    return _World(
        known=known,
        agents=by_name,
        taken={each.name for each in known.code_agents},
        with_model=own | _below(own, by_name),
    )


def _below(names: Collection[str], agents: Mapping[str, agent_pb2.AgentDefinition]) -> set[str]:
    """Return the agents that can be reached by links from the named ones, without these."""
    found: set[str] = set()
    pending = [name for name in names if name in agents]
    while pending:
        for link in agents[pending.pop()].sub_agents:
            if link.agent in agents and link.agent not in found and link.agent not in names:
                found.add(link.agent)
                pending.append(link.agent)
    return found


def _identity(
    definition: agent_pb2.AgentDefinition, world: _World, seen: Collection[str]
) -> Iterator[DefinitionProblem]:
    name = definition.name
    if not name:
        yield DefinitionProblem("name", "is required.")
    elif not AGENT_NAME.fullmatch(name):
        yield DefinitionProblem("name", "must be a letter, then up to 58 letters, digits, _ or -.")
    elif name in seen:
        yield DefinitionProblem("name", f"{name!r} is defined twice; names must be unique in a catalog.")
    elif name in world.taken:
        yield DefinitionProblem("name", f"{name!r} is the name of an agent in code; choose another.")
    if not definition.description.strip():
        yield DefinitionProblem("description", "is required: models choose the agent by it.")
    if definition.WhichOneof("kind") is None:
        yield DefinitionProblem("llm", "is required, or another kind such as `sequence: {}`.")


def _llm(definition: agent_pb2.AgentDefinition, world: _World) -> Iterator[DefinitionProblem]:
    if definition.WhichOneof("kind") not in ("llm", "supervisor"):
        return
    llm, known = llm_of(definition), world.known
    if llm.model and llm.model not in known.models:
        yield DefinitionProblem("llm.model", f"There is no model {llm.model!r}.{suggestion(llm.model, known.models)}")
    if not llm.model and not known.has_default_model and definition.name not in world.with_model:
        yield DefinitionProblem(
            "llm.model", "is required: there is no model named default, and no caller has one to inherit."
        )
    yield from _tools(definition, known)


def names_of_catalog(known: Known, agents: Mapping[str, agent_pb2.AgentDefinition]) -> Names:
    """Return what the names in a graph stand for; `agents` are all agents by name."""
    return Names(agent=agents.get, tool_schema=known.tool_schemas.get, function=known.node_functions.get)


def _graph(definition: agent_pb2.AgentDefinition, world: _World) -> Iterator[DefinitionProblem]:
    if not definition.HasField("graph") or is_too_large(definition):
        return
    known = world.known
    names = names_of_catalog(known, world.agents)
    yield from (DefinitionProblem(*each) for each in graph_problems(definition, names))
    for link, place in tool_places(definition.graph):
        yield from _tool_problems(link, place, known)
        if link.name in SPECS and link.name not in OF_STATE:
            yield DefinitionProblem(f"{place}.name", f"{link.name!r} is for models of agents: a graph routes by edges.")
        yield from (DefinitionProblem(*each) for each in tool_link_problems(link, place))
    for index, node in enumerate(definition.graph.nodes):
        place, model = f"graph.nodes[{index}].model", node.model
        if not node.HasField("model"):
            continue
        if model.model and model.model not in known.models:
            description = f"There is no model {model.model!r}.{suggestion(model.model, known.models)}"
            yield DefinitionProblem(f"{place}.model", description)
        if not model.model and not known.has_default_model and definition.name not in world.with_model:
            description = "is required: there is no model named default, and no caller has one to inherit."
            yield DefinitionProblem(f"{place}.model", description)
        yield from (DefinitionProblem(*each) for each in settings_problems(model.settings, f"{place}.settings"))


def _tool_problems(
    link: agent_pb2.ToolLink, place: str, known: Known, *, instead: str = ""
) -> Iterator[DefinitionProblem]:
    """Yield the problems of one link to a tool, wherever it is; `instead` says what may stand for the name."""
    if not link.name:
        yield DefinitionProblem(f"{place}.name", f"is required{instead}.")
    elif link.name not in known.tools and link.name not in SPECS and not is_unlisted(link.name, known):
        reason = error_pb2.ERROR_REASON_UNKNOWN_TOOL
        description = f"There is no tool {link.name!r}.{suggestion(link.name, {*known.tools, *SPECS})}"
        yield DefinitionProblem(f"{place}.name", description, reason)
    if link.HasField("timeout") and link.name in known.client_tools:
        description = f"{link.name!r} runs in the client, which a timeout does not stop; use the tool's answer_within."
        yield DefinitionProblem(f"{place}.timeout", description)


def _tools(definition: agent_pb2.AgentDefinition, known: Known) -> Iterator[DefinitionProblem]:
    # A model is offered a linked agent as a tool of this name, and providers refuse two tools of one name.
    others = {f"call_{link.agent}": f"the linked agent {link.agent!r}" for link in definition.sub_agents}
    if llm_of(definition).final_answer_tool:
        others[FINAL_ANSWER] = "the final answer"
    seen: set[str] = set()
    for index, link in enumerate(llm_of(definition).tools):
        place = f"llm.tools[{index}].name"
        if link.server:
            yield from _server_link(link, f"llm.tools[{index}].server", known, seen)
            continue
        instead = ", or `server` for all tools of a tool server"
        yield from _tool_problems(link, f"llm.tools[{index}]", known, instead=instead)
        if link.name in seen:
            yield DefinitionProblem(place, f"{link.name!r} is listed twice.")
        elif link.name in others:
            yield DefinitionProblem(
                place, f"{link.name!r} is also the tool of {others[link.name]}; remove one of the two."
            )
        seen.add(link.name)
    yield from _count_tools(definition, known)


def _server_link(link: agent_pb2.ToolLink, place: str, known: Known, seen: set[str]) -> Iterator[DefinitionProblem]:
    """Yield the problems of a link to a tool server; `seen` has those before, each with a `:`, as no tool's name."""
    if link.name:
        yield DefinitionProblem(place, "stands beside `name`: exactly one of the two is set.")
    if link.server not in known.tool_servers:
        reason = error_pb2.ERROR_REASON_UNKNOWN_TOOL
        near = suggestion(link.server, known.tool_servers)
        yield DefinitionProblem(place, f"There is no tool server {link.server!r}.{near}", reason)
    if f":{link.server}" in seen:
        yield DefinitionProblem(place, f"{link.server!r} is listed twice.")
    seen.add(f":{link.server}")


def is_unlisted(tool: str, known: Known) -> bool:
    """Return whether a tool may be one of a tool server whose tools are not known yet."""
    return any(
        tool.startswith(offer.section.prefix_of(name))
        for name, offer in known.tool_servers.items()
        if not offer.is_listed
    )


def _count_tools(definition: agent_pb2.AgentDefinition, known: Known) -> Iterator[DefinitionProblem]:
    names = {link.name for link in llm_of(definition).tools if link.name}
    for link in llm_of(definition).tools:
        if link.server in known.tool_servers:
            names |= known.tool_servers[link.server].tools.keys()
    if (count := len(names) + len(definition.sub_agents)) > MOST_TOOLS:
        yield DefinitionProblem(
            "llm.tools",
            f"are {count} with the linked agents, and at most {MOST_TOOLS} are possible: link fewer by name, or select "
            "some by `tools` of the tool server.",
        )


def _links(definition: agent_pb2.AgentDefinition, world: _World) -> Iterator[DefinitionProblem]:
    seen: set[str] = set()
    for index, link in enumerate(definition.sub_agents):
        place = f"sub_agents[{index}].agent"
        if not link.agent:
            yield DefinitionProblem(place, "is required.")
        elif link.agent == definition.name:
            yield DefinitionProblem(place, "An agent cannot link to itself.")
        elif link.agent not in world.agents:
            reason = error_pb2.ERROR_REASON_UNKNOWN_AGENT
            yield DefinitionProblem(
                place, f"There is no agent {link.agent!r}.{suggestion(link.agent, world.agents)}", reason
            )
        elif link.agent in seen:
            yield DefinitionProblem(place, f"{link.agent!r} is linked twice.")
        seen.add(link.agent)
