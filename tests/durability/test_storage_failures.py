"""A database that cannot be opened, and one that stops taking writes while runs go on."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection

from bough_server.errors import ConfigurationError, NotFound, StorageFailed
from bough_server.store.opening import Store, open_store, upgrade_database
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything
from tests.support.open_runs import open_runs

_NOBODY = 65534


@contextmanager
def _unprivileged(folder: Path) -> Iterator[None]:
    """Owns a folder and its files as an ordinary user does, for whom files can be read-only."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.iterdir()):
        os.chown(path, _NOBODY, _NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database that does not exist yet."""
    return tmp_path / "bough.db"


async def _limit(store: Store, more_pages: int) -> None:
    """Lets the database grow by so many pages and no further, as a full disk does."""

    def limit(connection: Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + more_pages}")

    await store.write(limit)


async def test_a_full_disk_stops_the_run_that_needs_room_and_leaves_its_log_whole(path: Path) -> None:
    large, small = Made(number=1), Made(number=2)
    async with open_store(str(path), retry_delays=(0.0,)) as store:
        for run in (large, small):
            await store.log.create(run.new())
        await _limit(store, 4)
        made = [large.next(delta("x" * 100_000), completed()), small.next(delta("y"))]
        outcomes = await asyncio.gather(
            store.log.append(large.run_id, epoch=1, log_events=made[0]),
            store.log.append(small.run_id, epoch=1, log_events=made[1]),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [StorageFailed, type(None)]
        assert await store.log.last_sequence(large.run_id) == 1
        assert list(await store.log.read(large.run_id)) == as_stored([large.new().first])
        assert list(await store.log.read(small.run_id, after=1)) == as_stored(made[1])
    async with open_store(str(path)) as store:
        await store.log.take_over(large.run_id, epoch=2, owner="next", log_events=[])
        await store.log.append(large.run_id, epoch=2, log_events=made[0])
        assert (await everything(store.log, large.run_id))[1:] == as_stored(made[0])


async def test_a_run_is_not_accepted_on_a_full_disk(path: Path) -> None:
    run = Made(labels={"large": "x" * 50_000})
    async with open_store(str(path), retry_delays=(0.0,)) as store:
        await _limit(store, 4)
        with pytest.raises(StorageFailed) as failed:
            await store.log.create(run.new())
        assert "full" not in failed.value.message, "the driver's words are for the server's log"
        with pytest.raises(NotFound):
            await store.sessions.get(ANNE, run.session_id)


async def test_a_database_that_another_program_locks_is_waited_for_and_then_given_up(path: Path) -> None:
    run, other = Made(number=1), Made(number=2)
    async with open_store(str(path), busy_timeout=0.01, retry_delays=(0.0,)) as store:
        await store.log.create(run.new())
        await store.log.create(other.new())
        intruder = sqlite3.connect(path, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageFailed):
            await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
        assert await store.log.last_sequence(run.run_id) == 1, "reading goes on"
        intruder.execute("ROLLBACK")
        intruder.close()
        await store.log.append(other.run_id, epoch=1, log_events=other.next(delta()))


async def test_a_lock_that_is_released_in_time_is_not_noticed(path: Path) -> None:
    run = Made()
    async with open_store(str(path), busy_timeout=10) as store:
        await store.log.create(run.new())
        intruder = sqlite3.connect(path, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        append = asyncio.ensure_future(store.log.append(run.run_id, epoch=1, log_events=run.next(completed())))
        assert await store.log.last_sequence(run.run_id) == 1
        intruder.execute("ROLLBACK")
        intruder.close()
        await append


def test_a_database_that_another_program_locks_is_not_opened(path: Path) -> None:
    intruder = sqlite3.connect(path, isolation_level=None)
    intruder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigurationError, match="locked by another program: close that program"):
        open_store(str(path), busy_timeout=0.01)
    intruder.close()


def test_a_file_that_is_no_database_is_not_opened_and_not_touched(path: Path) -> None:
    path.write_bytes(b"dear diary, " * 1_000)
    with pytest.raises(ConfigurationError, match="is not a database"):
        open_store(str(path))
    assert path.read_bytes() == b"dear diary, " * 1_000


def test_a_folder_is_no_database(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        open_store(str(path))


def test_a_folder_that_cannot_be_made_is_named(path: Path) -> None:
    path.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"bough.db' cannot be created"):
        open_store(str(path / "below.db"))


def test_a_read_only_file_is_not_opened(folder: Path) -> None:
    path = folder / "bough.db"
    upgrade_database(str(path))
    path.chmod(0o444)
    with (
        _unprivileged(folder),
        pytest.raises(ConfigurationError, match="cannot be written: make the file and its folder writable"),
    ):
        open_store(str(path))


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.chmod(0o555)
    with _unprivileged(folder), pytest.raises(ConfigurationError, match="cannot be written"):
        open_store(str(folder / "bough.db"))
    folder.chmod(0o755)


async def test_a_database_that_becomes_read_only_stops_its_runs(path: Path) -> None:
    run = Made()
    async with open_store(str(path), retry_delays=(0.0,)) as store:
        await store.log.create(run.new())

        def forbid(connection: Connection) -> None:
            connection.exec_driver_sql("PRAGMA query_only = ON")

        await store.write(forbid)
        with pytest.raises(StorageFailed):
            await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
        assert await store.log.last_sequence(run.run_id) == 1


async def test_a_second_process_is_refused_and_told_the_first_ones_number(path: Path) -> None:
    program = f"""
        from bough_server.errors import ConfigurationError
        from bough_server.store.opening import open_store
        try:
            open_store({str(path)!r})
        except ConfigurationError as error:
            print(error.message)
    """
    async with open_store(str(path)):
        said = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert said.stdout == (
        f"The database {str(path)!r} is in use by process {os.getpid()}: stop that process, "
        "reach it with --address, or name another database; only one process may use a file.\n"
    )


async def test_a_killed_process_leaves_what_it_had_committed_and_no_lock(path: Path) -> None:
    program = f"""
        import asyncio, os, signal
        from bough_server.store.opening import open_store
        from tests.store.logs import Made, delta

        async def main():
            run, store = Made(), open_store({str(path)!r})
            await store.log.create(run.new())
            for _ in range(20):
                await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
            store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", textwrap.dedent(program)])
    assert killed.returncode == -9
    async with open_store(str(path)) as store:
        run = Made()
        assert await store.log.last_sequence(run.run_id) >= 21
        assert [one.run.run_id for one in await open_runs(store)] == [run.run_id]
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[])


def test_an_opening_that_fails_gives_the_lock_back(path: Path) -> None:
    path.write_bytes(b"dear diary, " * 1_000)
    with pytest.raises(ConfigurationError):
        open_store(str(path))
    path.unlink()
    assert upgrade_database(str(path)).is_current
