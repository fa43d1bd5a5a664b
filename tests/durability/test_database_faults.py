"""A PostgreSQL that fails over, stands still, or has no connection or no disk left: runs pause and go on."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from psycopg import sql
from structlog.testing import capture_logs

from bough import AsyncClient
from bough.v1 import event_pb2, policy_pb2
from bough_server.errors import ConfigurationError, DatabaseUnreachable
from bough_server.ownership.worker import DECLARE_DEAD_SECONDS
from bough_server.store.opening import open_store
from bough_server.store.sql.store import Store
from tests.durability.storage_agents import noise
from tests.durability.torture_clients import REJOINING
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, begin, served, settings, watch
from tests.support import postgres
from tests.support.log_laws import check_laws
from tests.support.log_readings import having
from tests.support.postgres import Cluster
from tests.support.processes import PATIENCE_SECONDS, finished
from tests.support.projects import llm, write_project

QUICKLY_SECONDS = 5.0
"""A bound on the time in which a run is refused; a statement that waits for PostgreSQL exceeds it."""

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
KEEPS_ON = policy_pb2.RunPolicy(on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE)
Events = Sequence[event_pb2.AgentEvent]


@contextmanager
def _running(keep_in: Path, make: Callable[[Cluster], object] = Cluster.make, **settings: str) -> Iterator[Cluster]:
    """A cluster with settings; its log is kept in a folder at the end."""
    with ExitStack() as stack:
        made = postgres.empty_cluster()
        stack.callback(_keep_log, made, keep_in)
        for name in ("data", "wal"):
            stack.callback(_unmount, made.folder / name)
        make(made)
        stack.callback(_stop, made)
        made.start(settings=settings)
        yield made


def _stop(cluster: Cluster) -> None:
    with suppress(AssertionError):  # the test may have left it stopped
        cluster.stop()


def _keep_log(cluster: Cluster, folder: Path) -> None:
    with suppress(FileNotFoundError):  # it was never started
        shutil.copy(cluster.folder / "log", folder / f"{cluster.folder.name}.log")
    shutil.rmtree(cluster.folder)


def _unmount(folder: Path) -> None:
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@asynccontextmanager
async def _serving(folder: Path, url: str) -> AsyncIterator[Served]:
    """A server on a database."""
    python = ["tests.rpc.agents", "tests.durability.storage_agents"]
    async with served(settings(folder, python=python, storage={"url": url})) as server:
        yield server


async def _until_health(server: Served, status: HealthCheckResponse.ServingStatus.ValueType) -> None:
    """Wait until a server's health is this."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        states = HealthStub(server.channel).Watch(HealthCheckRequest(service="bough.v1.AgentService"))
        while (await states.read()).status != status:
            pass
        states.cancel()


@contextmanager
def _storage_failed() -> Iterator[None]:
    """A block whose call is refused, or stops following its run, because of the storage."""
    with pytest.raises(aio.AioRpcError) as caught:
        yield
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, caught.value
    assert status_details(caught.value)[0] == ErrorInfo(reason="STORAGE_FAILED", domain="bough.dev")


async def _refuses(server: Served, **fields: Any) -> None:
    with _storage_failed():
        await begin(server, "echo", "refused", timeout=QUICKLY_SECONDS, **fields).to_the_end()


async def _log(server: Served, run_id: str) -> Events:
    """Read the log of a run to its end, as a client that rejoins."""
    async with asyncio.timeout(PATIENCE_SECONDS), AsyncClient(server.app.address, rejoining=REJOINING) as client:
        return [event async for event in client.watch(run_id)]


def _check(log: Events, seen: Events, *, resumed: int = 1) -> None:
    """A run has gone on after what was seen of it."""
    check_laws(log)
    assert log[: len(seen)] == seen
    assert log[-1].HasField("run_completed")
    assert len(having(log, "run_resumed")) == resumed


# Away at the start


async def test_a_server_waits_at_its_start_for_a_database_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _running(tmp_path) as cluster:
        cluster.stop()
        unreachable: list[str] = []

        def start_database(*args: Any, **options: Any) -> Store:
            try:
                return open_store(*args, **options)
            except DatabaseUnreachable as error:
                unreachable.append(error.message)
                cluster.start()
                raise

        monkeypatch.setattr("bough_server.app.open_store", start_database)
        with capture_logs() as logged:
            async with _serving(tmp_path, cluster.url("postgres")) as server:
                assert (await begin(server, "echo", "hi").to_the_end()).kinds[-1] == "run_completed"
    assert len(unreachable) == 1
    waiting = {"event": "waiting for the database", "log_level": "warning", "error": unreachable[0], "seconds": 30.0}
    assert waiting in logged


