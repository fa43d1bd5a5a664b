"""Two servers' stores on one database: what one of them did the other knows, and what both do at once is done once."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, event_pb2
from bough_server.errors import Fenced, NotFound, SessionBusy, SessionExists
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import open_store
from bough_server.store.ports.log import RequestIdTaken, RunMoved, SessionMoved
from bough_server.store.ports.workers import CatalogMoved, RunCommand
from bough_server.store.sql.store import Store
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, START_NS, Made, completed, definition, delta, record, resumed
from tests.store.sql import execute
from tests.support import postgres
from tests.support.examples import examples


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two stores on one database."""
    async with _open(postgres_url) as one, _open(postgres_url) as other:
        yield one, other


def _open(url: str) -> Store:
    return open_store(url, durability="process")


async def _both(*work: object) -> list[object]:
    return list(await asyncio.gather(*work, return_exceptions=True))  # type: ignore[call-overload]


async def test_of_two_who_take_over_a_run_one_wins_and_the_owner_before_is_fenced(stores: tuple[Store, Store]) -> None:
    one, other = stores
    for number in range(1, 21):
        run = Made(number=number)
        await one.log.create(run.new())
        begun = [[record(resumed(2, name), 2)] for name in ("a", "b")]
        outcomes = await _both(
            one.log.take_over(run.run_id, epoch=2, owner="a", log_events=begun[0]),
            other.log.take_over(run.run_id, epoch=2, owner="b", log_events=begun[1]),
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "RunMoved"], outcomes
        winner = outcomes.index(None)
        assert (await other.runs.get(ANNE, run.run_id)).owner == "ab"[winner]
        with pytest.raises(Fenced):
            await one.log.append(run.run_id, epoch=1, log_events=[record(delta("late"), 2)])
        await stores[winner].log.append(run.run_id, epoch=2, log_events=[record(completed(), 3)])


async def test_a_head_that_is_kept_here_does_not_overwrite_what_another_server_wrote(
    stores: tuple[Store, Store],
) -> None:
    one, other = stores
    run = Made()
    await one.log.create(run.new())
    await one.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    await other.log.take_over(run.run_id, epoch=2, owner="b", log_events=run.next(resumed(2, "b")))
    await other.log.append(run.run_id, epoch=2, log_events=run.next(delta(), delta()))
    with pytest.raises(Fenced):
        await one.log.append(run.run_id, epoch=1, log_events=[record(delta("late"), 3)])
    with pytest.raises(Fenced):
        await one.log.append(run.run_id, epoch=1, log_events=[record(delta("later"), 6)])
    await one.log.take_over(run.run_id, epoch=3, owner="a", log_events=run.next(resumed(3, "a")))
    await one.log.append(run.run_id, epoch=3, log_events=run.next(completed()))
    stored = [event async for page in one.log.tail(run.run_id) for event in page]
    assert [event.sequence for event in stored] == list(range(1, run.last_sequence + 1))
    assert stored == [event async for page in other.log.tail(run.run_id) for event in page]


async def test_one_request_id_on_both_is_one_run(stores: tuple[Store, Store]) -> None:
    for number in range(1, 31):
        runs = [Made(number=2 * number + place, request_id=f"ask-{number}") for place in (0, 1)]
        outcomes = await _both(*(store.log.create(run.new()) for store, run in zip(stores, runs, strict=True)))
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "RequestIdTaken"], outcomes
        (taken,) = (outcome for outcome in outcomes if isinstance(outcome, RequestIdTaken))
        assert taken.run_id == runs[outcomes.index(None)].run_id


async def test_one_session_id_on_both_is_one_session(stores: tuple[Store, Store]) -> None:
    for number in range(30):
        outcomes = await _both(
            *(one.sessions.create(ANNE, session_id=f"s{number}", labels={}, now_ns=START_NS + place)
              for place, one in enumerate(stores))
        )  # fmt: skip
        assert sum(isinstance(outcome, SessionExists) for outcome in outcomes) == 1, outcomes


