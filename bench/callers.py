"""The callers case: what proofs of callers, TLS and forged tokens cost, and the lists of one user of many."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc import aio

from bench.desk import ONE, Entrant, raced
from bench.desk_team import write_project
from bench.desk_turns import Turns
from bench.figures import Aim, CaseResult, Figure
from bench.programs import Program, asked
from bench.servers import bough_server, model_server
from bench.user_lists import measure_lists
from bough.v1.access_service_pb2 import GetCallerRequest
from bough.v1.access_service_pb2_grpc import AccessServiceStub
from bough_server.auth.authentication import Authenticator
from bough_server.auth.certificates import Peer
from bough_server.auth.sections import AuthSection
from bough_server.clock import SystemClock
from tests.support.callers import KeyRing, bearer
from tests.support.certificates import Authority, Issued
from tests.support.issuer import Issuer, issuing

if TYPE_CHECKING:
    from bough.v1.access_service_pb2_grpc import AccessServiceAsyncStub

CASE: Final = "callers"
ROUNDS: Final = 9
CALLS: Final = 500
"""Calls of a round, one after the other."""

CONNECTIONS: Final = 40
"""Connections of a round, each with one call."""

FORGED: Final = 1_000
"""Forged tokens a second."""

PACE_MS: Final = 10
TURNS: Final = 8
"""Turns at once beside forged tokens."""

NONE: Final = "none"
KEY: Final = "an API key"
SEEN: Final = "a token seen before"
NEW: Final = "a new token (RS256)"
TLS: Final = "TLS beside that of an API key"
MTLS: Final = "mTLS beside that of an API key"
AIMS: Final[Mapping[str, Aim]] = {
    KEY: Aim("at most", 20, "median"),
    SEEN: Aim("at most", 20, "median"),
    NEW: Aim("at most", 100, "median"),
}
_WHO: Final = GetCallerRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Servers without auth, with it, and with it and TLS; and what their clients need."""

    plain: Program
    proved: Program
    secured: Program
    mtls_address: str
    ring: KeyRing
    issuer: Issuer
    authority: Authority
    client: Issued

    @property
    def key(self) -> str:
        """An API key."""
        return self.ring.key("bench")

    def trust(self, client: Issued | None = None) -> grpc.ChannelCredentials:
        """Return the credentials of a connection with TLS, of a client that may have a certificate."""
        own = (None, None) if client is None else (client.key, client.chain)
        return grpc.ssl_channel_credentials(self.authority.pem, *own)


async def measure(folder: Path, *, rounds: int = ROUNDS, calls: int = CALLS) -> CaseResult:
    """Run the case in an empty folder."""
    failures: list[str] = []
    async with (
        model_server(folder) as base_url,
        model_server(folder, delta_interval_ms=PACE_MS) as paced_base_url,
        _serving(folder, base_url=base_url, paced_base_url=paced_base_url) as servers,
    ):
        figures = [
            *await _measure_proofs(servers, rounds=rounds, calls=calls),
            *await _measure_calls(servers, rounds=rounds, calls=calls),
            *await _measure_connections(servers, rounds=rounds),
            *await _measure_desk(servers, base_url, failures),
            *await _measure_forged(folder, servers, failures, rounds=rounds),
        ]
    (folder / "lists").mkdir()
    return CaseResult(figures=[*figures, *await measure_lists(folder / "lists")], failures=failures)


@asynccontextmanager
async def _serving(folder: Path, **models: str) -> AsyncIterator[Servers]:
    authority, ring = Authority("bench"), KeyRing(folder / "keys.yaml")
    ring.add("bench", roles=["RUN"])
    async with issuing() as issuer, AsyncExitStack() as stack:
        authority.issue().write(folder / "server.crt", folder / "server.key")
        (folder / "clients.crt").write_bytes(authority.pem)
        mtls_port = _find_port()
        auth = {**ring.auth, "oidc": [issuer.section()]}
        files = {"cert_file": str(folder / "server.crt"), "key_file": str(folder / "server.key")}
        mtls = {"port": mtls_port, "client_ca_file": str(folder / "clients.crt")}
        sections: Mapping[str, Mapping[str, Any]] = {
            "plain": {},
            "proved": {"auth": auth},
            "secured": {"auth": auth, "server": {"tls": files, "mtls": mtls}},
        }
        programs = {}
        for name, section in sections.items():
            (folder / name).mkdir()
            config = write_project(folder / name, **models)
            config.write_text(json.dumps(json.loads(config.read_text()) | section), encoding="utf-8")
            programs[name] = await stack.enter_async_context(bough_server(folder, config, name=name))
        yield Servers(
            **programs,
            mtls_address=f"127.0.0.1:{mtls_port}",
            ring=ring,
            issuer=issuer,
            authority=authority,
            client=authority.issue(),
        )


