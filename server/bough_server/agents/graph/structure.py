"""Validation of a graph's structure: names, edges, branches, cycles, channels, mappings and what nodes refer to."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from bough.v1 import agent_pb2, policy_pb2
from bough_server.agents.graph.channels import INITIAL, reducer_of
from bough_server.agents.graph.inputs import InputNames
from bough_server.agents.graph.topology import (
    END,
    START,
    Topology,
    find_levels,
    targets_of_branch,
)
from bough_server.agents.graph.values import (
    CHANNELS,
    HISTORY,
    NAME,
    RESERVED,
    STATE,
    json_key,
    parse_inner_path,
    parse_path,
)
from bough_server.documents.yaml import suggestion
from bough_server.log.session_state import json_text
from bough_server.matching.schemas import schema_mistakes, value_schema_problem
from bough_server.matching.work import TooMuchWork, limit_work
from bough_server.templates import template_mistake

Problem = tuple[str, str]
"""A field's path and the problem with it."""

MAX_NODES: Final = 500
MAX_LINKS: Final = 2_000
"""The most edges and targets of branches of one graph."""
MAX_MAPPINGS: Final = 5_000
"""The most mappings of all nodes and of the output together."""
MAX_CASES: Final = 2_000
"""The most cases of all branches together."""
MAX_WRITES: Final = 2_000
"""The most writes of all nodes together."""
MAX_CHANNELS: Final = 64
MAX_CONCURRENCY: Final = 1_000
MAX_SUPERSTEPS: Final = 10_000
MAX_SCHEMA_BYTES: Final = 64 * 1024

_MAX_SUGGESTIONS: Final = 20
"""How many unknown names of a graph get a suggestion: each is compared with all that are known."""
_SCHEMA_STEPS: Final = 10_000_000
"""The most steps of trying the schemas of a graph."""
_NAME_WORDS: Final = "must be a letter, then up to 63 letters, digits, _ or -."


def structure_problems(definition: agent_pb2.AgentDefinition, topology: Topology) -> Iterator[Problem]:
    """Yield every problem of a graph that does not depend on types or on the names of tools, models and functions."""
    graph = definition.graph
    if too_large := list(_size_problems(graph)):
        yield from too_large
        return  # nothing goes through what has no bound
    known = _Known(definition)
    yield from _option_range_problems(graph)
    yield from _node_name_problems(graph)
    yield from _link_problems(graph, known)
    yield from _branch_problems(graph, known)
    yield from _reach_problems(graph, topology)
    yield from _cycle_problems(graph, topology)
    yield from _mode_problems(graph)
    yield from _channel_problems(graph, known)
    for index, node in enumerate(graph.nodes):
        place = f"graph.nodes[{index}]"
        yield from _node_problems(node, place, known)
        if node.HasField("agent") and node.agent not in known.agents:
            near = known.suggest(node.agent, known.agents)
            yield f"{place}.agent", f"{node.agent!r} is not one of its sub_agents.{near}"
        yield from _write_problems(node, place, known)
        yield from _mapping_problems(node.input, f"{place}.input", node.name, known=known, topology=topology)
    yield from _mapping_problems(graph.output, "graph.output", END, known=known, topology=topology)
    yield from _option_problems(graph)
    yield from _agent_link_problems(definition)


class _Known:
    """The names that a graph may refer to, and what is counted while it is validated."""

    def __init__(self, definition: agent_pb2.AgentDefinition) -> None:
        self.nodes = {node.name for node in definition.graph.nodes}
        self.channels = {channel.name for channel in definition.graph.channels}
        self.agents = {link.agent for link in definition.sub_agents}
        self._suggestions_left = _MAX_SUGGESTIONS
        self._steps_left = [_SCHEMA_STEPS]

    def suggest(self, name: str, known: Collection[str]) -> str:
        """Return a suggestion as a sentence; empty after the first few."""
        self._suggestions_left -= 1
        return suggestion(name, known) if self._suggestions_left >= 0 else ""

    def schema_problem(self, schema_json: str) -> str:
        """Return what is wrong with a schema of any value, as a sentence; empty if nothing is, or if there is none."""
        try:
            with limit_work(self._steps_left):
                return schema_problem(schema_json)
        except TooMuchWork:
            return "cannot be used: the schemas of the graph take too long to check."

    def mistakes(self, value: Any, schema_json: str) -> str:
        """Return how a value violates a valid schema; empty if it does not."""
        try:
            with limit_work(self._steps_left):
                return "; ".join(schema_mistakes(value, schema_json, is_bounded=True)[:3])
        except TooMuchWork:
            return "the schemas of the graph take too long to check"


