"""Agent definitions written as YAML that reads back to the same; reading is definition.py's."""

import json
from typing import TypeAlias

import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from bough.v1 import agent_pb2
from bough_server.agents.definition import short_enum_name
from bough_server.documents import FLOAT_PATTERN

_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"


class _Dumper(yaml.SafeDumper):
    """Block style throughout; long texts keep their lines."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # YAML folds these as line breaks unless they are escaped, which only double quotes can.
    folds = any(character in text for character in "\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if folds else "|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
# The reader takes 1e5 for a number, which PyYAML by itself would not put in quotes.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_PATTERN, list("-+.0123456789"))


def definition_yaml(definition: agent_pb2.AgentDefinition) -> str:
    """A definition as YAML, as an author would write it: what is output only is left out."""
    shown = agent_pb2.AgentDefinition()
    shown.CopyFrom(definition)
    shown.ClearField("revision")
    shown.ClearField("create_time")
    return yaml.dump(_plain(shown), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(message: Message) -> dict[str, _Json]:
    plain: dict[str, _Json] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if descriptor.is_repeated:
            plain[name] = [_value(descriptor, item) for item in value]
        elif name.endswith("_json") and (parsed := _compact_json(value)) is not None:
            plain[name.removesuffix("_json")] = parsed
        else:
            plain[name] = _value(descriptor, value)
    return plain


def _value(descriptor: FieldDescriptor, value: Message | str | bool | int | float) -> _Json:
    if isinstance(value, Message):
        if value.DESCRIPTOR.full_name.startswith("google.protobuf."):
            return json_format.MessageToJson(value).strip('"')
        return _plain(value)
    if descriptor.enum_type is not None:
        known = descriptor.enum_type.values_by_number.get(int(value))
        return short_enum_name(descriptor.enum_type, known.name) if known else int(value)
    return value


def _compact_json(text: str) -> _Json:
    """The values of a JSON text that would be written back letter by letter; None for any other."""
    try:
        value: _Json = json.loads(text, parse_constant=_refuse)
        same = json.dumps(value, ensure_ascii=False, separators=(",", ":")) == text
    except (ValueError, RecursionError):
        return None
    return value if same else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
