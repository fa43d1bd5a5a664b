"""The schema's rules: what is wrong with a message by them.

The stubs have no rules, so that clients do not need buf.validate. The server ships the whole schema as a file and
parses each message a second time by that schema to check it.
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources

import protovalidate
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bough_server.errors import FieldViolation


def find_violations(message: Message) -> list[FieldViolation]:
    """Return every rule of the schema that a message breaks."""
    return [
        FieldViolation(field=_path(violation.proto.field), description=violation.proto.message)
        for violation in protovalidate.collect_violations(_with_rules(message))
    ]


def _with_rules(message: Message) -> Message:
    """Parse a message again by the schema that has the rules; takes 1.5 us for a minimal one."""
    return _class(message.DESCRIPTOR.full_name).FromString(message.SerializeToString())


@cache
def _class(name: str) -> type[Message]:
    """Return the class of a message, kept: protobuf makes it and those of its fields anew if nothing refers to it."""
    return GetMessageClass(schema().FindMessageTypeByName(name))


@cache
def schema() -> DescriptorPool:
    """Return the whole schema, read from this package in a few milliseconds, in a pool separate from the stubs'."""
    # Its own pool: the stubs' default pool has the same files without the rules.
    pool = DescriptorPool()
    for file in schema_files():
        pool.Add(file)
    return pool


def schema_files() -> Sequence[descriptor_pb2.FileDescriptorProto]:
    """Return the files of the whole schema, with their comments and all that they import."""
    data = resources.files("bough_server").joinpath("bough.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data).file


def _path(field: protovalidate.FieldPathPb | None) -> str:
    """Return a path in readable form: `labels["a"]`, `follow.event_names[0]`."""
    if field is None:
        return ""
    return ".".join(_step(element) for element in field.elements)


def _step(element: protovalidate.FieldPathElementPb) -> str:
    subscript = element.subscript
    if subscript is None:
        return element.field_name
    quoted = f'"{subscript.value}"' if subscript.field == "string_key" else str(subscript.value)
    return f"{element.field_name}[{quoted}]"