def _size_problems(graph: agent_pb2.GraphAgent) -> Iterator[Problem]:
    links = len(graph.edges) + sum(max(1, len(targets_of_branch(branch))) for branch in graph.branches)
    mappings = len(graph.output) + sum(len(node.input) for node in graph.nodes)
    cases = sum(len(branch.cases) for branch in graph.branches)
    writes = sum(len(node.writes) for node in graph.nodes)
    if len(graph.nodes) > MAX_NODES:
        yield "graph.nodes", f"must be at most {MAX_NODES}; there are {len(graph.nodes)}."
    if links > MAX_LINKS:
        yield "graph.edges", f"and targets of branches must be at most {MAX_LINKS:,} together; there are {links:,}."
    if len(graph.channels) > MAX_CHANNELS:
        yield "graph.channels", f"must be at most {MAX_CHANNELS}; there are {len(graph.channels)}."
    if mappings > MAX_MAPPINGS:
        words = f"must have at most {MAX_MAPPINGS:,} mappings with the output together; there are {mappings:,}."
        yield "graph.nodes", words
    if cases > MAX_CASES:
        yield "graph.branches", f"must have at most {MAX_CASES:,} cases together; there are {cases:,}."
    if writes > MAX_WRITES:
        yield "graph.nodes", f"must have at most {MAX_WRITES:,} writes together; there are {writes:,}."


def _option_range_problems(graph: agent_pb2.GraphAgent) -> Iterator[Problem]:
    if graph.HasField("max_supersteps") and not 1 <= graph.max_supersteps <= MAX_SUPERSTEPS:
        yield "graph.max_supersteps", f"must be between 1 and {MAX_SUPERSTEPS:,}."
    if graph.HasField("max_concurrency") and not 1 <= graph.max_concurrency <= MAX_CONCURRENCY:
        yield "graph.max_concurrency", f"must be between 1 and {MAX_CONCURRENCY:,}."


def _node_name_problems(graph: agent_pb2.GraphAgent) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, node in enumerate(graph.nodes):
        place = f"graph.nodes[{index}].name"
        if not node.name:
            yield place, "is required."
        elif node.name in RESERVED:
            yield place, f"{node.name!r} is reserved; choose another name."
        elif not NAME.fullmatch(node.name):
            yield place, _NAME_WORDS
        elif node.name in seen:
            yield place, f"{node.name!r} is the name of another node; names must be unique in a graph."
        seen.add(node.name)


def _link_problems(graph: agent_pb2.GraphAgent, known: _Known) -> Iterator[Problem]:
    for index, edge in enumerate(graph.edges):
        yield from _source_problems(edge.source, f"graph.edges[{index}].source", known)
        yield from _target_problems(edge.target, f"graph.edges[{index}].target", known)
    for index, node in enumerate(graph.nodes):
        if node.error_target == END:
            yield f"graph.nodes[{index}].error_target", "must be a node: END takes no errors."
        elif node.error_target:
            yield from _target_problems(node.error_target, f"graph.nodes[{index}].error_target", known)


def _source_problems(name: str, place: str, known: _Known) -> Iterator[Problem]:
    if not name:
        yield place, "is required: a node, or START."
    elif name == END:
        yield place, "Nothing leads out of END."
    elif name != START and name not in known.nodes:
        yield place, f"There is no node {name!r}.{known.suggest(name, {*known.nodes, START})}"


def _target_problems(name: str, place: str, known: _Known) -> Iterator[Problem]:
    if not name:
        yield place, "is required: a node, or END."
    elif name == START:
        yield place, "Nothing leads into START."
    elif name != END and name not in known.nodes:
        yield place, f"There is no node {name!r}.{known.suggest(name, {*known.nodes, END})}"


