"""TLS of a server over real sockets: its ports, certificates of clients, and files that change while it serves."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from structlog.testing import capture_logs

from bough.v1 import agent_service_pb2 as pb
from bough.v1.agent_service_pb2_grpc import AgentServiceStub
from bough_server import watched_files
from bough_server.app import App
from bough_server.errors import ConfigurationError
from tests.rpc.agents import GATES
from tests.rpc.run_server import Turn, said, settings
from tests.rpc.test_metrics import scraped
from tests.support.callers import KeyRing, bearer, stubs
from tests.support.certificates import DAY, FOR_SERVERS, Authority, Issued
from tests.support.databases import on_postgres

SERVERS, CLIENTS, STRANGERS = Authority("servers"), Authority("clients"), Authority("strangers")
"""Who issues certificates of servers, of clients, and of neither."""

SPIFFE = x509.UniformResourceIdentifier("spiffe://acme.example/ns/jobs/nightly")


class Files:
    """The certificates of a server in a folder, which it watches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(SERVERS.issue())
        self.trust(CLIENTS)

    @property
    def section(self) -> dict[str, Any]:
        """The settings of a server with these files, and with a port for probes."""
        tls = {"cert_file": str(self.folder / "server.crt"), "key_file": str(self.folder / "server.key")}
        mtls = {"port": 0, "client_ca_file": str(self.folder / "clients.crt")}
        return {"tls": tls, "mtls": mtls, "health_port": 0}

    def write(self, issued: Issued) -> None:
        """Replace the server's certificate and key."""
        issued.write(self.folder / "server.crt", self.folder / "server.key")

    def trust(self, *authorities: Authority) -> None:
        """Replace the authorities of clients."""
        (self.folder / "clients.crt").write_bytes(b"".join(each.pem for each in authorities))


