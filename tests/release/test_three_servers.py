"""The three servers of compose.cluster.yaml, by their commands, on a real PostgreSQL and behind one address."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from bough import NO_REJOINING, AsyncClient, CallFailed, NotFound, Unavailable
from bough.v1 import event_pb2, policy_pb2
from tests.release.test_cluster import SERVERS, composed
from tests.support import postgres
from tests.support.balancer import Balancing, envoy, forwarding
from tests.support.callers import KeyRing
from tests.support.certificates import certificate
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import standing_gate

ON_ITS_OWN = policy_pb2.RunPolicy(background=True)


@pytest.fixture
def empty() -> Iterator[str]:
    """A database without tables."""
    made = postgres.database(is_empty=True)
    yield made
    postgres.drop(made)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    """The callers of the servers."""
    (tmp_path / "auth").mkdir()
    made = KeyRing(tmp_path / "auth" / "keys.yaml")
    made.add("anne")
    made.add("bert")
    return made


@asynccontextmanager
async def servers(config: Path, url: str, ring: KeyRing) -> AsyncIterator[list[tuple[Serving, str]]]:
    """Start the servers at once, each by its command and at a free port; yield them with their addresses."""
    _, *arguments = composed()["services"]["bough"]["command"]
    environment = {"BOUGH_DATABASE": url, "BOUGH_KEYS_FILE": str(ring.path)}
    async with AsyncExitStack() as stack:
        started = [
            stack.enter_async_context(serving(config, arguments=arguments, environment=environment))
            for _ in range(SERVERS)
        ]
        found = [await one for one in started]
        yield [(server, f"127.0.0.1:{server.address.rpartition(':')[2]}") for server in found]


def _project(folder: Path, port: int) -> Path:
    wait = {"calls": [{"name": "wait_at", "arguments": {"port": port}}]}
    return write_project(
        folder, llm("waiter", tools=["wait_at"]), script={"waiter": [wait, "So."]}, server={"drain_grace": 0.1}
    )


async def _follow(address: str, token: str, run_id: str, held: asyncio.Barrier) -> list[event_pb2.AgentEvent]:
    """Follow a run to its end by one more client, which waits for the others when the tool is held at the gate."""
    log: list[event_pb2.AgentEvent] = []
    async with AsyncClient(address, token=token) as client:
        async for event in client.watch(run_id):
            log.append(event)
            if event.HasField("tool_started") and not any(one.HasField("run_resumed") for one in log):
                await held.wait()
    return log


@pytest.mark.parametrize("balancing", [forwarding, envoy], ids=["forwarder", "envoy"])
async def test_a_run_is_followed_through_every_server(
    tmp_path: Path, empty: str, ring: KeyRing, balancing: Balancing
) -> None:
    token = ring.key("anne")
    async with standing_gate() as gate, servers(_project(tmp_path, gate.port), empty, ring) as found:
        addresses = [address for _, address in found]
        async with balancing(addresses, tmp_path) as address:
            async with AsyncClient(address, token=token) as client:
                run_id = await client.run("waiter", "Wait.", policy=ON_ITS_OWN).started()
            held = asyncio.Barrier(2 * SERVERS + 1)
            followed = (*addresses, *[address] * SERVERS)
            following = [asyncio.create_task(_follow(each, token, run_id, held)) for each in followed]
            await held.wait()
            gate.open()
            first, *others = await asyncio.gather(*following)
    assert first[-1].WhichOneof("payload") == "run_completed"
    assert [event.sequence for event in first] == list(range(1, len(first) + 1))
    assert others == [first] * (2 * SERVERS - 1)


@pytest.mark.parametrize("balancing", [forwarding, envoy], ids=["forwarder", "envoy"])
async def test_a_run_goes_on_elsewhere_when_its_server_stops(
    tmp_path: Path, empty: str, ring: KeyRing, balancing: Balancing
) -> None:
    token = ring.key("anne")
    async with standing_gate() as gate, servers(_project(tmp_path, gate.port), empty, ring) as found:
        (first, at_first), *_ = found
        addresses = [address for _, address in found]
        async with balancing(addresses, tmp_path) as address, AsyncClient(address, token=token) as client:
            async with AsyncClient(at_first, token=token) as direct:
                run_id = await direct.run("waiter", "Wait.", policy=ON_ITS_OWN).started()
            held = asyncio.Barrier(2)
            following = asyncio.create_task(_follow(address, token, run_id, held))
            await held.wait()
            first.send(signal.SIGTERM)
            assert await first.end() == 0
            gate.open()
            log = await following
            again = [await client.ask("waiter", "Again.") for _ in range(SERVERS)]
    (resumed,) = (event.run_resumed for event in log if event.HasField("run_resumed"))
    assert (resumed.epoch, resumed.cause) == (2, event_pb2.RESUME_CAUSE_TAKEOVER)
    assert log[-1].WhichOneof("payload") == "run_completed"
    assert again == ["So."] * SERVERS


async def test_tls_ends_at_the_balancer_and_every_server_proves_the_callers(
    tmp_path: Path, empty: str, ring: KeyRing
) -> None:
    pem = certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials(pem.read_bytes())
    config = write_project(tmp_path, llm("waiter"), script={"waiter": ["So."] * 9})
    async with (
        servers(config, empty, ring) as found,
        envoy([address for _, address in found], tmp_path, pem) as address,
    ):
        async with AsyncClient(address, credentials=credentials, token=ring.key("anne")) as anne:
            run_ids = [await anne.run("waiter", "Go.").started() for _ in range(2 * SERVERS)]
            owners = {(await anne.get_run(run_id)).user_id for run_id in run_ids}
        async with AsyncClient(address, credentials=credentials, token=ring.key("bert")) as bert:
            for run_id in run_ids:
                with pytest.raises(NotFound):
                    await bert.get_run(run_id)
        async with AsyncClient(address, credentials=credentials, rejoining=NO_REJOINING) as stranger:
            with pytest.raises(CallFailed, match="no token") as refused:
                await stranger.get_run(run_ids[0])
        async with AsyncClient(address, rejoining=NO_REJOINING) as plain:
            with pytest.raises(Unavailable):
                await plain.get_run(run_ids[0])
    assert (owners, refused.value.code) == ({"anne"}, grpc.StatusCode.UNAUTHENTICATED)
