"""What a request that breaks the schema's rules is told."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import eval_service_pb2, invocation_pb2, message_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough.v1.eval_service_pb2_grpc import EvalServiceStub, add_EvalServiceServicer_to_server
from tests.rpc.servers import behaving, outcome, status_details


async def test_a_stream_is_refused_before_its_handler_with_every_field_that_is_wrong() -> None:
    request = pb.RunRequest(
        agent="",
        input=message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(text="hi")]),
        follow=pb.FollowOptions(event_names=["agent.llm.*", "everything"]),
        labels={"": "x"},
    )
    async with behaving(add_AgentServiceServicer_to_server) as channel:
        received, error = await outcome(AgentServiceStub(channel).Run(request))
    assert received == []
    assert error is not None
    info, bad_request = status_details(error)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert info == ErrorInfo(reason="INVALID_REQUEST", domain="bough")
    assert [(violation.field, violation.reason) for violation in bad_request.field_violations] == [
        ("agent", "string.min_len"),
        ("input", "input.role"),
        ("follow.event_names[1]", "string.pattern"),
        ('labels[""]', "string.min_len"),
    ]


async def test_every_message_of_a_request_stream_is_checked() -> None:
    seen = []

    async def aggregate(requests: AsyncIterator[eval_service_pb2.AggregateEventsRequest], context: Any) -> Any:
        async for request in requests:
            seen.append(request.options.max_agents)  # noqa: PERF401 # what came before a refusal counts
        return eval_service_pb2.AggregateEventsResponse()

    def options(number: int) -> eval_service_pb2.AggregateEventsRequest:
        return eval_service_pb2.AggregateEventsRequest(options=invocation_pb2.InvocationOptions(max_agents=number))

    async with behaving(add_EvalServiceServicer_to_server, AggregateEvents=aggregate) as channel:
        stub = EvalServiceStub(channel)
        assert await stub.AggregateEvents(iter([options(1), options(2)])) == eval_service_pb2.AggregateEventsResponse()
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.AggregateEvents(iter([options(3), options(-1)]))
    _, bad_request = status_details(caught.value)
    assert seen == [1, 2, 3]
    assert bad_request == BadRequest(
        field_violations=[
            BadRequest.FieldViolation(
                field="options",
                description="limits must not be negative, and max_bytes must be at least 1024",
                reason="options.not_negative",
            )
        ]
    )
