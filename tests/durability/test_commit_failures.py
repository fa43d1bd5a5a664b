"""A server whose commits wait or fail: what callers see of it over gRPC, and what the log keeps."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio
from sqlalchemy import Connection
from structlog.testing import capture_logs

from bough import AsyncClient, Rejoining, Unavailable
from bough.v1 import agent_service_pb2 as pb
from bough.v1 import execution_pb2, follow_pb2, policy_pb2
from bough_server.store.opening import Store, open_store
from bough_server.store.sql.writer import CommitHooks
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, begin, served, settings, watch
from tests.support.log_laws import check_laws

LARGE = "x" * 100_000
LABELS = {f"n{number}": "whispered".ljust(256) for number in range(60)}
KEEPS_ON = policy_pb2.RunPolicy(on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE)


class Commits:
    """What becomes of the server's commits."""

    def __init__(self) -> None:
        self.are_failing = False
        self.reached = threading.Event()
        self.released = threading.Event()
        self.released.set()

    def __call__(self) -> None:
        self.reached.set()
        self.released.wait()
        if self.are_failing:
            error = sqlite3.OperationalError("disk I/O error of /secret/place")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    def hold(self) -> None:
        """Holds every commit from now on."""
        self.reached.clear()
        self.released.clear()


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Commits]:
    """The commits of every server of the test; a store that gives up soon."""
    made = Commits()
    opened = partial(open_store, busy_timeout=0.01, retry_delays=(0.0,), hooks=CommitHooks(before=made))
    monkeypatch.setattr("bough_server.app.open_store", opened)
    yield made
    made.released.set()


async def _refused(turn: Turn) -> None:
    """Asserts that a stream ends by the failed storage, and says no more than that."""
    with pytest.raises(aio.AioRpcError) as caught:
        await turn.to_the_end()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "The server could not write to its storage; its log says why."
    assert status_details(caught.value)[0] == ErrorInfo(reason="STORAGE_FAILED", domain="bough.dev")


async def test_while_a_commit_is_held_no_reader_sees_its_event(tmp_path: Path, commits: Commits) -> None:
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "held commit").until("run_started")
        run_id = await turn.run_id()
        commits.hold()
        GATES["held commit"].set()
        await asyncio.to_thread(commits.reached.wait)
        reading = asyncio.create_task(turn.to_the_end())
        current = await watch(server, run_id, until=follow_pb2.WATCH_UNTIL_CURRENT).to_the_end()
        run = (await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))).run
        assert (current.kinds, turn.kinds, reading.done()) == (["run_started"], ["run_started"], False)
        assert (run.state, run.last_sequence) == (execution_pb2.EXECUTION_STATE_RUNNING, 1)
        commits.released.set()
        await reading
    assert turn.kinds == ["run_started", "value_recorded", "run_completed"]


async def test_an_event_whose_commit_fails_is_never_seen_and_other_runs_go_on(tmp_path: Path, commits: Commits) -> None:
    async with served(settings(tmp_path)) as server:
        broken = await begin(server, "waiter", "failing commit", policy=KEEPS_ON).until("run_started")
        other = await begin(server, "waiter", "sound commit").until("run_started")
        watcher = await watch(server, await broken.run_id()).until("run_started")
        commits.are_failing = True
        GATES["failing commit"].set()
        for reader in (broken, watcher):
            await _refused(reader)
        await _refused(begin(server, "echo", "while it fails"))
        commits.are_failing = False
        GATES["sound commit"].set()
        await other.to_the_end()
        late = watch(server, await broken.run_id())
        await _refused(late)
    assert broken.kinds == watcher.kinds == late.kinds == ["run_started"]
    check_laws(other.events)
    async with served(settings(tmp_path)) as server:
        after = await watch(server, await broken.run_id()).to_the_end()
    assert after.events[:1] == broken.events
    assert after.kinds == ["run_started", "run_resumed", "value_recorded", "run_completed"]
    check_laws(after.events)


async def test_a_run_whose_storage_failed_is_ended_when_it_is_cancelled_and_lets_go_of_its_session(
    tmp_path: Path, commits: Commits
) -> None:
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "ended by hand", policy=KEEPS_ON).until("run_started")
        run_id, session_id = await turn.run_id(), turn.events[0].session_id
        commits.are_failing = True
        GATES["ended by hand"].set()
        await _refused(turn)
        with pytest.raises(aio.AioRpcError) as caught:
            await server.agents.CancelRun(pb.CancelRunRequest(run_id=run_id))
        commits.are_failing = False
        answers = await asyncio.gather(*(server.agents.CancelRun(pb.CancelRunRequest(run_id=run_id)) for _ in range(3)))
        log = await watch(server, run_id).to_the_end()
        after = await begin(server, "echo", "next", session_id=session_id).to_the_end()
    assert status_details(caught.value)[0] == ErrorInfo(reason="STORAGE_FAILED", domain="bough.dev")
    assert [answer.run.state for answer in answers] == [execution_pb2.EXECUTION_STATE_CANCELLED] * 3
    assert log.kinds == ["run_started", "cancel_requested", "run_cancelled"]
    assert log.events[1].cancel_requested.reason == execution_pb2.CANCEL_REASON_CALLER
    check_laws(log.events)
    assert after.kinds[-1] == "run_completed"


