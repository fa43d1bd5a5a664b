"""Spans of calls: in the caller's trace, with the right status codes."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import run_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough_server import errors
from bough_server.observability.tracing import Parent, Tracing, make_provider
from tests.rpc.interceptor_server import Method, behaving

_CALLERS_TRACE = "0af7651916cd43dd8448eb211c80319c"
_CALLERS_SPAN = "b7ad6b7169203331"


class _FirstSpan(SpanProcessor):
    """Keeps the first span that ends; a caller may see the end of its call before the server does."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[ReadableSpan] = asyncio.get_running_loop().create_future()

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.set_result(span)


async def _span_of(method: Method, *, timeout: float | None = None, cancels: bool = False) -> ReadableSpan:
    """The span of one call of WatchRun."""
    first = _FirstSpan()
    provider = make_provider(export=False, processor=first)
    async with behaving(add_AgentServiceServicer_to_server, provider=provider, WatchRun=method) as channel:
        call = AgentServiceStub(channel).WatchRun(pb.WatchRunRequest(run_id="r"), timeout=timeout)
        await call.read()
        if cancels:
            call.cancel()
        with pytest.raises((aio.AioRpcError, asyncio.CancelledError)):
            await call.read()
        return await first.ended


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.NotFound("run", "r"), code_pb2.NOT_FOUND, StatusCode.UNSET),
        (errors.ServerStopping("The server stops."), code_pb2.UNAVAILABLE, StatusCode.ERROR),
        (ValueError("a defect"), code_pb2.INTERNAL, StatusCode.ERROR),
    ],
)
async def test_the_span_of_a_failed_call_has_the_code_that_the_caller_got(
    error: Exception, code: int, status: StatusCode
) -> None:
    async def fail(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        yield pb.WatchRunResponse()
        raise error

    span = await _span_of(fail)
    assert span.attributes is not None
    assert (span.attributes["rpc.grpc.status_code"], span.status.status_code) == (code, status)


async def _wait_for_ever(request: Any, context: Any) -> AsyncGenerator[Any, None]:
    yield pb.WatchRunResponse()
    await asyncio.get_running_loop().create_future()


async def test_the_span_of_a_cancelled_call_says_cancelled() -> None:
    span = await _span_of(_wait_for_ever, cancels=True)
    assert span.attributes is not None
    assert (span.attributes["rpc.grpc.status_code"], span.status.status_code) == (code_pb2.CANCELLED, StatusCode.UNSET)


async def test_the_span_of_an_overdue_call_says_deadline_exceeded() -> None:
    span = await _span_of(_wait_for_ever, timeout=1.0)
    assert span.attributes is not None
    assert span.attributes["rpc.grpc.status_code"] == code_pb2.DEADLINE_EXCEEDED
    assert span.status.status_code == StatusCode.ERROR


async def test_the_callers_trace_goes_on_below_the_call_with_its_baggage() -> None:
    exporter = InMemorySpanExporter()
    provider = make_provider(export=False, processor=SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)

    async def get_run(request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        parent = Parent.current()
        tracing.chat(model="m", provider="scripted", parent=parent).end()
        return pb.GetRunResponse(run=run_pb2.Run(agent=str(parent.baggage("team"))))

    metadata = (("traceparent", f"00-{_CALLERS_TRACE}-{_CALLERS_SPAN}-01"), ("baggage", "team=desk"))
    async with behaving(add_AgentServiceServicer_to_server, provider=provider, GetRun=get_run) as channel:
        response = await AgentServiceStub(channel).GetRun(pb.GetRunRequest(run_id="r"), metadata=metadata)
    chat, call = exporter.get_finished_spans()
    assert response.run.agent == "desk"
    assert chat.context is not None
    assert call.context is not None
    assert chat.parent is not None
    assert call.parent is not None
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (_CALLERS_TRACE, _CALLERS_SPAN)
    assert (chat.context.trace_id, chat.parent.span_id) == (call.context.trace_id, call.context.span_id)
    assert call.attributes is not None
    assert call.attributes["rpc.grpc.status_code"] == grpc.StatusCode.OK.value[0]
