"""Streams: cancelled in their own task, and passed through if they are serialized already."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import follow_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough_server.observability.tracing import make_provider
from tests.rpc.interceptor_server import behaving

_REQUEST = pb.WatchRunRequest(run_id="r")


def _response(through: int) -> pb.WatchRunResponse:
    return pb.WatchRunResponse(batch=follow_pb2.EventBatch(through_sequence=through))


@pytest.fixture(params=["spans", "no spans"])
def provider(request: pytest.FixtureRequest) -> TracerProvider | None:
    """The provider of the calls' spans: with one, OpenTelemetry's interceptor is around the streams."""
    processor = SimpleSpanProcessor(InMemorySpanExporter()) if request.param == "spans" else None
    return make_provider(export=False, processor=processor)


async def test_a_generator_may_yield_messages_and_serialized_messages(provider: TracerProvider | None) -> None:
    async def watch(request: pb.WatchRunRequest, context: Any) -> AsyncGenerator[Any, None]:
        yield _response(1)
        yield _response(2).SerializeToString()

    async with behaving(add_AgentServiceServicer_to_server, provider=provider, WatchRun=watch) as channel:
        received = [response async for response in AgentServiceStub(channel).WatchRun(_REQUEST)]
    assert received == [_response(1), _response(2)]


@pytest.mark.parametrize("blocked", ["waiting", "writing"])
async def test_a_cancelled_stream_is_closed_in_the_task_that_served_it(
    blocked: str, provider: TracerProvider | None, caplog: pytest.LogCaptureFixture
) -> None:
    began: list[Any] = []
    ended: asyncio.Future[tuple[Any, Any, type[BaseException]]] = asyncio.get_running_loop().create_future()
    is_full = asyncio.Event()

    async def watch(request: pb.WatchRunRequest, context: Any) -> AsyncGenerator[bytes, None]:
        began.extend((asyncio.current_task(), trace.get_current_span()))
        filler = _response(1).SerializeToString() + bytes((0x7A, 0x80, 0x80, 0x40))
        try:
            yield filler + bytes(1 << 20)
            while blocked == "writing":
                asyncio.get_running_loop().call_later(0.2, is_full.set)
                yield filler + bytes(1 << 20)
                is_full.clear()
            is_full.set()
            await asyncio.get_running_loop().create_future()
        except BaseException as error:
            ended.set_result((asyncio.current_task(), trace.get_current_span(), type(error)))
            raise

    async with behaving(add_AgentServiceServicer_to_server, provider=provider, WatchRun=watch) as channel:
        call = AgentServiceStub(channel).WatchRun(_REQUEST)
        await anext(aiter(call))
        await is_full.wait()
        call.cancel()
        task, span, error = await ended
    assert [task, span] == began
    assert span.get_span_context().is_valid is (provider is not None)
    assert error is (GeneratorExit if blocked == "writing" else asyncio.CancelledError)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
