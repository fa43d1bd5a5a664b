"""What every Lease does: counters that rise, and on a SQLite file go with the process that held it."""

import asyncio

from bough_server.store.opening import Store, open_store


async def test_a_worker_that_lives_raises_its_counter(store: Store) -> None:
    for worker in ("a", "b", "a", "a"):
        await store.leases.renew(worker)
    assert await store.leases.counters() == {"a": 3, "b": 1}


async def test_a_worker_that_released_its_lease_has_none(store: Store) -> None:
    await asyncio.gather(*(store.leases.renew(worker) for worker in ("a", "b")))
    await store.leases.release("a")
    await store.leases.release("absent")
    assert await store.leases.counters() == {"b": 1}


async def test_who_opens_the_store_knows_that_every_worker_before_is_dead(url: str) -> None:
    async with open_store(url) as store:
        await store.leases.renew("before")
    async with open_store(url) as store:
        assert await store.leases.counters() == {}


async def test_who_opens_a_shared_database_leaves_the_leases_of_others(postgres_url: str) -> None:
    async with open_store(postgres_url) as first:
        await first.leases.renew("a")
        async with open_store(postgres_url) as second:
            await second.leases.renew("a")
            assert await first.leases.counters() == {"a": 2}
            assert not second.leases.crashed("a")
