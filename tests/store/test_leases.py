"""What every Lease does: counters that rise, and on a SQLite file go with the process that held it."""

import asyncio

from sqlalchemy import text

from bough_server.store.opening import Store, open_store
from bough_server.store.ports.workers import Topic
from tests.store.logs import ANNE, Made, completed, resumed
from tests.store.question_events import interrupted


async def test_a_worker_that_lives_raises_its_counter(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    assert [await store.leases.renew(worker) for worker in ("a", "a", "absent")] == [True, True, False]
    assert await store.leases.counters() == {"a": 3, "b": 1}


async def test_a_worker_that_is_taken_for_lost_cannot_renew_its_lease_but_begin_a_new_one(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    run = Made(owner="a")
    await store.log.create(run.new())
    await store.leases.renew("a")
    await store.leases.expire("a", 1)
    assert await store.leases.counters() == {"a": 2, "b": 1}, "it has renewed its lease since"
    await store.leases.expire("a", 2)
    assert await store.leases.counters() == {"b": 1}
    assert not await store.leases.renew("a")
    (claimed,) = await store.leases.claim("b", most=9)
    assert (claimed.run.run_id, claimed.owner) == (run.run_id, "a")
    assert store.leases.has_crashed("a")
    await store.leases.begin("a")
    again = await store.leases.counters()
    assert (again["a"] > 2, again["b"]) == (True, 1), "no count of the lease before comes again"
    assert (await store.runs.get(ANNE, run.run_id)).owner == "b"


async def test_the_lease_of_a_lost_worker_is_removed_once_none_of_its_runs_is_open(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    run = Made(owner="a")
    await store.log.create(run.new())
    await store.leases.expire("a", 1)
    (claimed,) = await store.leases.claim("b", most=9)
    assert claimed.owner == "a"
    await store.log.take_over(run.run_id, epoch=2, owner="b", log_events=run.next(resumed(1, "b")))
    assert await store.leases.claim("b", most=9) == []  # nothing, and the lease is removed
    assert await store.write(lambda each: each.execute(text("SELECT worker FROM workers")).all()) == [("b",)]


async def test_a_lease_begins_without_runs(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    await store.log.create(Made(owner="a").new())
    await store.leases.begin("a")
    (claimed,) = await store.leases.claim("b", most=9)
    assert (claimed.owner, store.leases.has_crashed("a")) == ("", False)


async def test_a_run_that_a_lost_worker_creates_after_its_name_was_forgotten_is_claimed(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    await store.log.create(Made(number=1, owner="b").new())
    await store.leases.expire("a", 1)
    await store.log.create(Made(number=2, owner="a").new())
    (claimed,) = await store.leases.claim("b", most=9)
    assert (claimed.run.run_id, claimed.owner) == (Made(number=2).run_id, "a")


async def test_a_worker_that_was_lost_has_not_crashed_once_it_has_a_lease_again(store: Store) -> None:
    await store.leases.begin("a")
    await store.leases.expire("a", 1)
    assert await store.leases.claim("a", most=9) == ()
    await store.log.create(Made(owner="a").new())
    await store.leases.begin("a")
    assert not store.leases.has_crashed("a")


async def test_runs_without_an_owner_are_claimed_once_and_oldest_first(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    owners = {1: "", 2: "a", 3: "", 4: "a", 5: "", 6: "", 7: ""}
    for number, owner in owners.items():
        await store.log.create(Made(number=number, owner=owner).new())
    parked, ended, waits, given = (Made(number=number) for number in (3, 5, 6, 4))
    await store.log.append(ended.run_id, epoch=1, log_events=ended.next(completed()))
    await store.log.append(waits.run_id, epoch=1, log_events=waits.next(interrupted()))
    await store.leases.give_up("a", given.run_id)
    await store.leases.give_up("b", Made(number=2).run_id)

    async def claim(worker: str, most: int) -> list[str]:
        return [one.run.run_id[-1] for one in await store.leases.claim(worker, most=most, but=[parked.run_id])]

    assert await claim("a", 2) == ["1", "4"]
    assert await claim("b", 2) == ["7"]
    assert await claim("b", 2) == []
    assert (await store.runs.get(ANNE, parked.run_id)).owner == ""
    assert await claim("without a lease", 9) == []


async def test_a_worker_that_ends_in_order_leaves_its_runs_to_others(store: Store) -> None:
    for worker in ("a", "b"):
        await store.leases.begin(worker)
    await store.log.create(Made(owner="a").new())
    offers: list[str] = []
    store.notifier.subscribe(Topic.UNOWNED, offers.append)
    await store.leases.release("a")
    assert set(offers) == {""}  # PostgreSQL's notifier offers again when it connects or polls meanwhile
    (claimed,) = await store.leases.claim("b", most=9)
    assert (claimed.owner, store.leases.has_crashed("a")) == ("", False)


async def test_a_worker_that_released_its_lease_has_none(store: Store) -> None:
    await asyncio.gather(*(store.leases.begin(worker) for worker in ("a", "b")))
    await store.leases.release("a")
    await store.leases.release("absent")
    assert await store.leases.counters() == {"b": 1}


async def test_who_opens_the_store_knows_that_every_worker_before_is_dead(url: str) -> None:
    async with open_store(url) as store:
        await store.leases.begin("before")
    async with open_store(url) as store:
        assert await store.leases.counters() == {}


async def test_who_opens_a_shared_database_leaves_the_leases_of_others(postgres_url: str) -> None:
    async with open_store(postgres_url) as first:
        await first.leases.begin("a")
        async with open_store(postgres_url) as second:
            assert await second.leases.renew("a")
            assert await first.leases.counters() == {"a": 2}
            assert not second.leases.has_crashed("a")
