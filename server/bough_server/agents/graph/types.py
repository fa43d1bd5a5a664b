"""Types of a graph's nodes: what each takes and gives, and whether what reaches a node is known to fit it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from bough.v1 import agent_pb2
from bough_server.agents.graph.topology import END, START, Topology
from bough_server.agents.graph.values import CHANNELS, HISTORY, STATE, parse_path
from bough_server.functions import NodeFunction
from bough_server.matching.json_types import (
    ANY,
    MESSAGE,
    Fit,
    Verdict,
    assignable,
    describe,
    is_any,
    list_of,
    parse,
    type_at,
)
from bough_server.matching.schema_reading import Schema
from bough_server.matching.work import TooMuchWork, limit_work

_MOST_STEPS: Final = 20_000_000
"""The most steps of reading and comparing the types of one graph, about 1 s; what takes more is unknown."""
_LARGEST_MAPPED: Final = 16 * 1024
"""The most characters of a type that mappings make: each holds those of its sources, which can double in each node."""

_LIST: Final = '{"type": "array"}'
STRING: Final = '{"type": "string"}'
MESSAGES: Final = list_of(MESSAGE)

ERROR: Final = json.dumps(
    {
        "type": "object",
        "properties": {
            "node": {"type": "string"},
            "reason": {"type": "string"},
            "message": {"type": "string"},
            "retryable": {"type": "boolean"},
            "details": {},
        },
        "required": ["node", "reason", "message", "retryable", "details"],
        "additionalProperties": False,
    }
)
"""The type of a failure as its handler gets it."""

_ANSWERS_IN_TEXT: Final = ("llm", "supervisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the names in a graph stand for; each returns None for a name that is unknown."""

    agent: Callable[[str], agent_pb2.AgentDefinition | None]
    tool_schema: Callable[[str], str | None]
    """Returns the JSON Schema of a tool's arguments."""
    function: Callable[[str], NodeFunction | None]


