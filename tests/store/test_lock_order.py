"""Two servers lock in one order on PostgreSQL: none of them is ever ended by a deadlock.

In each test a connection beside the stores holds a lock in the middle of what one of them is doing. The other one comes
meanwhile, wants the same in the opposite order, and would hold what the first needs next.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import psycopg
import pytest
from sqlalchemy import Connection
from structlog.testing import capture_logs
from structlog.typing import EventDict

from bough.v1 import agent_pb2, event_pb2
from bough_server.errors import NotFound
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import open_store
from bough_server.store.ports.workers import RunCommand
from bough_server.store.sql.store import Store
from tests.store.logs import ANNE, START_NS, Made, completed, definition, delta, session_id
from tests.store.sql import execute


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two stores on one database."""
    async with (
        open_store(postgres_url, durability="process") as one,
        open_store(postgres_url, durability="process") as other,
    ):
        yield one, other


@pytest.fixture
def logged() -> Iterator[list[EventDict]]:
    with capture_logs() as entries:
        yield entries


@pytest.fixture
def beside(postgres_url: str) -> Iterator["psycopg.Connection[tuple[object, ...]]"]:
    """A connection that holds locks; it is not the one that PostgreSQL ends if there is a deadlock."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SET deadlock_timeout = '20s'")
        yield connection


Call = Callable[[], Awaitable[object]]


async def _as_one_group(store: Store, calls: Sequence[Call]) -> "asyncio.Future[list[object]]":
    """Let a store do some calls in one transaction; return when it has begun with them."""
    free, loop, busy = threading.Event(), asyncio.get_running_loop(), asyncio.Event()

    def wait(_: Connection) -> None:
        loop.call_soon_threadsafe(busy.set)
        free.wait()

    waiting = asyncio.ensure_future(store.write(wait))
    await busy.wait()
    together = asyncio.gather(*(call() for call in calls), return_exceptions=True)
    for _ in range(5):  # each call submits its job before it first waits for something else
        await asyncio.sleep(0)
    free.set()
    await waiting
    return together


async def _until_waiting(url: str, count: int, work: "asyncio.Future[list[object]]") -> None:
    """Wait until so many connections wait for a lock, or some work is done."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while not work.done() and execute(url, waiting) != [(count,)]:  # noqa: ASYNC110 # a wait in the database is no event
        await asyncio.sleep(0.005)


def _deadlocks(logged: Sequence[EventDict]) -> list[EventDict]:
    return [entry for entry in logged if "deadlock" in str(entry.get("error"))]


Beside = psycopg.Connection[tuple[object, ...]]


async def _meet(
    stores: tuple[Store, Store], url: str, beside: Beside, calls: tuple[Sequence[Call], ...]
) -> list[object]:
    """Let the first store begin until it waits for the lock beside, then the second; free the lock.

    Return the outcomes of all calls.
    """
    first = await _as_one_group(stores[0], calls[0])
    await _until_waiting(url, 1, first)
    second = await _as_one_group(stores[1], calls[1])
    await _until_waiting(url, 2, second)
    beside.rollback()
    return [*await first, *await second]


def _session(store: Store, number: int) -> Awaitable[object]:
    return store.sessions.create(
        ANNE, session_id=session_id(number), labels={}, now_ns=START_NS, request_id=str(number)
    )


def _append(store: Store, run: Made, event: event_pb2.AgentEvent) -> Awaitable[None]:
    return store.log.append(run.run_id, epoch=1, log_events=run.next(event))


def _cancel(run: Made) -> RunCommand:
    return RunCommand(command_id=0, run_id=run.run_id, cancel=event_pb2.CancelRequested())


def _insert_session(beside: Beside, number: int) -> None:
    beside.execute(
        "INSERT INTO sessions (tenant_id, session_id, user_id, labels, create_time_ns, request_id, request_digest, "
        "current_run_id, last_position, state_json, state_run_id) VALUES (%s, %s, '', '{}', 0, '', '', '', 0, '', '')",
        [ANNE.tenant_id, session_id(number)],
    )