def _find_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def _measure_proofs(servers: Servers, *, rounds: int, calls: int) -> Sequence[Figure]:
    """Measure what the proofs alone cost, without a server around them."""
    section = AuthSection.model_validate({**servers.ring.auth, "oidc": [servers.issuer.section()]})
    authenticator, token = Authenticator(section, {"*"}, clock=SystemClock()), servers.issuer.token()
    await authenticator.prove([bearer(token)], Peer())  # fetches the keys

    async def prove(make_token: Callable[[int], str]) -> float:
        metadata = [[bearer(make_token(number))] for number in range(calls)]
        start = time.thread_time()
        for each in metadata:
            await authenticator.prove(each, Peer())
        return (time.thread_time() - start) * 1e6 / calls

    proofs: Mapping[str, Callable[[int], str]] = {
        KEY: partial(_keep, servers.key),
        SEEN: partial(_keep, token),
        NEW: lambda _: servers.issuer.token(jti=token_hex(8)),
    }
    costs = await _take_rounds({name: partial(prove, make_token) for name, make_token in proofs.items()}, rounds)
    return [
        Figure(case=CASE, what=f"CPU of the proof by {name} alone", unit="us", rounds=found)
        for name, found in costs.items()
    ]


async def _measure_calls(servers: Servers, *, rounds: int, calls: int) -> Sequence[Figure]:
    token, issuer = servers.issuer.token(), servers.issuer
    async with AsyncExitStack() as stack:
        key, seen = partial(_keep, servers.key), partial(_keep, token)
        ways: Mapping[str, tuple[Program, str, grpc.ChannelCredentials | None, Callable[[int], str]]] = {
            KEY: (servers.proved, servers.proved.address, None, key),
            SEEN: (servers.proved, servers.proved.address, None, seen),
            NEW: (servers.proved, servers.proved.address, None, lambda _: issuer.token(jti=token_hex(8))),
            TLS: (servers.secured, servers.secured.address, servers.trust(), key),
            MTLS: (servers.secured, servers.mtls_address, servers.trust(servers.client), key),
        }
        # The same calls, with the same tokens, to a server that does not look at them.
        ways |= {f"{NONE}: {name}": (servers.plain, servers.plain.address, None, ways[name][3]) for name in AIMS}
        measured = {}
        for name, (program, address, credentials, make_token) in ways.items():
            stub = AccessServiceStub(await stack.enter_async_context(_connect(address, credentials)))
            measured[name] = partial(_measure_round, program, stub, calls, make_token)
        costs = await _take_rounds(measured, rounds)
    figures = [Figure(case=CASE, what="CPU of a call without auth", unit="us", rounds=costs[f"{NONE}: {KEY}"])]
    for name, base in [*((name, f"{NONE}: {name}") for name in AIMS), (TLS, KEY), (MTLS, KEY)]:
        more = [cost - without for cost, without in zip(costs[name], costs[base], strict=True)]
        what = f"further CPU of a call with {name}"
        figures.append(Figure(case=CASE, what=what, unit="us", rounds=more, aim=AIMS.get(name)))
    return figures


def _keep(token: str, _: int) -> str:
    return token


async def _measure_round(
    program: Program, stub: "AccessServiceAsyncStub", calls: int, make_token: Callable[[int], str]
) -> float:
    """Make so many calls, and return the microseconds of CPU of the server for each."""
    tokens = [make_token(number) for number in range(calls)]
    start = program.cpu_seconds()
    for token in tokens:
        await stub.GetCaller(_WHO, metadata=[bearer(token)] if token else [])
    return (program.cpu_seconds() - start) * 1e6 / calls