class GraphTypes:
    """The types of one graph, as far as they can be read in a bounded number of steps."""

    def __init__(
        self, definition: agent_pb2.AgentDefinition, topology: Topology, names: Names, *, trusts_agents: bool = True
    ) -> None:
        """With `trusts_agents` an agent answers as it declares; in a run another may answer, after a transfer."""
        self._definition, self._topology, self._names = definition, topology, names
        self._trusts_agents = trusts_agents
        self._outputs: dict[str, str] = {}
        self._inputs: dict[str, Sequence[str]] = {}
        self._taken: dict[str, Sequence[str]] = {}
        self._mapped: dict[str, str] = {}
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._steps_left = [_MOST_STEPS]

    @cached_property
    def channels(self) -> dict[str, str]:
        """The types of the channels, by name."""
        return {channel.name: channel.schema_json or ANY for channel in self._definition.graph.channels}

    @property
    def start(self) -> str:
        """The type of START."""
        return self._definition.input_schema_json or STRING

    def inputs_of(self, name: str) -> Sequence[str]:
        """Return all types that a node's input has to fit: of each item, if it runs once for each. Empty for any."""
        found = self._inputs.get(name)
        if found is None:
            if name == END:
                own = [self._definition.output_schema_json]
            else:
                node = self._topology.nodes[name]
                own = [node.input_schema_json, self._kind_input(node)]
            found = self._inputs[name] = [each for each in dict.fromkeys(own) if not is_any(each)]
        return found

    def output_of(self, name: str) -> str:
        """Return the type of a node's output, or of START."""
        found = self._outputs.get(name)
        if found is None:
            found = self._outputs[name] = self._output(name)
        return found

    def work_output(self, node: agent_pb2.GraphNode) -> str:
        """Return the type of what the work of a node gives: for each item, if it runs once for each."""
        match node.WhichOneof("kind"):
            case "agent":
                return self._agent_output(self._names.agent(node.agent)) if self._trusts_agents else ANY
            case "function":
                function = self._names.function(node.function)
                return function.output_schema_json if function is not None else ANY
            case "model":
                return MESSAGE if node.model.tools else node.output_schema_json or STRING
            case "tools":
                return MESSAGES
            case "ask":
                return node.output_schema_json or ANY
        return ANY

    def find_mapped_type(self, name: str) -> str:
        """Return the type of what the mappings of a node, or of the output, make. Raises as `source_type` does."""
        found = self._mapped.get(name)
        if found is None:
            node = self._topology.nodes.get(name)
            mappings = self._definition.graph.output if node is None else node.input
            found = self._mapped[name] = self._make_mapped_type(mappings)
        return found

    def _make_mapped_type(self, mappings: Sequence[agent_pb2.FieldMapping]) -> str:
        if len(mappings) == 1 and not mappings[0].field:
            kind, is_certain = self.source_type(mappings[0])
            return kind if is_certain else _or_null(kind)
        properties: dict[str, Schema] = {}
        required, size = [], 0
        for mapping in mappings:
            kind, is_certain = self.source_type(mapping)
            size += len(kind)
            # References lead from the root, which such a type has no longer.
            is_read = "$ref" not in kind and size <= _LARGEST_MAPPED and self._has_steps(len(kind))
            properties[mapping.field] = parse(kind) if is_read else {}
            if is_certain:
                required.append(mapping.field)
        return json.dumps(
            {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        )

    def source_type(self, mapping: agent_pb2.FieldMapping) -> tuple[str, bool]:
        """Return the type of a mapping's source, and whether its field is always set.

        Raises KeyError with a name that no value has, and ValueError for a path that is none.
        """
        if not mapping.path:
            return json.dumps({"const": json.loads(mapping.value_json)}), True
        path = parse_path(mapping.path)
        if path.root == HISTORY:
            return MESSAGES, True
        if path.root.startswith(f"{STATE}."):
            return ANY, not path.is_optional
        if path.root.startswith(f"{CHANNELS}."):
            channel = self.channels.get(path.root.partition(".")[2], ANY)
            return self.type_at(channel, path.names), not path.is_optional
        return self.type_at(self.output_of(path.root), path.names), not path.is_optional

    def type_at(self, schema_json: str, names: Sequence[str]) -> str:
        """Return the type of what is at a path in values of a type. Raises KeyError as `json_types.type_at` does."""
        if not names:
            return schema_json
        return type_at(schema_json, names)[0] if self._has_steps(len(schema_json)) else ANY

    def compare(self, source: str, target: str) -> Verdict:
        """Return whether every value of a type fits another."""
        found = self._verdicts.get((source, target))
        if found is None:
            try:
                with limit_work(self._steps_left):
                    found = assignable(source, target)
            except TooMuchWork:
                found = Verdict(Fit.UNKNOWN)
            self._verdicts[source, target] = found
        return found

    def describe(self, schema_json: str) -> str:
        """Return a type in a few words."""
        try:
            with limit_work(self._steps_left):
                return describe(schema_json)
        except TooMuchWork:
            return "a large type"

    def read(self, schema_json: str) -> Schema:
        """Return a type as a schema."""
        return parse(schema_json) if self._has_steps(len(schema_json)) else {}

    def _has_steps(self, count: int) -> bool:
        """Count the steps of reading so many characters; return False if there are not so many left."""
        self._steps_left[0] -= 3 * count
        return self._steps_left[0] >= 0

    def judge(self, source: str, name: str) -> Verdict:
        """Return whether values of a type fit what a node, or END, takes."""
        verdicts = [self.compare(source, kind) for kind in self._find_whole_inputs(name)]
        for fit in (Fit.NO, Fit.UNKNOWN):
            if found := next((verdict for verdict in verdicts if verdict.fit is fit), None):
                return found
        return Verdict(Fit.YES)

    def _find_whole_inputs(self, name: str) -> Sequence[str]:
        """Return all types that a node's whole input has to fit."""
        found = self._taken.get(name)
        if found is None:
            node, found = self._topology.nodes.get(name), self.inputs_of(name)
            if node is not None and node.map:
                found = [self._list_of(kind) for kind in found] or [_LIST]
            self._taken[name] = found
        return found

    def _list_of(self, schema_json: str) -> str:
        return list_of(schema_json) if self._has_steps(len(schema_json)) else _LIST

    def is_proved(self, name: str, senders: Sequence[str]) -> bool:
        """Return whether a node's input is known to fit it, by what its mappings or these senders give."""
        node = self._topology.nodes.get(name)
        if node is not None and node.before:
            return not self.inputs_of(name) and not node.map
        mappings = self._definition.graph.output if node is None else node.input
        if mappings:
            return self.judge(self._find_made_type(name), name).fit is Fit.YES
        if len(senders) != 1 or not self._is_plain(senders[0], name):
            return not self.inputs_of(name) and (node is None or not node.map)
        return self.judge(self.output_of(senders[0]), name).fit is Fit.YES

    def needs_output_check(self, node: agent_pb2.GraphNode) -> bool:
        """Return whether a node's output may break its declared type."""
        if not node.output_schema_json:
            return False
        if node.after:
            return True
        return self.compare(self.work_output(node), node.output_schema_json).fit is not Fit.YES

    def _kind_input(self, node: agent_pb2.GraphNode) -> str:
        match node.WhichOneof("kind"):
            case "agent":
                agent = self._names.agent(node.agent)
                if agent is not None and agent.HasField("graph"):
                    return agent.input_schema_json or STRING
                return agent.input_schema_json if agent is not None else ANY
            case "tool":
                return self._names.tool_schema(node.tool.name) or ANY
            case "function":
                function = self._names.function(node.function)
                return function.input_schema_json if function is not None else ANY
            case "tools":
                return MESSAGE
        return ANY

    @staticmethod
    def _agent_output(agent: agent_pb2.AgentDefinition | None) -> str:
        if agent is None:
            return ANY
        if agent.output_schema_json:
            return agent.output_schema_json
        return STRING if agent.WhichOneof("kind") in _ANSWERS_IN_TEXT else ANY

    def _output(self, name: str) -> str:
        seen: set[str] = set()
        while name != START:
            node = self._topology.nodes.get(name)
            if node is None or name in seen:
                return ANY
            seen.add(name)
            if node.WhichOneof("kind") is not None or node.after or node.output_schema_json or node.map:
                return self._own_output(node)
            if node.input and not node.before:
                return self._find_made_type(name)
            before = self._topology.predecessors.get(name, ())
            if len(before) != 1 or node.before or not self._is_plain(before[0], name):
                return ANY
            name = before[0]
        return self.start

    def _find_made_type(self, name: str) -> str:
        """Return the type of what a node's mappings make: any if they are wrong, or are by types that have changed."""
        try:
            return self.find_mapped_type(name)
        except (KeyError, ValueError, RecursionError):
            return ANY

    def _is_plain(self, source: str, target: str) -> bool:
        """Return whether all that a node sends to another is its output."""
        node = self._topology.nodes.get(source)
        return node is None or node.error_target != target

    def _own_output(self, node: agent_pb2.GraphNode) -> str:
        own = node.output_schema_json or (ANY if node.after else self.work_output(node)) or ANY
        return self._list_of(own) if node.map and not node.after else own


def _or_null(schema_json: str) -> str:
    """Return a type with null added; any for one with references, which lead from its root."""
    if is_any(schema_json) or "$ref" in schema_json or len(schema_json) > _LARGEST_MAPPED:
        return ANY
    return json.dumps({"anyOf": [json.loads(schema_json), {"type": "null"}]})
