"""The connection of notifications: what it sends, and what it costs if it cannot be had."""

import asyncio
import re
from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from bough_server.errors import ConfigurationError
from bough_server.store.opening import open_store
from bough_server.store.ports.workers import Topic
from bough_server.store.postgres.notifications import MAX_PAYLOAD, MAX_PENDING
from tests.store.logs import Made, as_stored, completed, everything


async def _sent(url: str, act: Callable[[Callable[[Topic, str], None]], None], *, last: str) -> list[str]:
    """Return the payloads that a store sends for what `act` publishes, up to the one that contains `last`."""
    payloads: list[str] = []
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as other:
        (channel,) = await (await other.execute("SELECT 'bough_' || md5(current_schema())")).fetchone() or ("",)
        await other.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        async with open_store(url, durability="process") as store:
            act(store.notifier.publish)
            async for received in other.notifies():
                payloads.append(received.payload.partition(" ")[2])
                if last in payloads[-1]:
                    break
    return payloads


async def test_all_that_is_published_is_sent_once_in_as_many_notifications_as_it_needs(postgres_url: str) -> None:
    ids = [str(uuid4()) for _ in range(500)]

    def publish(one: Callable[[Topic, str], None]) -> None:
        for log_id in [*ids, *ids]:
            one(Topic.LOG, log_id)
        one(Topic.COMMANDS, ids[0])
        one(Topic.UNOWNED, "")

    payloads = await _sent(postgres_url, publish, last=ids[-1])
    assert len(payloads) == 3
    assert all(len(payload) + 33 <= MAX_PAYLOAD for payload in payloads)
    named = [part.partition("=") for payload in payloads for part in payload.split(" ")]
    assert [log_id for topic, _, some in named if topic == "log" for log_id in some.split(",")] == ids
    assert [some for topic, _, some in named if topic != "log"] == [ids[0], ""]


async def test_of_too_many_it_is_said_that_there_are_any(postgres_url: str) -> None:
    def publish(one: Callable[[Topic, str], None]) -> None:
        for number in range(MAX_PENDING + 1):
            one(Topic.LOG, str(number))
        one(Topic.COMMANDS, "last")

    assert await _sent(postgres_url, publish, last="last") == ["log= commands=last"]


async def test_a_server_that_cannot_connect_says_so_once_without_the_password_and_works(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = re.sub(r"bough@/\w+", "bough:hunter2@/nowhere", postgres_url)
    run = Made()
    async with open_store(postgres_url, durability="process", listen_url=nowhere) as store:
        await store.log.create(run.new())
        ended = run.next(completed())
        await store.log.append(run.run_id, epoch=1, log_events=ended)
        assert (await everything(store.log, run.run_id, after=1)) == as_stored(ended)
        looked = asyncio.Event()
        store.notifier.subscribe(Topic.COMMANDS, lambda _: looked.set())
        await looked.wait()  # a second, in which it has tried several times
    said = capsys.readouterr().out
    assert said.count("are not received") == 1
    assert "nowhere" in said
    assert "hunter2" not in said


async def test_a_closed_store_leaves_no_task(postgres_url: str) -> None:
    before = asyncio.all_tasks()
    async with open_store(postgres_url, durability="process") as store:
        await store.log.create(Made().new())
        assert asyncio.all_tasks() > before
    assert asyncio.all_tasks() == before


async def test_a_url_for_notifications_is_one_of_postgresql(postgres_url: str, file_url: str) -> None:
    for url, listen_url in ((file_url, postgres_url), (postgres_url, file_url)):
        with pytest.raises(ConfigurationError, match=r"storage\.listen_url"):
            open_store(url, listen_url=listen_url)
