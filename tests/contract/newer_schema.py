"""The schema as a later version may have it: more kinds of events, more values of enums, more fields."""

from functools import cache
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import Message

from bough_server import __file__ as server_package

SCHEMA: Final = Path(server_package).with_name("bough.binpb")

ADDED_VALUE: Final = 99
"""The number of every added value of an enum."""

_ADDED_FIELD: Final = 900
"""The number of the added fields: AgentEvent.mood, RunCompleted.epilogue, AgentInvocation.mood."""


@cache
def newer_type(name: str) -> type[Message]:
    """Return the class of a message of the newer schema, such as "bough.v1.AgentEvent"."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))


def pool_of(schema: bytes) -> descriptor_pool.DescriptorPool:
    """Return a pool that has the files of a descriptor set, and no other."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(schema).file:
        pool.Add(file)
    return pool


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    schema = descriptor_pb2.FileDescriptorSet.FromString(SCHEMA.read_bytes())
    files = {file.name.rpartition("/")[2]: file for file in schema.file}
    _add_kind(files["event.proto"], "AgentEvent", "agent_dreamed", 170)
    _add_kind(files["event.proto"], "AgentEvent", "run_paused", 171)
    _add_kind(files["evaluation.proto"], "EvaluationEvent", "evaluation_dreamed", 270)
    _add_text(files["event.proto"], "AgentEvent", "mood")
    _add_text(files["event.proto"], "RunCompleted", "epilogue")
    _add_text(files["invocation.proto"], "AgentInvocation", "mood")
    _add_value(files["execution.proto"], "EndReason", "END_REASON_BORED")
    _add_value(files["execution.proto"], "AgentKind", "AGENT_KIND_ORACLE")
    _add_value(files["execution.proto"], "ExecutionState", "EXECUTION_STATE_PAUSED")
    _add_value(files["eval_result.proto"], "Verdict", "VERDICT_DOUBTED")
    return pool_of(schema.SerializeToString())


def _message(file: descriptor_pb2.FileDescriptorProto, name: str) -> descriptor_pb2.DescriptorProto:
    return next(message for message in file.message_type if message.name == name)


def _add_kind(file: descriptor_pb2.FileDescriptorProto, message: str, payload: str, number: int) -> None:
    kind = "".join(part.title() for part in payload.split("_"))
    text = FieldDescriptorProto(
        name="dream", number=1, type=FieldDescriptorProto.TYPE_STRING, label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    file.message_type.add(name=kind, field=[text])
    _message(file, message).field.add(
        name=payload,
        number=number,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
        type_name=f".bough.v1.{kind}",
        oneof_index=0,
    )


def _add_text(file: descriptor_pb2.FileDescriptorProto, message: str, field: str) -> None:
    _message(file, message).field.add(
        name=field,
        number=_ADDED_FIELD,
        type=FieldDescriptorProto.TYPE_STRING,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )


def _add_value(file: descriptor_pb2.FileDescriptorProto, enum: str, name: str) -> None:
    next(one for one in file.enum_type if one.name == enum).value.add(name=name, number=ADDED_VALUE)
