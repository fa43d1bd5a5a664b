"""TLS and tokens of both clients: a token travels encrypted, or to this machine only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc

from bough import AsyncClient, CallFailed, Client, Unavailable, collect
from bough.channel import Token
from bough.v1 import agent_service_pb2_grpc
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import Call, LoopbackService, listening
from tests.support.certificates import certificate


class _Tokens(aio.ServerInterceptor):
    """Collects what calls say of who they are."""

    def __init__(self) -> None:
        self.seen: list[str | bytes | None] = []

    async def intercept_service(self, continuation, details):
        self.seen.append(dict(details.invocation_metadata).get("authorization"))
        return await continuation(details)


@asynccontextmanager
async def serve_tokens(pem: Path | None = None) -> AsyncIterator[tuple[str, list[str | bytes | None]]]:
    """Serve a run, over TLS if there is a certificate; yield the address and the tokens of calls."""
    tokens = _Tokens()
    server = aio.server(interceptors=[tokens], options=(("grpc.so_reuseport", 0),))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(LoopbackService(desk()), server)
    # For those who ask, such as balancers; it answers all of them with SERVING.
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    if pem is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        key_and_chain = await asyncio.to_thread(pem.read_bytes)
        own = grpc.ssl_server_credentials([(key_and_chain, key_and_chain)])
        port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", tokens.seen
    finally:
        await server.stop(0)


def _sync_use(address: str, credentials: grpc.ChannelCredentials | None, token: Token) -> None:
    with Client(address, credentials=credentials, token=token) as client:
        client.get_run(RUN_ID)
        with client.run("lead", "hi") as stream:
            assert len(list(stream)) == len(desk())


async def _use(address: str, credentials: grpc.ChannelCredentials | None, token: Token) -> None:
    async with AsyncClient(address, credentials=credentials, token=token) as client:
        await client.get_run(RUN_ID)
        await collect(client.run("lead", "hi"))


async def test_a_token_is_sent_with_every_call_over_tls(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    trusted = grpc.ssl_channel_credentials(pem.read_bytes())
    async with serve_tokens(pem) as (address, tokens):
        await _use(address, trusted, "secret")
        await asyncio.to_thread(_sync_use, address, trusted, "secret")
    assert tokens == ["Bearer secret"] * 4


async def test_the_certificates_of_several_servers_are_checked_for_one_name(tmp_path: Path) -> None:
    trusted = grpc.ssl_channel_credentials(certificate(tmp_path, "bough.example").read_bytes())
    async with serve_tokens(tmp_path / "models.pem") as (address, tokens):
        await _use(f"127.0.0.1:1,{address}", trusted, "secret")
        named = (("grpc.default_authority", "bough.example"),)
        async with AsyncClient(f"localhost:1,{address}", credentials=trusted, options=named) as client:
            await client.get_run(RUN_ID)
        with pytest.raises(ValueError, match=r"names several hosts, .* options=\[\(\"grpc.default_authority\""):
            AsyncClient(f"localhost:1,{address}", credentials=trusted)
    assert tokens == ["Bearer secret", "Bearer secret", None]


async def test_a_token_is_sent_in_the_clear_to_this_machine(tmp_path: Path) -> None:
    async with serve_tokens() as (address, tokens):
        await _use(address, None, "secret")
        await asyncio.to_thread(_sync_use, address, None, "secret")
    assert tokens == ["Bearer secret"] * 4


async def test_a_token_that_changes_is_asked_for_with_each_call() -> None:
    current = iter("abcd")
    async with serve_tokens() as (address, tokens):
        await _use(address, None, lambda: next(current))
        await asyncio.to_thread(_sync_use, address, None, lambda: next(current))
    assert tokens == ["Bearer a", "Bearer b", "Bearer c", "Bearer d"]


@pytest.mark.parametrize("token", ["sec\nret", "sec ret", ""])
async def test_a_token_that_no_header_may_have_is_refused_and_not_shown(token: str) -> None:
    async with AsyncClient("127.0.0.1:1", token=token) as client:
        with pytest.raises(ValueError, match=r"^the token is empty or has characters that no bearer token has$"):
            await client.get_run(RUN_ID)


@pytest.mark.parametrize(
    "address",
    [
        "bough.example:443",
        "192.0.2.7:50051",
        "dns:///bough.example:50051",
        "[2001:db8::1]:50051",
        "ipv4:127.0.0.1:1,192.0.2.7:1",
        "127.0.0.1:1,192.0.2.7:1",
    ],
)
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_token_never_travels_unencrypted_to_another_machine(kind: type[Client], address: str) -> None:
    with pytest.raises(ValueError, match=r"the token would travel to .* unencrypted: pass credentials"):
        kind(address, token="secret")


@pytest.mark.parametrize(
    "address",
    [
        "localhost:1",
        "127.0.0.1:1",
        "[::1]:1",
        "dns:///localhost:1",
        "ipv4:127.0.0.1:1",
        "ipv6:[::1]:1",
        "unix:bough.sock",
        "unix:///run/bough.sock",
        "localhost:1,[::1]:1",
    ],
)
def test_this_machine_has_many_names(address: str) -> None:
    Client(address, token="secret").close()


async def test_a_certificate_that_is_not_trusted_ends_the_call(tmp_path: Path) -> None:
    strangers = grpc.ssl_channel_credentials()
    async with (
        serve_tokens(certificate(tmp_path)) as (address, tokens),
        AsyncClient(address, credentials=strangers) as client,
    ):
        with pytest.raises(Unavailable):
            await client.get_run(RUN_ID)
    assert tokens == []


async def test_a_stream_whose_token_has_expired_rejoins_with_the_next_one_and_only_once_without_progress() -> None:
    expired = Call(events=2, code=grpc.StatusCode.UNAUTHENTICATED)
    refused = Call(silent=True, code=grpc.StatusCode.UNAUTHENTICATED)
    current = iter("abcdefgh")
    async with listening(LoopbackService(desk(), [expired, expired])) as port:
        async with AsyncClient(f"127.0.0.1:{port}", token=lambda: next(current)) as client:
            assert list((await collect(client.run("lead", "hi"))).events) == desk()
        assert next(current) == "d"
    async with listening(LoopbackService(desk(), [expired, refused])) as port:
        async with AsyncClient(f"127.0.0.1:{port}", token=lambda: next(current)) as client:
            with pytest.raises(CallFailed) as ended:
                await collect(client.run("lead", "hi"))
        assert (ended.value.code, next(current)) == (grpc.StatusCode.UNAUTHENTICATED, "g")