async def test_a_server_does_not_wait_for_longer_than_it_is_told_nor_for_a_database_that_does_not_exist(
    tmp_path: Path,
) -> None:
    with _running(tmp_path) as cluster:
        with pytest.raises(ConfigurationError, match='"missing" does not exist'):
            async with _serving(tmp_path, cluster.url("missing")):
                pass
        cluster.stop()
        impatient = settings(tmp_path, storage={"url": cluster.url("postgres"), "wait_at_start": "0s"})
        with pytest.raises(DatabaseUnreachable, match="Check the address"):
            async with served(impatient):
                pass


# Failed over


@contextmanager
def _with_standby(folder: Path) -> Iterator[tuple[Cluster, Cluster]]:
    """A primary and its standby; what is committed is on both."""
    with _running(folder) as primary, _running(folder, lambda made: made.make_standby(primary)) as standby:
        primary.execute(sql.SQL("ALTER SYSTEM SET synchronous_standby_names = '*'"), sql.SQL("SELECT pg_reload_conf()"))
        with psycopg.connect(primary.url("postgres"), autocommit=True) as connection:
            while connection.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone() is None:
                connection.execute("SELECT pg_sleep(0.02)")
        yield primary, standby


@pytest.mark.parametrize("form", ["host={},{}", "host={}&host={}"])
async def test_runs_go_on_at_the_standby_that_is_promoted_and_what_was_seen_is_there(tmp_path: Path, form: str) -> None:
    with _with_standby(tmp_path) as (primary, standby):
        hosts = form.format(primary.folder, standby.folder)
        url = f"postgresql://bough@/postgres?{hosts}&target_session_attrs=read-write"
        async with _serving(tmp_path, url) as server:
            before = await begin(server, "echo", "before").to_the_end()
            going = await begin(server, "waiter", form, policy=KEEPS_ON).until("run_started")
            await asyncio.to_thread(primary.stop)
            GATES[form].set()
            with _storage_failed():
                await going.to_the_end()
            await _until_health(server, NOT_SERVING)
            await _refuses(server)
            await asyncio.to_thread(standby.promote)
            await _until_health(server, SERVING)
            _check(await _log(server, await going.run_id()), going.events)
            assert await _log(server, await before.run_id()) == before.events
            assert (await begin(server, "echo", "after").to_the_end()).kinds[-1] == "run_completed"


# Slow


async def test_servers_of_a_database_that_stands_still_refuse_runs_and_go_on_with_theirs_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bough_server.app.open_store", partial(open_store, stall_seconds=0.5))
    with _running(tmp_path) as cluster:
        url = cluster.url("postgres")
        async with _serving(tmp_path, url) as one, _serving(tmp_path, url) as other:
            before = await begin(one, "echo", "before").to_the_end()
            session_id = before.events[0].session_id
            going = await begin(one, "waiter", "stands still", policy=KEEPS_ON).until("run_started")
            elsewhere = await watch(other, await going.run_id()).until("run_started")
            with cluster.standing_still():
                GATES["stands still"].set()
                for server in (one, other):
                    await _until_health(server, NOT_SERVING)
                    await _refuses(server)
                    await _refuses(server, session_id=session_id)
                    await _refuses(server, request_id="once")
                await asyncio.sleep(DECLARE_DEAD_SECONDS + 1)  # longer than the lease of a server that is lost lasts
            for server in (one, other):
                await _until_health(server, SERVING)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.gather(going.to_the_end(), elsewhere.to_the_end())
            _check(going.events, going.events, resumed=0)
            assert elsewhere.events == going.events
            for server in (one, other):
                after = await begin(server, "echo", "after", session_id=session_id).to_the_end()
                assert after.kinds[-1] == "run_completed"
    said = "".join(capfd.readouterr())
    assert "a server was declared dead" not in said
    assert "this server was declared dead" not in said


# Out of connections


_CONNECTIONS = 20