async def test_sessions_that_both_create_in_opposite_orders(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores
    _insert_session(beside, 2)
    calls = (
        [partial(_session, one, number) for number in (1, 2, 3)],
        [partial(_session, other, number) for number in (3, 1)],
    )
    await _meet(stores, postgres_url, beside, calls)
    assert _deadlocks(logged) == []
    assert execute(postgres_url, "SELECT count(*) FROM sessions") == [(3,)]


async def test_definitions_and_files_that_both_bring_in_opposite_orders(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores

    def start(store: Store, number: int, label: str) -> Awaitable[object]:
        run = Made(number=number)
        run.definitions = [definition("lead", label)]
        new = run.new()
        file = StoredBlob(sha256=label, media_type="image/png", data=b"photo")
        return store.log.create(replace(new, first=new.first._replace(blobs=[file])))

    beside.execute("INSERT INTO definitions (revision, name, data) VALUES ('b', '', '')")
    calls = (
        [partial(start, one, number, label) for number, label in ((1, "a"), (2, "b"), (3, "c"))],
        [partial(start, other, number, label) for number, label in ((4, "c"), (5, "a"))],
    )
    await _meet(stores, postgres_url, beside, calls)
    assert _deadlocks(logged) == []
    assert execute(postgres_url, "SELECT count(*) FROM definitions") == [(3,)]
    assert execute(postgres_url, "SELECT count(*) FROM blobs") == [(3,)]


async def test_agents_of_two_tenants_that_both_store_in_opposite_orders(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores
    agent = agent_pb2.Agent(definition=definition("lead", "r"))

    async def put(store: Store, tenant_id: str, version: int) -> None:
        await store.agents.put(tenant_id, agent, version=version)

    for tenant_id in "abc":
        await put(one, tenant_id, 0)
    beside.execute("SELECT 1 FROM catalogs WHERE tenant_id = 'b' FOR UPDATE")
    calls = (
        [partial(put, one, tenant_id, 1) for tenant_id in ("a", "b", "c")],
        [partial(put, other, tenant_id, version) for tenant_id, version in (("c", 1), ("a", 2))],
    )
    await _meet(stores, postgres_url, beside, calls)
    assert _deadlocks(logged) == []


async def test_a_session_that_is_deleted_beside_writes_to_its_runs(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores
    runs = [Made(number=number, session_number=9) for number in (3, 2, 1)]
    await one.sessions.create(ANNE, session_id=session_id(9), labels={}, now_ns=START_NS)
    for place, run in enumerate(runs):
        # Neither the rows nor their times are in the order of their ids, which is the order in which runs are locked.
        await one.log.create(replace(run.new(), create_time_ns=START_NS + place))
        await one.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    beside.execute("SELECT 1 FROM runs WHERE run_id = %s FOR UPDATE", [runs[1].run_id])
    calls = (
        [partial(one.sessions.delete, ANNE, session_id(9))],
        [partial(other.mailbox.post, _cancel(run)) for run in (runs[0], runs[2])],
    )
    outcomes = await _meet(stores, postgres_url, beside, calls)
    assert [type(outcome) for outcome in outcomes] == [type(None), NotFound, NotFound]
    assert _deadlocks(logged) == []
    assert execute(postgres_url, "SELECT count(*) FROM runs") == [(0,)]


async def test_commands_that_are_done_in_another_order_than_their_runs_end(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores
    runs = [Made(number=number) for number in (1, 2, 3)]
    ids = []
    for run in runs:
        await one.log.create(run.new())
        ids.append(await one.mailbox.post(_cancel(run)))
    beside.execute("SELECT 1 FROM run_commands WHERE command_id = %s FOR UPDATE", [ids[1]])
    calls = (
        [partial(one.mailbox.delete_command, command_id) for command_id in ids],
        [partial(_append, other, run, completed()) for run in (runs[2], runs[0])],
    )
    await _meet(stores, postgres_url, beside, calls)
    assert _deadlocks(logged) == []
    assert execute(postgres_url, "SELECT count(*) FROM run_commands") == [(0,)]


async def test_workers_that_take_each_other_for_lost(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores
    for worker in "abc":
        await one.leases.begin(worker)
    beside.execute("SELECT 1 FROM workers WHERE worker = 'b' FOR UPDATE")
    calls = (
        [partial(one.leases.expire, worker, 1) for worker in ("a", "b", "c")],
        [partial(other.leases.release, worker) for worker in ("c", "a")],
    )
    await _meet(stores, postgres_url, beside, calls)
    assert _deadlocks(logged) == []
    assert await one.leases.counters() == {}


async def test_a_worker_whose_runs_are_freed_beside_writes_to_them(
    stores: tuple[Store, Store], postgres_url: str, beside: Beside, logged: list[EventDict]
) -> None:
    one, other = stores
    await one.leases.begin("a")
    runs = [Made(number=number, owner="a") for number in (3, 2, 1)]
    for run in runs:
        await one.log.create(run.new())
    beside.execute("SELECT 1 FROM runs WHERE run_id = %s FOR UPDATE", [runs[1].run_id])
    calls = (
        [partial(one.leases.release, "a")],
        [partial(_append, other, run, delta()) for run in (runs[0], runs[2])],
    )
    assert await _meet(stores, postgres_url, beside, calls) == [None, None, None]
    assert _deadlocks(logged) == []
    assert execute(postgres_url, "SELECT DISTINCT owner FROM runs") == [("",)]
