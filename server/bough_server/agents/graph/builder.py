"""Graphs in Python: the same definition as in YAML, with types from hints and the lines that declare each part."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias, overload

from bough.v1 import agent_pb2, policy_pb2
from bough_server.agents.definition import Source
from bough_server.agents.graph.function import node as make_node
from bough_server.agents.graph.function import schema_of
from bough_server.functions import Function, Handler, NodeFunction, Reducer, Router

Mappings: TypeAlias = str | Mapping[str, object] | Sequence[agent_pb2.FieldMapping]
"""An input: a path, paths and constants by field, or mappings. A constant is `Constant(value)`."""


class Constant:
    """A constant in an input, in place of a path."""

    def __init__(self, value: object) -> None:
        self.value = value


class Graph:
    """A graph agent that a module declares. Its methods return the name of the node that they add.

    Types are Python hints. Names of what is defined elsewhere are texts; handlers, routers, reducers and node functions
    may be given themselves. Everything is checked when the module is loaded, as a definition in YAML is.
    """

    def __init__(
        self,
        name: str,
        *,
        description: str,
        input: Any = None,
        output: Any = None,
        mode: Literal["PREGEL", "DAG"] = "PREGEL",
        max_supersteps: int | None = None,
        max_concurrency: int | None = None,
        on_failure: Literal["WAIT_ALL", "FAIL_FAST"] = "WAIT_ALL",
        end_join: Literal["ANY", "ALL"] | None = None,
        result: Mappings | None = None,
        limits: policy_pb2.Limits | None = None,
    ) -> None:
        """`input` and `output` are the types of START and END; `result` says how END's value is made."""
        self.definition = agent_pb2.AgentDefinition(name=name, description=description, limits=limits)
        self.definition.input_schema_json = schema_of(input, name) if input is not None else ""
        self.definition.output_schema_json = schema_of(output, name) if output is not None else ""
        graph = self._graph = self.definition.graph
        graph.SetInParent()
        graph.mode = agent_pb2.GraphMode.Value(f"GRAPH_MODE_{mode}")
        graph.on_failure = agent_pb2.ParallelFailurePolicy.Value(f"PARALLEL_FAILURE_POLICY_{on_failure}")
        if end_join is not None:
            graph.end_join = agent_pb2.GraphJoin.Value(f"GRAPH_JOIN_{end_join}")
        if max_supersteps is not None:
            graph.max_supersteps = max_supersteps
        if max_concurrency is not None:
            graph.max_concurrency = max_concurrency
        graph.output.extend(_to_mappings(result))
        self.functions: dict[str, Function] = {}
        """The functions that were given themselves, by name."""
        self._path = sys._getframe(1).f_code.co_filename
        self._lines = {"": sys._getframe(1).f_lineno}

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.definition.name

    @property
    def source(self) -> Source:
        """The definition, with the lines of its parts."""
        return Source(definition=self.definition, path=self._path, lines=dict(self._lines))

    # Nodes

    def agent(self, name: str, agent: str | agent_pb2.AgentLink = "", /, **options: Any) -> str:
        """Add a node that runs an agent, default: the one of the node's name. See `node` for the options.

        Nodes of one agent share its link. Raises TypeError for another link than that of a node before.
        """
        link = agent if isinstance(agent, agent_pb2.AgentLink) else agent_pb2.AgentLink(agent=agent or name)
        known = next((each for each in self.definition.sub_agents if each.agent == link.agent), None)
        if known is None:
            self.definition.sub_agents.append(link)
        elif isinstance(agent, agent_pb2.AgentLink) and known != link:
            first = next((each.name for each in self._graph.nodes if each.agent == link.agent), "sub_agents")
            raise TypeError(
                f"The nodes {first!r} and {name!r} link the agent {link.agent!r} with different options. A graph has "
                "one link to an agent: give it to the first of them."
            )
        return self._add(agent_pb2.GraphNode(name=name, agent=link.agent), options)

    def tool(self, name: str, tool: str | agent_pb2.ToolLink = "", /, **options: Any) -> str:
        """Add a node that calls a tool, default: the one of the node's name. See `node` for the options."""
        return self._add(agent_pb2.GraphNode(name=name, tool=_to_link(tool or name)), options)

    @overload
    def function(self, function: Callable[..., Any], /, **options: Any) -> NodeFunction: ...

    @overload
    def function(self, name: str = "", /, **options: Any) -> Callable[[Callable[..., Any]], NodeFunction]: ...

    def function(
        self, function: Callable[..., Any] | str = "", /, **options: Any
    ) -> NodeFunction | Callable[[Callable[..., Any]], NodeFunction]:
        """Add a node that calls a function: `graph.function(code)`, or as a decorator, with the node's name or without.

        `name`, `version` and `tools` are those of `@node`, the name by default the graph's, `_` and the node's; see
        `node` for the other options.
        """
        line = sys._getframe(1).f_lineno
        own_name, version, tools = options.pop("name", ""), options.pop("version", "1"), options.pop("tools", ())
        given = function if isinstance(function, str) else ""

        def add(code: Callable[..., Any]) -> NodeFunction:
            name = given or (code.name if isinstance(code, NodeFunction) else code.__name__)
            made = code if isinstance(code, NodeFunction) else None
            if made is None:
                # Graphs of one project may have nodes of the same name.
                made = make_node(name=own_name or f"{self.name}_{name}", version=version, tools=tools)(code)
            self._keep(made)
            self._add(agent_pb2.GraphNode(name=name, function=made.name), options, line=line)
            return made

        return add if isinstance(function, str) else add(function)

    def model(
        self,
        name: str,
        *,
        model: str = "",
        instruction: str = "",
        prompt: str = "",
        tools: Iterable[str | agent_pb2.ToolLink] = (),
        **options: Any,
    ) -> str:
        """Add a node that calls a model once. See `node` for the options."""
        links = [_to_link(each) for each in tools]
        kind = agent_pb2.ModelNode(model=model, instruction=instruction, prompt=prompt, tools=links)
        return self._add(agent_pb2.GraphNode(name=name, model=kind), options)

    def tools(self, name: str, tools: Iterable[str | agent_pb2.ToolLink], /, **options: Any) -> str:
        """Add a node that runs the tool calls of a message. See `node` for the options."""
        kind = agent_pb2.ToolsNode(tools=[_to_link(each) for each in tools])
        return self._add(agent_pb2.GraphNode(name=name, tools=kind), options)

    def ask(
        self, name: str, prompt: str, /, *, expires: float | None = None, default: object = None, **options: Any
    ) -> str:
        """Add a node that asks the user; `expires` is in seconds. See `node` for the options."""
        kind = agent_pb2.AskNode(prompt=prompt)
        if expires is not None:
            kind.expires.FromNanoseconds(int(expires * 1e9))
        if default is not None:
            kind.default_json = json.dumps(default)
        return self._add(agent_pb2.GraphNode(name=name, ask=kind), options)

    def node(self, name: str, **options: Any) -> str:
        """Add a node that gives its input. The options of all nodes are:

        `input` (a path, or paths and constants by field), `before` and `after` (handlers), `writes` (paths into the
        output by channel), `join` ("ALL"), `map`, `error_target`, `input_type` and `output_type` (hints).

        Raises TypeError for another option.
        """
        return self._add(agent_pb2.GraphNode(name=name), options)

    def _add(self, node: agent_pb2.GraphNode, options: dict[str, Any], *, line: int = 0) -> str:
        known = ("input", "before", "after", "writes", "join", "map", "error_target", "input_type", "output_type")
        if wrong := [name for name in options if name not in known]:
            raise TypeError(f"A node has no option {wrong[0]!r}; there is {', '.join(known)}.")
        node.input.extend(_to_mappings(options.get("input")))
        node.before, node.after = self._name_of(options.get("before")), self._name_of(options.get("after"))
        for channel, path in (options.get("writes") or {}).items():
            node.writes.add(channel=channel, path=path)
        if join := options.get("join"):
            node.join = agent_pb2.GraphJoin.Value(f"GRAPH_JOIN_{join}")
        node.map, node.error_target = bool(options.get("map")), options.get("error_target") or ""
        for field, option in (("input_schema_json", "input_type"), ("output_schema_json", "output_type")):
            if options.get(option) is not None:
                setattr(node, field, schema_of(options[option], node.name))
        self._note(f"graph.nodes[{len(self._graph.nodes)}]", line or sys._getframe(2).f_lineno)
        self._graph.nodes.append(node)
        return node.name

    # What leads from node to node

    def channel(
        self, name: str, type: Any = None, *, reducer: str | Reducer | None = None, initial: object = None
    ) -> str:
        """Add a channel; `reducer` is REPLACE (default), APPEND, EXTEND, SUM, MERGE, or a `@reducer`."""
        channel = agent_pb2.GraphChannel(name=name)
        channel.schema_json = schema_of(type, name) if type is not None else ""
        if isinstance(reducer, Reducer):
            channel.reducer_function = self._name_of(reducer)
        elif reducer is not None:
            channel.reducer = agent_pb2.ChannelReducer.Value(f"CHANNEL_REDUCER_{reducer}")
        if initial is not None:
            channel.initial_json = json.dumps(initial)
        self._note(f"graph.channels[{len(self._graph.channels)}]", sys._getframe(1).f_lineno)
        self._graph.channels.append(channel)
        return name

    def edge(self, source: str | NodeFunction, target: str | NodeFunction, /) -> None:
        """Add an edge."""
        self._add_edges([source, target], sys._getframe(1).f_lineno)

    def chain(self, *names: str | NodeFunction) -> None:
        """Add the edges from each name to the next."""
        self._add_edges(names, sys._getframe(1).f_lineno)

    def _add_edges(self, names: Sequence[str | NodeFunction], line: int) -> None:
        for source, target in pairwise(names):
            self._note(f"graph.edges[{len(self._graph.edges)}]", line)
            self._graph.edges.add(source=self._node_of(source), target=self._node_of(target))

    def branch(
        self,
        source: str | NodeFunction,
        by: str | Router,
        /,
        *,
        cases: Mapping[Any, str] | None = None,
        otherwise: str = "",
        targets: Iterable[str] = (),
    ) -> None:
        """Add a branch by a path into the source's output, with cases, or by a `@router`, with targets."""
        branch = agent_pb2.GraphBranch(source=self._node_of(source), otherwise=otherwise, targets=targets)
        if isinstance(by, Router):
            branch.function = self._name_of(by)
        else:
            branch.path = by
        for value, target in (cases or {}).items():
            branch.cases.add(value_json=json.dumps(value), target=target)
        self._note(f"graph.branches[{len(self._graph.branches)}]", sys._getframe(1).f_lineno)
        self._graph.branches.append(branch)

    def _node_of(self, name: str | NodeFunction) -> str:
        """Return the name of a node; of a function that of its first node."""
        if isinstance(name, str):
            return name
        return next((each.name for each in self._graph.nodes if each.function == name.name), name.name)

    def _name_of(self, function: str | Handler | Router | Reducer | None) -> str:
        if function is None or isinstance(function, str):
            return function or ""
        self._keep(function)
        return function.name

    def _keep(self, function: Function) -> None:
        self.functions[function.name] = function

    def _note(self, place: str, line: int) -> None:
        self._lines[place] = line


def _to_link(tool: str | agent_pb2.ToolLink) -> agent_pb2.ToolLink:
    return agent_pb2.ToolLink(name=tool) if isinstance(tool, str) else tool


def _to_mappings(given: Mappings | None) -> list[agent_pb2.FieldMapping]:
    if given is None:
        return []
    if isinstance(given, str):
        return [agent_pb2.FieldMapping(path=given)]
    if not isinstance(given, Mapping):
        return list(given)
    mappings = []
    for field, source in given.items():
        if isinstance(source, Constant):
            mappings.append(agent_pb2.FieldMapping(field=field, value_json=json.dumps(source.value)))
        elif isinstance(source, str):
            mappings.append(agent_pb2.FieldMapping(field=field, path=source))
        else:
            raise TypeError(f"The input field {field!r} must be a path, or Constant(value).")
    return mappings
