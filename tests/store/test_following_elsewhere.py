"""Readers at one server of logs that another one writes: notified, or found by a poll each second."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from bough.v1 import event_pb2
from bough_server.errors import Fenced, NotFound, RunParked
from bough_server.store.opening import open_store
from bough_server.store.ports.log import AnyLogEvent, StoredEvent
from bough_server.store.ports.workers import RunCommand, Topic
from bough_server.store.sql.store import Store
from tests.store.logs import Made, as_stored, completed, delta, everything, next_page, resumed
from tests.store.sql import execute, seen_statements
from tests.support import postgres

_END_LISTENERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE (query ILIKE '%pg_notify%' OR query LIKE 'LISTEN%')
    AND datname = current_database() AND pid != pg_backend_pid()
"""


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two stores on one database, both of which receive notifications."""
    async with _open(postgres_url) as one, _open(postgres_url) as other:
        await _connected(one, other)
        yield one, other


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A database whose notifications the writer does not send."""
    made = postgres.database()
    yield made
    postgres.drop(made)


def _open(url: str, **options: object) -> Store:
    return open_store(url, durability="process", **options)


async def _connected(one: Store, other: Store) -> None:
    """Wait until each store receives what the other one publishes."""
    for sender, receiver in ((one, other), (other, one)):
        received = asyncio.Event()
        receiver.notifier.subscribe(Topic.UNOWNED, partial(_set, received), own=False)
        while not received.is_set():
            sender.notifier.publish(Topic.UNOWNED)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await received.wait()


def _set(event: asyncio.Event, _: str) -> None:
    event.set()


async def _waiting(store: Store, run: Made, count: int) -> "list[asyncio.Task[list[StoredEvent]]]":
    """Start readers of a run, and wait until each is at its head."""
    tails = [store.log.tail(run.run_id) for _ in range(count)]
    for tail in tails:
        await next_page(tail)

    async def rest(tail: object) -> list[StoredEvent]:
        return [event async for page in tail for event in page]  # type: ignore[attr-defined]

    readers = [asyncio.ensure_future(rest(tail)) for tail in tails]
    await asyncio.sleep(0)
    return readers


async def _write(store: Store, run: Made, count: int = 30) -> list[AnyLogEvent]:
    """Append events one by one, and the end."""
    made: list[AnyLogEvent] = []
    for number in range(count):
        records = run.next(delta(str(number)))
        await store.log.append(run.run_id, epoch=1, log_events=records)
        made += records
    records = run.next(completed())
    await store.log.append(run.run_id, epoch=1, log_events=records)
    return made + records


async def test_a_follower_gets_what_another_server_commits_in_order(stores: tuple[Store, Store]) -> None:
    one, other = stores
    run = Made()
    await one.log.create(run.new())
    readers = await _waiting(other, run, 3)
    made = await _write(one, run)
    assert await asyncio.gather(*readers) == [as_stored(made)] * 3


async def test_a_follower_gets_it_too_if_every_notification_is_lost(postgres_url: str, elsewhere: str) -> None:
    async with _open(postgres_url) as one, _open(postgres_url, listen_url=elsewhere) as other:
        run = Made()
        await one.log.create(run.new())
        readers = await _waiting(other, run, 2)
        made = await _write(one, run)
        assert await asyncio.gather(*readers) == [as_stored(made)] * 2
        assert other.followed is not None
        counted = other.followed.count_reads()
        assert (counted["notification"], counted["look"] > 0) == (0, True)


