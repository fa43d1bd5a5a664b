"""Messages on the wire, in binary and in JSON: every kind of event and every request, the same each time.

Usage: python -m tests.contract.wire_samples writes tests/contract/wire/.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bough import v1
from bough.v1 import (
    agent_service_pb2,
    catalog_service_pb2,
    eval_service_pb2,
    session_service_pb2,
    tool_service_pb2,
)
from bough_server.documents.messages import map_value
from tests.contract.newer_schema import ADDED_VALUE, newer_type

FOLDER: Final = Path(__file__).with_name("wire")

UNKNOWN: Final = "unknown."
"""How the names of samples begin that have fields which clients do not know. They have no JSON."""

_SERVICES: Final = (agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2, tool_service_pb2)
_ANSWERS: Final = (v1.Invocation, v1.EvalResult, v1.EvalComparison, v1.InvocationDiff, v1.Run, v1.CallToolResponse)

_TEXTS: Final = (
    "a",
    "two words",
    "Zwölf Bäume",
    "木の枝",
    "🌳",
    'a "quoted" \\ text',
    "<b>&amp;</b>",
    "line\nline",
    "\u2028",
)
_SCALARS: Final[Mapping[int, Sequence[Any]]] = {
    FieldDescriptor.CPPTYPE_BOOL: (True,),
    FieldDescriptor.CPPTYPE_INT32: (1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (1, -1, 2**53 + 1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.1, -2.5, 1e300, 5e-324, float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_STRING: _TEXTS,
}
_WELL_KNOWN: Final[Mapping[str, Callable[[random.Random], Message]]] = {
    "google.protobuf.Duration": lambda chance: Duration(
        seconds=chance.randrange(100_000), nanos=chance.choice((0, 500_000_000, 1_000, 1))
    ),
    "google.protobuf.Timestamp": lambda chance: Timestamp(
        seconds=chance.randrange(2_000_000_000), nanos=chance.choice((0, 500_000_000, 1_000, 1))
    ),
    "google.protobuf.FieldMask": lambda chance: FieldMask(paths=["description", "llm.max_steps"]),
}
_DEPTH: Final = 5
"""How deep messages are filled; from the third level on only with some of their fields."""


def samples() -> Iterator[tuple[str, Message]]:
    """Return every sample with its name, which is the message's, or the message's and a field's."""
    known = [*_main_samples()]
    yield from known
    yield from _further_samples(known)
    yield from _unknown()


def _main_samples() -> Iterator[tuple[str, Message]]:
    """Every kind of event, every request, and some answers."""
    for kind in (v1.AgentEvent, v1.EvaluationEvent):
        for field in kind.DESCRIPTOR.oneofs_by_name["payload"].fields:
            yield f"{kind.DESCRIPTOR.name}.{field.name}", filled(kind(), payload=field.name)
    for service in _SERVICES:
        for description in service.DESCRIPTOR.services_by_name.values():
            for method in description.methods:
                kind = getattr(v1, method.input_type.name)
                yield kind.DESCRIPTOR.name, filled(kind())
    for kind in _ANSWERS:
        yield kind.DESCRIPTOR.name, filled(kind())


def _further_samples(known: Sequence[tuple[str, Message]]) -> Iterator[tuple[str, Message]]:
    """Messages with the fields that no other sample has."""
    has = {field for _, message in known for field in _fields_of(message)}
    for full_name in sorted(_fields_wanted(known) - has):
        if full_name not in has:
            name, _, field = full_name.removeprefix("bough.v1.").partition(".")
            message = filled(getattr(v1, name)(), payload=field)
            has.update(_fields_of(message))
            yield f"{name}.{field}", message


def missing_fields() -> list[str]:
    """Return the fields below any sample that no sample has."""
    made = [(name, message) for name, message in samples() if not name.startswith(UNKNOWN)]
    return sorted(_fields_wanted(made) - {field for _, message in made for field in _fields_of(message)})


def _fields_wanted(known: Iterable[tuple[str, Message]]) -> set[str]:
    return {field for _, message in known for field in _fields_below(message.DESCRIPTOR, set())}


def _fields_of(message: Message) -> Iterator[str]:
    """Return the full names of the fields that are set in a message and in those that it holds."""
    for field, value in message.ListFields():
        yield field.full_name
        values = map_value(field)
        if field.message_type is None or (values is not None and values.message_type is None):
            continue
        held = value.values() if values is not None else value if field.is_repeated else [value]
        for one in held:
            yield from _fields_of(one)


