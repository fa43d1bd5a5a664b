"""Validation of the graph of a definition: its structure, then its types, with every problem at once."""

from collections.abc import Iterator

from bough.v1 import agent_pb2
from bough_server.agents.graph.structure import structure_problems
from bough_server.agents.graph.topology import build_topology
from bough_server.agents.graph.type_checks import Problem, TypeChecks
from bough_server.agents.graph.types import GraphTypes, Names


def graph_problems(definition: agent_pb2.AgentDefinition, names: Names) -> Iterator[Problem]:
    """Yield every problem of a graph: the field and the problem; types are checked if its structure is valid."""
    topology = build_topology(definition.graph)
    problems = list(structure_problems(definition, topology))
    yield from problems
    if not problems:
        yield from TypeChecks(definition, topology, GraphTypes(definition, topology, names)).find_problems()


def graph_notes(definition: agent_pb2.AgentDefinition, names: Names) -> Iterator[Problem]:
    """Yield notes about a valid graph: what each run checks, and what its author may not expect."""
    topology = build_topology(definition.graph)
    yield from TypeChecks(definition, topology, GraphTypes(definition, topology, names)).find_notes()
