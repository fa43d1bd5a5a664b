"""Health, as load balancers and command-line tools use them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough_server.api.health import SERVICES, Health
from bough_server.interceptors.chain import interceptors

_SERVING, _NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def _operated(health: Health) -> AsyncIterator[aio.Channel]:
    server = aio.server(interceptors=interceptors(None))
    await health.start(server)
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
        await health.set_serving()
        during = await _states(stub)
        await health.set_not_serving()
        await health.set_serving()
        after = await _states(stub)
    assert SERVICES == (
        "bough.v1.AccessService",
        "bough.v1.AgentService",
        "bough.v1.CatalogService",
        "bough.v1.EvalService",
        "bough.v1.SessionService",
        "bough.v1.UsageService",
    )
    assert (set(before.values()), set(during.values()), set(after.values())) == (
        {_NOT_SERVING},
        {_SERVING},
        {_NOT_SERVING},
    )


async def test_who_watches_health_sees_the_server_stop() -> None:
    health = Health()
    async with _operated(health) as channel:
        await health.set_serving()
        watching = aiter(HealthStub(channel).Watch(HealthCheckRequest(service="bough.v1.AgentService")))
        seen = [(await anext(watching)).status]
        await health.set_not_serving()
        seen.append((await anext(watching)).status)
    assert seen == [_SERVING, _NOT_SERVING]


async def test_the_health_of_an_unknown_service_is_not_found() -> None:
    async with _operated(Health()) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await HealthStub(channel).Check(HealthCheckRequest(service="bough.v1.Nothing"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
