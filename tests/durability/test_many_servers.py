"""Servers on one PostgreSQL: a run outlives its server, and a server that was only stopped notices its replacement.

The times that are printed are asserted nowhere.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from bough import AsyncClient, RunStream
from tests.durability.torture_clients import Events, changing_client
from tests.support import postgres
from tests.support.log_laws import check_laws
from tests.support.log_readings import having
from tests.support.model_scenarios import Reply, Request, calling, plain, results
from tests.support.model_server import serving_model
from tests.support.processes import PATIENCE_SECONDS, Serving, serving
from tests.support.projects import llm, openai_model, write_project
from tests.support.tool_gate import Gate, standing_gate


@pytest.fixture
def database() -> Iterator[str]:
    """An empty database of PostgreSQL with its tables."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@dataclass(slots=True)
class Model:
    """Looks something up, then waits at the gate, and then answers; it counts how often it was asked for each."""

    port: int
    asked: Counter[int] = field(default_factory=Counter)

    def __call__(self, request: Request) -> Reply:
        """The next call, or the answer."""
        done = results(request)
        self.asked[done] += 1
        calls = [("look_up", '{"topic": "gates"}'), ("wait_at", f'{{"port": {self.port}}}')]
        return calling([calls[done]]) if done < len(calls) else plain(request)


@dataclass(slots=True, kw_only=True)
class Servers:
    """Three servers on one database, and the model and the gate of their agent."""

    all: list[Serving]
    model: Model
    gate: Gate


@asynccontextmanager
async def three_servers(folder: Path, database: str) -> AsyncIterator[Servers]:
    """Three servers with the agent `waiter`."""
    async with standing_gate() as gate, AsyncExitStack() as stack:
        model = Model(gate.port)
        served = await stack.enter_async_context(serving_model(model, delta_interval=0.01))
        config = write_project(
            folder,
            llm("waiter", tools=["look_up", "wait_at"]),
            model=openai_model(served.base_url),
            storage={"url": database},
        )
        servers = [await stack.enter_async_context(serving(config, name=f"serve-{number}")) for number in range(3)]
        yield Servers(all=servers, model=model, gate=gate)


class Follower:
    """A client that reads a run to its end, beginning at one of the servers and rejoining at the next ones."""

    def __init__(self) -> None:
        self.events: Events = []
        self._more = asyncio.Event()

    async def read(self, stream: RunStream) -> None:
        """Read to the end."""
        async for event in stream:
            self.events.append(event)
            self._more.set()

    async def until(self, payload: str, *, times: int = 1) -> None:
        """Wait until so many events of a kind have come."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(having(self.events, payload)) < times:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def followed(servers: Servers) -> AsyncIterator[list[Follower]]:
    """A run of `waiter` that waits at the gate at the first server, followed through each; it ends in the context."""
    addresses = [server.address for server in servers.all]
    followers = [Follower() for _ in addresses]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        clients = [
            await stack.enter_async_context(changing_client(addresses, (n % len(addresses) for n in count(first))))
            for first in range(len(addresses))
        ]
        stream = clients[0].run("waiter", "hi")
        run_id = await stream.started()
        group.create_task(followers[0].read(stream))
        for client, follower in zip(clients[1:], followers[1:], strict=True):
            group.create_task(follower.read(client.watch(run_id)))
        await servers.gate.arrived.wait()
        for follower in followers:
            await follower.until("tool_started", times=2)
        yield followers


def _check(log: Events, servers: Servers) -> None:
    """The run was taken over once, and repeated nothing but the call that was in flight."""
    check_laws(log)
    assert log[-1].HasField("run_completed")
    assert [event.run_resumed.epoch for event in having(log, "run_resumed")] == [2]
    assert servers.model.asked == {0: 1, 1: 1, 2: 1}
    started = [event.tool_started for event in having(log, "tool_started")]
    assert [
        (one.call.name, event.attempt) for one, event in zip(started, having(log, "tool_started"), strict=True)
    ] == [
        ("look_up", 1),
        ("wait_at", 1),
        ("wait_at", 2),
    ]
    assert started[1].idempotency_key == started[2].idempotency_key


async def test_a_run_whose_server_is_killed_is_continued_by_another_and_looks_the_same_through_all(
    tmp_path: Path, database: str
) -> None:
    async with three_servers(tmp_path, database) as servers:
        async with followed(servers) as followers:
            await servers.all[0].kill()
            killed = time.monotonic()
            await followers[1].until("run_resumed")
            print(f"taken over after {time.monotonic() - killed:.2f} s")
            servers.gate.open()
        logs = [follower.events for follower in followers]
    _check(logs[0], servers)
    assert logs[1] == logs[2] == logs[0]


async def test_a_server_that_was_stopped_and_replaced_writes_nothing_more_of_its_runs_and_serves_on(
    tmp_path: Path, database: str
) -> None:
    async with three_servers(tmp_path, database) as servers:
        stopped = servers.all[0]
        async with followed(servers) as followers:
            stopped.send(SIGSTOP)
            began = time.monotonic()
            await followers[1].until("run_resumed")
            print(f"taken over after {time.monotonic() - began:.2f} s")
            stopped.send(SIGCONT)
            continued = time.monotonic()
            await stopped.until_said("run stopped unrecorded")
            print(f"noticed after {time.monotonic() - continued:.2f} s")
            servers.gate.open()
        logs = [follower.events for follower in followers]
        _check(logs[0], servers)
        assert logs[1] == logs[2] == logs[0]
        async with AsyncClient(stopped.address) as client:
            (run,) = [run async for run in client.list_runs()]
            assert [event async for event in client.watch(run.run_id)] == logs[0]
            again = [event async for event in client.run("waiter", "hi", session_id=run.session_id)]
        check_laws(again)
        assert again[-1].HasField("run_completed")
        assert not having(again, "run_resumed")