@contextmanager
def _no_connection_left(url: str) -> Iterator[None]:
    """Open a block in which others have all connections, that of the server's writer among them."""
    with ExitStack() as stack:
        holder = stack.enter_context(psycopg.connect(url, autocommit=True))
        shown = "FROM pg_stat_activity WHERE backend_type = 'client backend'"
        while True:  # the server may be faster than this to take what becomes free
            try:
                stack.enter_context(psycopg.connect(url, autocommit=True))
            except psycopg.OperationalError:
                found = [
                    is_writer
                    for (is_writer,) in holder.execute(f"SELECT application_name LIKE 'bough writer%' {shown}")
                ]
                if len(found) == _CONNECTIONS and not any(found):  # fewer: one that begins is not shown yet
                    break
                holder.execute(f"SELECT pg_terminate_backend(pid) {shown} AND application_name LIKE 'bough writer%'")
        yield


async def test_a_server_that_gets_no_connection_refuses_runs_and_goes_on_when_there_are_some(tmp_path: Path) -> None:
    with _running(tmp_path, max_connections=str(_CONNECTIONS), superuser_reserved_connections="0") as cluster:
        url = cluster.url("postgres")
        config = write_project(tmp_path, llm("alone"), storage={"url": url})
        async with _serving(tmp_path, url) as server:
            before = await begin(server, "echo", "before").to_the_end()
            going = await begin(server, "waiter", "no connection", policy=KEEPS_ON).until("run_started")
            with _no_connection_left(url):
                GATES["no connection"].set()
                with _storage_failed():
                    await going.to_the_end()
                await _until_health(server, NOT_SERVING)
                await _refuses(server)
                ended = await finished("--config", str(config), "serve", "--port", "0")
            await _until_health(server, SERVING)
            _check(await _log(server, await going.run_id()), going.events)
            assert await _log(server, await before.run_id()) == before.events
            assert (await begin(server, "echo", "after").to_the_end()).kinds[-1] == "run_completed"
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert "sorry, too many clients already. Raise max_connections of PostgreSQL" in line


# Out of disk


def _mount(folder: Path, *, megabytes: int) -> None:
    """Mount a file system of a bounded size at a new folder, or skip the test."""
    folder.mkdir()
    refusal = "it is mounted by root only, and this is another user"
    if os.geteuid() == 0:
        options = ["-o", f"size={megabytes}m,mode=700"]
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            shutil.chown(folder, postgres.account())
            return
        refusal = done.stderr.strip()
    pytest.skip(f"NOT TESTED WITH A FULL DISK: no small file system can be mounted: {refusal}")


def _fill(file: Path) -> None:
    """Write a file until its disk is full."""
    with file.open("wb", buffering=0) as filling:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while filling.write(b"\0" * size) == size:
                    pass
        with pytest.raises(OSError, match="No space left"):
            filling.write(b"\0")


async def _brought_back(cluster: Cluster) -> None:
    """Start a cluster unless it runs."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await asyncio.to_thread(cluster.execute)
            except psycopg.OperationalError:
                with suppress(AssertionError):  # it runs, but is still recovering
                    await asyncio.to_thread(cluster.start)
            else:
                return


async def _begin_until_refused(server: Served) -> None:
    with _storage_failed():
        while True:
            await begin(server, "echo", noise(), timeout=QUICKLY_SECONDS).to_the_end()


@pytest.mark.parametrize("small", ["data", "wal"])
async def test_runs_pause_while_the_disk_of_the_database_is_full_and_go_on_when_it_is_not(
    tmp_path: Path, small: str
) -> None:
    """The data's disk refuses transactions; without its write-ahead log PostgreSQL stops."""

    def make(cluster: Cluster) -> None:
        _mount(cluster.folder / small, megabytes={"data": 128, "wal": 16}[small])
        cluster.make(["--wal-segsize=1", "-X", str(cluster.folder / "wal")])

    with _running(tmp_path, make, min_wal_size="2MB", max_wal_size="8MB") as cluster:
        async with _serving(tmp_path, cluster.url("postgres")) as server:
            before = await begin(server, "echo", "before").to_the_end()
            going = await begin(server, "noisy", small, policy=KEEPS_ON).until("sub_agent_started")
            filler = cluster.folder / small / "filler"
            await asyncio.to_thread(_fill, filler)
            await _begin_until_refused(server)
            GATES[small].set()
            with _storage_failed():
                await going.to_the_end()
            filler.unlink()
            await _brought_back(cluster)
            await _until_health(server, SERVING)
            _check(await _log(server, await going.run_id()), going.events)
            assert await _log(server, await before.run_id()) == before.events
            assert (await begin(server, "echo", noise()).to_the_end()).kinds[-1] == "run_completed"
        assert "No space left on device" in cluster.log()
