"""The events of the schema: their names, their places, and that every reader gets back what was written."""

from typing import cast

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

from bough.v1 import agent_service_pb2, event_pb2, follow_pb2
from bough_server.log import events
from tests.support.logs import RUN_ID, SESSION_ID, AgentEvent, at, desk, stamped, stored

TAGS_OF_GROUP = {
    "run": range(20, 30),
    "sub_agent": range(30, 40),
    "llm": range(40, 60),
    "tool": range(60, 80),
    "step": range(80, 90),
    "control": range(90, 120),
    "graph": range(120, 140),
    "plan": range(140, 150),
}
PAYLOADS = list(AgentEvent.DESCRIPTOR.oneofs_by_name["payload"].fields)


def type_of(field: FieldDescriptor) -> Descriptor:
    """The message that a payload is."""
    assert field.message_type is not None
    return field.message_type


def group_of(number: int) -> str:
    return next(group for group, tags in TAGS_OF_GROUP.items() if number in tags)


@pytest.mark.parametrize("field", PAYLOADS, ids=lambda field: str(field.name))
def test_a_name_derives_from_the_group_of_the_tag_and_the_field(field: FieldDescriptor) -> None:
    group = group_of(field.number)
    name = field.name.removeprefix(f"{group}_")
    if name.endswith("_delta"):
        name = f"{name.removesuffix('_delta')}.delta"
    assert events.NAME_OF_KIND[field.number] == f"agent.{group}.{name}"


def test_names_kinds_and_fields_are_one_to_one() -> None:
    assert len(set(events.NAME_OF_KIND.values())) == len(events.NAME_OF_KIND) == len(PAYLOADS)
    assert len(set(events.KIND_OF_FIELD.values())) == len(events.KIND_OF_FIELD) == len(PAYLOADS)
    assert {26, 27, 28} == events.TERMINAL_KINDS
    assert {events.NAME_OF_KIND[kind] for kind in events.DELTA_KINDS} == {
        "agent.llm.output_text.delta",
        "agent.llm.reasoning.delta",
        "agent.llm.tool_call.delta",
        "agent.tool.output",
    }


def test_every_payload_is_a_message_of_its_own() -> None:
    types = [type_of(field).full_name for field in PAYLOADS]
    assert len(set(types)) == len(types)
    assert all(tag < 20 for tag in (one.number for one in AgentEvent.DESCRIPTOR.fields if one not in PAYLOADS))


def test_the_responses_of_all_streams_are_one_batch() -> None:
    service = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"]
    responses = [method.output_type for method in service.methods if method.server_streaming]
    assert [response.name for response in responses] == [
        "RunResponse",
        "WatchRunResponse",
        "ResumeRunResponse",
        "ForkRunResponse",
    ]
    for response in responses:
        ((name, number, kind),) = [(field.name, field.number, field.message_type) for field in response.fields]
        assert (name, number, kind) == ("batch", 1, follow_pb2.EventBatch.DESCRIPTOR)
    assert [(field.name, field.number, field.type) for field in follow_pb2.EventBatch.DESCRIPTOR.fields] == [
        ("events", 1, FieldDescriptor.TYPE_MESSAGE),
        ("through_sequence", 2, FieldDescriptor.TYPE_INT64),
    ]


