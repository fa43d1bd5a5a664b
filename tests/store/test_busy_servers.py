"""Two servers that do everything at random on a few sessions: no call is lost, and none has to be repeated.

Both lock in one order, so none waits for the other for ever: PostgreSQL never has to end one of the two.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from bough.v1 import agent_pb2, event_pb2, session_pb2
from bough_server.errors import Fenced, NotFound, SessionBusy, SessionExists
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import open_store
from bough_server.store.ports.log import RequestIdTaken, RunMoved, SessionMoved
from bough_server.store.ports.workers import CatalogMoved, RunCommand
from bough_server.store.sql.store import Store
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, START_NS, Made, completed, definition, delta, record, resumed, session_id, text
from tests.store.sql import execute
from tests.support.open_runs import open_runs

SESSIONS: Final = (1, 2, 3)
WORKERS: Final = ("a", "b")
_FILES: Final = [StoredBlob(sha256=label, media_type="image/png", data=label.encode()) for label in "abcd"]
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

_MUST_BE_EMPTY: Final = {
    "sessions that a run waits for and none holds": """
        SELECT session_id FROM sessions s WHERE s.current_run_id = '' AND EXISTS (
            SELECT 1 FROM runs r WHERE r.tenant_id = s.tenant_id AND r.session_id = s.session_id AND NOT r.ended
        )""",
    "sessions that a run holds which has ended or is gone": """
        SELECT session_id FROM sessions s WHERE s.current_run_id != '' AND NOT EXISTS (
            SELECT 1 FROM runs r WHERE r.run_id = s.current_run_id AND r.session_id = s.session_id AND NOT r.ended
        )""",
    "runs without their session": """
        SELECT run_id FROM runs r WHERE kind = 0 AND NOT EXISTS (
            SELECT 1 FROM sessions s WHERE s.tenant_id = r.tenant_id AND s.session_id = r.session_id
        )""",
    "logs with gaps": """
        SELECT r.run_id FROM runs r LEFT JOIN events e USING (run_id)
        GROUP BY r.run_id, r.last_sequence HAVING count(e.sequence) != r.last_sequence OR min(e.sequence) != 1""",
    "events of no run": "SELECT run_id FROM events WHERE run_id NOT IN (SELECT run_id FROM runs)",
    "messages with gaps": """
        SELECT s.session_id FROM sessions s LEFT JOIN messages m USING (tenant_id, session_id)
        GROUP BY s.tenant_id, s.session_id, s.last_position HAVING count(m.position) != s.last_position""",
    "files without bytes": """
        SELECT sha256 FROM session_blobs WHERE (tenant_id, sha256) NOT IN (SELECT tenant_id, sha256 FROM blobs)""",
    "bytes that no session refers to": """
        SELECT sha256 FROM blobs WHERE (tenant_id, sha256) NOT IN (SELECT tenant_id, sha256 FROM session_blobs)""",
    "revisions that are not stored": """
        SELECT revision FROM run_definitions WHERE revision NOT IN (SELECT revision FROM definitions)""",
    "commands to runs that have ended or are gone": """
        SELECT run_id FROM run_commands WHERE run_id NOT IN (SELECT run_id FROM runs WHERE NOT ended)""",
}
"""What there must never be, each with the query that finds it."""


@dataclass(kw_only=True)
class Play:
    """Calls of two servers on a few sessions, drawn at random."""

    stores: Sequence[Store]
    chance: random.Random
    number: int = 100
    outcomes: Counter[str] = field(default_factory=Counter)
    claiming: dict[str, asyncio.Lock] = field(default_factory=lambda: {worker: asyncio.Lock() for worker in WORKERS})

    def next(self) -> int:
        """Return a number that no run has yet."""
        self.number += 1
        return self.number

    async def play(self, steps: int) -> None:
        """Make one call after another."""
        weights: dict[Callable[[Store], Awaitable[object]], int] = {
            self._start: 4,
            self._queue: 1,
            self._extend: 2,
            self._end: 6,
            self._take_over: 1,
            self._send: 1,
            self._fork: 1,
            self._delete: 3,
            self._label: 1,
            self._change: 1,
            self._create: 1,
            self._store_agent: 1,
            self._restart: 1,
            self._give_up: 1,
            self._claim: 1,
        }
        calls = self.chance.choices([*weights], [*weights.values()], k=steps)
        for call in calls:
            try:
                await call(self.chance.choice(self.stores))
            except _REFUSALS as refused:
                self.outcomes[f"{call.__name__}: {type(refused).__name__}"] += 1
            else:
                self.outcomes[call.__name__] += 1

    def _session(self) -> int:
        return self.chance.choice(SESSIONS)

    def _run(self, **fields: Any) -> Made:
        made = Made(number=self.next(), session_number=self._session(), question=text("?", "USER"), **fields)
        made.definitions = [definition("lead", f"r{number}") for number in self.chance.sample(range(8), 3)]
        return made

    async def _start(self, store: Store) -> None:
        made = self._run()
        try:
            cut = await store.sessions.read_position(ANNE, made.session_id)
            made.session_cut, made.state_json = cut.position, cut.state_json
        except NotFound:
            made.session_cut = 0
        new = made.new()
        files = self.chance.sample(_FILES, self.chance.randrange(3))
        await store.log.create(replace(new, create_session=True, first=new.first._replace(blobs=files)))

    async def _queue(self, store: Store) -> None:
        await store.log.create(self._run(is_queued=True).new())

    async def _found(self, store: Store) -> tuple[str, int, int]:
        there = await open_runs(store)
        if not there:
            raise NotFound("run", "any")
        found = self.chance.choice(there)
        return found.run.run_id, found.epoch, found.run.last_sequence

    async def _extend(self, store: Store) -> None:
        run_id, epoch, last = await self._found(store)
        await store.log.append(run_id, epoch=epoch, log_events=[record(delta(), last + 1)])

    async def _end(self, store: Store) -> None:
        run_id, epoch, last = await self._found(store)
        event = event_pb2.AgentEvent(run_cancelled=event_pb2.RunCancelled()) if last == 2 else completed()
        await store.log.append(run_id, epoch=epoch, log_events=[record(event, last + 1)])

    async def _take_over(self, store: Store) -> None:
        run_id, epoch, last = await self._found(store)
        records = [record(resumed(epoch + 1), last + 1)._replace(blobs=self.chance.sample(_FILES, 2))]
        await store.log.take_over(run_id, epoch=epoch + 1, owner="w", log_events=records)

    async def _send(self, store: Store) -> None:
        run_id, *_ = await self._found(store)
        await store.mailbox.post(RunCommand(command_id=0, run_id=run_id, cancel=event_pb2.CancelRequested()))
        for other in self.stores:
            for command in await other.mailbox.take(run_id):
                await other.mailbox.delete_command(command.command_id)

    async def _fork(self, store: Store) -> None:
        run_id, *_ = await self._found(store)
        origin, fork = Made(number=int(run_id[-12:])), Fork(number=self.next())
        await store.log.fork(fork.of(origin, 1))
        ending = fork.next(completed())
        await store.log.append(fork.run_id, epoch=1, log_events=ending)
        await self.chance.choice(self.stores).sessions.delete(ANNE, fork.session_id)

    async def _delete(self, store: Store) -> None:
        await store.sessions.delete(ANNE, session_id(self._session()))

    async def _create(self, store: Store) -> None:
        session = session_id(self._session())
        await store.sessions.create(ANNE, session_id=session, labels={}, now_ns=START_NS + self.next())

    async def _label(self, store: Store) -> None:
        await store.sessions.set_labels(ANNE, session_id(self._session()), {"n": str(self.next())})

    async def _change(self, store: Store) -> None:
        change = session_pb2.SessionStateChange(key="n", value_json=str(self.next()))
        await store.sessions.update_state(ANNE, session_id(self._session()), [change])

    async def _give_up(self, store: Store) -> None:
        run_id, *_ = await self._found(store)
        found = await store.runs.find(run_id)
        await store.leases.give_up(found.owner if found is not None else "", run_id)

    async def _claim(self, store: Store) -> None:
        worker = WORKERS[self.stores.index(store)]
        async with self.claiming[worker]:  # a worker makes one claim at a time
            await store.leases.renew(worker)
            await store.leases.claim(worker, most=2)

    async def _restart(self, store: Store) -> None:
        worker = WORKERS[self.stores.index(store)]
        async with self.claiming[worker]:
            for other, counter in (await store.leases.counters()).items():
                await store.leases.expire(other, counter)
            await store.leases.begin(worker)

    async def _store_agent(self, store: Store) -> None:
        tenant_id = self.chance.choice(("one tenant", "another tenant", "a third tenant"))
        version = await store.agents.version(tenant_id)
        agent = agent_pb2.Agent(definition=definition("lead", str(self.next())))
        await store.agents.put(tenant_id, agent, version=version)


@pytest.mark.grid
async def test_two_busy_servers_lose_nothing(postgres_url: str, whole_grid: bool) -> None:
    with capture_logs() as logged:
        play = await _play(postgres_url, 1_000 if whole_grid else 60)
    assert [entry for entry in logged if "deadlock" in str(entry.get("error"))] == []
    found = {what: execute(postgres_url, query) for what, query in _MUST_BE_EMPTY.items()}
    assert not any(found.values()), found
    assert len([outcome for outcome in play.outcomes if ":" not in outcome]) == 15, play.outcomes


async def _play(url: str, steps: int) -> Play:
    async with _open(url) as one, _open(url) as other:
        play = Play(stores=[one, other], chance=random.Random(1))
        for number in SESSIONS:
            await one.sessions.create(ANNE, session_id=session_id(number), labels={}, now_ns=START_NS)
        for store, worker in zip(play.stores, WORKERS, strict=True):
            await store.leases.begin(worker)
        await asyncio.gather(*(play.play(steps) for _ in range(16)))
    return play


def _open(url: str) -> Store:
    return open_store(url, durability="process")
