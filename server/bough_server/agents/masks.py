"""Which fields of a definition a change takes over: the paths of a field mask; what they mean is not judged here."""

from collections.abc import Sequence
from typing import Final

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from bough.v1 import agent_pb2
from bough_server.errors import FieldViolation

_ALL: Final = ["*"]
_FIXED: Final = ("name", "revision", "create_time")


def mask_problems(mask: FieldMask) -> list[FieldViolation]:
    """What is wrong with the paths of a mask of definitions."""
    if list(mask.paths) == _ALL:
        return []
    descriptor = agent_pb2.AgentDefinition.DESCRIPTOR
    problems: list[FieldViolation] = []
    for index, path in enumerate(mask.paths):
        if path in _FIXED:
            said = f"{path!r} cannot be changed."
        elif not FieldMask(paths=[path]).IsValidForDescriptor(descriptor):
            said = f"{path!r} is no field of an agent, or lies in a list: name the whole list."
        else:
            continue
        problems.append(FieldViolation(field=f"update_mask.paths[{index}]", description=said))
    return problems


def masked(
    current: agent_pb2.AgentDefinition, asked: agent_pb2.AgentDefinition, paths: Sequence[str]
) -> agent_pb2.AgentDefinition:
    """The definition with the fields of these paths as `asked` has them; with all of them where there are none."""
    if list(paths) in ([], _ALL):
        return asked
    merged = agent_pb2.AgentDefinition()
    merged.CopyFrom(current)
    for path in paths:
        _take(path.split("."), asked, merged)
    return merged


def _take(names: Sequence[str], source: Message, target: Message) -> None:
    """Makes one field the source's, which clears it where the source does not have it."""
    *outer, leaf = names
    for name in outer:
        if not source.HasField(name) and not target.HasField(name):
            return
        source, target = getattr(source, name), getattr(target, name)
    only = type(source)()
    only.CopyFrom(source)
    for descriptor, _ in source.ListFields():
        if descriptor.name != leaf:
            only.ClearField(descriptor.name)
    target.ClearField(leaf)
    if only.ListFields():
        target.MergeFrom(only)
