"""Two calls at once, each at another server: what comes of them comes of one after the other, too.

The transaction of the first is held right before its commit, when it has all its locks and no other sees what it has
written. The second is then made at the other server, until it is over or waits for the first.
"""

import asyncio
import random
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

import psycopg
import pytest
from structlog.testing import capture_logs

from bough.v1 import agent_pb2, event_pb2, session_pb2
from bough_server.errors import Fenced, NotFound, SessionBusy, SessionExists
from bough_server.identity import Principal
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import open_store
from bough_server.store.ports.log import NewRun, RequestIdTaken, RunMoved, SessionMoved
from bough_server.store.ports.workers import CatalogMoved, RunCommand
from bough_server.store.sql.store import Store
from bough_server.store.sql.writer import CommitHooks
from tests.store.evaluation_logs import MadeEvaluation
from tests.store.fork_logs import Fork
from tests.store.logs import START_NS, Made, completed, definition, delta, record, resumed, session_id, text

_PHOTO: Final = StoredBlob(sha256="ab", media_type="image/png", data=b"photo")
_REFUSALS: Final = (
    CatalogMoved,
    Fenced,
    NotFound,
    RequestIdTaken,
    RunMoved,
    SessionBusy,
    SessionExists,
    SessionMoved,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A tenant with a session that a run holds and another waits for, and one that is free and has a file."""

    number: int
    """Numbers of runs and sessions are larger by less than 100."""

    @property
    def principal(self) -> Principal:
        """The tenant's user."""
        return Principal(tenant_id=f"tenant {self.number}", user_id="anne")

    def run(self, number: int, **fields: Any) -> Made:
        """A run of the tenant."""
        made = Made(number=self.number + number, principal=self.principal, **fields)
        made.definitions = [definition("lead", f"{self.number}: lead")]
        return made

    @property
    def holder(self) -> Made:
        """The run that holds a session; it has two events."""
        return self.run(1, last_sequence=2)

    @property
    def waiting(self) -> Made:
        """The run that waits for that session."""
        return self.queued(2)

    def queued(self, number: int) -> Made:
        """A run that is to wait for the session that is held."""
        return self.run(number, session_number=self.number + 1, is_queued=True)

    @property
    def free(self) -> str:
        """The session that no run holds."""
        return session_id(self.number + 3)

    def into_free(self, number: int) -> NewRun:
        """A run that continues the free session."""
        return self.run(number, session_number=self.number + 3, session_cut=2, question=text("?", "USER")).new()

    async def begin(self, store: Store) -> None:
        """Write what there is before the two calls."""
        before, holder = self.run(3, question=text("?", "USER")), self.run(1)
        new = before.new()
        await store.log.create(replace(new, first=new.first._replace(blobs=[_PHOTO])))
        ended = before.next(completed(text("So.", "ASSISTANT")))
        await asyncio.gather(
            store.log.append(before.run_id, epoch=1, log_events=ended),
            store.log.create(holder.new()),
        )
        await store.log.append(holder.run_id, epoch=1, log_events=holder.next(delta()))
        await store.log.create(self.waiting.new())


Call = Callable[[World, Store, int], Awaitable[object]]
"""Makes a call; the number tells what the first creates from what the second does."""

CALLS: Final[dict[str, Call]] = {}


def _call(name: str) -> Callable[[Call], Call]:
    def add(made: Call) -> Call:
        CALLS[name] = made
        return made

    return add


@_call("end the holder")
def _end(world: World, store: Store, _: int) -> Awaitable[object]:
    return store.log.append(world.holder.run_id, epoch=1, log_events=world.holder.next(completed()))


@_call("extend the holder's log")
def _extend(world: World, store: Store, _: int) -> Awaitable[object]:
    return store.log.append(world.holder.run_id, epoch=1, log_events=world.holder.next(delta()))


@_call("take the holder over, with a file")
def _take_over(world: World, store: Store, _: int) -> Awaitable[object]:
    (first,) = world.holder.next(resumed(2, "b"))
    records = [first._replace(blobs=[_PHOTO])]
    return store.log.take_over(world.holder.run_id, epoch=2, owner="b", log_events=records)


@_call("cancel the run that waits")
def _cancel(world: World, store: Store, _: int) -> Awaitable[object]:
    cancelled = event_pb2.AgentEvent(run_cancelled=event_pb2.RunCancelled())
    return store.log.take_over(world.waiting.run_id, epoch=2, owner="b", log_events=world.waiting.next(cancelled))


@_call("queue a run")
def _queue(world: World, store: Store, number: int) -> Awaitable[object]:
    return store.log.create(world.queued(10 + number).new())


@_call("hold the session that is held")
def _hold(world: World, store: Store, number: int) -> Awaitable[object]:
    return store.log.create(replace(world.queued(12 + number).new(), queued=None))


@_call("send a command")
def _send(world: World, store: Store, _: int) -> Awaitable[object]:
    command = RunCommand(command_id=0, run_id=world.holder.run_id, cancel=event_pb2.CancelRequested())
    return store.mailbox.post(command)


@_call("fork the holder")
def _fork(world: World, store: Store, number: int) -> Awaitable[object]:
    fork = Fork(number=world.number + 14 + number, principal=world.principal)
    return store.log.fork(fork.of(world.holder, 2, delta(), principal=world.principal))


@_call("fork the run that has ended")
def _fork_ended(world: World, store: Store, number: int) -> Awaitable[object]:
    fork = Fork(number=world.number + 16 + number, principal=world.principal)
    return store.log.fork(fork.of(world.run(3), 1, principal=world.principal))


@_call("delete the session that is held")
def _delete_held(world: World, store: Store, _: int) -> Awaitable[object]:
    return store.sessions.delete(world.principal, world.holder.session_id)


@_call("delete the free session")
def _delete_free(world: World, store: Store, _: int) -> Awaitable[object]:
    return store.sessions.delete(world.principal, world.free)


@_call("continue the free session")
def _continue(world: World, store: Store, number: int) -> Awaitable[object]:
    return store.log.create(world.into_free(20 + number))


@_call("start a run in the free session, or in a new one of its id")
def _continue_or_create(world: World, store: Store, number: int) -> Awaitable[object]:
    made = world.into_free(22 + number)
    started = made.first.event.run_started
    cut = replace(made, session_position=0, create_session=True)
    started.session_cut = 0
    return store.log.create(replace(cut, first=record(made.first.event, 1)))


@_call("change the state of the free session")
def _change(world: World, store: Store, number: int) -> Awaitable[object]:
    change = session_pb2.SessionStateChange(key=f"by {number}", value_json=str(number))
    return store.sessions.update_state(world.principal, world.free, [change])


@_call("label the free session")
def _label(world: World, store: Store, number: int) -> Awaitable[object]:
    return store.sessions.set_labels(world.principal, world.free, {"by": str(number)})


@_call("start a run with a request id")
def _start(world: World, store: Store, number: int) -> Awaitable[object]:
    return store.log.create(world.run(30 + number, request_id="once").new())


@_call("start a run with a file that the free session has")
def _start_with_file(world: World, store: Store, number: int) -> Awaitable[object]:
    new = world.run(32 + number).new()
    return store.log.create(replace(new, first=new.first._replace(blobs=[_PHOTO])))


@_call("create a session with a request id")
def _create_session(world: World, store: Store, number: int) -> Awaitable[object]:
    principal, name = world.principal, session_id(world.number + 34 + number)
    return store.sessions.create(principal, session_id=name, labels={}, now_ns=START_NS, request_id="once")


@_call("create a session of an id")
def _create_named(world: World, store: Store, number: int) -> Awaitable[object]:
    name = session_id(world.number + 36)
    return store.sessions.create(world.principal, session_id=name, labels={}, now_ns=START_NS + number)


@_call("start an evaluation with a request id")
def _evaluate(world: World, store: Store, number: int) -> Awaitable[object]:
    made = MadeEvaluation(number=world.number + 40 + number, principal=world.principal, request_id="once")
    return store.log.create_evaluation(made.new())


@_call("store an agent")
def _store_agent(world: World, store: Store, number: int) -> Awaitable[object]:
    agent = agent_pb2.Agent(definition=definition(f"agent {number}", "r"))
    return store.agents.put(world.principal.tenant_id, agent, version=0)


class Gate:
    """Holds the next commit of a store, once it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._loop = asyncio.get_running_loop()
        self.arrived = asyncio.Event()
        """Set when a commit is held."""

    def __call__(self) -> None:
        """Call it right before a commit, on the writer's thread."""
        if not self._open.is_set():
            self._loop.call_soon_threadsafe(self.arrived.set)
            self._open.wait()

    def close(self) -> None:
        """Hold the next commit."""
        self.arrived.clear()
        self._open.clear()

    def open(self) -> None:
        """Let commits happen."""
        self._open.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Two stores on one database; the commits of the first can be held."""

    url: str
    one: Store
    other: Store
    gate: Gate
    look: "psycopg.Connection[Any]"
    """A connection beside those of the stores."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1_000, 100))

    async def world(self) -> World:
        """A new world."""
        world = World(number=next(self.numbers))
        await world.begin(self.one)
        return world

    async def in_order(self, first: Call, second: Call, *, swapped: bool = False) -> object:
        """Make two calls one after the other, the second first if `swapped`; return what comes of them."""
        world = await self.world()
        calls = [(first, self.one, 0), (second, self.other, 1)]
        outcomes: dict[int, object] = {}
        for call, store, number in reversed(calls) if swapped else calls:
            outcomes[number] = await _outcome(call(world, store, number))
        return self._result(world, [outcomes[0], outcomes[1]])

    async def at_once(self, first: Call, second: Call) -> object:
        """Make a call while the commit of another is held; return what comes of them."""
        world = await self.world()
        self.gate.close()
        holding = asyncio.ensure_future(_outcome(first(world, self.one, 0)))
        try:
            arriving = asyncio.ensure_future(self.gate.arrived.wait())
            await asyncio.wait({holding, arriving}, return_when=asyncio.FIRST_COMPLETED)
            arriving.cancel()
            following = asyncio.ensure_future(_outcome(second(world, self.other, 1)))
            while not following.done() and not self._waits():  # noqa: ASYNC110 # a wait in the database is no event
                await asyncio.sleep(0.001)
        finally:
            self.gate.open()
        return self._result(world, [await holding, await following])

    def _waits(self) -> bool:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return self.look.execute(waiting).fetchone() is not None

    def _result(self, world: World, outcomes: list[object]) -> object:
        tenant, session_runs = world.principal.tenant_id, "run_id IN (SELECT run_id FROM runs WHERE tenant_id = %(of)s)"
        found = {
            table: sorted(
                self.look.execute(f"SELECT {columns} FROM {table} WHERE {where}".encode(), {"of": tenant}).fetchall()
            )
            for table, columns, where in (
                ("runs", "run_id, session_id, epoch, owner, last_sequence, ended, state, kind", "tenant_id = %(of)s"),
                ("events", "run_id, sequence, kind", session_runs),
                ("run_commands", "run_id", session_runs),
                ("run_definitions", "run_id, split_part(revision, ':', 2)", session_runs),
                ("definitions", "name", "split_part(%(of)s, ' ', 2) = split_part(revision, ':', 1)"),
                ("sessions", "session_id, labels, current_run_id, last_position, state_json", "tenant_id = %(of)s"),
                ("messages", "session_id, position, run_id", "tenant_id = %(of)s"),
                ("session_blobs", "session_id, sha256, run_id, sequence", "tenant_id = %(of)s"),
                ("blobs", "sha256, data", "tenant_id = %(of)s"),
                ("agents", "name", "tenant_id = %(of)s"),
                ("catalogs", "version", "tenant_id = %(of)s"),
            )
        }
        return _relative([outcomes, found], world.number)


async def _outcome(call: Awaitable[object]) -> object:
    try:
        done = await call
    except _REFUSALS as refused:
        taken = f" {refused.run_id}" if isinstance(refused, RequestIdTaken) else ""
        return f"{type(refused).__name__}{taken}"
    return f"session {done.session_id}" if isinstance(done, session_pb2.Session) else "done"


def _relative(found: object, number: int) -> str:
    """Return what was found as a text, with numbers of ids as they would be in the first world."""
    return re.sub(r"-(\d{12})\b", lambda digits: f"-{int(digits[1]) - number}", repr(found))


@pytest.fixture
async def servers(postgres_url: str) -> AsyncIterator[Servers]:
    """Two stores on one database."""
    gate = Gate()
    hooks = CommitHooks(before=gate)
    with psycopg.connect(postgres_url, autocommit=True) as look:
        async with (
            open_store(postgres_url, durability="process", hooks=hooks) as one,
            open_store(postgres_url, durability="process") as other,
        ):
            yield Servers(url=postgres_url, one=one, other=other, gate=gate, look=look)


@pytest.mark.grid
@pytest.mark.parametrize("name", CALLS)
async def test_two_calls_at_once_are_as_one_after_the_other(name: str, servers: Servers, whole_grid: bool) -> None:
    others = sorted(CALLS) if whole_grid else random.Random(name).sample(sorted(CALLS), 7)
    for other in others:
        calls = CALLS[name], CALLS[other]
        result = await servers.at_once(*calls)
        if result != await servers.in_order(*calls):
            swapped = await servers.in_order(*calls, swapped=True)
            assert result == swapped, f"{name!r} at one server, and {other!r} at the other"


async def test_creations_with_equal_request_ids_in_any_order_neither_deadlock_nor_repeat(postgres_url: str) -> None:
    order, numbers = random.Random(7), count(1)

    async def create(store: Store, request: int) -> object:
        made = Made(number=next(numbers), request_id=f"request {request}", definitions=[definition("lead", "1: lead")])
        return await _outcome(store.log.create(made.new()))

    async with (
        open_store(postgres_url, durability="process") as one,
        open_store(postgres_url, durability="process") as other,
    ):
        with capture_logs() as logged:
            for begin in range(0, 160, 8):
                requests = [(store, begin + number) for store in (one, other) for number in range(8)]
                order.shuffle(requests)
                outcomes = await asyncio.gather(*(create(store, request) for store, request in requests))
                assert outcomes.count("done") == 8
    assert logged == []


async def test_a_file_that_comes_with_answers_is_kept_though_its_session_is_deleted_meanwhile(servers: Servers) -> None:
    calls = CALLS["take the holder over, with a file"], CALLS["delete the free session"]
    result = await servers.at_once(*calls)
    assert result in [await servers.in_order(*calls), await servers.in_order(*calls, swapped=True)]
