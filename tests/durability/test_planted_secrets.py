"""Secrets of callers and of the server: wherever they are sent, nothing that a server writes or answers has them."""

import asyncio
import base64
import re
import time
import urllib.request
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
from grpc import aio

from bough import v1
from tests.rpc.run_server import Turn, said
from tests.rpc.test_mutated_metadata import call_raw
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs
from tests.support.certificates import Authority
from tests.support.issuer import Issuer, issuing
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project

AUTHORITY: Final = Authority()

UNREAD: Final = ("x-request-id", "bough-client", "traceparent", "baggage", "cookie", "x-api-key")
"""Metadata that the server reads, or that other systems use; none of it is the place of a secret."""


class _Sink(grpc.GenericRpcHandler):
    """Takes all that is exported by OTLP, as bytes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._keep)

    def _keep(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        self.received.append(request)
        return b""


@contextmanager
def collecting() -> Iterator[tuple[_Sink, str]]:
    """Serve a sink; yield it with its address."""
    sink, server = _Sink(), grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers([sink])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sink, address
    finally:
        server.stop(grace=None).wait()


def write_server(folder: Path, ring: KeyRing, issuer: Issuer) -> Path:
    """Write the configuration of a server with every port and every proof that there is."""
    AUTHORITY.issue().write(folder / "server.crt", folder / "server.key")
    (folder / "authority.crt").write_bytes(AUTHORITY.pem)
    return write_project(
        folder,
        llm("alone"),
        llm("silent"),
        script={"alone": ["Hm."] * 99},
        server={
            "tls": {"cert_file": "server.crt", "key_file": "server.key"},
            "mtls": {"port": 0, "client_ca_file": "authority.crt"},
            "health_port": 0,
        },
        auth={**ring.auth, "oidc": [issuer.section(leeway=0)]},
        telemetry={"prometheus_port": 0},
        log_level="debug",
        storage={"durability": "process"},
    )


def spell(secret: bytes) -> Sequence[bytes]:
    """Return a secret in each form in which it could be found."""
    encoded = base64.b64encode(secret).rstrip(b"=")
    return (secret, encoded, encoded.translate(bytes.maketrans(b"+/", b"-_")), secret.hex().encode())


def make_calls(caller: CallerStubs) -> list[Awaitable[object]]:
    """Make calls that do and that do not what they ask for."""
    agents = ("alone", "silent", "none")
    runs = [caller.agents.Run(v1.RunRequest(agent=agent, input=said("hi"))) for agent in agents]
    return [
        caller.access.GetCaller(v1.GetCallerRequest()),
        caller.agents.ListRuns(v1.ListRunsRequest(page_size=-1)),
        caller.sessions.CreateSession(v1.CreateSessionRequest()),
        caller.trees.AggregateEvents(iter([v1.AggregateEventsRequest()])),
        *(Turn(call=call).to_the_end() for call in runs),
    ]


def name_things(caller: CallerStubs, secret: str) -> list[Awaitable[object]]:
    """Make calls with a part of a secret in place of ids."""
    return [
        caller.agents.GetRun(v1.GetRunRequest(run_id=secret[:64])),
        Turn(call=caller.agents.Run(v1.RunRequest(agent=secret[:64], input=said("hi")))).to_the_end(),
    ]


async def collect_errors(calls: Iterable[Awaitable[object]]) -> list[str]:
    """Return all that the errors of calls say."""
    ends = await asyncio.gather(*calls, return_exceptions=True)
    return [f"{end} {end.trailing_metadata()}" for end in ends if isinstance(end, aio.AioRpcError)]


async def send_everywhere(server: Serving, ring: KeyRing, secrets: Sequence[str]) -> list[str]:
    """Send secrets as proofs, in other metadata, in requests and to the wrong ports; return what errors say."""
    own, roots = AUTHORITY.issue(), AUTHORITY.pem
    health, mtls = (str(re.findall(rf"{name}=(\S+)", server.said)[0]) for name in ("health", "mtls"))
    backend, calls = bearer(ring.key("backend")), []
    async with (
        aio.secure_channel(server.address, grpc.ssl_channel_credentials(roots)) as channel,
        aio.secure_channel(mtls, grpc.ssl_channel_credentials(roots, own.key, own.chain)) as at_mtls,
        aio.insecure_channel(health) as at_health,
    ):
        for secret in secrets:
            calls += make_calls(stubs(channel, bearer(secret)))
            calls += make_calls(stubs(channel, backend, *((name, secret) for name in UNREAD)))
            for wrong in (
                stubs(channel, bearer(f"{secret}x")),
                stubs(channel, bearer(secret), bearer(secret)),
                stubs(channel, ("authorization", f"Basic {secret}")),
                stubs(channel, ("authorization", secret)),
                stubs(channel, backend, ("bough-user-id", secret)),
                stubs(at_mtls, bearer(f"{secret}x")),
                stubs(at_health, bearer(secret)),
            ):
                calls.append(wrong.access.GetCaller(v1.GetCallerRequest()))
        errors = await collect_errors(calls)
        # Errors of these may repeat to their caller what it has asked for.
        await collect_errors(call for secret in secrets for call in name_things(stubs(channel, bearer(secret)), secret))
        for secret in secrets:
            await call_raw(health, (b"authorization", b"Bearer " + secret.encode() + b"\xff"))
            with suppress(EOFError, ConnectionError):  # no TLS at a port that has it
                await call_raw(server.address, (b"authorization", b"Bearer " + secret.encode()))
    return errors


async def read_metrics(server: Serving, secret: str) -> bytes:
    """Return the page of metrics, which is asked for with a secret."""
    (address,) = re.findall(r"metrics=(\S+)", server.said)
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {secret}"})

    def read() -> bytes:
        with urllib.request.urlopen(request, timeout=10) as page:
            return bytes(page.read())

    return await asyncio.to_thread(read)


async def test_planted_secrets_are_found_nowhere(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    ring = KeyRing(tmp_path / "keys.yaml")
    for key_id, fields in {
        "ci": {},
        "backend": {"acts_for": "users"},
        "old": {"expires": "2020-01-01T00:00:00Z"},
    }.items():
        ring.add(key_id, **fields)
    async with issuing() as issuer:
        config = write_server(project, ring, issuer)
        private = (project / "server.key").read_bytes()
        tokens = [issuer.token(), issuer.token(exp=int(time.time()) - 5, iat=int(time.time()) - 60)]
        sent = [ring.key("ci"), ring.key("old"), *tokens]
        with collecting() as (sink, endpoint):
            environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{endpoint}", "OTEL_BSP_SCHEDULE_DELAY": "100"}
            async with serving(config, environment=environment) as server:
                errors = await send_everywhere(server, ring, sent)
                page = await read_metrics(server, sent[0])
                # What operators get wrong: a key in place of its hash, and the key of another certificate.
                ring.path.write_text(f"keys: [{{id: ci, sha256: {ring.key('ci')}, tenant: acme, user: ci}}]")
                (project / "server.key").write_bytes(AUTHORITY.issue().key)
                await server.until_said("keys[0].sha256")
                await server.until_said("is not the key of the certificate")
    searched = {
        **{path.name: path.read_bytes() for path in project.rglob("*") if path.is_file() and path.suffix != ".key"},
        "metrics": page,
        "errors": "\n".join(errors).encode(),
        "exports": b"\n".join(sink.received),
    }
    private_lines = private.splitlines()[1:-1]
    secrets = {
        **{f"key {name}": [name.encode().ljust(32, b"."), ring.key(name)[-43:].encode()] for name in ring.entries},
        **{f"token {number}": [*map(str.encode, token.split(".")[1:])] for number, token in enumerate(tokens)},
        "private key": [*private_lines, base64.b64decode(b"".join(private_lines))],
    }
    assert find_secrets(secrets, searched) == []
    # There was something to search.
    assert {"bough.db", "serve.stderr"} <= searched.keys()
    assert [word for word in (b"AgentService/Run", b"bough_runs") if word not in searched["exports"] + page] == []
    codes = {"UNAUTHENTICATED", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}
    assert codes <= set(re.findall(r"StatusCode\.(\w+)", "\n".join(errors)))
    assert "it has expired" in searched["serve.stderr"].decode()


def find_secrets(secrets: Mapping[str, Iterable[bytes]], searched: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return each secret with each place that has one of its parts, in any of the usual forms."""
    return [
        (name, place)
        for name, parts in secrets.items()
        for place, data in searched.items()
        if any(form in data for part in parts for form in spell(part))
    ]
