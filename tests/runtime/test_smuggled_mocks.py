"""Mocks come from evaluations only: whatever a request of a client holds, its run has none and belongs to no case."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from bough.v1 import agent_service_pb2, eval_set_pb2, event_pb2, fork_pb2, message_pb2, policy_pb2
from bough_server.observability.tracing import Parent
from tests.support.examples import examples
from tests.support.fork_agents import World, open_forked, run_of
from tests.support.log_readings import having
from tests.support.run_harness import ME, RunHarness
from tests.support.tool_mocks import mock

METHODS = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].methods_by_name
MOCKS = eval_set_pb2.ToolMocks(tools=[mock("look", "smuggled")], strict=True).SerializeToString()


def reachable(message: Descriptor, seen: set[str]) -> Iterator[Descriptor]:
    """A type of message and all that it can hold."""
    if message.full_name not in seen:
        seen.add(message.full_name)
        yield message
        for field in message.fields:
            if field.message_type is not None:
                yield from reachable(field.message_type, seen)


@pytest.mark.parametrize("method", list(METHODS.values()), ids=list(METHODS))
def test_no_field_of_a_request_holds_mocks_or_names_an_evaluation_to_belong_to(method: object) -> None:
    request: Descriptor = method.input_type  # type: ignore[attr-defined]
    types = {one.full_name: one for one in reachable(request, set())}
    assert not types.keys() & {
        "bough.v1.ToolMocks",
        "bough.v1.ToolMock",
        "bough.v1.RunStarted",
        "bough.v1.RunForked",
        "bough.v1.EvaluationRef",
    }
    named = {name for name, one in types.items() if {"evaluation_id", "case_id"} & set(one.fields_by_name)}
    assert named <= {"bough.v1.RunFilter"}


def smuggling(message: Message, number: int, payload: bytes) -> Message:
    """The message with a field of a number that its type does not have."""
    tag, size, data = number << 3 | 2, len(payload), bytearray()
    for value in (tag, size):
        while value > 127:
            data.append(value & 127 | 128)
            value >>= 7
        data.append(value)
    return type(message).FromString(message.SerializeToString() + bytes(data) + payload)


def with_unknown(request: Message, path: str, number: int, payload: bytes) -> None:
    """Adds an unknown field to the part of a request at a path."""
    part = request
    for name in path.split(".") if path else ():
        part = getattr(part, name)
        part = part[0] if name == "parts" else part  # type: ignore[index]
    if number not in part.DESCRIPTOR.fields_by_number:
        part.CopyFrom(smuggling(part, number, payload))


FIELDS = st.tuples(
    st.sampled_from(["", "input", "input.parts", "policy", "policy.limits", "policy.deltas"]),
    st.integers(1, 40) | st.integers(1, 18_000),
    st.sampled_from([MOCKS, b"an-evaluation"]) | st.binary(max_size=20),
)
EVERYWHERE = [
    (path, number, payload)
    for path in ("", "input", "policy")
    for number, payload in ((10, b"an-evaluation"), (11, b"a case"), (12, MOCKS), (19, b"e"), (20, b"c"), (21, MOCKS))
]


@examples(12)
@given(st.lists(FIELDS, min_size=1, max_size=6))
@example(EVERYWHERE)
def test_unknown_fields_of_a_request_bring_no_mocks(fields: list[tuple[str, int, bytes]]) -> None:
    world = World()
    with tempfile.TemporaryDirectory() as folder:
        log, fork = asyncio.run(_smuggled(Path(folder), world, fields))
    begun = log[0].run_started
    forked = having(fork, "run_forked")[0].run_forked
    for one in (begun, forked):
        assert (one.HasField("mocks"), one.HasField("evaluation")) == (False, False)
    for event in (*log, *fork):
        assert MOCKS not in event.SerializeToString()
    assert world.looked == {"leaf": 2, "root": 2}


async def _smuggled(
    folder: Path, world: World, fields: list[tuple[str, int, bytes]]
) -> tuple[list[event_pb2.AgentEvent], list[event_pb2.AgentEvent]]:
    message = message_pb2.Message(parts=[message_pb2.Part(text="hello")])
    policy = policy_pb2.RunPolicy(
        limits=policy_pb2.Limits(tool_calls=9),
        deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()),
    )
    request = agent_service_pb2.RunRequest(agent="p", input=message, policy=policy)
    for path, number, payload in fields:
        with_unknown(request, path, number, payload)
    async with open_forked(folder, world) as it:
        record = await it.runs.start(ME, request, deadline_time_ns=None, trace=Parent.current())
        log = await it.log(record.run)
        return log, await _forked(it, log, fields)


async def _forked(
    harness: RunHarness, origin: list[event_pb2.AgentEvent], fields: list[tuple[str, int, bytes]]
) -> list[event_pb2.AgentEvent]:
    request = agent_service_pb2.ForkRunRequest(
        run_id=run_of(origin).run_id,
        after_sequence=1,
        policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=9)),
        changes=fork_pb2.ForkChanges(input=message_pb2.Message(parts=[message_pb2.Part(text="hi")])),
    )
    for path, number, payload in fields:
        below = f"changes.{path}" if path.startswith("input") else path
        with_unknown(request, below, number, payload)
    record, _ = await harness.runs.fork(ME, request, deadline_time_ns=None)
    return await harness.log(record.run)
