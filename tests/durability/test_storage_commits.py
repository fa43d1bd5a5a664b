"""Committed, then seen: what readers and owners learn of commits that wait, fail, or answer too late."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from bough.v1 import execution_pb2
from bough_server.errors import Fenced, StorageFailed
from bough_server.store.opening import Store, open_store
from bough_server.store.sql.writer import CommitHooks
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything, next_page, text


class Gate:
    """A hook that counts commits, and holds or fails them while it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.errors: list[Exception] = []
        self.before_error: Callable[[], None] = lambda: None
        self.reached = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self) -> None:
        self.calls += 1
        self.reached.set()
        self.open.wait()
        if self.errors:
            self.before_error()
            raise self.errors.pop(0)

    def hold(self) -> None:
        """Holds the next commit."""
        self.reached.clear()
        self.open.clear()


def _broken() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    return error


def _open(path: Path, before: Gate | None = None, after: Gate | None = None) -> Store:
    return open_store(str(path), retry_delays=(0.0, 0.0), hooks=CommitHooks(before=before, after=after))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database that does not exist yet."""
    return tmp_path / "bough.db"


async def _committed_of(store: Store, run: Made) -> list[int]:
    return [event.sequence for event in await store.log.read(run.run_id)]


async def test_while_a_commit_is_held_no_reader_sees_the_event(path: Path) -> None:
    gate, run = Gate(), Made()
    async with _open(path, before=gate) as store:
        await store.log.create(run.new())
        tail = store.log.tail(run.run_id)
        await anext(tail)
        gate.hold()
        append = asyncio.ensure_future(store.log.append(run.run_id, epoch=1, log_events=run.next(completed())))
        waiting = asyncio.ensure_future(next_page(tail))
        await asyncio.to_thread(gate.reached.wait)
        assert await _committed_of(store, run) == [1]
        assert await store.log.last_sequence(run.run_id) == 1
        assert (await store.runs.get(ANNE, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_RUNNING
        assert store.log.pending_bytes() > 0
        assert not append.done()
        assert not waiting.done()
        gate.open.set()
        await append
        assert [event.sequence for event in await waiting] == [2]
        assert store.log.pending_bytes() == 0


async def test_an_event_whose_commit_fails_is_never_seen_and_ends_the_writing_of_its_run(path: Path) -> None:
    gate, run, other = Gate(), Made(number=1), Made(number=2)
    async with _open(path, before=gate) as store:
        await store.log.create(run.new())
        await store.log.create(other.new())
        tail = store.log.tail(run.run_id, after=1)
        waiting = asyncio.ensure_future(next_page(tail))
        gate.errors = [_broken() for _ in range(3)]
        with pytest.raises(StorageFailed):
            await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
        with pytest.raises(StorageFailed):
            await waiting
        with pytest.raises(StorageFailed):
            await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
        with pytest.raises(StorageFailed):
            await everything(store.log, run.run_id)
        await store.log.append(other.run_id, epoch=1, log_events=other.next(completed()))
        assert await _committed_of(store, run) == [1]
        assert (await store.runs.get(ANNE, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_RUNNING


async def test_a_run_whose_storage_failed_goes_on_under_its_next_owner(path: Path) -> None:
    gate, run = Gate(), Made(question=text("?", "USER"))
    async with _open(path, before=gate) as store:
        await store.log.create(run.new())
        gate.errors = [_broken() for _ in range(3)]
        with pytest.raises(StorageFailed):
            await store.log.append(run.run_id, epoch=1, log_events=run.next(completed(text("Lost.", "ASSISTANT"))))
        run.last_sequence = 1
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[])
        reader = asyncio.ensure_future(everything(store.log, run.run_id, after=1))
        await asyncio.sleep(0)
        made = run.next(completed(text("Found.", "ASSISTANT")))
        await store.log.append(run.run_id, epoch=2, log_events=made)
        assert await reader == as_stored(made)
        stored = await store.sessions.messages(ANNE, run.session_id, through=9)
        assert [one.message.parts[0].text for one in stored] == ["?", "Found."]


async def test_a_failing_commit_is_tried_again_in_place(path: Path) -> None:
    gate, run = Gate(), Made(question=text("?", "USER"))
    async with _open(path, before=gate) as store:
        await store.log.create(run.new())
        gate.errors = [_broken(), _broken()]
        made = run.next(delta(), completed(text("So.", "ASSISTANT")))
        await store.log.append(run.run_id, epoch=1, log_events=made)
        assert await everything(store.log, run.run_id, after=1) == as_stored(made)
        assert len(await store.sessions.messages(ANNE, run.session_id, through=9)) == 2


async def test_a_run_that_was_accepted_although_its_commit_failed_is_accepted_once(path: Path) -> None:
    after, run = Gate(), Made(request_id="ask", question=text("?", "USER"))
    async with _open(path, after=after) as store:
        after.errors = [_broken()]
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
        assert await _committed_of(store, run) == [1, 2]
        assert len(await store.sessions.messages(ANNE, run.session_id, through=9)) == 1


async def test_an_append_that_was_committed_although_its_commit_failed_is_a_success(path: Path) -> None:
    after, run = Gate(), Made(question=text("?", "USER"))
    async with _open(path, after=after) as store:
        await store.log.create(run.new())
        after.errors = [_broken()]
        made = [run.next(delta()), run.next(completed(text("So.", "ASSISTANT")))]
        await asyncio.gather(*(store.log.append(run.run_id, epoch=1, log_events=one) for one in made))
        assert await everything(store.log, run.run_id, after=1) == as_stored([one for (one,) in made])
        assert len(await store.sessions.messages(ANNE, run.session_id, through=9)) == 2


async def test_an_append_of_unknown_outcome_is_fenced_where_another_owner_came_in_between(path: Path) -> None:
    after, run = Gate(), Made()

    def take_over_elsewhere() -> None:
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE runs SET epoch = epoch + 1")
        connection.close()

    async with _open(path, after=after) as store:
        await store.log.create(run.new())
        after.errors, after.before_error = [_broken()], take_over_elsewhere
        with pytest.raises(Fenced):
            await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))


async def test_a_commit_carries_the_appends_of_many_runs(path: Path) -> None:
    gate, runs = Gate(), [Made(number=number) for number in range(1, 129)]
    async with _open(path, before=gate) as store:
        await asyncio.gather(*(store.log.create(run.new()) for run in runs))
        gate.calls = 0

        async def go_through(run: Made) -> None:
            for _ in range(5):
                await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))

        await asyncio.gather(*(go_through(run) for run in runs))
        assert gate.calls < 128 * 5 / 16
        assert [await store.log.last_sequence(run.run_id) for run in runs] == [6] * 128


def _synchronous(connection: Connection) -> int:
    """2 survives a power cut, 1 only a killed process."""
    return int(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())


async def test_a_commit_answers_to_the_disk_unless_the_operator_chose_otherwise(path: Path) -> None:
    async with open_store(str(path)) as store:
        assert await store.write(_synchronous) == 2
    async with open_store(str(path), durability="process") as store:
        assert await store.write(_synchronous) == 1