def _branch_problems(graph: agent_pb2.GraphAgent, known: _Known) -> Iterator[Problem]:
    for index, branch in enumerate(graph.branches):
        place = f"graph.branches[{index}]"
        yield from _source_problems(branch.source, f"{place}.source", known)
        if branch.HasField("function"):
            if branch.cases or branch.otherwise:
                yield f"{place}.cases", "is for a `path`; a router returns one of `targets`."
            if not branch.targets:
                yield f"{place}.targets", "is required: the nodes that the router may return."
        else:
            if not branch.HasField("path"):
                yield f"{place}.path", "is required, or `function`: what chooses the target."
            elif problem := _inner_path_problem(branch.path, has_mark=False):
                yield f"{place}.path", problem
            if branch.targets:
                yield f"{place}.targets", "is for a `function`; a path has `cases` and `otherwise`."
            if not branch.cases:
                yield f"{place}.cases", "is required: the targets by value."
        for number, name in enumerate(branch.targets):
            yield from _target_problems(name, f"{place}.targets[{number}]", known)
        if branch.otherwise:
            yield from _target_problems(branch.otherwise, f"{place}.otherwise", known)
        yield from _case_problems(branch.cases, place, known)


def _case_problems(cases: Sequence[agent_pb2.BranchCase], place: str, known: _Known) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, case in enumerate(cases):
        yield from _target_problems(case.target, f"{place}.cases[{number}].target", known)
        value, problem = read_json(case.value_json)
        if problem:
            yield f"{place}.cases[{number}].value_json", problem
        elif json_key(value) in seen:
            yield f"{place}.cases[{number}].value_json", f"{case.value_json} is another case's value."
        else:
            seen.add(json_key(value))


def _reach_problems(graph: agent_pb2.GraphAgent, topology: Topology) -> Iterator[Problem]:
    reached = topology.reached
    for index, node in enumerate(graph.nodes):
        if node.name and node.name not in reached:
            yield f"graph.nodes[{index}].name", f"START does not reach {node.name!r}: add an edge or a branch to it."
    if END not in reached:
        yield "graph.edges", "START does not reach END: add an edge or a branch to it."


def _cycle_problems(graph: agent_pb2.GraphAgent, topology: Topology) -> Iterator[Problem]:
    if topology.is_dag:
        if cycle := find_cycle(topology.successors):
            yield "graph.edges", f"A DAG has no cycles, and this has {' -> '.join(cycle)}."
        return
    if cycle := find_cycle({name: list(targets) for name, targets in topology.edges.items()}):
        yield "graph.edges", f"The cycle {' -> '.join(cycle)} would never end: no branch is on it."
    elif not graph.HasField("max_supersteps") and (cycle := find_cycle(topology.successors)):
        yield "graph.max_supersteps", f"is required, as there is a cycle: {' -> '.join(cycle)}."