def _fields_below(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """Return the full names of all fields of a message of the schema and of those that it can hold."""
    if message.full_name in seen or not message.full_name.startswith("bough.v1."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field.full_name
        values = map_value(field)
        below = field.message_type if values is None else values.message_type
        if below is not None:
            yield from _fields_below(below, seen)


def _unknown() -> Iterator[tuple[str, Message]]:
    """Messages of a newer schema, under the names that clients know them by."""
    event = newer_type("bough.v1.AgentEvent")
    made = {
        "AgentEvent.payload": event(run_id="r", sequence=7, mood="calm", agent_dreamed={"dream": "of sheep"}),
        "AgentEvent.fields": event(
            sequence=8, mood="calm", run_completed={"epilogue": "The end.", "end_reason": ADDED_VALUE}
        ),
        "EvaluationEvent.payload": newer_type("bough.v1.EvaluationEvent")(
            sequence=9, evaluation_dreamed={"dream": "of passing"}
        ),
        "AgentInvocation.fields": newer_type("bough.v1.AgentInvocation")(name="lead", mood="calm", kind=ADDED_VALUE),
    }
    for name, message in made.items():
        yield f"{UNKNOWN}{name}", message


def filled(message: Message, *, payload: str = "") -> Message:
    """Fill a message with values that depend on its name alone; of the payloads of an event set this one."""
    _fill(message, f"{message.DESCRIPTOR.full_name} {payload}", 0, payload)
    return message


def _fill(message: Message, path: str, depth: int, payload: str = "") -> None:
    for field in message.DESCRIPTOR.fields:
        # A separate generator for each field: one that is added to the schema changes no other.
        place = f"{path}.{field.name}"
        chance = random.Random(place)
        oneof = field.containing_oneof
        is_choice = oneof is not None and len(oneof.fields) > 1
        is_named = payload in (one.name for one in oneof.fields) if is_choice else False
        if is_choice and (field.name != payload if is_named else message.WhichOneof(oneof.name) is not None):
            continue
        is_rare = depth > 2 or (depth > 1 and field.message_type is not None) or (is_choice and not is_named)
        if depth == _DEPTH and field.message_type is not None:
            continue
        if is_rare and chance.random() < 0.7:
            continue
        _set(message, field, place, depth)


def _set(message: Message, field: FieldDescriptor, path: str, depth: int) -> None:
    chance = random.Random(f"{path} value")
    held = getattr(message, field.name)
    values = map_value(field)
    if values is not None:
        for key in chance.sample(("a", "key-1", "ключ"), 2):
            if values.message_type is None:
                held[key] = _scalar(values, chance)
            else:
                _fill(held[key], f"{path}[{key}]", depth + 1)
    elif field.message_type is None:
        if field.is_repeated:
            held.extend(_scalar(field, chance) for _ in range(2))
        else:
            # A field with presence keeps its zero, which a reader must tell from an absent one.
            is_zero = field.has_presence and field.containing_oneof is not None and chance.random() < 0.3
            setattr(message, field.name, type(held)() if is_zero else _scalar(field, chance))
    else:
        for number, one in enumerate([held.add(), held.add()] if field.is_repeated else [held]):
            one.SetInParent()
            made = _WELL_KNOWN.get(field.message_type.full_name)
            if made is None:
                _fill(one, f"{path}[{number}]", depth + 1)
            else:
                one.CopyFrom(made(chance))


def _scalar(field: FieldDescriptor, chance: random.Random) -> Any:
    if field.enum_type is not None:
        return chance.choice([value.number for value in field.enum_type.values if value.number])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([0, 255, 251, 62, 63][: chance.randrange(1, 6)])
    return chance.choice(_SCALARS[field.cpp_type])


def written(name: str, message: Message) -> Mapping[str, bytes]:
    """Return the files of a sample by their names."""
    files = {f"{name}.binpb": message.SerializeToString(deterministic=True)}
    if not name.startswith(UNKNOWN):
        document = json_format.MessageToDict(message)
        files[f"{name}.json"] = (json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
    return files


def all_written() -> dict[str, bytes]:
    """Return every file by its name."""
    return {file: content for name, message in samples() for file, content in written(name, message).items()}


def main() -> None:
    """Write the folder anew."""
    FOLDER.mkdir(exist_ok=True)
    for old in [*FOLDER.glob("*.json"), *FOLDER.glob("*.binpb")]:
        old.unlink()
    for name, content in all_written().items():
        (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
