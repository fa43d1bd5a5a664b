"""Agent definitions as YAML and JSON documents, in both directions.

documents/messages.py has the rules of how they are written. validation.py checks whether a definition makes sense.
"""

import hashlib
from dataclasses import dataclass

from bough.v1 import agent_pb2, execution_pb2
from bough_server.documents.messages import FieldLines, message_yaml, read_message
from bough_server.documents.yaml import Document
from bough_server.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(FieldLines):
    """A definition, and the line of each of its fields."""

    definition: agent_pb2.AgentDefinition


def parse_definition(document: Document) -> tuple[Source, list[Problem]]:
    """Return a document's definition, as far as it can be read, and every problem with how it is written."""
    definition = agent_pb2.AgentDefinition()
    required = "must be a mapping with `name`, `description` and a kind, such as `llm`"
    lines, problems = read_message(document, definition, required=required)
    return Source(definition=definition, path=document.path, lines=lines), problems


def revision(definition: agent_pb2.AgentDefinition) -> str:
    """Return the SHA-256 hex digest of a definition's content; equal content has equal digests."""
    return hashlib.sha256(definition.SerializeToString(deterministic=True)).hexdigest()


def kind_of(definition: agent_pb2.AgentDefinition) -> execution_pb2.AgentKind.ValueType:
    """Return the kind of a definition's agent; FUNCTION for an agent in code, whose definition has no kind."""
    return execution_pb2.AgentKind.Value(f"AGENT_KIND_{(definition.WhichOneof('kind') or 'function').upper()}")


def drop_unknown_fields(definition: agent_pb2.AgentDefinition) -> agent_pb2.AgentDefinition:
    """Return a copy of a definition from a request, without the fields that this server does not know."""
    copy = agent_pb2.AgentDefinition()
    copy.CopyFrom(definition)
    # They would count in the revision, although this server neither checks nor runs them.
    copy.DiscardUnknownFields()
    return copy


def definition_yaml(definition: agent_pb2.AgentDefinition) -> str:
    """Return a definition as YAML, as an author would write it."""
    return message_yaml(definition)
