"""Health and new runs of a server whose disk fails or does not answer, and comes back."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough.v1 import policy_pb2
from bough_server.errors import StorageFailed
from bough_server.store.opening import open_store
from bough_server.store.sql.writer import CommitHooks
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, begin, served, settings, watch

KEEPS_ON = policy_pb2.RunPolicy(on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE)
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class Disk:
    """What becomes of the server's commits."""

    def __init__(self) -> None:
        self.is_failing = False
        self.answers = threading.Event()
        self.answers.set()
        self.commits = 0

    def __call__(self) -> None:
        self.commits += 1
        self.answers.wait()
        if self.is_failing:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The disk of every server of the test; a store that looks again soon."""
    made = Disk()
    opened = partial(open_store, retry_delays=(0.0, 0.0), stall_seconds=0.1, hooks=CommitHooks(before=made))
    monkeypatch.setattr("bough_server.app.open_store", opened)
    monkeypatch.setattr("bough_server.store.sql.writer.PROBE_SECONDS", 0.01)
    yield made
    made.answers.set()


class Health:
    """What a client sees that watches a service's health."""

    def __init__(self, server: Served) -> None:
        request = HealthCheckRequest(service="bough.v1.AgentService")
        self._states = aiter(HealthStub(server.channel).Watch(request))

    async def turns(self, status: HealthCheckResponse.ServingStatus.ValueType) -> None:
        """Waits until it is this."""
        while (await anext(self._states)).status != status:
            pass


async def _refusal(turn: Turn) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await turn.to_the_end()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert status_details(caught.value)[0] == ErrorInfo(reason="STORAGE_FAILED", domain="bough.dev")
    return str(caught.value.details())


async def test_a_server_is_not_serving_while_its_disk_fails_and_serves_when_it_is_well_without_any_call(
    tmp_path: Path, disk: Disk
) -> None:
    async with served(settings(tmp_path)) as server:
        health = Health(server)
        await health.turns(SERVING)
        before = await begin(server, "echo", "before").to_the_end()
        disk.is_failing = True
        await _refusal(begin(server, "echo", "refused"))
        await health.turns(NOT_SERVING)
        tried = disk.commits
        await _refusal(begin(server, "echo", "refused"))
        assert (await watch(server, await before.run_id()).to_the_end()).events == before.events
        assert tried < disk.commits
        disk.is_failing = False
        await health.turns(SERVING)
        await begin(server, "echo", "after").to_the_end()


async def test_while_a_disk_fails_a_run_is_refused_after_one_try(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough_server.store.sql.writer.PROBE_SECONDS", 1000.0)
    async with served(settings(tmp_path)) as server:
        await begin(server, "echo", "before").to_the_end()
        disk.is_failing, disk.commits = True, 0
        await _refusal(begin(server, "echo", "patient"))
        first, disk.commits = disk.commits, 0
        await _refusal(begin(server, "echo", "quick"))
        assert (first, disk.commits) == (3, 1)
        disk.is_failing = False
        assert (await begin(server, "echo", "after").to_the_end()).kinds[-1] == "run_completed"


async def test_a_server_whose_disk_does_not_answer_refuses_runs_at_once_and_goes_on_when_it_does(
    tmp_path: Path, disk: Disk
) -> None:
    async with served(settings(tmp_path)) as server:
        health = Health(server)
        await health.turns(SERVING)
        before = await begin(server, "echo", "before").to_the_end()
        going = await begin(server, "waiter", "a disk that pauses", policy=KEEPS_ON).until("run_started")
        disk.answers.clear()
        GATES["a disk that pauses"].set()
        await health.turns(NOT_SERVING)
        assert "does not respond" in await _refusal(begin(server, "echo", "refused"))
        assert (await watch(server, await before.run_id()).to_the_end()).events == before.events
        disk.answers.set()
        await health.turns(SERVING)
        await asyncio.gather(going.to_the_end(), begin(server, "echo", "after").to_the_end())
    assert going.kinds[-1] == "run_completed"


async def test_a_write_ahead_log_that_sqlite_has_removed_itself_is_not_missed(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "bough.db"), durability="process") as store:
        watching = asyncio.create_task(store.watch())
        await store.leases.begin("a")
        before = (tmp_path / "bough.db-wal").stat().st_ino
        await asyncio.sleep(0)
        with pytest.raises(StorageFailed):  # the connection is lost, the only one: SQLite removes its files
            await store.write(lambda connection: connection.invalidate())
        await store.leases.begin("b")
        assert (tmp_path / "bough.db-wal").stat().st_ino != before
        await asyncio.wait({watching}, timeout=1.2)  # longer than between two looks
        assert store.write_health.is_possible
        watching.cancel()


@pytest.mark.parametrize(("name", "is_replaced"), [("bough.db", False), ("bough.db", True), ("bough.db-wal", False)])
async def test_a_database_file_that_is_deleted_or_replaced_is_noticed_within_a_second(
    tmp_path: Path, name: str, is_replaced: bool
) -> None:
    database, aside = tmp_path / name, tmp_path / "aside.db"
    async with served(settings(tmp_path)) as server:
        watching = aiter(HealthStub(server.channel).Watch(HealthCheckRequest()))
        assert (await anext(watching)).status == SERVING
        database.rename(aside)
        if is_replaced:
            database.write_bytes(aside.read_bytes())
        async with asyncio.timeout(1.5):
            assert (await anext(watching)).status == NOT_SERVING
        with pytest.raises(aio.AioRpcError) as refused:
            await begin(server, "echo", "hi").to_the_end()
        aside.replace(database)
        async with asyncio.timeout(1.5):
            assert (await anext(watching)).status == SERVING
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "deleted or replaced" in (refused.value.details() or "")
    assert status_details(refused.value)[0] == ErrorInfo(reason="DATABASE_REMOVED", domain="bough.dev")
