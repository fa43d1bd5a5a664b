"""Read what a file can hold from the schema: its messages, fields and enums, each with its comment."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

import bough_server
from bough_server.documents.messages import document_names, map_value, short_enum_name

SCHEMA: Final = Path(bough_server.__file__).parent / "bough.binpb"

Kind: TypeAlias = Literal[
    "text", "boolean", "integer", "long", "number", "duration", "time", "bytes", "json", "mapping", "enum", "message"
]

_KINDS: Final[Mapping[int, Kind]] = {
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "long",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_ENUM: "enum",
    FieldDescriptor.CPPTYPE_MESSAGE: "message",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Enum:
    """An enum: the short names of its values with their comments, but for the unspecified one."""

    name: str
    values: Mapping[str, str]
    unset: str
    """The comment of the unspecified value: what holds if the field is not set."""
    prefix: str
    """What precedes each short name in its full name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a message, by the name that authors are shown."""

    name: str
    names: Sequence[str]
    """Every name that a document may use for it and whose value is of this kind."""
    text_names: Sequence[str] = ()
    """Names under which it takes its JSON as text."""
    comment: str
    kind: Kind
    """What it holds, or each item of a list or a map."""
    is_list: bool
    is_map: bool = False
    null_is_json: bool = False
    """Whether null is a value: JSON's, instead of no value."""
    type: str = ""
    """The name of its message or enum."""
    group: str = ""
    """The name of the `oneof` that it is in."""

    @property
    def is_required(self) -> bool:
        """Whether its comment says so."""
        return self.comment.endswith(" Required.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message, which is a mapping in a document."""

    name: str
    comment: str
    fields: Sequence[Field]
    groups: Mapping[str, str]
    """The comments of its `oneof`s, of whose fields only one can be set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definitions:
    """Everything that a file is made of; what it holds is the first message."""

    messages: Mapping[str, Message]
    enums: Mapping[str, Enum]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What is read, and how."""

    comments: Mapping[str, str]
    opaque: Collection[str]
    null_is_json: bool


def read_definitions(first: Descriptor, *, opaque: Collection[str] = (), null_is_json: bool = False) -> Definitions:
    """The messages that a message holds at any depth, in the order in which they are first named.

    Those in `opaque` are mappings whose fields are not listed. `null_is_json` is that of the reader of the files.
    """
    reading = _Reading(comments=_comments(), opaque=opaque, null_is_json=null_is_json)
    messages: dict[str, Message] = {}
    enums: dict[str, Enum] = {}
    waiting = [first]
    while waiting:
        descriptor = waiting.pop(0)
        if descriptor.name in messages:
            continue
        messages[descriptor.name] = _message(descriptor, reading)
        for field in descriptor.fields:
            held = map_value(field) or field
            if held.enum_type is not None:
                enums.setdefault(held.enum_type.name, _enum(held.enum_type, reading.comments))
            elif held.message_type is not None and _kind(held, opaque) == "message":
                waiting.append(held.message_type)
    return Definitions(messages=messages, enums=enums)


def _message(descriptor: Descriptor, reading: _Reading) -> Message:
    groups = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
    names = document_names(descriptor)
    return Message(
        name=descriptor.name,
        comment=_without_tags(reading.comments[descriptor.full_name]),
        fields=[_field(field, names, reading) for field in descriptor.fields],
        groups={oneof.name: reading.comments[oneof.full_name] for oneof in groups},
    )


def _field(descriptor: FieldDescriptor, names: Mapping[str, tuple[str, bool]], reading: _Reading) -> Field:
    as_text = [name for name, (field, is_plain) in names.items() if field == descriptor.name and not is_plain]
    as_json = [name for name, (field, is_plain) in names.items() if field == descriptor.name and is_plain]
    oneof = descriptor.containing_oneof
    values = map_value(descriptor)
    held = values or descriptor
    typed = held.enum_type or held.message_type
    return Field(
        name=as_json[0] if as_json else as_text[0],
        names=as_json or as_text,
        text_names=as_text if as_json else (),
        comment=reading.comments[descriptor.full_name],
        kind="json" if as_json else _kind(held, reading.opaque),
        is_list=descriptor.is_repeated and values is None,
        is_map=values is not None,
        null_is_json=bool(as_json) and reading.null_is_json,
        type=typed.name if typed else "",
        group=oneof.name if oneof and not oneof.name.startswith("_") else "",
    )


_WELL_KNOWN: Final[Mapping[str, Kind]] = {"google.protobuf.Duration": "duration", "google.protobuf.Timestamp": "time"}


def _kind(descriptor: FieldDescriptor, opaque: Collection[str]) -> Kind:
    message = descriptor.message_type
    if message is not None:
        return "mapping" if message.name in opaque else _WELL_KNOWN.get(message.full_name, "message")
    return "bytes" if descriptor.type == FieldDescriptor.TYPE_BYTES else _KINDS[descriptor.cpp_type]


def _enum(descriptor: EnumDescriptor, comments: Mapping[str, str]) -> Enum:
    # The comments of values are found by their enum: the full name of a value does not have its name.
    by_name = {value.name: comments[f"{descriptor.full_name}.{value.name}"] for value in descriptor.values}
    first = descriptor.values[0].name
    return Enum(
        name=descriptor.name,
        values={short_enum_name(descriptor, name): comment for name, comment in by_name.items() if name != first},
        unset=by_name[first],
        prefix=first.removesuffix(short_enum_name(descriptor, first)),
    )


def _comments() -> dict[str, str]:
    """The comment of everything in the schema that has one, by its full name, in one line for each paragraph."""
    files = descriptor_pb2.FileDescriptorSet.FromString(SCHEMA.read_bytes()).file
    found: dict[str, str] = {}
    for file in files:
        for location in file.source_code_info.location:
            for name in _names_at(file, location.path):
                found[f"{file.package}.{name}"] = _join_lines(location.leading_comments)
    return found


def _names_at(file: descriptor_pb2.FileDescriptorProto, path: Sequence[int]) -> Iterator[str]:
    """The name of the message, field, oneof, enum or value at a path of the source, if it is one of these."""
    match list(path):
        case [4, message]:
            yield file.message_type[message].name
        case [4, message, 2, field]:
            yield f"{file.message_type[message].name}.{file.message_type[message].field[field].name}"
        case [4, message, 8, oneof]:
            yield f"{file.message_type[message].name}.{file.message_type[message].oneof_decl[oneof].name}"
        case [5, enum]:
            yield file.enum_type[enum].name
        case [5, enum, 2, value]:
            yield f"{file.enum_type[enum].name}.{file.enum_type[enum].value[value].name}"


def _join_lines(comment: str) -> str:
    paragraphs = comment.split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _without_tags(comment: str) -> str:
    """A message's comment without the paragraph about reserved tags, which is for authors of the schema."""
    return "\n\n".join(each for each in comment.split("\n\n") if "reserved for a later version" not in each)
