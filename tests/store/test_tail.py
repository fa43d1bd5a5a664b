"""Tails: any number of readers of a live or an ended log, from the window and from the disk behind it."""

import asyncio

import pytest

from bough_server.errors import NotFound, RunParked, ServerStopping
from bough_server.store.opening import Store, open_store
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything, next_page, resumed


async def test_a_reader_at_the_head_is_given_what_is_committed_next(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    tail = store.log.tail(run.run_id)
    assert await next_page(tail) == as_stored([run.new().first])
    waiting = asyncio.ensure_future(next_page(tail))
    await asyncio.sleep(0)
    made = run.next(delta(), completed())
    await store.log.append(run.run_id, epoch=1, log_events=made)
    assert await waiting == as_stored(made)
    with pytest.raises(StopAsyncIteration):
        await anext(tail)


async def test_a_page_never_waits_for_more_events_than_there_are(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    made = run.next(delta("1"), delta("2"))
    await store.log.append(run.run_id, epoch=1, log_events=made)
    assert await next_page(store.log.tail(run.run_id, after=1)) == as_stored(made)


async def test_an_ended_log_is_read_from_disk_alone(url: str) -> None:
    run = Made()
    made = run.next(*(delta(str(number)) for number in range(300)), completed())
    async with open_store(url) as store:
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=made)
    async with open_store(url) as store:
        assert await everything(store.log, run.run_id) == as_stored([run.new().first, *made])
        assert await everything(store.log, run.run_id, after=300) == as_stored(made[-2:])
        assert await everything(store.log, run.run_id, after=302) == []
        assert await everything(store.log, run.run_id, after=999) == []


async def test_a_reader_of_a_run_of_before_a_restart_sees_it_go_on(url: str) -> None:
    run = Made()
    async with open_store(url) as store:
        await store.log.create(run.new())
    async with open_store(url) as store:
        tail = store.log.tail(run.run_id)
        assert await next_page(tail) == as_stored([run.new().first])
        waiting = asyncio.ensure_future(next_page(tail))
        made = run.next(resumed(2), completed())
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[:1])
        assert await waiting == as_stored(made[:1])
        await store.log.append(run.run_id, epoch=2, log_events=made[1:])
        assert await next_page(tail) == as_stored(made[1:])


@pytest.mark.parametrize("window_bytes", [0, 2_000, 16 * 1024 * 1024])
async def test_a_slow_reader_gets_everything_however_small_the_window(url: str, window_bytes: int) -> None:
    run = Made()
    async with open_store(url, durability="process", window_bytes=window_bytes) as store:
        await store.log.create(run.new())
        slow = store.log.tail(run.run_id)
        got = await next_page(slow)
        made = [run.next(delta(str(number))) for number in range(400)] + [run.next(completed())]
        await asyncio.gather(*(store.log.append(run.run_id, epoch=1, log_events=one) for one in made))
        async for page in slow:
            got += page
        assert got == as_stored([run.new().first, *(one for (one,) in made)])


async def test_many_readers_at_different_places_each_get_all_that_is_after(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    readers = [asyncio.ensure_future(everything(store.log, run.run_id, after=after)) for after in range(12)]
    made = [run.next(delta(str(number))) for number in range(10)] + [run.next(completed())]
    for one in made:
        await store.log.append(run.run_id, epoch=1, log_events=one)
    whole = as_stored([run.new().first, *(one for (one,) in made)])
    assert await asyncio.gather(*readers) == [whole[after:] for after in range(12)]


async def test_a_reader_beyond_the_head_waits_for_the_log_to_reach_it(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    reader = asyncio.ensure_future(everything(store.log, run.run_id, after=3))
    made = run.next(delta("2"), delta("3"), delta("4"), completed())
    await store.log.append(run.run_id, epoch=1, log_events=made)
    assert await reader == as_stored(made[2:])


async def test_a_reader_that_leaves_disturbs_nobody(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    tails = [store.log.tail(run.run_id) for _ in range(2)]
    for tail in tails:
        await anext(tail)
    leaving, staying = (asyncio.ensure_future(next_page(tail)) for tail in tails)
    await asyncio.sleep(0)
    leaving.cancel()
    made = run.next(delta(), completed())
    await store.log.append(run.run_id, epoch=1, log_events=made)
    assert await staying == as_stored(made)
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_run_that_does_not_exist_has_no_tail(store: Store) -> None:
    with pytest.raises(NotFound):
        await everything(store.log, Made().run_id)


async def test_readers_of_a_deleted_session_are_told(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(*(delta() for _ in range(3000)), completed()))
    tail = store.log.tail(run.run_id)
    assert len(await next_page(tail)) == 256
    await store.sessions.delete(ANNE, run.session_id)
    with pytest.raises(NotFound):
        _ = [page async for page in tail]


async def test_closing_the_store_sends_readers_home(url: str) -> None:
    run = Made()
    async with open_store(url) as store:
        await store.log.create(run.new())
        tail = store.log.tail(run.run_id)
        await anext(tail)
        waiting = asyncio.ensure_future(next_page(tail))
        await asyncio.sleep(0)
    with pytest.raises(ServerStopping):
        await waiting
    with pytest.raises(ServerStopping):
        await store.log.read(run.run_id)
    with pytest.raises(ServerStopping):
        await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))


async def test_readers_that_are_dismissed_get_what_is_committed_and_the_run_goes_on(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    tail = store.log.tail(run.run_id)
    await anext(tail)
    waiting = asyncio.ensure_future(next_page(tail))
    await asyncio.sleep(0)
    store.log.close_readers()
    made = run.next(delta(), completed())
    await store.log.append(run.run_id, epoch=1, log_events=made[:1])
    late = store.log.tail(run.run_id)
    assert await next_page(late) == as_stored([run.new().first, made[0]])
    for reader in (waiting, anext(late)):
        with pytest.raises(ServerStopping):
            await reader
    await store.log.append(run.run_id, epoch=1, log_events=made[1:])
    assert await everything(store.log, run.run_id, after=2) == as_stored(made[1:])


async def test_readers_of_a_run_that_is_held_up_are_told_until_somebody_takes_it_over(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    tail = store.log.tail(run.run_id)
    await anext(tail)
    waiting = asyncio.ensure_future(next_page(tail))
    await asyncio.sleep(0)
    store.log.fail_readers(run.run_id, RunParked("The code is missing."))
    late = store.log.tail(run.run_id)
    assert await next_page(late) == as_stored([run.new().first])
    for reader in (waiting, anext(late)):
        with pytest.raises(RunParked):
            await reader
    made = run.next(resumed(2), completed())
    await store.log.take_over(run.run_id, epoch=2, owner="another", log_events=made)
    assert await everything(store.log, run.run_id, after=1) == as_stored(made)


async def test_closing_the_store_commits_what_is_queued(url: str) -> None:
    run = Made()
    async with open_store(url) as store:
        await store.log.create(run.new())
        append = store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    await append
    async with open_store(url) as store:
        assert await store.log.last_sequence(run.run_id) == 2
