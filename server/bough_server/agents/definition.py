"""Agent definitions as YAML and JSON documents, in both directions.

Reading follows protobuf's JSON mapping and accepts more: enum values without their prefix, durations such as `10m`, the
names of tools and sub-agents in place of links, and every `*_json` field as plain values under its name without the
suffix. validation.py checks whether a definition makes sense.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

import yaml
from google.protobuf import duration_pb2, json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from bough.v1 import agent_pb2, execution_pb2
from bough_server.documents import FLOAT_PATTERN, Document, FieldPath, Value, parse_duration, suggestion
from bough_server.errors import Problem

_INT_BITS: Final = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
_FLOATS: Final = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)

SHORTHANDS: Final[Mapping[str, str]] = {"AgentLink": "agent", "ToolLink": "name"}
"""Messages that a document may write as a text, and the field that the text sets; all other fields stay unset."""

_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A definition, and the line of each of its fields."""

    definition: agent_pb2.AgentDefinition
    path: str
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line by field path, in the schema's names."""

    def problem(self, field_path: str, description: str) -> Problem:
        """Return a problem at a field, located at the nearest enclosing field that the document contains."""
        place = field_path
        while place and place not in self.lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return Problem(path=self.path, line=self.lines.get(place, 0), field=field_path, description=description)


def parse_definition(document: Document) -> tuple[Source, list[Problem]]:
    """Return a document's definition, as far as it can be read, and every problem with how it is written."""
    reader = _DefinitionReader(document)
    definition = agent_pb2.AgentDefinition()
    if isinstance(document.value, dict):
        reader.message(document.value, definition, (), "")
    else:
        reader.report((), "must be a mapping with `name`, `description` and a kind, such as `llm`")
    return Source(definition=definition, path=document.path, lines=reader.lines), reader.problems


def revision(definition: agent_pb2.AgentDefinition) -> str:
    """Return the SHA-256 hex digest of a definition's content; equal content has equal digests."""
    return hashlib.sha256(definition.SerializeToString(deterministic=True)).hexdigest()


def kind_of(definition: agent_pb2.AgentDefinition) -> execution_pb2.AgentKind.ValueType:
    """Return the kind of a definition's agent; FUNCTION for an agent in code, whose definition has no kind."""
    return execution_pb2.AgentKind.Value(f"AGENT_KIND_{(definition.WhichOneof('kind') or 'function').upper()}")


def received(definition: agent_pb2.AgentDefinition) -> agent_pb2.AgentDefinition:
    """Return a copy of a definition from a request, without the fields that this server does not know."""
    copy = agent_pb2.AgentDefinition()
    copy.CopyFrom(definition)
    copy.DiscardUnknownFields()
    return copy


def short_enum_name(enum: EnumDescriptor, name: str) -> str:
    """Return an enum value's name without the enum's prefix: HISTORY_SCOPE_NONE becomes NONE."""
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in enum.name).lstrip("_") + "_"
    return name.removeprefix(prefix)


def document_names(descriptor: Descriptor) -> dict[str, tuple[str, bool]]:
    """What a document may call each field, to the field's name and whether its value is plain JSON."""
    names: dict[str, tuple[str, bool]] = {}
    for each in descriptor.fields:
        names[each.name] = names[each.json_name] = (each.name, False)
    for each in descriptor.fields:
        if each.name.endswith("_json"):
            names.setdefault(each.name.removesuffix("_json"), (each.name, True))
            names.setdefault(each.json_name.removesuffix("Json"), (each.name, True))
    return names


class _Wrong(ValueError):
    """A value that does not fit its field; the message becomes the problem's description."""