class Secured:
    """A server with TLS and with a port for clients with certificates."""

    def __init__(self, app: App, files: Files) -> None:
        self.app, self.files = app, files

    async def presented(self) -> str:
        """The fingerprint of the certificate that a new connection is shown."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        host, _, port = self.app.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return hashlib.sha256(shown).hexdigest()

    async def presents(self, issued: Issued) -> None:
        """Wait until new connections are shown a certificate."""
        await until(lambda: self._is_shown(issued))

    async def _is_shown(self, issued: Issued) -> bool:
        return await self.presented() == hashlib.sha256(ssl.PEM_cert_to_DER_cert(issued.chain.decode())).hexdigest()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds outside of this process's event loop: in a file, or in a connection."""
    async with asyncio.timeout(30):
        while not await holds():  # noqa: ASYNC110 # neither has an event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def secured(
    folder: Path, *, files: Files | None = None, ring: KeyRing | None = None, **server: object
) -> AsyncIterator[Secured]:
    """Serve the team with TLS, and metrics; with a ring to callers with its keys only."""
    files = files or Files(folder)
    auth = None if ring is None else ring.auth
    made = settings(folder, server={**files.section, **server}, telemetry={"prometheus_port": 0}, auth=auth)
    async with App.open(made) as app:
        yield Secured(app, files)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll files a hundred times a second."""
    monkeypatch.setattr(watched_files, "POLL_SECONDS", 0.01)


@asynccontextmanager
async def calling(
    address: str, client: Issued | None = None, trusted: Authority = SERVERS
) -> AsyncIterator[aio.Channel]:
    """A channel of a client, which may have a certificate; no other channel shares its connection."""
    own = (None, None) if client is None else (client.key, client.chain)
    credentials = grpc.ssl_channel_credentials(trusted.pem, *own)
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with aio.secure_channel(address, credentials, options=options) as channel:
        yield channel


async def is_accepted(
    address: str, client: Issued | None = None, trusted: Authority = SERVERS, *, key: str = ""
) -> bool:
    """Whether a call is answered; the only other ends are a connection that is not made, and a key that is unknown."""
    async with calling(address, client, trusted) as channel:
        caller = stubs(channel, *([bearer(key)] if key else []))
        code: grpc.StatusCode = await caller.agents.ListRuns(pb.ListRunsRequest(), timeout=20).code()
    others = (grpc.StatusCode.UNAVAILABLE, *([grpc.StatusCode.UNAUTHENTICATED] if key else []))
    assert code in (grpc.StatusCode.OK, *others)
    return code == grpc.StatusCode.OK


async def begin(channel: aio.Channel, gate: str, key: str) -> Turn:
    """Start a run that waits at a gate, as the caller of a key."""
    call = stubs(channel, bearer(key)).agents.Run(pb.RunRequest(agent="waiter", input=said(gate)))
    return await Turn(call=call).until("run_started")


async def test_calls_are_encrypted_and_only_with_a_certificate_that_the_client_trusts(tmp_path: Path) -> None:
    async with secured(tmp_path) as server, aio.insecure_channel(server.app.address) as plain:
        assert await is_accepted(server.app.address)
        assert not await is_accepted(server.app.address, trusted=STRANGERS)
        with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
            await AgentServiceStub(plain).ListRuns(pb.ListRunsRequest())


async def test_the_mtls_port_accepts_certificates_of_its_authority_and_refuses_all_others(tmp_path: Path) -> None:
    clients = {
        "SPIFFE": CLIENTS.issue(SPIFFE),
        "none": None,
        "of a stranger": STRANGERS.issue(SPIFFE),
        "of the server's authority": SERVERS.issue(SPIFFE),
        "expired": CLIENTS.issue(SPIFFE, ends=-DAY),
        "not valid yet": CLIENTS.issue(SPIFFE, begins=DAY, ends=2 * DAY),
        "for servers only": CLIENTS.issue(SPIFFE, usage=[FOR_SERVERS]),
    }
    async with secured(tmp_path) as server:
        accepted = [name for name, client in clients.items() if await is_accepted(server.app.mtls_address, client)]
        anonymous = await is_accepted(server.app.address, clients["of a stranger"])
    assert (accepted, anonymous) == (["SPIFFE"], True)


async def test_health_is_answered_in_plaintext_on_its_port_and_nothing_else_is(tmp_path: Path) -> None:
    async with secured(tmp_path) as server, aio.insecure_channel(server.app.health_address) as channel:
        probe = HealthStub(channel)
        serving = await probe.Check(HealthCheckRequest(service="bough.v1.AgentService"))
        listed = await probe.List(HealthListRequest())
        with pytest.raises(aio.AioRpcError, match="UNIMPLEMENTED"):
            await AgentServiceStub(channel).ListRuns(pb.ListRunsRequest())
        watching = aiter(probe.Watch(HealthCheckRequest(service="")))
        states = [(await anext(watching)).status]
        stopping = asyncio.create_task(server.app.stop())
        states.append((await anext(watching)).status)
        await stopping
    assert serving.status == HealthCheckResponse.SERVING
    assert set(listed.statuses) >= {"", "bough.v1.EvalService"}
    assert states == [HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING]


async def test_streams_of_two_servers_outlive_three_certificates_their_authority_and_changes_of_the_keys(
    tmp_path: Path,
) -> None:
    client, later, files = CLIENTS.issue(SPIFFE), Authority("later clients"), Files(tmp_path)
    ring = KeyRing(tmp_path / "keys.yaml")
    ring.add("anne")
    names = [f"rotation {number}" for number in range(50)]
    with on_postgres(tmp_path):
        async with AsyncExitStack() as stack:
            made = [secured(tmp_path, files=files, ring=ring, max_connection_age=0.05) for _ in range(2)]
            servers = [await stack.enter_async_context(each) for each in made]
            ports = [calling(each.app.address) for each in servers]
            ports += [calling(each.app.mtls_address, client) for each in servers]
            channels = [await stack.enter_async_context(each) for each in ports]
            turns = [
                await begin(channel, name, ring.key("anne"))
                for name, channel in zip(names, cycle(channels), strict=False)
            ]
            for number in range(3):
                renewed = SERVERS.issue()
                files.write(renewed)
                ring.add(f"later-{number}")
                for server in servers:
                    await server.presents(renewed)
                    await until(partial(is_accepted, server.app.address, key=ring.key(f"later-{number}")))
            files.trust(later)
            refused = []
            for server in servers:
                await until(partial(is_accepted, server.app.mtls_address, later.issue(SPIFFE), key=ring.key("anne")))
                refused.append(not await is_accepted(server.app.mtls_address, client, key=ring.key("anne")))
            for name in names:
                GATES[name].set()
            await asyncio.gather(*(turn.to_the_end() for turn in turns))
    assert refused == [True, True]
    for turn in turns:
        assert turn.kinds[-1] == "run_completed"
        assert [event.sequence for event in turn.events] == list(range(1, len(turn.events) + 1))


async def test_files_that_are_half_written_keep_the_old_certificate_and_are_reported(tmp_path: Path) -> None:
    async with secured(tmp_path) as server:
        before, renewed = await server.presented(), SERVERS.issue()
        with capture_logs() as logged:
            (tmp_path / "server.crt").write_bytes(renewed.chain[:300])
            await until(lambda: _is_logged(logged, "error"))
            refused = await _metric(server, "bough_certificate_files_refused")
            assert (await server.presented(), await is_accepted(server.app.address)) == (before, True)
            server.files.write(renewed)
            await server.presents(renewed)
        repaired = await _metric(server, "bough_certificate_files_refused")
        expiry = await _metric(server, "bough_certificate_expiry_seconds")
    assert (refused, repaired) == (1, 0)
    assert [line["problem"].partition(",")[0] for line in logged if line["log_level"] == "error"] == [
        f"{tmp_path / 'server.crt'} has no certificates"
    ]
    assert expiry == pytest.approx(_expiry(renewed))


def _expiry(issued: Issued) -> float:
    return x509.load_pem_x509_certificate(issued.chain).not_valid_after_utc.timestamp()


async def _is_logged(logged: list[dict[str, object]], level: str) -> bool:
    return any(line["log_level"] == level for line in logged)


async def _metric(server: Secured, name: str) -> float:
    return (await asyncio.to_thread(scraped, server.app.metrics_address))[name]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("server.crt", None, r"server\.crt cannot be read: No such file or directory\."),
        ("server.key", STRANGERS.issue().key, r"server\.key is not the key of the certificate in .*server\.crt"),
        ("clients.crt", b"half", r"clients\.crt has no certificates, or one that is damaged"),
    ],
)
async def test_a_server_with_files_that_it_cannot_use_does_not_start(
    tmp_path: Path, file: str, content: bytes | None, problem: str
) -> None:
    section = Files(tmp_path).section
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"^bough\.yaml: server\.m?tls: .*{problem}"):
        async with App.open(settings(tmp_path, server=section)):
            pass


async def test_a_key_that_every_user_can_read_is_a_warning(tmp_path: Path) -> None:
    section = Files(tmp_path).section
    (tmp_path / "server.key").chmod(0o644)
    with capture_logs() as logged:
        async with App.open(settings(tmp_path, server=section)):
            pass
    warnings = [(line["event"], line["file"]) for line in logged if line["log_level"] == "warning"]
    words = "every user of this machine can read the server's private key: remove the right, as `chmod o-r` does"
    assert warnings == [(words, str(tmp_path / "server.key"))]


NO_TLS, NO_AUTH = "calls are not encrypted", "callers are not authenticated"


@pytest.mark.parametrize(
    ("allowed", "has_tls", "missing", "warned"),
    [
        ((), False, ["--allow-no-tls", "--allow-no-auth"], []),
        ((), True, ["--allow-no-auth"], []),
        (("allow_no_auth",), False, ["--allow-no-tls"], []),
        (("allow_no_tls",), False, ["--allow-no-auth"], []),
        (("allow_no_auth",), True, [], [NO_AUTH]),
        (("allow_no_tls", "allow_no_auth"), False, [], [NO_TLS, NO_AUTH]),
        (("allow_insecure",), False, [], [NO_TLS, NO_AUTH]),
    ],
)
async def test_beyond_loopback_each_protection_is_there_or_left_out_on_purpose(
    tmp_path: Path, allowed: tuple[str, ...], has_tls: bool, missing: list[str], warned: list[str]
) -> None:
    tls = Files(tmp_path).section["tls"]
    section = {"host": "0.0.0.0", "tls": tls if has_tls else None, **dict.fromkeys(allowed, True)}
    refusal = ""
    with capture_logs() as logged:
        try:
            async with App.open(settings(tmp_path, server=section)):
                pass
        except ConfigurationError as error:
            refusal = error.message
    assert [flag for flag in ("--allow-no-tls", "--allow-no-auth") if flag in refusal] == missing
    assert [line["event"].partition(":")[0] for line in logged if line["log_level"] == "warning"] == warned
