"""When two events say the same: what a replay makes against what was recorded; pure."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from bough.v1 import event_pb2

_MEASURED: Final = ("duration", "latency", "start_time", "create_time")


def same_fact(made: event_pb2.AgentEvent, recorded: event_pb2.AgentEvent) -> bool:
    """Whether two events say the same, times, durations and trace ids apart."""
    return _without_measures(made) == _without_measures(recorded)


def _without_measures(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    plain = event_pb2.AgentEvent()
    plain.CopyFrom(event)
    for name in ("run_id", "session_id", "sequence", "time", "trace_id", "span_id"):
        plain.ClearField(name)
    payload = plain.WhichOneof("payload")
    if payload is not None:
        _clear_measures(getattr(plain, payload))
    return plain


def _clear_measures(message: Any) -> None:
    measured, nested = _measures(message.DESCRIPTOR)
    for name in measured:
        message.ClearField(name)
    for name, is_repeated in nested:
        if is_repeated:
            for item in getattr(message, name):
                _clear_measures(item)
        elif message.HasField(name):
            _clear_measures(getattr(message, name))


@cache
def _measures(kind: Descriptor) -> tuple[tuple[str, ...], tuple[tuple[str, bool], ...]]:
    """The fields of a message that are measures, and those that hold some further down, with whether they are lists."""
    measured = tuple(field.name for field in kind.fields if field.name in _MEASURED)
    nested = [field for field, below in _nested(kind) if any(map(_has_measures, _within(below)))]
    return measured, tuple((field.name, field.is_repeated) for field in nested)


def _has_measures(kind: Descriptor) -> bool:
    return any(field.name in _MEASURED for field in kind.fields)


def _nested(kind: Descriptor) -> Iterator[tuple[FieldDescriptor, Descriptor]]:
    for field in kind.fields:
        below = field.message_type
        if below is None or field.name in _MEASURED:
            continue
        if not (below.GetOptions().map_entry or below.full_name.startswith("google.")):
            yield field, below


def _within(kind: Descriptor) -> set[Descriptor]:
    """A message's kind, and the kinds of everything in it."""
    found, waiting = {kind}, [kind]
    while waiting:
        new = {below for _, below in _nested(waiting.pop())} - found
        found |= new
        waiting.extend(new)
    return found