class _DefinitionReader:
    """Fills messages from values, and collects problems and the line of each field."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {"": document.line(())}

    def report(self, path: FieldPath, description: str) -> None:
        self.problems.append(self.document.problem(path, description))

    def message(self, values: Mapping[str, Value], message: Message, path: FieldPath, schema_path: str) -> None:
        """Fill a message. `path` locates it in the document; `schema_path` is the same place in the schema's names."""
        schema = cast(Descriptor, message.DESCRIPTOR)
        names = document_names(schema)
        given: dict[str, str] = {}
        chosen: dict[str, str] = {}
        for key, value in values.items():
            inner = (*path, key)
            if key not in names:
                self.report(inner, f"There is no such field.{suggestion(key, _shown_names(schema))}")
                continue
            if value is None:
                continue
            name, is_plain_json = names[key]
            descriptor = schema.fields_by_name[name]
            if name in given:
                self.report(inner, f"is the same field as {given[name]!r}; remove one of the two")
                continue
            given[name] = key
            # protobuf puts each optional field into a synthetic oneof, whose name starts with an underscore.
            oneof = descriptor.containing_oneof
            if oneof is not None and oneof.name in chosen and not oneof.name.startswith("_"):
                self.report(inner, f"excludes {chosen[oneof.name]!r}: there can be only one {oneof.name}")
                continue
            if oneof is not None:
                chosen[oneof.name] = key
            place = f"{schema_path}.{name}" if schema_path else name
            self.lines[place] = self.document.line(inner)
            self._field(_json_text(value) if is_plain_json else value, message, descriptor, (inner, place))

    def _field(
        self, value: Value, message: Message, descriptor: FieldDescriptor, places: tuple[FieldPath, str]
    ) -> None:
        path, schema_path = places
        try:
            if not descriptor.is_repeated:
                self._single(value, message, descriptor, places)
                return
            if not isinstance(value, list):
                raise _Wrong("must be a list")
        except _Wrong as error:
            self.report(path, str(error))
            return
        items = getattr(message, descriptor.name)
        for index, item in enumerate(value):
            inner, place = (*path, index), f"{schema_path}[{index}]"
            self.lines[place] = self.document.line(inner)
            try:
                if descriptor.message_type is None:
                    items.append(_scalar(item, descriptor))
                else:
                    self._into(item, items.add(), (inner, place))
            except _Wrong as error:
                self.report(inner, str(error))

    def _single(
        self, value: Value, message: Message, descriptor: FieldDescriptor, places: tuple[FieldPath, str]
    ) -> None:
        if descriptor.message_type is None:
            setattr(message, descriptor.name, _scalar(value, descriptor))
            return
        inner = getattr(message, descriptor.name)
        # Without this an empty mapping would leave the field unset, and its oneof with it.
        inner.SetInParent()
        self._into(value, inner, places)

    def _into(self, value: Value, message: Message, places: tuple[FieldPath, str]) -> None:
        if isinstance(message, duration_pb2.Duration):
            if not isinstance(value, str):
                raise _Wrong("must be a duration such as 10m, 50ms or 1h30m")
            try:
                message.FromNanoseconds(parse_duration(value))
            except ValueError as error:
                raise _Wrong(str(error)) from None
        elif isinstance(value, dict):
            self.message(value, message, *places)
        else:
            self._from_text(value, message, places)

    def _from_text(self, value: Value, message: Message, places: tuple[FieldPath, str]) -> None:
        """Fill a message from the text that its shorthand allows."""
        schema = cast(Descriptor, message.DESCRIPTOR)
        named = SHORTHANDS.get(schema.name, "")
        if not named or not isinstance(value, str):
            name = "a name, or " if named else ""
            raise _Wrong(f"must be {name}a mapping of {', '.join(_shown_names(schema)) or 'nothing: {}'}")
        path, schema_path = places
        setattr(message, named, value)
        self.lines[f"{schema_path}.{named}"] = self.document.line(path)


def _shown_names(descriptor: Descriptor) -> list[str]:
    """Return the names to suggest: those of the schema, without the `_json` suffix."""
    return [each.name.removesuffix("_json") for each in descriptor.fields]


def _json_text(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _scalar(value: Value, descriptor: FieldDescriptor) -> str | bool | int | float:
    kind = descriptor.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if not isinstance(value, str):
            raise _Wrong("must be text" + ("" if isinstance(value, list | dict) else "; put it in quotes"))
        return value
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise _Wrong("must be true or false")
        return value
    if descriptor.enum_type is not None:
        return _enum(value, descriptor.enum_type)
    if kind in _FLOATS:
        return _number(value)
    return _integer(value, _INT_BITS[kind])


def _enum(value: Value, enum: EnumDescriptor) -> int:
    for each in enum.values:
        if value in (each.name, short_enum_name(enum, each.name)):
            return each.number
    shown = [short_enum_name(enum, each.name) for each in enum.values if each.number]
    raise _Wrong(f"must be {' or '.join(shown)}.{suggestion(str(value), shown) if isinstance(value, str) else ''}")


def _number(value: Value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise _Wrong("must be a number in the range of a double") from None


def _integer(value: Value, bits: int) -> int:
    # As in protobuf's JSON mapping, 1.0 and 1e3 are integers too.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("must be a whole number")
    if not -(1 << bits) <= value < 1 << bits:
        raise _Wrong(f"must be a whole number that fits {bits + 1} bits")
    return value


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes block style throughout and keeps the lines of long texts."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # YAML folds these as line breaks unless they are escaped, which only the double-quoted style can do.
    folds = any(character in text for character in "\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if folds else "|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


# documents.py reads 1e5 as a number, but PyYAML would write the text 1e5 without quotes.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_PATTERN, list("-+.0123456789"))


def definition_yaml(definition: agent_pb2.AgentDefinition) -> str:
    """Return a definition as YAML, as an author would write it."""
    return yaml.dump(_plain(definition), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


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
        # Well-known types such as Duration have their own JSON form, a string.
        if value.DESCRIPTOR.full_name.startswith("google.protobuf."):
            return json_format.MessageToJson(value).strip('"')
        return _plain(value)
    if descriptor.enum_type is not None:
        known = descriptor.enum_type.values_by_number.get(int(value))
        return short_enum_name(descriptor.enum_type, known.name) if known else int(value)
    return value


def _compact_json(text: str) -> _Json:
    """Return the value of a JSON text that json.dumps would write back byte for byte; None for any other text."""
    try:
        value: _Json = json.loads(text, parse_constant=_refuse)
        same = json.dumps(value, ensure_ascii=False, separators=(",", ":")) == text
    except (ValueError, RecursionError):
        return None
    return value if same else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
