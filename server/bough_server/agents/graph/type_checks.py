"""Validation of a graph's types: what each node gives fits what it reaches; notes about what a run may still refuse."""

import json
from collections.abc import Iterator, Sequence

from bough.v1 import agent_pb2
from bough_server.agents.graph.channels import reducer_of
from bough_server.agents.graph.topology import END, START, Link, Topology, find_links
from bough_server.agents.graph.types import ERROR, GraphTypes
from bough_server.agents.graph.values import parse_inner_path
from bough_server.matching.json_types import ANY, Fit, Verdict, is_any, parse
from bough_server.matching.schema_reading import Schema, types_of

Problem = tuple[str, str]
"""A field's path and the problem with it."""


class TypeChecks:
    """The checks of one graph whose structure is valid."""

    def __init__(self, definition: agent_pb2.AgentDefinition, topology: Topology, types: GraphTypes) -> None:
        self._definition, self._graph = definition, definition.graph
        self._topology, self._types, self._text_of = topology, types, types.describe
        self._write_types = {channel.name: _find_write_type(channel) for channel in self._graph.channels}

    def find_problems(self) -> Iterator[Problem]:
        """Yield every place at which a value certainly cannot fit."""
        for index, node in enumerate(self._graph.nodes):
            place = f"graph.nodes[{index}]"
            yield from self._schema_problems(node, place)
            yield from self._mapping_problems(node.input, node.name, f"{place}.input", has_before=bool(node.before))
            yield from self._write_problems(node, place)
        yield from self._mapping_problems(self._graph.output, END, "graph.output", has_before=False)
        for link in find_links(self._graph):
            if (verdict := self._judge(link)) and verdict.fit is Fit.NO:
                yield link.field, self._describe(link.source, self._output_type(link), link.target, verdict)
        yield from self._merge_problems()
        yield from self._branch_problems()

    def find_notes(self) -> Iterator[Problem]:
        """Yield what is checked at run time only, dead ends, and edges to END beside others."""
        for link in find_links(self._graph):
            verdict = self._judge(link)
            if verdict is not None and verdict.fit is Fit.UNKNOWN:
                given, taken = self._text_of(self._output_type(link)), self._input_text(link.target)
                yield link.field, f"{link.source!r} gives {given}, {link.target!r} takes {taken}: checked in each run."
        ways = {link.source for link in find_links(self._graph)}
        for index, node in enumerate(self._graph.nodes):
            if node.name not in ways:
                yield f"graph.nodes[{index}].name", f"Nothing leads on from {node.name!r}: its output is dropped."
        if not self._topology.is_dag and self._graph.end_join != agent_pb2.GRAPH_JOIN_ALL:
            for name, targets in self._topology.edges.items():
                if END in targets and len(targets) > 1:
                    others = ", ".join(repr(each) for each in targets if each != END)
                    yield (
                        "graph.end_join",
                        f"{name!r} leads to END and to {others}: the graph ends before those run. Set ALL to let them.",
                    )

    def _output_type(self, link: Link) -> str:
        return ERROR if link.kind == "error" else self._types.output_of(link.source)

    def _input_text(self, name: str) -> str:
        kinds = self._types.inputs_of(name)
        node = self._topology.nodes.get(name)
        text = " and ".join(map(self._text_of, kinds)) or "any"
        return f"list of {text}" if node is not None and node.map else text

    def _judge(self, link: Link) -> Verdict | None:
        """Return whether what travels on a link fits; None if something else makes the target's input."""
        node = self._topology.nodes.get(link.target)
        mappings = self._graph.output if node is None else node.input
        if mappings or (node is not None and node.before):
            return None
        verdict = self._types.judge(self._output_type(link), link.target)
        is_alone = len(self._topology.predecessors.get(link.target, ())) == 1
        # Of several, an object may be completed by the others.
        return verdict if is_alone or not isinstance(verdict.value, dict) else None

    def _describe(self, source: str, given: str, target: str, verdict: Verdict) -> str:
        at = f" at {verdict.place}" if verdict.place else ""
        value = json.dumps(verdict.value, ensure_ascii=False)
        example = f" {value} does not fit{at}." if len(value) <= 80 else f" They differ{at}." if at else ""
        return f"{source!r} gives {self._text_of(given)}, {target!r} takes {self._input_text(target)}.{example}"

    def _schema_problems(self, node: agent_pb2.GraphNode, place: str) -> Iterator[Problem]:
        kinds = self._types.inputs_of(node.name)
        if node.input_schema_json and len(kinds) > 1:
            verdict = self._types.compare(node.input_schema_json, kinds[1])
            if verdict.fit is Fit.NO:
                yield (
                    f"{place}.input_schema_json",
                    f"is {self._text_of(node.input_schema_json)}, and the node takes {self._text_of(kinds[1])}.",
                )
        work = self._types.work_output(node)
        if (
            node.output_schema_json
            and not node.after
            and self._types.compare(work, node.output_schema_json).fit is Fit.NO
        ):
            yield (
                f"{place}.output_schema_json",
                f"is {self._text_of(node.output_schema_json)}, and the node gives {self._text_of(work)}.",
            )

    def _mapping_problems(
        self, mappings: Sequence[agent_pb2.FieldMapping], target: str, place: str, *, has_before: bool
    ) -> Iterator[Problem]:
        wrong = False
        for index, mapping in enumerate(mappings):
            try:
                self._types.source_type(mapping)
            except KeyError as error:
                wrong = True
                root = mapping.path.partition(".")[0]
                kind = self._types.output_of(root) if root == START or root in self._topology.nodes else ANY
                yield (
                    f"{place}[{index}].path",
                    f"There is no {error.args[0]!r}: {root!r} gives {self._text_of(kind)}.",
                )
        if not mappings or wrong or has_before:
            return
        kind = self._types.find_mapped_type(target)
        verdict = self._types.judge(kind, target)
        if verdict.fit is Fit.NO:
            yield place, self._describe("input" if target != END else "output", kind, target, verdict)

    def _write_problems(self, node: agent_pb2.GraphNode, place: str) -> Iterator[Problem]:
        output = self._types.output_of(node.name)
        for index, write in enumerate(node.writes):
            try:
                kind = self._types.type_at(output, parse_inner_path(write.path).names)
            except KeyError as error:
                description = f"There is no {error.args[0]!r}: {node.name!r} gives {self._text_of(output)}."
                yield f"{place}.writes[{index}].path", description
                continue
            taken = self._write_types[write.channel]
            if taken and self._types.compare(kind, taken).fit is Fit.NO:
                description = (
                    f"is {self._text_of(kind)}, and a write to {write.channel!r} takes {self._text_of(taken)}."
                )
                yield f"{place}.writes[{index}].path", description

    def _merge_problems(self) -> Iterator[Problem]:
        """Yield merges that certainly fail: of values that are no objects, or with a key in two of them."""
        for name, senders in self._find_certain_senders().items():
            kinds = [(sender, self._types.read(self._types.output_of(sender))) for sender in senders]
            place = self._place(name)
            bad = [sender for sender, kind in kinds if not _may_be_object(kind)]
            if bad:
                others = " and ".join(map(repr, senders))
                description = (
                    f"{name!r} gets values of {others}, and that of {bad[0]!r} is no object: give it an `input`."
                )
                yield place, description
                continue
            owner: dict[str, str] = {}
            for sender, kind in kinds:
                for key in kind.get("required", ()) if isinstance(kind, dict) else ():
                    if key in owner:
                        yield (
                            place,
                            f"{name!r} gets the key {key!r} of both {owner[key]!r} and {sender!r}: give it an `input`.",
                        )
                    owner.setdefault(key, sender)

    def _place(self, name: str) -> str:
        index = next((index for index, node in enumerate(self._graph.nodes) if node.name == name), None)
        return "graph.output" if index is None else f"graph.nodes[{index}].input"

    def _find_certain_senders(self) -> dict[str, list[str]]:
        """Return the nodes that wait for all and merge, with the several senders that deliver in any case."""
        certain = {START}
        pending = [START]
        while pending:
            for target in self._topology.edges.get(pending.pop(), ()):
                if target not in certain and target != END:
                    certain.add(target)
                    pending.append(target)
        found: dict[str, list[str]] = {}
        for source in sorted(certain, key=self._topology.place.__getitem__):
            node = self._topology.nodes.get(source)
            if node is not None and node.error_target:
                continue
            for target in self._topology.edges.get(source, ()):
                found.setdefault(target, []).append(source)
        return {name: senders for name, senders in found.items() if len(senders) > 1 and self._merges(name)}

    def _merges(self, name: str) -> bool:
        node = self._topology.nodes.get(name)
        if node is None:
            return self._topology.is_dag and not self._graph.output
        is_on_cycle = not self._topology.is_dag and self._topology.leads_to(name, name)
        return self._topology.is_all(name) and not node.input and not is_on_cycle

    def _branch_problems(self) -> Iterator[Problem]:
        for index, branch in enumerate(self._graph.branches):
            if not branch.HasField("path"):
                continue
            output = self._types.output_of(branch.source)
            place = f"graph.branches[{index}]"
            try:
                kind = self._types.type_at(output, parse_inner_path(branch.path).names)
            except KeyError as error:
                yield (
                    f"{place}.path",
                    f"There is no {error.args[0]!r}: {branch.source!r} gives {self._text_of(output)}.",
                )
                continue
            schema = self._types.read(kind)
            if isinstance(schema, dict) and schema.get("type") == "array" and "$ref" not in kind:
                kind = json.dumps(schema.get("items", {}))
            for number, case in enumerate(branch.cases):
                constant = json.dumps({"const": json.loads(case.value_json)})
                if self._types.compare(constant, kind).fit is Fit.NO:
                    description = (
                        f"{case.value_json} cannot be: {branch.path or 'the output'} is {self._text_of(kind)}."
                    )
                    yield f"{place}.cases[{number}].value_json", description


def _may_be_object(schema: Schema) -> bool:
    types = types_of(schema) if isinstance(schema, dict) else None
    return types is None or "object" in types


def _find_write_type(channel: agent_pb2.GraphChannel) -> str:
    """Return the type of what is written to a channel; empty for any value."""
    if channel.reducer_function:
        return ""
    schema = parse(channel.schema_json)
    match reducer_of(channel):
        case agent_pb2.CHANNEL_REDUCER_APPEND:
            items = schema.get("items", {}) if isinstance(schema, dict) else {}
            return ANY if "$ref" in channel.schema_json else json.dumps(items)
        case agent_pb2.CHANNEL_REDUCER_EXTEND:
            return '{"type": "array"}' if is_any(channel.schema_json) else channel.schema_json
        case agent_pb2.CHANNEL_REDUCER_SUM:
            return '{"type": "number"}'
        case agent_pb2.CHANNEL_REDUCER_MERGE:
            return '{"type": "object"}'
    return channel.schema_json
