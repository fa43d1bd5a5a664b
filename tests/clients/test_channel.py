"""Channel options: which calls are retried, and that the caller's options win."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc import aio

from bough import NO_REJOINING, AsyncClient, Client, Rejoining, Unavailable, collect
from bough.channel import RETRIED_METHODS
from bough.v1.session_service_pb2_grpc import SessionServiceServicer, add_SessionServiceServicer_to_server
from bough_server.auth import access
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import AT_ONCE, Call, LoopbackService, client_of, listening

SERVICES = {descriptor.full_name: descriptor for descriptor in access.SERVICES}
NOT_TWICE = {
    "bough.v1.CatalogService": {"CreateAgent", "DeleteAgent"},
    "bough.v1.EvalService": {"DeleteEvaluation"},
    "bough.v1.SessionService": {"DeleteSession", "UpdateSession", "UpdateSessionState"},
}


class FullSessions(SessionServiceServicer):
    """Refuses every call as unavailable, and counts the calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.request_ids: list[str] = []

    async def CreateSession(self, request, context):
        self.asked.append("CreateSession")
        self.request_ids.append(request.request_id)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "full")

    async def GetSession(self, request, context):
        self.asked.append("GetSession")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "full")

    async def DeleteSession(self, request, context):
        self.asked.append("DeleteSession")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "full")


@asynccontextmanager
async def full() -> AsyncIterator[tuple[FullSessions, AsyncClient]]:
    service, server = FullSessions(), aio.server()
    add_SessionServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        yield service, client
    await server.stop(0)


def test_of_every_method_it_is_said_whether_it_may_be_called_twice_for_once() -> None:
    every = {name: {method.name for method in service.methods} for name, service in SERVICES.items()}
    said = {name: set(methods) | NOT_TWICE.get(name, set()) for name, methods in RETRIED_METHODS.items()}
    assert said == every


@pytest.mark.parametrize("kind", [AsyncClient, Client])
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:50051", "is a URL: write HOST:PORT, such as 127.0.0.1:50051. For TLS pass credentials"),
        ("https://bough.example", "is a URL: write HOST:PORT"),
        ("bough.example", "has no port: write HOST:PORT, such as 127.0.0.1:50051"),
        ("dns:///bough.example", "has no port"),
        ("ipv4:192.0.2.7:1,192.0.2.8", "has no port"),
        ("[::1]", "has no port"),
        ("::1:50051", "is not HOST:PORT"),
        ("bough.example:http", "is not HOST:PORT"),
        ("tcp://bough.example:1", "is not HOST:PORT"),
        ("", "is not HOST:PORT"),
        ("a:1,,b:1", "has an empty item: write HOST:PORT,HOST:PORT."),
        ("a:1,", "has an empty item"),
        ("a:1,b:1, a:1", "names 'a:1' twice: name each server once."),
        ("a:1,b", "has no port in 'b': write HOST:PORT"),
        ("a:1;b:1", "is not HOST:PORT"),
        ("a:1,b:c", "is not HOST:PORT,HOST:PORT: 'b:c' is not one."),
        ("dns:a:1,dns:b:1", "has 'dns:a:1' in a list: write HOST:PORT,HOST:PORT, without dns:."),
        ("a:1,ipv4:b:1", "has 'ipv4:b:1' in a list: write HOST:PORT,HOST:PORT, without ipv4:."),
        ("a:1,http://b:1", "is not HOST:PORT,HOST:PORT: 'http://b:1' is not one."),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(address: str, said: str, kind: type[Client]) -> None:
    with pytest.raises(ValueError, match=f"^The address '{re.escape(address)}' {said}"):
        kind(address)


