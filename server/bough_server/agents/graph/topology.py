"""Topology of a graph: its nodes in merge order, what leads where, and what can still reach a node."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from bough.v1 import agent_pb2

START: Final = "START"
END: Final = "END"


def targets_of_branch(branch: agent_pb2.GraphBranch) -> list[str]:
    """Return the targets that a branch may choose, each once."""
    named = [*(case.target for case in branch.cases), branch.otherwise, *branch.targets]
    return [name for name in dict.fromkeys(named) if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way on which a value may travel, and the field of the definition that declares it."""

    source: str
    target: str
    field: str
    kind: str
    """`edge`, `branch` or `error`."""


def find_links(graph: agent_pb2.GraphAgent) -> Iterator[Link]:
    """Yield every edge, every target of a branch and every error target of a graph."""
    for index, edge in enumerate(graph.edges):
        yield Link(source=edge.source, target=edge.target, field=f"graph.edges[{index}]", kind="edge")
    for index, branch in enumerate(graph.branches):
        for target in targets_of_branch(branch):
            yield Link(source=branch.source, target=target, field=f"graph.branches[{index}]", kind="branch")
    for index, node in enumerate(graph.nodes):
        if node.error_target:
            place = f"graph.nodes[{index}].error_target"
            yield Link(source=node.name, target=node.error_target, field=place, kind="error")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The shape of a valid graph."""

    is_dag: bool
    nodes: Mapping[str, agent_pb2.GraphNode]
    """The nodes by name, in merge order."""
    edges: Mapping[str, Sequence[str]]
    branches: Mapping[str, Sequence[agent_pb2.GraphBranch]]
    successors: Mapping[str, Sequence[str]]
    predecessors: Mapping[str, Sequence[str]]
    place: Mapping[str, int]
    """The place of each node in merge order; START comes before, END after all."""
    _avoiding: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict, repr=False)

    def is_all(self, name: str) -> bool:
        """Return whether a node waits for every predecessor that can still send a value."""
        return self.is_dag or (name in self.nodes and self.nodes[name].join == agent_pb2.GRAPH_JOIN_ALL)

    def can_reach(self, sources: Iterable[str], target: str, *, without: str) -> bool:
        """Return whether one of some nodes is a node or leads to it without passing another."""
        return not self._find_origins(target, without).isdisjoint(sources)

    def _find_origins(self, target: str, without: str) -> frozenset[str]:
        """Return the nodes from which a value may reach a node without passing another, itself included."""
        found = self._avoiding.get((target, without))
        if found is None:
            seen = {target}
            pending = [target]
            while pending:
                for name in self.predecessors.get(pending.pop(), ()):
                    if name not in seen and name != without:
                        seen.add(name)
                        pending.append(name)
            found = self._avoiding[target, without] = frozenset(seen)
        return found

    def leads_to(self, source: str, target: str) -> bool:
        """Return whether a value may travel from START or a node to a node or END; to itself in a cycle only."""
        return bool(self._ancestors.get(target, 0) & 1 << self.place[source] + 1)

    @cached_property
    def reached(self) -> frozenset[str]:
        """The nodes, and END, that a value may reach from START."""
        return frozenset(_find_order([START], self.successors)) - {START}

    @cached_property
    def _ancestors(self) -> Mapping[str, int]:
        """The nodes from which a value may reach each: the bits of their places, plus one."""
        order = _find_order([START, *self.nodes], self.successors)
        found = dict.fromkeys(order, 0)
        is_changed = True
        while is_changed:  # once more for each cycle within a cycle
            is_changed = False
            for name in order:
                before = 0
                for each in self.predecessors.get(name, ()):
                    before |= found[each] | 1 << self.place[each] + 1
                if before != found[name]:
                    found[name], is_changed = before, True
        return found


def _find_order(origins: Sequence[str], successors: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what some nodes reach, and they, each before its successors except where a cycle closes."""
    seen: set[str] = set()
    found: list[str] = []
    for origin in origins:
        path = [] if origin in seen else [(origin, iter(successors.get(origin, ())))]
        seen.add(origin)
        while path:
            name, after = path[-1]
            following = next((each for each in after if each not in seen), None)
            if following is None:
                found.append(name)
                path.pop()
            else:
                seen.add(following)
                path.append((following, iter(successors.get(following, ()))))
    return found[::-1]


def build_topology(graph: agent_pb2.GraphAgent) -> Topology:
    """Return the topology of a graph; of an invalid one as far as its names are known."""
    is_dag = graph.mode == agent_pb2.GRAPH_MODE_DAG
    nodes = {node.name: node for node in graph.nodes}
    known = {START, END, *nodes}
    edges: dict[str, dict[str, None]] = {}
    successors: dict[str, dict[str, None]] = {}
    predecessors: dict[str, dict[str, None]] = {}
    for link in find_links(graph):
        if link.source in known and link.target in known and link.target != START and link.source != END:
            successors.setdefault(link.source, {})[link.target] = None
            predecessors.setdefault(link.target, {})[link.source] = None
            if link.kind == "edge":
                edges.setdefault(link.source, {})[link.target] = None
    branches: dict[str, list[agent_pb2.GraphBranch]] = {}
    for branch in graph.branches:
        branches.setdefault(branch.source, []).append(branch)
    after = {name: tuple(targets) for name, targets in successors.items()}
    levels = find_levels(nodes, after) if is_dag else {}
    ordered = sorted(nodes, key=lambda name: (levels.get(name, 0), name))
    place = {START: -1, **{name: index for index, name in enumerate(ordered)}, END: len(ordered)}
    return Topology(
        is_dag=is_dag,
        nodes={name: nodes[name] for name in ordered},
        edges={name: tuple(targets) for name, targets in edges.items()},
        branches=branches,
        successors=after,
        predecessors={name: tuple(sorted(sources, key=place.__getitem__)) for name, sources in predecessors.items()},
        place=place,
    )


def find_levels(nodes: Iterable[str], successors: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the longest path from START to each node that is in no cycle and behind none."""
    names = [START, *(name for name in nodes if name != START)]
    waits = dict.fromkeys(names, 0)
    for name in names:
        for target in successors.get(name, ()):
            if target in waits:
                waits[target] += 1
    levels = dict.fromkeys(names, 0)
    ready = deque(name for name in names if not waits[name])
    while ready:
        name = ready.popleft()
        for target in successors.get(name, ()):
            if target in waits:
                levels[target] = max(levels[target], levels[name] + 1)
                waits[target] -= 1
                if not waits[target]:
                    ready.append(target)
    return {name: level for name, level in levels.items() if not waits[name]}
