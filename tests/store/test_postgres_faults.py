"""A PostgreSQL that fails: connections that are lost, commits without an answer, and rows that others lock."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import psycopg
import pytest
from sqlalchemy import Connection, event
from sqlalchemy import text as sql_text
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

from bough.v1 import event_pb2
from bough_server.clock import SystemClock
from bough_server.errors import Fenced, InvalidRequest, StorageFailed
from bough_server.store.opening import open_store
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.ports.workers import RunCommand
from bough_server.store.postgres import store as postgres_store
from bough_server.store.postgres.database import reader_engine
from bough_server.store.postgres.driver import POSTGRES
from bough_server.store.sql.driver import Reach
from bough_server.store.sql.pages import encode_token
from bough_server.store.sql.readers import Readers, read_range
from bough_server.store.sql.store import Store
from bough_server.store.sql.writer import CommitHooks
from bough_server.store.window import PAGE_BYTES
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything, record, resumed, text
from tests.store.sql import execute

_END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND {}"
_WRITERS = (
    "datname = current_database() AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory') "
    "AND pid != pg_backend_pid()"
)


class Hook:
    """Does something once, right before or after a commit."""

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None

    def __call__(self) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


@pytest.fixture
def before() -> Hook:
    return Hook()


@pytest.fixture
def after() -> Hook:
    return Hook()


@pytest.fixture
async def store(postgres_url: str, before: Hook, after: Hook) -> AsyncIterator[Store]:
    """An empty store whose commits can be disturbed."""
    hooks = CommitHooks(before=before, after=after)
    async with open_store(postgres_url, durability="process", hooks=hooks, retry_delays=(0.0, 0.1)) as opened:
        yield opened


def _end_writers(url: str) -> None:
    assert execute(url, _END_ALL.format(_WRITERS)) != []


async def test_a_connection_that_is_lost_before_a_commit_is_replaced(
    store: Store, postgres_url: str, before: Hook
) -> None:
    run = Made()
    await store.log.create(run.new())
    before.act = lambda: _end_writers(postgres_url)
    await store.log.append(run.run_id, epoch=1, log_events=run.next(delta(), delta()))
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    assert [one.sequence for one in await everything(store.log, run.run_id)] == [1, 2, 3, 4]


async def test_a_connection_that_is_lost_while_nothing_uses_it_is_replaced(store: Store, postgres_url: str) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.runs.get(ANNE, run.run_id)
    execute(postgres_url, _END_ALL.format("pid != pg_backend_pid()"))
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    assert (await store.runs.get(ANNE, run.run_id)).run.last_sequence == 2


async def test_a_commit_whose_answer_is_lost_is_looked_up(store: Store, postgres_url: str, after: Hook) -> None:
    first, second, command = Made(number=1), Made(number=2), event_pb2.CancelRequested()

    def lose() -> None:
        _end_writers(postgres_url)
        raise psycopg.OperationalError("the connection is closed")

    after.act = lose
    await store.log.create(first.new())
    await store.log.create(second.new())
    after.act = lose
    await asyncio.gather(
        store.log.append(first.run_id, epoch=1, log_events=first.next(delta())),
        store.log.append(first.run_id, epoch=1, log_events=first.next(delta())),
        store.log.append(second.run_id, epoch=1, log_events=second.next(delta())),
    )
    after.act = lose
    posted = await store.mailbox.post(RunCommand(command_id=0, run_id=first.run_id, cancel=command))
    assert [one.command_id for one in await store.mailbox.take(first.run_id)] == [posted]
    after.act = lose
    await store.log.take_over(second.run_id, epoch=2, owner="b", log_events=second.next(delta()))
    after.act = lose
    await store.log.append(first.run_id, epoch=1, log_events=first.next(completed()))
    assert [one.sequence for one in await everything(store.log, first.run_id)] == [1, 2, 3, 4]
    assert (await store.runs.get(ANNE, second.run_id)).epoch == 2
    assert await store.mailbox.take(first.run_id) == []


async def test_the_connection_before_is_ended_before_its_commit_is_looked_up(
    store: Store, postgres_url: str, before: Hook
) -> None:
    """A server whose network is cut sees an error, while its transaction is still open in the database."""
    run = Made()
    await store.log.create(run.new())
    (writer,) = execute(postgres_url, f"SELECT pid FROM pg_stat_activity WHERE {_WRITERS}")
    connection = await store.write(lambda each: each.connection.dbapi_connection)
    assert isinstance(connection, psycopg.Connection)
    kept: list[int] = []

    def cut() -> None:
        open_socket = connection.fileno()
        kept.append(os.dup(open_socket))
        one, other = socket.socketpair()
        os.dup2(one.fileno(), open_socket)
        one.close()
        other.close()

    before.act = cut
    began = time.monotonic()
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    assert time.monotonic() - began < 1.5  # the busy timeout is 2 seconds: no lock of the old one was waited for
    assert kept
    assert [one.sequence for one in await everything(store.log, run.run_id)] == [1, 2]
    assert execute(postgres_url, f"SELECT pid FROM pg_stat_activity WHERE pid = {writer[0]}") == []
    os.close(kept[0])


async def test_a_run_that_another_connection_locks_is_written_when_it_does_not_any_more(
    store: Store, postgres_url: str
) -> None:
    run = Made()
    await store.log.create(run.new())
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM runs FOR UPDATE")
        writing = asyncio.ensure_future(store.log.append(run.run_id, epoch=1, log_events=run.next(delta())))
        _, pending = await asyncio.wait({writing}, timeout=0.3)
        assert pending
    await writing


async def _as_one_group(store: Store, calls: Sequence[Callable[[], Awaitable[object]]]) -> list[object]:
    """Let a store do some calls in one transaction; return their outcomes."""
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
    return await together


@pytest.mark.parametrize(
    "locked", ["SELECT 1 FROM runs WHERE run_id = %s", "SELECT 1 FROM sessions WHERE session_id = %s"]
)
async def test_a_lock_that_is_held_longer_than_the_retries_fails_those_alone_that_need_it(
    postgres_url: str, locked: str
) -> None:
    runs, late = [Made(number=number) for number in (1, 2, 3)], Made(number=4)
    held = {"run_id": runs[1].run_id, "session_id": runs[1].session_id}

    healths: list[bool] = []
    options = {"busy_timeout": 0.2, "retry_delays": (0.0, 0.1)}
    async with open_store(postgres_url, durability="process", **options) as store:

        def end(run: Made) -> Awaitable[None]:
            return store.log.append(run.run_id, epoch=1, log_events=run.next(delta(), completed()))

        async def note_health() -> None:
            note = healths.append
            async for is_possible in store.write_health.changes():
                note(is_possible)

        for run in runs:
            await store.log.create(run.new())
        noting = asyncio.ensure_future(note_health())
        with psycopg.connect(postgres_url) as other:
            other.execute(f"{locked} FOR UPDATE".encode(), [held[locked.split()[-3]]])
            calls = [partial(end, run) for run in runs]
            outcomes = await _as_one_group(store, [*calls, partial(store.log.create, late.new())])
            assert [type(outcome) for outcome in outcomes] == [type(None), StorageFailed, type(None), type(None)]
            with pytest.raises(StorageFailed):
                await store.log.append(runs[1].run_id, epoch=1, log_events=runs[1].next(delta()))
        await store.log.take_over(runs[1].run_id, epoch=2, owner="b", log_events=[record(completed(), 2)])
        noting.cancel()
    assert execute(postgres_url, "SELECT ended FROM runs ORDER BY run_id") == [(True,), (True,), (True,), (False,)]
    assert healths == [True]


async def test_few_tries_find_the_one_of_many_jobs_that_waits_for_a_lock(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, tries = [Made(number=number) for number in range(100)], list[int]()

    def counted(connection: Connection, reach: Reach) -> bool:
        tries.append(len(reach.runs))
        return POSTGRES.can_lock(connection, reach)

    monkeypatch.setattr(postgres_store, "POSTGRES", replace(POSTGRES, can_lock=counted))
    options = {"busy_timeout": 0.2, "retry_delays": (0.0,)}
    async with open_store(postgres_url, durability="process", **options) as store:
        for run in runs:
            await store.log.create(run.new())

        def append(run: Made) -> Awaitable[None]:
            return store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))

        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT 1 FROM runs WHERE run_id = %s FOR UPDATE", [runs[60].run_id])
            outcomes = await _as_one_group(store, [partial(append, run) for run in runs])
    assert [index for index, outcome in enumerate(outcomes) if outcome is not None] == [60]
    assert tries[0] == 100
    assert len(tries) < 30, "one by one it would be 100"


async def test_what_follows_in_a_run_that_is_locked_fails_with_it(postgres_url: str) -> None:
    locked, free = Made(number=1), Made(number=2)
    options = {"busy_timeout": 0.2, "retry_delays": (0.1,)}
    async with open_store(postgres_url, durability="process", **options) as store:
        for run in (locked, free):
            await store.log.create(run.new())

        def append(run: Made) -> Awaitable[None]:
            return store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))

        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT 1 FROM runs WHERE run_id = %s FOR UPDATE", [locked.run_id])
            calls = [partial(append, run) for run in (locked, free, locked, free)]
            outcomes = await _as_one_group(store, calls)
        assert [type(outcome) for outcome in outcomes] == [StorageFailed, type(None)] * 2
        assert [len(await store.log.read(run.run_id)) for run in (locked, free)] == [1, 3]


async def test_writes_that_come_later_pass_those_that_wait_for_a_lock(postgres_url: str) -> None:
    locked, free = Made(number=1), Made(number=2)
    async with open_store(postgres_url, durability="process", busy_timeout=0.3) as store:
        for run in (locked, free):
            await store.log.create(run.new())
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT 1 FROM runs WHERE run_id = %s FOR UPDATE", [locked.run_id])
            waiting = asyncio.ensure_future(store.log.append(locked.run_id, epoch=1, log_events=locked.next(delta())))
            await store.log.append(free.run_id, epoch=1, log_events=free.next(delta()))
            assert not waiting.done()
        await waiting


async def test_a_server_that_stands_still_within_a_transaction_does_not_hold_up_the_others(
    store: Store, postgres_url: str, before: Hook
) -> None:
    run, goes_on = Made(), threading.Event()
    await store.log.create(run.new())
    stands_still = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stand_still() -> None:
        loop.call_soon_threadsafe(stands_still.set)
        goes_on.wait()

    before.act = stand_still
    writing = asyncio.ensure_future(store.log.append(run.run_id, epoch=1, log_events=run.next(completed())))
    try:
        await stands_still.wait()
        async with open_store(postgres_url, durability="process") as other:
            neighbor, taken = Made(number=2), [record(resumed(2, "b"), 2)]
            await asyncio.gather(
                other.log.create(neighbor.new()), other.log.take_over(run.run_id, epoch=2, owner="b", log_events=taken)
            )
            goes_on.set()
            with pytest.raises(Fenced):
                await writing
            assert list(await other.log.read(run.run_id, after=1)) == as_stored(taken)
    finally:
        goes_on.set()


async def test_an_append_that_leaves_its_session_as_it_is_does_not_wait_for_a_lock_of_it(
    store: Store, postgres_url: str
) -> None:
    run = Made()
    await store.log.create(run.new())
    model_call = event_pb2.AgentEvent(effect_key="s0.m", llm_started=event_pb2.LlmStarted(model="m"))
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM sessions FOR UPDATE")
        await store.log.append(run.run_id, epoch=1, log_events=run.next(model_call, delta()))
        writing = asyncio.ensure_future(store.log.append(run.run_id, epoch=1, log_events=run.next(completed())))
        _, pending = await asyncio.wait({writing}, timeout=0.3)
        assert pending
    await writing


async def test_an_append_whose_message_cannot_be_inserted_fails_alone(store: Store, postgres_url: str) -> None:
    runs = [Made(number=number) for number in (1, 2, 3)]
    for run in runs:
        await store.log.create(run.new())
    execute(
        postgres_url,
        "INSERT INTO messages (tenant_id, session_id, position, run_id, agent, chain, data) "
        f"SELECT tenant_id, session_id, 1, '', '', '', '' FROM sessions WHERE session_id = '{runs[1].session_id}'",
    )
    answers = [run.next(completed(text("Yes.", "ASSISTANT"))) for run in runs]
    outcomes = await asyncio.gather(
        *(store.log.append(run.run_id, epoch=1, log_events=answer) for run, answer in zip(runs, answers, strict=True)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), StorageFailed, type(None)]
    assert execute(postgres_url, "SELECT ended FROM runs ORDER BY run_id") == [(True,), (False,), (True,)]
    assert store.write_health.is_possible


async def test_a_fenced_run_fails_alone_and_its_neighbors_are_written(store: Store, postgres_url: str) -> None:
    runs = [Made(number=number) for number in range(1, 6)]
    for run in runs:
        await store.log.create(run.new())
    execute(postgres_url, f"UPDATE runs SET epoch = 2, owner = 'other' WHERE run_id = '{runs[2].run_id}'")
    outcomes = await asyncio.gather(
        *(store.log.append(run.run_id, epoch=1, log_events=run.next(completed())) for run in runs),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), Fenced, type(None), type(None)]
    ended = execute(postgres_url, "SELECT ended, last_sequence FROM runs ORDER BY run_id")
    assert ended == [(True, 2), (True, 2), (False, 1), (True, 2), (True, 2)]
    assert execute(postgres_url, "SELECT count(*) FROM sessions WHERE current_run_id = ''") == [(4,)]


async def test_a_deadlock_is_tried_again(store: Store, postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Made(number=1), Made(number=2)
    for run in (first, second):
        await store.log.create(run.new())
    lock = "SELECT 1 FROM sessions WHERE session_id = %s FOR UPDATE"
    with psycopg.connect(postgres_url) as other:
        other.execute("SET deadlock_timeout = '20s'")  # so that the store's side is the one that finds out
        other.execute(lock, [second.session_id])
        both = asyncio.gather(
            store.log.append(first.run_id, epoch=1, log_events=first.next(completed())),
            store.log.append(second.run_id, epoch=1, log_events=second.next(completed())),
        )
        await asyncio.wait({both}, timeout=0.2)
        await asyncio.to_thread(other.execute, lock, [first.session_id])
        other.rollback()
        await both
    assert "deadlock detected" in capsys.readouterr().out
    assert store.write_health.is_possible


async def test_a_value_that_postgresql_cannot_hold_fails_its_writer_alone(store: Store) -> None:
    good, bad = Made(number=1), Made(number=2, request_id="a\0b")
    outcomes = await asyncio.gather(store.log.create(good.new()), store.log.create(bad.new()), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), StorageFailed]
    assert store.write_health.is_possible


async def test_a_forged_token_with_nul_is_refused(store: Store) -> None:
    filters: list[object] = ["runs", "acme", "", "", [], {}, None, None, ""]
    for token in (
        encode_token((1, "a\0"), filters),
        encode_token((1, "a\0"), [*filters[:1], ANNE.tenant_id, *filters[2:]]),
    ):
        with pytest.raises(InvalidRequest):
            await store.runs.list(ANNE, RunFilter(), Page(size=1, token=token))


async def test_a_read_stops_by_bytes_in_the_database(store: Store) -> None:
    run, words = Made(), "x" * (PAGE_BYTES // 3)
    await store.log.create(run.new())
    made = [*run.first(), *run.next(*(delta(words) for _ in range(12)))]
    await store.log.append(run.run_id, epoch=1, log_events=made[1:])
    read = partial(read_range, run_id=run.run_id, after=0)
    assert [len(await store.write(partial(read, deltas=deltas))) for deltas in (True, False)] == [4, 1]
    found: list[StoredEvent] = []
    while page := await store.log.read(run.run_id, after=len(found)):
        found += page
    assert found == as_stored(made)


async def test_an_outage_is_a_few_lines_without_a_stack_and_one_at_its_end(postgres_url: str) -> None:
    is_away = False

    def fail() -> None:
        if is_away:
            raise psycopg.OperationalError("the connection is closed")

    hooks, run = CommitHooks(before=fail), Made()
    async with open_store(postgres_url, durability="process", hooks=hooks, retry_delays=(0.0, 0.0)) as store:
        await store.log.create(run.new())
        with capture_logs() as logged:
            is_away = True
            for _ in range(3):
                with pytest.raises(StorageFailed):
                    await store.leases.begin("a worker")
            is_away = False
            await store.leases.begin("a worker")
    said = [(entry["event"], entry.get("error"), "exc_info" in entry) for entry in logged]
    assert said == [
        ("commit failed", "the connection is closed", False),
        ("write given up", "the connection is closed", False),
        ("storage can be written again", None, False),
    ]


async def test_reads_that_fail_again_and_again_are_one_line_without_a_stack(postgres_url: str) -> None:
    readers = Readers(reader_engine(postgres_url, connections=1, busy_timeout=1.0), threads=1, clock=SystemClock())
    with capture_logs() as logged:
        for _ in range(3):
            with pytest.raises(StorageFailed):
                await readers.run(_fail_to_read)
    assert [(entry["event"], entry["error"], "exc_info" in entry) for entry in logged] == [
        ("read failed", "canceling statement due to user request", False)
    ]
    await readers.close()


async def test_a_read_ends_with_a_commit_as_the_database_counts_rollbacks(postgres_url: str) -> None:
    engine = reader_engine(postgres_url, connections=1, busy_timeout=1.0)
    readers, ends = Readers(engine, threads=1, clock=SystemClock()), list[str]()
    for end in ("commit", "rollback"):
        event.listen(engine, end, lambda _, end=end: ends.append(end))
    assert await readers.run(lambda connection: connection.execute(sql_text("SELECT 1")).scalar()) == 1
    await readers.close()
    assert ends == ["commit"]


def test_a_reader_cannot_write(postgres_url: str) -> None:
    engine = reader_engine(postgres_url, connections=1, busy_timeout=1.0)
    with engine.connect() as connection, pytest.raises(DBAPIError, match="read-only transaction"):
        connection.execute(sql_text("DELETE FROM runs"))
    engine.dispose()


def _fail_to_read(connection: Connection) -> None:
    connection.execute(sql_text("SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(60)"))


async def test_what_was_to_be_written_is_not_in_the_log(store: Store) -> None:
    def write(connection: Connection) -> None:
        connection.execute(sql_text("SELECT CAST(:said AS text), 1 / 0"), {"said": "whispered"})

    with capture_logs() as logged, pytest.raises(StorageFailed):
        await store.write(write)
    (failed,) = logged
    assert failed["event"] == "write given up"
    assert "division by zero" in str(failed["exc_info"])
    assert "whispered" not in str(failed["exc_info"])
