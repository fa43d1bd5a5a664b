"""Health and reflection, as load balancers and command-line tools use them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from bough.v1 import agent_service_pb2
from bough_server.api.health import SERVICES, Health, add_reflection
from bough_server.interceptors.chain import interceptors
from tests.rpc.interceptor_server import outcome

_SERVING, _NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def _operated(health: Health, *, reflects: bool = True) -> AsyncIterator[aio.Channel]:
    server = aio.server(interceptors=interceptors(None))
    await health.start(server)
    if reflects:
        add_reflection(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(grace=None)


async def _states(stub: HealthStub) -> dict[str, int]:
    return {name: (await stub.Check(HealthCheckRequest(service=name))).status for name in ("", *SERVICES)}


async def test_every_service_is_healthy_from_when_the_server_serves_until_it_stops() -> None:
    health = Health()
    async with _operated(health) as channel:
        stub = HealthStub(channel)
        before = await _states(stub)
        await health.serving()
        during = await _states(stub)
        await health.stopping()
        await health.serving()
        after = await _states(stub)
    assert SERVICES == (
        "bough.v1.AgentService",
        "bough.v1.CatalogService",
        "bough.v1.EvalService",
        "bough.v1.SessionService",
    )
    assert (set(before.values()), set(during.values()), set(after.values())) == (
        {_NOT_SERVING},
        {_SERVING},
        {_NOT_SERVING},
    )


async def test_who_watches_health_sees_the_server_stop() -> None:
    health = Health()
    async with _operated(health) as channel:
        await health.serving()
        watching = aiter(HealthStub(channel).Watch(HealthCheckRequest(service="bough.v1.AgentService")))
        seen = [(await anext(watching)).status]
        await health.stopping()
        seen.append((await anext(watching)).status)
    assert seen == [_SERVING, _NOT_SERVING]


async def test_the_health_of_an_unknown_service_is_not_found() -> None:
    async with _operated(Health()) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await HealthStub(channel).Check(HealthCheckRequest(service="bough.v1.Nothing"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services_and_gives_their_schema() -> None:
    requests = [
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol="bough.v1.AgentService"),
    ]
    async with _operated(Health()) as channel:
        listed, described = [r async for r in ServerReflectionStub(channel).ServerReflectionInfo(iter(requests))]
    assert {service.name for service in listed.list_services_response.service} == {
        *SERVICES,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    names = {
        FileDescriptorProto.FromString(file).name for file in described.file_descriptor_response.file_descriptor_proto
    }
    assert agent_service_pb2.DESCRIPTOR.name in names


async def test_reflection_can_be_left_out() -> None:
    async with _operated(Health(), reflects=False) as channel:
        call = ServerReflectionStub(channel).ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]))
        received, error = await outcome(call)
    assert received == []
    assert error is not None
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