async def test_a_follower_gets_it_too_if_the_listening_connection_is_ended(
    stores: tuple[Store, Store], postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = stores
    run, later = Made(), Made(number=2)
    await one.log.create(run.new())
    await one.log.create(later.new())
    readers = await _waiting(other, run, 2)
    made = [run.next(delta()), run.next(delta()), run.next(completed())]
    await one.log.append(run.run_id, epoch=1, log_events=made[0])
    assert len(execute(postgres_url, _END_LISTENERS)) == 2
    await one.log.append(run.run_id, epoch=1, log_events=made[1])
    await one.log.append(run.run_id, epoch=1, log_events=made[2])
    assert await asyncio.gather(*readers) == [as_stored([record for records in made for record in records])] * 2
    await _connected(one, other)
    readers = await _waiting(other, later, 1)
    ended = await _write(one, later)
    assert await readers[0] == as_stored(ended)
    said = capsys.readouterr().out
    assert said.count("notifications of other servers are not received") == 2


async def test_more_than_fits_a_notification_is_found_all_the_same(stores: tuple[Store, Store]) -> None:
    one, other = stores
    runs = [Made(number=number) for number in range(1, 251)]
    await asyncio.gather(*(one.log.create(run.new()) for run in runs))
    readers = [(await _waiting(other, run, 1))[0] for run in runs]
    ends = [run.next(completed()) for run in runs]
    appends = zip(runs, ends, strict=True)
    await asyncio.gather(*(one.log.append(run.run_id, epoch=1, log_events=end) for run, end in appends))
    assert await asyncio.gather(*readers) == [as_stored(end) for end in ends]


async def test_many_followers_cost_one_read_and_those_of_the_owner_none(stores: tuple[Store, Store]) -> None:
    one, other = stores
    runs = [Made(number=number) for number in (1, 2)]
    for run in runs:
        await one.log.create(run.new())
    readers = [reader for run in runs for reader in await _waiting(other, run, 50)]
    own = [reader for run in runs for reader in await _waiting(one, run, 50)]
    with seen_statements() as statements:
        ends = [run.next(*(delta() for _ in range(20)), completed()) for run in runs]
        appends = zip(runs, ends, strict=True)
        await asyncio.gather(*(one.log.append(run.run_id, epoch=1, log_events=end) for run, end in appends))
        for logs in (await asyncio.gather(*readers), await asyncio.gather(*own)):
            assert logs == [as_stored(end) for end in ends for _ in range(50)]
    reads = [text for text, _ in statements if "FROM events" in text]
    assert 1 <= len(reads) <= 2, reads  # two if the looks of both seconds meet the commit
    assert all("unnest" in text for text in reads)


async def test_a_log_that_nobody_follows_is_not_read(stores: tuple[Store, Store]) -> None:
    one, other = stores
    run, followed = Made(number=1), Made(number=2)
    for each in (run, followed):
        await one.log.create(each.new())
    readers = await _waiting(other, followed, 1)
    with seen_statements() as statements:
        await _write(one, run, 5)
        await _write(one, followed, 0)
        await readers[0]
    read = [parameters for text, parameters in statements if "FROM events" in text]
    assert read
    assert all(run.run_id not in str(parameters) for parameters in read)


async def test_a_run_that_was_taken_over_is_followed_on_where_it_was_fenced(stores: tuple[Store, Store]) -> None:
    one, other = stores
    run = Made()
    await one.log.create(run.new())
    before = run.next(delta(), delta())
    await one.log.append(run.run_id, epoch=1, log_events=before)
    readers = await _waiting(one, run, 3)
    after = [run.next(resumed(2, "b")), run.next(delta()), run.next(completed())]
    await other.log.take_over(run.run_id, epoch=2, owner="b", log_events=after[0])
    with pytest.raises(Fenced):
        await one.log.append(run.run_id, epoch=1, log_events=[after[0][0]])
    one.log.release(run.run_id)
    for records in after[1:]:
        await other.log.append(run.run_id, epoch=2, log_events=records)
    logs = await asyncio.gather(*readers)
    assert logs == [as_stored([record for records in after for record in records])] * 3


async def test_a_run_that_is_parked_here_is_followed_again_once_another_server_has_it(
    stores: tuple[Store, Store],
) -> None:
    one, other = stores
    run, quiet = Made(number=1), Made(number=2)
    for each in (run, quiet):
        await one.log.create(each.new())
        one.log.fail_readers(each.run_id, RunParked("The code is missing."), epoch=1)
    behind, ended_tail = one.log.tail(run.run_id), one.log.tail(run.run_id)
    for reader_here in (behind, ended_tail):
        await next_page(reader_here)
    with pytest.raises(RunParked):
        await anext(ended_tail)
    for each in (run, quiet):
        await other.log.take_over(each.run_id, epoch=2, owner="b", log_events=each.next(resumed(2, "b")))
    tail = one.log.tail(run.run_id, after=1)
    assert [event.sequence for event in await next_page(tail)] == [2]
    ended = run.next(completed())
    waiting = asyncio.ensure_future(next_page(tail))
    await other.log.append(run.run_id, epoch=2, log_events=ended)
    assert await waiting == as_stored(ended)
    assert [event.sequence for event in await next_page(behind)] == [2, 3]
    reader = asyncio.ensure_future(everything(one.log, quiet.run_id, after=2))
    ended = quiet.next(completed())
    await other.log.append(quiet.run_id, epoch=2, log_events=ended)
    assert await reader == as_stored(ended)


async def test_followers_of_a_run_that_another_server_deletes_are_told(
    stores: tuple[Store, Store], postgres_url: str
) -> None:
    one, other = stores
    run = Made()
    await one.log.create(run.new())
    tail = other.log.tail(run.run_id)
    await next_page(tail)
    waiting = asyncio.ensure_future(next_page(tail))
    await asyncio.sleep(0)
    execute(postgres_url, "DELETE FROM events; DELETE FROM sessions; DELETE FROM runs")
    with pytest.raises(NotFound):
        await waiting


def _cancel(run: Made) -> RunCommand:
    return RunCommand(command_id=0, run_id=run.run_id, cancel=event_pb2.CancelRequested())


@asynccontextmanager
async def _arrivals(store: Store) -> AsyncIterator[AsyncIterator[str]]:
    arrivals = aiter(store.mailbox.arrivals())
    yield arrivals
    await arrivals.aclose()  # type: ignore[attr-defined]


async def test_a_command_arrives_at_the_other_servers(stores: tuple[Store, Store]) -> None:
    one, other = stores
    run = Made()
    await one.log.create(run.new())
    async with _arrivals(other) as arrivals:
        waiting = asyncio.ensure_future(anext(arrivals))
        await asyncio.sleep(0)
        await one.mailbox.post(_cancel(run))
        assert await waiting == run.run_id


async def test_a_command_arrives_too_if_its_notification_is_lost_and_again_at_a_new_owner(
    postgres_url: str, elsewhere: str
) -> None:
    async with _open(postgres_url) as one, _open(postgres_url, listen_url=elsewhere) as other:
        run, ended = Made(number=1), Made(number=2)
        for each in (run, ended):
            await one.log.create(each.new())
        async with _arrivals(other) as arrivals:
            waiting = asyncio.ensure_future(anext(arrivals))
            await asyncio.sleep(0)
            await one.mailbox.post(_cancel(run))
            assert await waiting == run.run_id
            waiting = asyncio.ensure_future(anext(arrivals))
            await one.log.take_over(run.run_id, epoch=2, owner="b", log_events=run.next(resumed(2, "b")))
            began = asyncio.get_running_loop().time()
            assert await waiting == run.run_id
            assert asyncio.get_running_loop().time() - began < 4  # the next look, not the repetition
    assert await _count(postgres_url) == 1


async def _count(url: str) -> int:
    ((count,),) = execute(url, "SELECT count(*) FROM run_commands")
    return int(count)
