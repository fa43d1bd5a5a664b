"""Count the bytes of files in a serialized request, before it is parsed: their bound is a separate one."""

from collections.abc import Mapping
from functools import cache
from typing import Final, TypeAlias

from google.protobuf.descriptor import Descriptor

from bough.v1 import agent_service_pb2, message_pb2

_MAX_FIELDS: Final = 25_000
"""The most fields that are looked at: parsing a request with more of them would cost more than it may."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Fields: TypeAlias = Mapping[int, Descriptor | None]
"""The fields of a message that lead to bytes of files, by number; None for those bytes themselves."""

REQUESTS: Final[Mapping[str, Descriptor]] = {
    kind.DESCRIPTOR.name: kind.DESCRIPTOR
    for kind in (
        agent_service_pb2.RunRequest,
        agent_service_pb2.ResumeRunRequest,
        agent_service_pb2.AnswerInputRequest,
        agent_service_pb2.ForkRunRequest,
    )
}
"""The requests that may bring files: those that carry an input or a tool's result."""


class _Malformed(Exception):
    """Bytes that are no message, or too many fields to look at."""


def count_file_bytes(data: bytes, request: Descriptor) -> int:
    """Return the bytes of all Blob.data in a serialized request; 0 if it is malformed or has too many fields."""
    try:
        return _count(data, request)
    except (_Malformed, IndexError):
        return 0


def _count(data: bytes, request: Descriptor) -> int:
    found = looked_at = 0
    waiting = [(0, len(data), _fields(request))]
    while waiting:
        at, end, fields = waiting.pop()
        while at < end:
            looked_at += 1
            number, begin, after = _field(data, at)
            if after > end or looked_at > _MAX_FIELDS:
                raise _Malformed
            if begin and number in fields:
                below = fields[number]
                if below is None:
                    found += after - begin
                else:
                    waiting.append((begin, after, _fields(below)))
            at = after
    return found


def _field(data: bytes, at: int) -> tuple[int, int, int]:
    """Return a field's number, where its bytes begin (0 if it has none), and where it ends."""
    tag, at = _varint(data, at)
    number, kind = tag >> 3, tag & 7
    if kind == _BYTES:
        size, at = _varint(data, at)
        return number, at, at + size
    if kind == _VARINT:
        return number, 0, _varint(data, at)[1]
    if kind == _FIXED64:
        return number, 0, at + 8
    if kind == _FIXED32:
        return number, 0, at + 4
    raise _Malformed


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise _Malformed


@cache
def _fields(message: Descriptor) -> _Fields:
    if message is message_pb2.Blob.DESCRIPTOR:
        return {message_pb2.Blob.DATA_FIELD_NUMBER: None}
    below = {field.number: field.message_type for field in message.fields if field.message_type is not None}
    return {number: kind for number, kind in below.items() if _holds_files(kind, frozenset())}


def _holds_files(message: Descriptor, above: frozenset[Descriptor]) -> bool:
    """Return whether a message can hold files; types are recursive, so those above it are not looked at again."""
    if message is message_pb2.Blob.DESCRIPTOR:
        return True
    if message in above:
        return False
    kinds = {field.message_type for field in message.fields if field.message_type is not None}
    return any(_holds_files(kind, above | {message}) for kind in kinds)