@pytest.mark.parametrize(
    "address",
    [
        "dns://192.0.2.1/bough.example:1",
        "ipv4:192.0.2.7:1,192.0.2.8:1",
        "[::1]:1",
        "unix:bough.sock",
        "localhost:1, [::1]:1",
    ],
)
async def test_an_address_may_be_any_that_grpc_resolves(address: str) -> None:
    async with AsyncClient(address) as client:
        assert client.address == address


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:50051"])
async def test_a_server_that_is_down_is_reported_with_the_command_that_starts_one(address: str) -> None:
    def call() -> None:
        with Client(address) as client:
            with pytest.raises(Unavailable, match="No server could be reached: start one with `bough serve`"):
                client.get_run("r1")
            with pytest.raises(Unavailable, match="No server could be reached: start one with `bough serve`"):
                client.ask("lead", "hi")

    async with asyncio.timeout(Rejoining().timeout / 4):
        await asyncio.to_thread(call)
        async with AsyncClient(address) as client:
            with pytest.raises(Unavailable, match="No server could be reached: start one with `bough serve`"):
                await client.get_run("r1")
            with pytest.raises(Unavailable, match="No server could be reached: start one with `bough serve`"):
                await client.evaluations.watch("e1").result()


@pytest.mark.parametrize("other", ["localhost", "[::1]", "no-such-host.invalid"])
async def test_of_several_addresses_the_first_that_answers_is_used_and_streams_continue_at_the_next(other: str) -> None:
    first, second = LoopbackService(desk(), [Call(events=2, hold=True)]), LoopbackService(desk())
    async with listening(second) as port, AsyncExitStack() as serving:
        lost = await serving.enter_async_context(listening(first))
        address = f"{other}:1,localhost:{lost}, 127.0.0.1:{port}"
        async with AsyncClient(address, rejoining=AT_ONCE) as client:
            stream = client.run("lead", "hi")
            events = [await anext(stream), await anext(stream)]
            await serving.aclose()
            events += [event async for event in stream]
            assert (await client.get_run(RUN_ID)).last_sequence == len(desk())
    assert events == desk()
    assert (len(first.asked), len(second.asked)) == (1, 1)


async def test_several_addresses_are_used_by_the_synchronous_client() -> None:
    async with listening(LoopbackService(desk())) as port:
        with Client(f"localhost:1,localhost:{port}") as client:
            assert await asyncio.to_thread(lambda: list(client.run("lead", "hi"))) == desk()


async def test_names_of_which_none_is_known_are_reported_as_a_server_that_is_down() -> None:
    async with AsyncClient("no-such-host.invalid:1,other-host.invalid:1") as client:
        with pytest.raises(Unavailable, match="No server could be reached: start one with `bough serve`"):
            await client.get_run("r1")


async def test_a_session_is_asked_for_again_under_the_same_request_id() -> None:
    async with full() as (service, client):
        for _ in range(2):
            with pytest.raises(Unavailable, match="full"):
                await client.sessions.create()
        with pytest.raises(Unavailable, match="full"):
            await client.sessions.create(request_id="mine")
    first, second, third = (service.request_ids[start : start + 4] for start in (0, 4, 8))
    assert service.asked == ["CreateSession"] * 12
    assert (len(set(first)), len(set(second)), set(third)) == (1, 1, {"mine"})
    assert len({"", first[0], second[0]}) == 3


async def test_deleting_is_not_tried_twice() -> None:
    async with full() as (service, client):
        with pytest.raises(Unavailable, match="full"):
            await client.sessions.delete("s1")
    assert service.asked == ["DeleteSession"]


async def test_reading_is_tried_again() -> None:
    async with full() as (service, client):
        with pytest.raises(Unavailable, match="full"):
            await client.sessions.get("s1")
    assert service.asked == ["GetSession"] * 4


async def test_a_callers_own_options_win() -> None:
    service = LoopbackService(desk(), [Call(silent=True)])
    async with listening(service) as port, client_of(port, NO_REJOINING) as client:
        with pytest.raises(Unavailable, match="silent"):
            await collect(client.run("lead", "hi"))
    assert len(service.asked) == 1
