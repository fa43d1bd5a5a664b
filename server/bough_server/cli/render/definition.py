"""A definition as YAML that a file could hold; reading one is the agents' package's."""

import yaml
from google.protobuf import json_format

from bough.v1 import agent_pb2


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, as people do."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def definition_yaml(definition: agent_pb2.AgentDefinition) -> str:
    """The definition by the schema's own field names, in their order."""
    fields = json_format.MessageToDict(definition, preserving_proto_field_name=True)
    return yaml.dump(fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100).rstrip()