async def _measure_connections(servers: Servers, *, rounds: int) -> Sequence[Figure]:
    ways = {
        NONE: (servers.proved, servers.proved.address, None),
        TLS: (servers.secured, servers.secured.address, servers.trust()),
        MTLS: (servers.secured, servers.mtls_address, servers.trust(servers.client)),
    }

    async def connect(program: Program, address: str, credentials: grpc.ChannelCredentials | None) -> float:
        start = program.cpu_seconds()
        for _ in range(CONNECTIONS):
            async with _connect(address, credentials) as channel:
                await AccessServiceStub(channel).GetCaller(_WHO, metadata=[bearer(servers.key)])
        return (program.cpu_seconds() - start) * 1e3 / CONNECTIONS

    costs = await _take_rounds({name: partial(connect, *way) for name, way in ways.items()}, rounds)
    return [
        Figure(
            case=CASE,
            what=f"CPU of a new connection with one call, {name.partition(' ')[0]}",
            unit="ms",
            rounds=costs[name],
            floor="plaintext",
            floor_rounds=costs[NONE],
        )
        for name in (TLS, MTLS)
    ]


def _connect(address: str, credentials: grpc.ChannelCredentials | None) -> aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]  # else it would use the connection of an equal channel
    if credentials is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, credentials, options=options)


async def _take_rounds(
    measured: Mapping[str, Callable[[], Awaitable[float]]], rounds: int
) -> Mapping[str, list[float]]:
    """Return what each way costs by round. Each round begins with another way, and the first is a warm-up."""
    costs: dict[str, list[float]] = {name: [] for name in measured}
    names = list(measured)
    for number in range(rounds + 1):
        names.append(names.pop(0))
        for name in names:
            cost = await measured[name]()
            if number:
                costs[name].append(cost)
    return costs


async def _measure_desk(servers: Servers, base_url: str, failures: list[str]) -> Sequence[Figure]:
    async with (
        aio.insecure_channel(servers.plain.address) as plain,
        aio.secure_channel(servers.secured.address, servers.trust()) as secured,
    ):
        entrants = {
            NONE: Entrant(servers.plain, Turns(plain).run),
            KEY: Entrant(servers.secured, Turns(secured, metadata=[bearer(servers.key)]).run),
        }
        costs = await raced(ONE, entrants, base_url, failures)
    what = f"CPU of a turn of the desk with an API key and TLS, {ONE.name}"
    aim = Aim("at most", 1.03)
    return [
        Figure(case=CASE, what=what, unit="ms", rounds=costs[KEY], floor="neither", floor_rounds=costs[NONE], aim=aim)
    ]


async def _measure_forged(folder: Path, servers: Servers, failures: list[str], *, rounds: int) -> Sequence[Figure]:
    """Measure the median time of turns, with forged tokens and without."""
    times: dict[str, list[float]] = {"forged": [], NONE: []}
    rates: list[float] = []
    async with (
        asked(folder, "forger", servers.proved.address) as forger,
        aio.insecure_channel(servers.proved.address) as channel,
    ):
        turns = Turns(channel, metadata=[bearer(servers.key)])
        for number in range(2 * rounds):
            ended = asyncio.Event()
            forging = asyncio.create_task(_forge(forger, servers.issuer.token(), ended)) if number % 2 else None
            took: list[float] = []
            for _ in range(2):
                took += await asyncio.gather(*(_time_turn(turns, failures) for _ in range(TURNS)))
            ended.set()
            if forging is not None:
                rates += await forging
            times["forged" if forging else NONE].append(median(took))
    return [
        Figure(
            case=CASE,
            what=f"p50 of a turn of the desk, {TURNS} at once, {PACE_MS} ms a delta, beside {FORGED:,} forged tokens/s",
            unit="ms",
            rounds=times["forged"],
            floor="none forged",
            floor_rounds=times[NONE],
            aim=Aim("at most", 1.1),
        ),
        Figure(case=CASE, what="forged tokens refused a second, meanwhile", unit="1/s", rounds=rates),
    ]


async def _time_turn(turns: Turns, failures: list[str]) -> float:
    start = time.perf_counter()
    failures += await turns.run(1, 1, agent="paced_lead")
    return (time.perf_counter() - start) * 1000


async def _forge(forger: Program, token: str, ended: asyncio.Event) -> Sequence[float]:
    """Call with forged tokens, a second at a time, until it has ended; return how many were refused a second."""
    rates: list[float] = []
    while not ended.is_set():
        made = await forger.ask(token, FORGED, 1)
        assert not made["accepted"], "a forged token was accepted"
        rates.append(made["calls"] / made["seconds"])
    return rates
