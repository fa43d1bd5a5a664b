"""Bounds on the size of requests, checked before a request has any effect."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import aio

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    catalog_service_pb2,
    eval_service_pb2,
    event_pb2,
    execution_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    message_pb2,
    run_pb2,
    session_service_pb2,
)
from bough.v1 import agent_service_pb2 as pb
from bough.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from bough.v1.eval_service_pb2_grpc import EvalServiceStub, add_EvalServiceServicer_to_server
from bough_server.errors import FieldViolation
from bough_server.interceptors.request_limits import MAX_BYTES, MAX_ITEMS, MAX_ITEMS_IN_ALL
from bough_server.interceptors.validation import violations
from tests.rpc.interceptor_server import behaving, outcome, status_details

MANY = MAX_ITEMS + 1
Part = message_pb2.Part


def message(count: int) -> message_pb2.Message:
    return message_pb2.Message(parts=[Part(text="x")] * count)


def resuming(*answers: input_pb2.InputAnswer) -> pb.ResumeRunRequest:
    return pb.ResumeRunRequest(run_id="r", answers=answers)


def forking(**changes: Any) -> pb.ForkRunRequest:
    return pb.ForkRunRequest(run_id="r", after_sequence=1, changes=fork_pb2.ForkChanges(**changes))


def pairs(count: int) -> dict[str, str]:
    return {str(number): "" for number in range(count)}


def outcome_of(count: int) -> message_pb2.ToolOutcome:
    return message_pb2.ToolOutcome(parts=[Part(text="x")] * count)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.RunRequest(agent="a", input=message(MANY)), "input.parts"),
        (pb.RunRequest(agent="a", input=message(1), labels=pairs(MANY)), "labels"),
        (
            pb.RunRequest(agent="a", input=message(1), follow=follow_pb2.FollowOptions(event_names=[""] * MANY)),
            "follow.event_names",
        ),
        (resuming(*[input_pb2.InputAnswer()] * MANY), "answers"),
        (
            resuming(input_pb2.InputAnswer(), input_pb2.InputAnswer(tool_outcome=outcome_of(MANY))),
            "answers[1].tool_outcome.parts",
        ),
        (forking(tool_results=[fork_pb2.EditedResult()] * MANY), "changes.tool_results"),
        (forking(agents={name: fork_pb2.AgentOverride() for name in pairs(MANY)}), "changes.agents"),
        (forking(input=message(MANY)), "changes.input.parts"),
        (
            pb.ListRunsRequest(filter=run_pb2.RunFilter(states=[execution_pb2.EXECUTION_STATE_RUNNING] * MANY)),
            "filter.states",
        ),
        (session_service_pb2.CreateSessionRequest(labels=pairs(MANY)), "labels"),
        (
            catalog_service_pb2.ValidateAgentsRequest(
                definitions=[agent_pb2.AgentDefinition(sub_agents=[agent_pb2.AgentLink()] * MANY)]
            ),
            "definitions[0].sub_agents",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_list_of_more_than_a_thousand_is_refused_alone_and_by_its_path(request_: Message, field: str) -> None:
    assert violations(request_) == [
        FieldViolation(field=field, description="has 1,001 items; a list of a request may have 1,000")
    ]


def test_lists_within_lists_count_together() -> None:
    answers = [input_pb2.InputAnswer(input_id=str(number), tool_outcome=outcome_of(100)) for number in range(256)]
    assert violations(resuming(*answers)) == [
        FieldViolation(
            field="",
            description=f"has more than {MAX_ITEMS_IN_ALL:,} items in all its lists together",
        )
    ]
    assert violations(resuming(*answers[:190])) == []


def test_an_input_of_a_thousand_parts_is_fine() -> None:
    assert violations(pb.RunRequest(agent="a", input=message(MAX_ITEMS))) == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (resuming(*(input_pb2.InputAnswer(input_id=name, value_json=name * 600_000) for name in "12")), "answers[0]"),
        (
            forking(tool_results=[fork_pb2.EditedResult(call_id="c" * 600_000, outcome=outcome_of(1))]),
            "changes.tool_results[0]",
        ),
    ],
)
def test_an_item_that_no_event_can_hold_is_refused_by_its_path(request_: Message, field: str) -> None:
    found = violations(request_)
    assert [violation.field for violation in found] == [field]
    assert "may be 512 KiB" in found[0].description


@pytest.mark.parametrize(
    ("method", "field", "most"),
    [
        ("Run", "input.parts", MAX_BYTES),
        ("ResumeRun", "answers", 2 * MAX_BYTES),
        ("ForkRun", "changes", MAX_BYTES),
        ("WatchRun", "", MAX_BYTES),
    ],
)
async def test_a_request_that_is_too_large_is_refused_without_being_parsed(method: str, field: str, most: int) -> None:
    nonsense = b"\xff" * (most + 1)
    async with behaving(add_AgentServiceServicer_to_server) as channel:
        call: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/bough.v1.AgentService/{method}")
        received, error = await outcome(call(nonsense))
    assert received == []
    assert error is not None
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    info, bad_request = status_details(error)
    assert info == ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev")
    hint = " Send large content as a file (a blob)." if method == "Run" else ""
    said = f"{method}Request is {most + 1:,} bytes and may be {most // 1024:,} KiB.{hint}"
    assert bad_request == BadRequest(
        field_violations=[BadRequest.FieldViolation(field=field, description=said, reason="INVALID_REQUEST")]
    )


async def test_a_request_at_its_bound_is_parsed() -> None:
    async def get_run(request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=run_pb2.Run(run_id=request.run_id))

    request = pb.GetRunRequest(run_id="r")
    padding = MAX_BYTES - request.ByteSize() - 5
    unknown = b"\xfa\x3e" + bytes([padding & 127 | 128, padding >> 7 & 127 | 128, padding >> 14]) + b"x" * padding
    data = request.SerializeToString() + unknown
    assert len(data) == MAX_BYTES
    async with behaving(add_AgentServiceServicer_to_server, GetRun=get_run) as channel:
        call: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/bough.v1.AgentService/GetRun")
        answer = await call(data)
    assert pb.GetRunResponse.FromString(answer) == pb.GetRunResponse(run=run_pb2.Run(run_id="r"))


async def test_recorded_events_are_bounded_by_the_service_that_reads_them() -> None:
    async def aggregate(requests: AsyncIterator[eval_service_pb2.AggregateEventsRequest], context: Any) -> Any:
        seen = [len(request.events) async for request in requests]
        return eval_service_pb2.AggregateEventsResponse(
            invocation={"agents_total": sum(seen)}  # type: ignore[arg-type]  # a mapping stands for a message
        )

    event = event_pb2.AgentEvent(invocation_id="i" * 1_000)
    request = eval_service_pb2.AggregateEventsRequest(events=[event] * (2 * MANY))
    async with behaving(add_EvalServiceServicer_to_server, AggregateEvents=aggregate) as channel:
        answer = await EvalServiceStub(channel).AggregateEvents(iter([request]))
    assert answer.invocation.agents_total == 2 * MANY


def test_every_request_is_named_by_its_method() -> None:
    modules = (agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2)
    methods = [
        method
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert [method.input_type.name for method in methods] == [f"{method.name}Request" for method in methods]
