"""Calls that no well-behaved client makes: bytes that are no message, thousands at once, metadata as a weapon."""

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2

from bough.v1 import agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import served, settings

METHODS: list[MethodDescriptor] = [
    method
    for module in (
        agent_service_pb2,
        catalog_service_pb2,
        eval_service_pb2,
        session_service_pb2,
        health_pb2,
        reflection_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

NO_MESSAGE = b"\xff\xff\xff\xff"


async def _sent(channel: aio.Channel, method: MethodDescriptor, data: bytes) -> aio.AioRpcError:
    """Send bytes as the request of a method; return the error of the call."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    is_stream = (method.client_streaming, method.server_streaming)
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }

    async def requests() -> Any:
        yield data

    async def responses() -> list[Any]:
        call = kinds[is_stream](name)(requests() if method.client_streaming else data)
        return [response async for response in call] if method.server_streaming else [await call]

    with pytest.raises(aio.AioRpcError) as failed:
        await responses()
    return failed.value


async def test_bytes_that_are_no_message_are_refused_by_every_method_without_a_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with served(settings(tmp_path)) as it:
        with caplog.at_level(logging.DEBUG):
            refused = {method.full_name: await _sent(it.channel, method, NO_MESSAGE) for method in METHODS}
    assert len(refused) >= 25
    for name, error in refused.items():
        service, _, method = name.rpartition(".")
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, name
        assert error.details() == f"The bytes are no request of {service}/{method} in protobuf."
        info, request = status_details(error)
        assert info == ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev")
        assert isinstance(request, BadRequest)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


async def test_health_lists_every_service(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as it:
        stub = HealthStub(it.channel)
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: one.status for name, one in listed.items()} == dict.fromkeys(
            ("", *(f"bough.v1.{name}Service" for name in ("Access", "Agent", "Catalog", "Eval", "Session", "Usage"))),
            health_pb2.HealthCheckResponse.SERVING,
        )


async def test_thousands_of_calls_at_once_are_all_answered(tmp_path: Path) -> None:
    async def check(stub: Any) -> str:
        try:
            await stub.Check(health_pb2.HealthCheckRequest())
        except aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async with served(settings(tmp_path)) as it:
        stub = HealthStub(it.channel)
        answered = Counter(await asyncio.gather(*(check(stub) for _ in range(2_000))))
    assert answered == {"OK": 2_000}