async def test_one_session_is_held_by_one_run(stores: tuple[Store, Store]) -> None:
    for number in range(1, 31):
        session_id = f"s{number}"
        await stores[0].sessions.create(ANNE, session_id=session_id, labels={}, now_ns=START_NS)
        runs = [Made(number=2 * number + place) for place in (0, 1)]
        news = [_into(run, session_id) for run in runs]
        outcomes = await _both(*(store.log.create(new) for store, new in zip(stores, news, strict=True)))
        assert sum(outcome is None for outcome in outcomes) == 1, outcomes
        assert {type(outcome) for outcome in outcomes} <= {type(None), SessionBusy, SessionMoved}
        session = await stores[0].sessions.get(ANNE, session_id)
        assert session.current_run_id == runs[outcomes.index(None)].run_id


def _into(run: Made, session_id: str) -> object:
    return replace(run.new(), session_id=session_id, new_session=False)


async def _end(store: Store, run: Made) -> None:
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))


async def test_a_run_that_is_queued_while_its_predecessor_ends_starts(
    stores: tuple[Store, Store], postgres_url: str
) -> None:
    one, other = stores
    waited = 0
    for number in range(1, 61):
        holder = Made(number=2 * number)
        await one.log.create(holder.new())
        await one.log.append(holder.run_id, epoch=1, log_events=holder.next(delta()))
        queued = Made(number=2 * number + 1, session_number=2 * number, is_queued=True)
        ending, creating = _end(one, holder), other.log.create(queued.new())
        if number % 2:
            ended, outcome = await _both(ending, creating)
        else:
            outcome, ended = await _both(creating, ending)
        assert ended is None
        session = await other.sessions.get(ANNE, holder.session_id)
        if outcome is None:
            waited += 1
            assert session.current_run_id == queued.run_id
        else:
            assert isinstance(outcome, SessionBusy)
            assert session.current_run_id == ""
    assert waited, "the runs that were queued in time"


async def test_agents_that_another_server_stored_are_known(stores: tuple[Store, Store]) -> None:
    one, other = stores
    agents = [agent_pb2.Agent(definition=definition(name, "r1")) for name in ("lead", "writer")]
    assert [await store.agents.version(ANNE.tenant_id) for store in stores] == [0, 0]
    outcomes = await _both(
        *(store.agents.put(ANNE.tenant_id, agent, version=0) for store, agent in zip(stores, agents, strict=True))
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["CatalogMoved", "NoneType"]
    assert [await store.agents.version(ANNE.tenant_id) for store in stores] == [1, 1]
    await other.agents.remove(ANNE.tenant_id, "lead", version=1)
    assert (await one.agents.version(ANNE.tenant_id), (await one.agents.read(ANNE.tenant_id)).version) == (2, 2)
    with pytest.raises(CatalogMoved):
        await one.agents.put(ANNE.tenant_id, agents[0], version=1)


async def test_a_command_is_posted_before_its_run_ends_or_refused(
    stores: tuple[Store, Store], postgres_url: str
) -> None:
    one, other = stores
    for number in range(1, 31):
        run = Made(number=number)
        await one.log.create(run.new())
        cancel = RunCommand(command_id=0, run_id=run.run_id, cancel=event_pb2.CancelRequested())
        ending = one.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
        ended, posted = await _both(ending, other.mailbox.post(cancel))
        assert ended is None
        assert isinstance(posted, int | Fenced)
    assert execute(postgres_url, "SELECT count(*) FROM run_commands") == [(0,)]


async def test_what_runs_share_is_not_deleted_under_them(stores: tuple[Store, Store], postgres_url: str) -> None:
    one, other = stores
    file = StoredBlob(sha256="ab", media_type="image/png", data=b"photo")
    for number in range(1, 31):
        before, after = Made(number=2 * number), Made(number=2 * number + 1)
        for run in (before, after):
            run.definitions = [definition("lead", "r1")]
        news = [replace(run.new(), first=run.new().first._replace(blobs=[file])) for run in (before, after)]
        await one.log.create(news[0])
        await one.log.append(before.run_id, epoch=1, log_events=before.next(completed()))
        outcomes = await _both(one.sessions.delete(ANNE, before.session_id), other.log.create(news[1]))
        assert outcomes == [None, None]
        assert await other.catalog.get_for_tenant(ANNE.tenant_id, "r1") is not None
        assert (await one.blobs.read(ANNE, after.session_id, "ab")).data == b"photo"
        await other.log.append(after.run_id, epoch=1, log_events=after.next(completed()))
        await other.sessions.delete(ANNE, after.session_id)
    assert execute(postgres_url, "SELECT count(*) FROM definitions") == [(0,)]
    assert execute(postgres_url, "SELECT count(*) FROM blobs") == [(0,)]


async def test_a_fork_of_a_run_that_is_deleted_meanwhile_has_all_of_it_or_is_not(stores: tuple[Store, Store]) -> None:
    one, other = stores
    for number in range(1, 21):
        origin, fork = Made(number=2 * number), Fork(number=2 * number + 1)
        await one.log.create(origin.new())
        await one.log.append(origin.run_id, epoch=1, log_events=origin.next(delta(), completed()))
        forking = other.log.fork(fork.of(origin, 2))
        deleted, forked = await _both(one.sessions.delete(ANNE, origin.session_id), forking)
        assert deleted is None
        if forked is None:
            assert [each.sequence for each in await one.log.read(fork.run_id)] == [1, 2, 3]
        else:
            assert isinstance(forked, NotFound)


_STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "take", "end", "queue"]), st.integers(0, 1), st.integers(0, 2)), max_size=25
)