def filled(message: Message, depth: int = 0) -> Message:
    """The message with a value in every field, of a oneof in the last."""
    fields = cast(list[FieldDescriptor], list(message.DESCRIPTOR.fields))
    for number, field in enumerate(fields, start=1):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = getattr(message, field.name)
            if field.message_type.fields_by_name["value"].message_type is None:
                values[f"key {number}"] = "välue"
            else:
                filled(values[f"key {number}"], depth + 1)
        elif field.message_type is not None:
            if depth < 5:
                one = getattr(message, field.name)
                filled(one.add() if field.is_repeated else one, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append("twö")
        else:
            setattr(message, field.name, value_of(field, number))
    return message


def value_of(field: FieldDescriptor, number: int) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    values: dict[int, object] = {
        FieldDescriptor.TYPE_STRING: f"{field.name} é",
        FieldDescriptor.TYPE_BYTES: b"\x00\xff",
        FieldDescriptor.TYPE_BOOL: True,
        FieldDescriptor.TYPE_INT64: 2**53 + number,
    }
    if field.containing_type is not None and field.containing_type.full_name.startswith("google.protobuf."):
        return number  # seconds and nanos have other bounds
    return values.get(field.type, 1_000 + number)


def event_with(field: FieldDescriptor) -> AgentEvent:
    """An event with everything in its envelope and in the payload of this field."""
    event = AgentEvent(
        run_id=RUN_ID,
        sequence=2**53 + 1,
        record_time=at(1),
        invocation_id="i",
        parent_invocation_id="p",
        agent="a",
        branch="b/a",
        depth=1,
        session_id=SESSION_ID,
        step_id="s",
        step_index=2,
        attempt=3,
        effect_key="s0.m",
        effect_digest="d",
        trace_id="t",
        span_id="u",
    )
    filled(getattr(event, field.name))
    getattr(event, field.name).SetInParent()
    return event


@pytest.mark.parametrize("field", PAYLOADS, ids=lambda field: str(field.name))
def test_every_payload_survives_bytes_and_json(field: FieldDescriptor) -> None:
    event = event_with(field)
    assert events.kind_of(event) == field.number
    assert events.name_of(event) == events.NAME_OF_KIND[field.number]
    assert AgentEvent.FromString(event.SerializeToString()) == event
    as_json = json_format.MessageToJson(event)
    assert json_format.Parse(as_json, AgentEvent()) == event
    assert f'"sequence": "{2**53 + 1}"' in as_json
    assert len(getattr(event, field.name).ListFields()) == how_many_can_be_set(field)


def how_many_can_be_set(field: FieldDescriptor) -> int:
    """The fields of a payload, of each oneof one."""
    oneofs = list(type_of(field).oneofs)
    return len(type_of(field).fields) - sum(len(oneof.fields) - 1 for oneof in oneofs)


def test_an_unknown_payload_keeps_its_sequence_and_its_bytes() -> None:
    later = AgentEvent(sequence=7, invocation_id="i").SerializeToString() + bytes((0xFA, 0x07, 2, 0x0A, 0x00))
    event = AgentEvent.FromString(later)
    assert (event.sequence, events.kind_of(event), events.name_of(event)) == (7, 0, "")
    assert event.SerializeToString() == later


def test_an_unknown_payload_is_ignored_in_json() -> None:
    text = '{"sequence": "7", "memoryCompacted": {"to": 3}, "agent": "a"}'
    assert json_format.Parse(text, AgentEvent(), ignore_unknown_fields=True) == AgentEvent(sequence=7, agent="a")


def older_event_type() -> type[Message]:
    """AgentEvent as a reader knows it whose schema has no sub-agents."""
    pool = descriptor_pool.DescriptorPool()
    for file in dependencies(event_pb2.DESCRIPTOR):
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        if file is event_pb2.DESCRIPTOR:
            event = next(one for one in proto.message_type if one.name == "AgentEvent")
            known = [field for field in event.field if field.number not in TAGS_OF_GROUP["sub_agent"]]
            del event.field[:]
            event.field.extend(known)
        pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bough.v1.AgentEvent"))


def dependencies(file: FileDescriptor, found: dict[str, FileDescriptor] | None = None) -> list[FileDescriptor]:
    """The file and all that it imports, the imported before the importing."""
    found = {} if found is None else found
    for needed in file.dependencies:
        dependencies(needed, found)
    found.setdefault(file.name, file)
    return list(found.values())


def test_a_reader_that_knows_no_sub_agents_still_reads_the_main_stream() -> None:
    older = older_event_type()
    assert "sub_agent_started" not in older.DESCRIPTOR.fields_by_name
    for event in desk():
        data = event.SerializeToString()
        read = older.FromString(data)
        payload = event.WhichOneof("payload")
        assert payload is not None
        if payload.startswith("sub_agent_"):
            assert read.WhichOneof("payload") is None
        else:
            assert read.WhichOneof("payload") == payload
            assert getattr(read, payload).SerializeToString() == getattr(event, payload).SerializeToString()
        assert (read.sequence, read.agent) == (event.sequence, event.agent)  # type: ignore[attr-defined]
        assert AgentEvent.FromString(read.SerializeToString()) == event


def test_a_stamp_before_stored_bytes_is_the_event_with_its_ids() -> None:
    stamp = events.stamp(RUN_ID, SESSION_ID)
    assert [events.parse(stamp + row.data) for row in stored(desk())] == stamped(desk())


def test_a_stamp_takes_ids_of_up_to_127_bytes() -> None:
    event = events.parse(events.stamp("r" * 127, "s"))
    assert event == AgentEvent(run_id="r" * 127, session_id="s")


def test_an_event_in_the_place_of_another_says_where_it_is_and_nothing_else() -> None:
    for other in desk():
        event = events.in_place_of(other)
        expected = AgentEvent()
        expected.CopyFrom(other)
        expected.ClearField("payload")
        for own in ("sequence", "record_time", "attempt", "effect_digest"):
            expected.ClearField(own)
        assert event == expected
