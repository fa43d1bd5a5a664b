"""Who keeps a lease, who is taken for lost and when, and what a server does that was."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bough_server.errors import StorageFailed
from bough_server.ownership.worker import DECLARE_DEAD_SECONDS, RENEW_SECONDS, Worker
from bough_server.store.opening import open_store
from bough_server.store.sql.store import Store
from tests.support.held_clock import HeldClock

_STEP = 0.5

_TASKS = 2
"""One that renews the watcher's lease, and one that looks at those of others."""


class Watch:
    """A server that watches the leases of others, and the moments at which it looked."""

    def __init__(self, store: Store) -> None:
        self.clock, self.is_reachable = HeldClock(), True
        self.is_writable = True
        self._store, self.lost = store, 0
        self.worker = Worker("me", self, self.clock)  # type: ignore[arg-type]
        self.worker.on_lost(self._on_lost)
        self._looks = 0
        self._looked = asyncio.Condition()

    async def counters(self) -> Mapping[str, int]:
        """The counters of all workers, if the database can be reached."""
        self._looks += 1
        async with self._looked:
            self._looked.notify_all()
        if not self.is_reachable:
            raise StorageFailed("It cannot be reached.")
        return await self._store.leases.counters()

    async def expire(self, worker: str, counter: int) -> None:
        """End a lease."""
        await self._store.leases.expire(worker, counter)

    async def renew(self, worker: str) -> bool:
        """Renew the watcher's own lease, if the database writes."""
        if not self.is_writable:
            raise StorageFailed("It cannot be written.")
        return True

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, with all the looks that fall into it."""
        for _ in range(round(seconds / _STEP)):
            await self.clock.next_sleep(_TASKS)
            looks = self._looks
            self.clock.advance(_STEP)
            async with self._looked:
                await self._looked.wait_for(lambda looks=looks: self._looks > looks)  # type: ignore[misc]
        await self.clock.next_sleep(_TASKS)

    async def _on_lost(self) -> None:
        self.lost += 1


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/bough.db", durability="process") as opened:
        yield opened


@asynccontextmanager
async def watching(store: Store) -> AsyncIterator[Watch]:
    for worker in ("me", "other"):
        await store.leases.begin(worker)
    watch = Watch(store)
    tasks = {asyncio.create_task(work) for work in (watch.worker.watch_others(), watch.worker.keep_lease())}
    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_worker_is_lost_once_its_counter_has_been_seen_unchanged_for_long_enough(store: Store) -> None:
    async with watching(store) as watch:
        await watch.pass_time(DECLARE_DEAD_SECONDS)
        assert "other" in await store.leases.counters(), "it was seen for the first time half a second ago"
        await watch.pass_time(1)
        assert list(await store.leases.counters()) == ["me"]


async def test_a_worker_that_renews_its_lease_is_never_lost(store: Store) -> None:
    async with watching(store) as watch:
        for _ in range(10):
            await watch.pass_time(DECLARE_DEAD_SECONDS - 1)
            assert await store.leases.renew("other")


async def test_a_worker_that_others_declared_dead_just_before_is_not_lost_again_with_its_new_lease(
    store: Store,
) -> None:
    async with watching(store) as watch:
        await watch.pass_time(DECLARE_DEAD_SECONDS)
        await store.leases.expire("other", 1)
        await store.leases.begin("other")
        await watch.pass_time(DECLARE_DEAD_SECONDS)
        assert "other" in await store.leases.counters()


async def test_time_in_which_the_database_did_not_answer_makes_nobody_lost(store: Store) -> None:
    async with watching(store) as watch:
        await watch.pass_time(DECLARE_DEAD_SECONDS - 1)
        watch.is_reachable = False
        await watch.pass_time(60)
        watch.is_reachable = True
        await watch.pass_time(DECLARE_DEAD_SECONDS)
        assert "other" in await store.leases.counters()
        await watch.pass_time(1)
        assert "other" not in await store.leases.counters()


async def test_time_in_which_the_database_answers_and_writes_nothing_makes_nobody_lost(store: Store) -> None:
    async with watching(store) as watch:
        watch.is_writable = False
        await watch.pass_time(60)
        assert "other" in await store.leases.counters()
        watch.is_writable = True
        await watch.pass_time(DECLARE_DEAD_SECONDS)
        assert "other" in await store.leases.counters()
        await watch.pass_time(RENEW_SECONDS + 1)
        assert "other" not in await store.leases.counters()


async def test_time_in_which_the_watcher_itself_was_held_up_makes_nobody_lost(store: Store) -> None:
    async with watching(store) as watch:
        await watch.pass_time(2)
        watch.clock.halt(60)
        await watch.pass_time(DECLARE_DEAD_SECONDS - 1)
        assert "other" in await store.leases.counters()


async def test_a_worker_that_was_taken_for_lost_stops_what_it_executes(store: Store) -> None:
    clock, stopped = HeldClock(), asyncio.Event()

    async def stop() -> None:
        stopped.set()

    worker = Worker("me", store.leases, clock)
    worker.on_lost(stop)
    await store.leases.begin("me")
    task = asyncio.create_task(worker.keep_lease())
    await clock.next_sleep()
    clock.advance(RENEW_SECONDS)
    await clock.next_sleep()
    assert (await store.leases.counters(), stopped.is_set()) == ({"me": 2}, False)
    await store.leases.expire("me", 2)
    clock.advance(RENEW_SECONDS)
    await stopped.wait()
    await clock.next_sleep()
    assert list(await store.leases.counters()) == ["me"]
    task.cancel()
    await asyncio.wait({task})


async def test_a_database_that_is_away_for_many_renewals_is_one_line_of_the_log() -> None:
    class Away:
        async def renew(self, _: str) -> bool:
            raise StorageFailed("It is away.")

    clock = HeldClock()
    task = asyncio.create_task(Worker("me", Away(), clock).keep_lease())  # type: ignore[arg-type]
    with capture_logs() as logged:
        for _ in range(5):
            await clock.next_sleep()
            clock.advance(RENEW_SECONDS)
            await clock.next_sleep()
    assert [entry["event"] for entry in logged] == ["lease not renewed"]
    task.cancel()
    await asyncio.wait({task})