class _Play:
    """Steps of two servers, a few at once; a server that is refused knows nothing of the run any more."""

    def __init__(self, stores: tuple[Store, Store]) -> None:
        self._stores = stores
        self.runs = [Made(number=number) for number in range(1, 4)]
        self._queued = 0
        self._known: dict[tuple[int, int], tuple[int, int]] = {(0, run): (1, 1) for run in range(3)}

    async def begin(self) -> None:
        for run in self.runs:
            await self._stores[0].log.create(run.new())

    async def do(self, name: str, server: int, number: int) -> None:
        store, run = self._stores[server], self.runs[number]
        try:
            if name == "take":
                found = await store.runs.get(ANNE, run.run_id)
                epoch, last = found.epoch + 1, found.run.last_sequence + 1
                await store.log.take_over(
                    run.run_id, epoch=epoch, owner=f"w{server}", log_events=[record(resumed(epoch), last)]
                )
                self._known[server, number] = epoch, last
            elif name == "queue":
                self._queued += 1
                waiting = Made(number=100 + self._queued, session_number=run.number, is_queued=True)
                await store.log.create(waiting.new())
            elif (server, number) in self._known:
                epoch, last = self._known.pop((server, number))
                event = completed() if name == "end" else delta(f"{server} {last}")
                await store.log.append(run.run_id, epoch=epoch, log_events=[record(event, last + 1)])
                if name == "append":
                    self._known[server, number] = epoch, last + 1
        except (Fenced, RunMoved, SessionBusy):
            return


@pytest.mark.grid
@examples(8)
@given(_STEPS, st.integers(1, 4))
def test_two_servers_write_each_log_once_and_no_session_is_forgotten(
    steps: list[tuple[str, int, int]], at_once: int
) -> None:
    url = postgres.database()
    try:
        asyncio.run(_play(url, steps, at_once))
    finally:
        postgres.drop(url)


async def _play(url: str, steps: list[tuple[str, int, int]], at_once: int) -> None:
    async with _open(url) as one, _open(url) as other:
        play = _Play((one, other))
        await play.begin()
        for first in range(0, len(steps), at_once):
            await asyncio.gather(*(play.do(*step) for step in steps[first : first + at_once]))
        for run in play.runs:
            logs = [await store.log.read(run.run_id) for store in (one, other)]
            assert list(logs[0]) == list(logs[1])
            assert [event.sequence for event in logs[0]] == list(range(1, len(logs[0]) + 1))
            found = await one.runs.get(ANNE, run.run_id)
            assert found.run.last_sequence == len(logs[0])
    # A session that no run holds has none that waits, and one that is held is held by a run that has not ended.
    forgotten = """
        SELECT count(*) FROM sessions s WHERE s.current_run_id = ''
        AND EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.session_id AND NOT r.ended)
    """
    held = "SELECT count(*) FROM sessions s JOIN runs r ON r.run_id = s.current_run_id WHERE r.ended"
    assert (execute(url, forgotten), execute(url, held)) == ([(0,)], [(0,)])
