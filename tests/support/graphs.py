"""Graphs as definitions, written in YAML as their authors write them."""

from textwrap import dedent

from bough.v1 import agent_pb2
from bough_server.agents.definition import parse_definition
from bough_server.documents.yaml import parse_documents


def graph(text: str) -> agent_pb2.AgentDefinition:
    """Return the definition that a document is, under the name `lead` if it has none, with a description."""
    (document,) = parse_documents(dedent(text), path="graph.yaml")
    source, problems = parse_definition(document)
    assert [str(problem) for problem in problems] == []
    source.definition.name = source.definition.name or "lead"
    source.definition.description = source.definition.description or "A graph."
    return source.definition
