"""Strategies for any message of the schema, sensible or not."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import strategies as st

from bough_server.documents.messages import map_value

M = TypeVar("M", bound=Message)

TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_JSON_TEXT: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
).flatmap(
    lambda value: st.sampled_from([(",", ":"), (", ", ": ")]).map(
        lambda separators: json.dumps(value, ensure_ascii=False, separators=separators)
    )
)
_SCALARS: Final[Mapping[int, st.SearchStrategy[Any]]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_STRING: TEXT,
}
_MOST_DEPTH: Final = 6
_TIMES: Final[Mapping[type[Message], st.SearchStrategy[Message]]] = {
    Duration: st.builds(Duration, seconds=st.integers(0, 10**9), nanos=st.integers(0, 999_999_999)),
    Timestamp: st.builds(Timestamp, seconds=st.integers(0, 10**9), nanos=st.integers(0, 999_999_999)),
}


def messages(kind: type[M]) -> st.SearchStrategy[M]:
    """Any message of a type, with few of its fields set at every depth."""

    @st.composite
    def made(draw: st.DrawFn) -> M:
        message = kind()
        _fill(message, draw, 0)
        return message

    return made()


def _fill(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any], depth: int) -> None:
    fields = [field for field in message.DESCRIPTOR.fields if field.message_type is None or depth < _MOST_DEPTH]
    if not fields:
        return
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda field: field.number)):
        held = getattr(message, field.name)
        values = map_value(field)
        if values is not None:
            key = draw(TEXT)
            if values.message_type is None:
                held[key] = draw(_scalars(values))
            else:
                _fill(held[key], draw, depth + 1)
        elif field.is_repeated and field.message_type is None:
            held.extend(draw(st.lists(_scalars(field), min_size=1, max_size=2)))
        elif field.message_type is None:
            setattr(message, field.name, draw(_scalars(field)))
        else:
            _fill_message(held.add() if field.is_repeated else held, draw, depth)


def _fill_message(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any], depth: int) -> None:
    message.SetInParent()
    times = _TIMES.get(type(message))
    if times is None:
        _fill(message, draw, depth + 1)
    else:
        message.CopyFrom(draw(times))


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return _JSON_TEXT | TEXT if field.name.endswith("_json") else _SCALARS[field.cpp_type]
