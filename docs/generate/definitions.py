"""Read what can stand in an agent file from the schema: its messages, fields and enums, each with its comment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

import bough_server
from bough.v1 import agent_pb2
from bough_server.agents.definition import document_names, short_enum_name

SCHEMA: Final = Path(bough_server.__file__).parent / "bough.binpb"

Kind: TypeAlias = Literal["text", "boolean", "integer", "number", "duration", "json", "enum", "message"]

_KINDS: Final[Mapping[int, Kind]] = {
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
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
    is_list: bool
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
    """Everything that an agent file is made of; the definition itself is the first message."""

    messages: Mapping[str, Message]
    enums: Mapping[str, Enum]


def read_definitions() -> Definitions:
    """The messages that an AgentDefinition holds at any depth, in the order in which they are first named."""
    comments = _comments()
    messages: dict[str, Message] = {}
    enums: dict[str, Enum] = {}
    waiting = [agent_pb2.AgentDefinition.DESCRIPTOR]
    while waiting:
        descriptor = waiting.pop(0)
        if descriptor.name in messages:
            continue
        messages[descriptor.name] = _message(descriptor, comments)
        for field in descriptor.fields:
            if field.enum_type is not None:
                enums.setdefault(field.enum_type.name, _enum(field.enum_type, comments))
            elif field.message_type is not None and _kind(field) == "message":
                waiting.append(field.message_type)
    return Definitions(messages=messages, enums=enums)


def _message(descriptor: Descriptor, comments: Mapping[str, str]) -> Message:
    groups = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
    return Message(
        name=descriptor.name,
        comment=_without_tags(comments[descriptor.full_name]),
        fields=[_field(field, document_names(descriptor), comments) for field in descriptor.fields],
        groups={oneof.name: comments[oneof.full_name] for oneof in groups},
    )


def _field(descriptor: FieldDescriptor, names: Mapping[str, tuple[str, bool]], comments: Mapping[str, str]) -> Field:
    as_text = [name for name, (field, is_plain) in names.items() if field == descriptor.name and not is_plain]
    as_json = [name for name, (field, is_plain) in names.items() if field == descriptor.name and is_plain]
    oneof = descriptor.containing_oneof
    typed = descriptor.enum_type or descriptor.message_type
    return Field(
        name=as_json[0] if as_json else as_text[0],
        names=as_json or as_text,
        text_names=as_text if as_json else (),
        comment=comments[descriptor.full_name],
        kind="json" if as_json else _kind(descriptor),
        is_list=descriptor.is_repeated,
        type=typed.name if typed else "",
        group=oneof.name if oneof and not oneof.name.startswith("_") else "",
    )


def _kind(descriptor: FieldDescriptor) -> Kind:
    message = descriptor.message_type
    if message is not None and message.full_name == "google.protobuf.Duration":
        return "duration"
    return _KINDS[descriptor.cpp_type]


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
                found[f"{file.package}.{name}"] = _joined(location.leading_comments)
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


def _joined(comment: str) -> str:
    paragraphs = comment.split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _without_tags(comment: str) -> str:
    """A message's comment without the paragraph about reserved tags, which is for authors of the schema."""
    return "\n\n".join(each for each in comment.split("\n\n") if "reserved for a later version" not in each)