async def test_a_cancellation_that_cannot_be_stored_is_refused_and_may_be_requested_again(
    tmp_path: Path, commits: Commits
) -> None:
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "never opened", policy=KEEPS_ON).until("run_started")
        request = pb.CancelRunRequest(run_id=await turn.run_id())
        commits.are_failing = True
        with pytest.raises(aio.AioRpcError) as caught:
            await server.agents.CancelRun(request)
        commits.are_failing = False
        answer = await server.agents.CancelRun(request)
        log = await watch(server, request.run_id).to_the_end()
    assert status_details(caught.value)[0] == ErrorInfo(reason="STORAGE_FAILED", domain="bough.dev")
    assert answer.run.state == execution_pb2.EXECUTION_STATE_CANCELLED
    assert log.kinds == ["run_started", "cancel_requested", "run_cancelled"]
    check_laws(log.events)


async def test_a_client_that_comes_back_to_a_run_whose_storage_failed_is_told_so_in_the_end(
    tmp_path: Path, commits: Commits
) -> None:
    impatient = Rejoining(first_delay=0.01, longest_delay=0.01, timeout=0.1)
    async with (
        served(settings(tmp_path)) as server,
        AsyncClient(server.app.address, timeout=30, rejoining=impatient) as client,
        client.run("waiter", "told in the end") as stream,
    ):
        assert (await anext(stream)).HasField("run_started")
        commits.are_failing = True
        GATES["told in the end"].set()
        with pytest.raises(Unavailable) as caught:
            await anext(stream)
    assert caught.value.reason == "STORAGE_FAILED"


async def test_a_client_that_is_patient_sees_the_run_go_on_when_the_storage_is_well_again(
    tmp_path: Path, commits: Commits
) -> None:
    patient = Rejoining(first_delay=0.01, longest_delay=0.1, timeout=30.0)
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "well again", policy=KEEPS_ON).until("run_started")
        async with (
            AsyncClient(server.app.address, timeout=30, rejoining=patient) as client,
            client.watch(await turn.run_id()) as stream,
        ):
            seen = [await anext(stream)]
            commits.are_failing = True
            GATES["well again"].set()
            await _refused(turn)
            commits.are_failing = False
            seen += [event async for event in stream]
    assert [event.WhichOneof("payload") for event in seen] == [
        "run_started",
        "run_resumed",
        "value_recorded",
        "run_completed",
    ]
    check_laws(seen)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    intruder = sqlite3.connect(path, isolation_level=None)
    intruder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        intruder.execute("ROLLBACK")
        intruder.close()


async def _tell(store: Store, pragma: str) -> None:
    """Tells the connection that writes."""

    def run(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA {pragma}")

    await store.write(run)


@asynccontextmanager
async def _fault(kind: str, store: Store, path: Path) -> AsyncIterator[None]:
    if kind == "locked":
        with _locked(path):
            yield
    else:
        # SQLite reads a bound below the file's size as that size: there is no room for another page.
        await _tell(store, "max_page_count = 1")
        yield
        await _tell(store, "max_page_count = 1000000")


@pytest.mark.usefixtures("commits")
@pytest.mark.parametrize("kind", ["locked", "full"])
async def test_a_database_that_cannot_be_written_for_a_while_refuses_runs_and_then_takes_them(
    tmp_path: Path, kind: str
) -> None:
    async with served(settings(tmp_path)) as server:
        before = await begin(server, "echo", "before").to_the_end()
        waiting = await begin(server, "waiter", kind).until("run_started")
        async with _fault(kind, server.app.store, tmp_path / "bough.db"):
            with capture_logs() as logged:
                await _refused(begin(server, "echo", LARGE, labels=LABELS))
            assert (await watch(server, await before.run_id()).to_the_end()).events == before.events
        assert {entry["event"] for entry in logged} == {"commit failed", "write given up", "call refused"}
        assert "whispered" not in str(logged), "the log says what failed, not what was to be written"
        after = await begin(server, "echo", LARGE).to_the_end()
        GATES[kind].set()
        await waiting.to_the_end()
        assert await _run_ids(server) == [await turn.run_id() for turn in (after, waiting, before)]
    for turn in (before, waiting, after):
        check_laws(turn.events)


@pytest.mark.usefixtures("commits")
@pytest.mark.parametrize("pragma", ["query_only = ON", "max_page_count = 1"])
async def test_a_database_that_stays_unwritable_stops_its_runs_and_the_next_server_goes_on_with_them(
    tmp_path: Path, pragma: str
) -> None:
    made = settings(tmp_path, python=["tests.rpc.agents", "tests.durability.storage_agents"])
    async with served(made) as server:
        before = await begin(server, "echo", "before").to_the_end()
        live = await begin(server, "long_winded", pragma).until("sub_agent_started")
        await _tell(server.app.store, pragma)
        GATES[pragma].set()
        await _refused(live)
        assert (await watch(server, await before.run_id()).to_the_end()).events == before.events
    async with served(made) as server:
        log = await watch(server, await live.run_id()).to_the_end()
        assert (await watch(server, await before.run_id()).to_the_end()).events == before.events
    assert log.events[: len(live.events)] == live.events
    assert log.kinds[-1] == "run_completed"
    check_laws(log.events)


async def _run_ids(server: Served) -> list[str]:
    return [run.run_id for run in (await server.agents.ListRuns(pb.ListRunsRequest())).runs]