def find_cycle(successors: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names on a cycle, the first of them again at its end; empty if there is none."""
    levels = find_levels(list(successors), successors)
    left = {name for name in successors if name not in levels}
    # What remains is on a cycle or behind one: back from any of it leads into one.
    sources: dict[str, str] = {}
    for name in sorted(left):
        for target in successors[name]:
            if target in left:
                sources.setdefault(target, name)
    if not sources:
        return []
    path = [min(sources)]
    while (before := sources[path[-1]]) not in path:
        path.append(before)
    cycle = path[path.index(before) :]
    return [cycle[0], *reversed(cycle)] if cycle else []


def _mode_problems(graph: agent_pb2.GraphAgent) -> Iterator[Problem]:
    if graph.mode != agent_pb2.GRAPH_MODE_DAG:
        return
    if graph.channels:
        yield "graph.channels", "is for PREGEL: in a DAG name the outputs of nodes by their paths."
    if graph.HasField("max_supersteps"):
        yield "graph.max_supersteps", "is for PREGEL: a DAG runs each node once."
    if graph.end_join:
        yield "graph.end_join", "is for PREGEL: in a DAG everything ends before END."
    for index, node in enumerate(graph.nodes):
        if node.join:
            yield f"graph.nodes[{index}].join", "is for PREGEL: every node of a DAG waits for all that can reach it."


def _channel_problems(graph: agent_pb2.GraphAgent, known: _Known) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, channel in enumerate(graph.channels):
        place = f"graph.channels[{index}]"
        if not NAME.fullmatch(channel.name):
            yield f"{place}.name", _NAME_WORDS if channel.name else "is required."
        elif channel.name in seen:
            yield f"{place}.name", f"{channel.name!r} is the name of another channel."
        seen.add(channel.name)
        if channel.reducer and channel.reducer_function:
            yield f"{place}.reducer", "excludes `reducer_function`; remove one of the two."
        if problem := known.schema_problem(channel.schema_json):
            yield f"{place}.schema_json", problem
            continue
        text = channel.initial_json or ("" if channel.reducer_function else INITIAL.get(reducer_of(channel), ""))
        value, problem = read_json(text) if text else (None, "")
        field = f"{place}.initial_json" if channel.initial_json else f"{place}.reducer"
        if not problem and text:
            problem = _initial_problem(channel, value, known)
        if problem:
            yield field, problem


def _initial_problem(channel: agent_pb2.GraphChannel, value: Any, known: _Known) -> str:
    kinds: Mapping[str, tuple[type, ...]] = {"[]": (list,), "0": (int, float), "{}": (dict,)}
    wanted = kinds.get(INITIAL.get(reducer_of(channel), ""))
    if not channel.reducer_function and wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
        return f"must be of the type that the reducer starts with, such as {INITIAL[reducer_of(channel)]}."
    if channel.schema_json and (mistakes := known.mistakes(value, channel.schema_json)):
        what = "does" if channel.initial_json else f"begins with {INITIAL.get(reducer_of(channel), '')}, which does"
        return f"{what} not fit the channel's schema: {mistakes}."
    return ""


def _node_problems(node: agent_pb2.GraphNode, place: str, known: _Known) -> Iterator[Problem]:
    if problem := known.schema_problem(node.input_schema_json):
        yield f"{place}.input_schema_json", problem
    if problem := known.schema_problem(node.output_schema_json):
        yield f"{place}.output_schema_json", problem
    output_schema_json = "" if problem else node.output_schema_json
    match node.WhichOneof("kind"):
        case "model":
            yield from _model_problems(node, f"{place}.model")
            if output_schema_json:
                schema = json.loads(output_schema_json)
                if node.model.tools:
                    yield f"{place}.output_schema_json", "is not for a model with tools: its output is a Message."
                elif not isinstance(schema, dict) or schema.get("type") != "object":
                    yield f"{place}.output_schema_json", 'of a model must be of "type": "object".'
        case "ask":
            yield from _ask_problems(node, f"{place}.ask", output_schema_json, known)
        case "tools" if not node.tools.tools:
            yield f"{place}.tools.tools", "is required: the tools that may be called."
        case "function" if not node.function:
            yield f"{place}.function", "is required: the name of a node function."
        case "tool" if not node.tool.name:
            yield f"{place}.tool.name", "is required."
        case None if node.map:
            yield f"{place}.map", "is for nodes that work: this one gives its input."


def _model_problems(node: agent_pb2.GraphNode, place: str) -> Iterator[Problem]:
    if problem := template_mistake(node.model.instruction, ()):
        yield f"{place}.instruction", problem
    if problem := template_mistake(node.model.prompt, InputNames()):
        yield f"{place}.prompt", problem


def _ask_problems(node: agent_pb2.GraphNode, place: str, schema_json: str, known: _Known) -> Iterator[Problem]:
    if not node.ask.prompt.strip():
        yield f"{place}.prompt", "is required: the question."
    elif problem := template_mistake(node.ask.prompt, InputNames()):
        yield f"{place}.prompt", problem
    if node.ask.HasField("expires") and node.ask.expires.ToNanoseconds() <= 0:
        yield f"{place}.expires", "must be longer than 0 s."
    if not node.ask.default_json:
        return
    value, problem = read_json(node.ask.default_json)
    if not problem and schema_json and (mistakes := known.mistakes(value, schema_json)):
        problem = f"does not fit the output schema: {mistakes}."
    if problem:
        yield f"{place}.default_json", problem
    elif not node.ask.HasField("expires"):
        yield f"{place}.default_json", "is used if the question expires: set `expires` too."


def _agent_link_problems(definition: agent_pb2.AgentDefinition) -> Iterator[Problem]:
    """Yield what links of agents that nodes run say and the nodes decide."""
    used = {node.agent for node in definition.graph.nodes}
    for index, link in enumerate(definition.sub_agents):
        if link.agent not in used:
            continue
        if link.HasField("input"):
            yield (
                f"sub_agents[{index}].input",
                "is not for an agent of a node: the node's `input` says what it gets.",
            )
        if link.link_mode:
            yield f"sub_agents[{index}].link_mode", "is not for an agent of a node, which runs it."
        if link.on_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE:
            description = "CONTINUE is not for an agent of a node: set the node's error_target."
            yield f"sub_agents[{index}].on_failure", description


def _write_problems(node: agent_pb2.GraphNode, place: str, known: _Known) -> Iterator[Problem]:
    for index, write in enumerate(node.writes):
        if write.channel not in known.channels:
            near = known.suggest(write.channel, known.channels)
            yield f"{place}.writes[{index}].channel", f"There is no channel {write.channel!r}.{near}"
        if problem := _inner_path_problem(write.path, has_mark=True):
            yield f"{place}.writes[{index}].path", problem


def _mapping_problems(
    mappings: Sequence[agent_pb2.FieldMapping],
    place: str,
    target: str,
    *,
    known: _Known,
    topology: Topology,
) -> Iterator[Problem]:
    """Yield every problem of the mappings that make the input of a node, or END's value."""
    seen: set[str] = set()
    for index, mapping in enumerate(mappings):
        inner = f"{place}[{index}]"
        if not mapping.field and len(mappings) > 1:
            yield f"{inner}.field", "is required: a mapping without it is the whole value, and the only one."
        elif mapping.field in seen:
            yield f"{inner}.field", f"{mapping.field!r} is mapped twice."
        seen.add(mapping.field)
        if mapping.HasField("value_json"):
            if problem := read_json(mapping.value_json)[1]:
                yield f"{inner}.value_json", problem
        elif not mapping.path:
            yield f"{inner}.path", "is required, or a `value`."
        elif problem := _path_problem(mapping.path, target, known, topology):
            yield f"{inner}.path", problem


def _path_problem(text: str, target: str, known: _Known, topology: Topology) -> str:
    try:
        path = parse_path(text)
    except ValueError as error:
        return f"{error}."
    if path.root == HISTORY or path.root == START or path.root.startswith(f"{STATE}."):
        return ""
    if path.root.startswith(f"{CHANNELS}."):
        name = path.root.partition(".")[2]
        is_known = name in known.channels
        return "" if is_known else f"There is no channel {name!r}.{known.suggest(name, known.channels)}"
    if path.root not in known.nodes:
        return f"There is no node {path.root!r}.{known.suggest(path.root, {*known.nodes, START, HISTORY})}"
    # A node's own last output is there only on a cycle, where it leads to itself.
    is_before = topology.leads_to(path.root, target)
    return "" if is_before else f"{path.root!r} does not lead to {target!r}, so it may never have an output."


def _inner_path_problem(text: str, *, has_mark: bool) -> str:
    try:
        path = parse_inner_path(text)
    except ValueError as error:
        return f"{error}."
    return (
        "takes no `?`: a value that is missing has the target `otherwise`." if path.is_optional and not has_mark else ""
    )


def _option_problems(graph: agent_pb2.GraphAgent) -> Iterator[Problem]:
    """Yield tools that two nodes link with different options: calls of the graph are counted and bounded together."""
    seen: dict[str, tuple[agent_pb2.ToolLink, str]] = {}
    for link, place in tool_places(graph):
        first, where = seen.setdefault(link.name, (link, place))
        if first != link:
            yield place, f"{link.name!r} has other options at {where}; a graph has one set of options for each tool."


def tool_places(graph: agent_pb2.GraphAgent) -> Iterator[tuple[agent_pb2.ToolLink, str]]:
    """Yield each link to a tool of a graph's nodes, and its field."""
    for index, node in enumerate(graph.nodes):
        place = f"graph.nodes[{index}]"
        if node.HasField("tool"):
            yield node.tool, f"{place}.tool"
        for number, link in enumerate(node.model.tools):
            yield link, f"{place}.model.tools[{number}]"
        for number, link in enumerate(node.tools.tools):
            yield link, f"{place}.tools.tools[{number}]"


def read_json(text: str) -> tuple[Any, str]:
    """Return a JSON text's value, and what is wrong with it; empty if nothing is."""
    if not text:
        return None, "is required."
    try:
        value = json.loads(text, parse_constant=_refuse)
        json_text(value).encode()
    except (ValueError, RecursionError) as error:
        return None, f"must be JSON: {error}."
    return value, ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def schema_problem(schema_json: str) -> str:
    """Return what is wrong with a schema of any value, as a sentence; empty if nothing is, or if there is none."""
    if not schema_json:
        return ""
    if len(schema_json) > MAX_SCHEMA_BYTES:
        return f"must be at most {MAX_SCHEMA_BYTES // 1024} KiB."
    schema, problem = read_json(schema_json)
    if problem or isinstance(schema, bool):
        return problem
    if not isinstance(schema, dict):
        return "must be a JSON Schema: an object, true or false."
    return value_schema_problem(schema, is_bounded=True)
