"""Copies of whole databases, of one kind to the other and back: the same rows, or none."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Boolean, Column, Integer, LargeBinary, Table, insert

from bough.v1 import event_pb2
from bough_server.errors import ConfigurationError
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import copy_database, database_status, open_store, upgrade_database
from bough_server.store.ports.workers import RunCommand
from bough_server.store.postgres.database import display_url
from bough_server.store.sql.database_copy import BATCH_ROWS
from bough_server.store.sql.migrations import HEAD
from bough_server.store.sql.tables import metadata
from bough_server.store.sqlite.database import exclusive_connection
from bough_server.store.sqlite.database_path import database_path
from tests.store.logs import ANNE, Made, completed, delta
from tests.store.sql import execute
from tests.support import postgres
from tests.support.examples import examples
from tests.support.open_runs import open_runs

Rows = dict[str, list[tuple[object, ...]]]


def _ignore(_table: str, _rows: int) -> None:
    """Report nothing."""


def _copy(source: str, target: str) -> dict[str, int]:
    return {name: count for name, count in copy_database(source, target, _ignore).items() if count}


def _rows(url: str) -> Rows:
    return {name: sorted(execute(url, f"SELECT * FROM {name}"), key=repr) for name in metadata.tables}


def _is_empty(url: str) -> bool:
    return not any(_rows(url).values())


@pytest.fixture
def other_file_url(tmp_path: Path) -> str:
    """Another SQLite file that is not there yet."""
    return f"sqlite:///{tmp_path}/other/bough.db"


_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
_NUMBER = st.integers(-(2**63), 2**63 - 1)


def _values(column: "Column[object]") -> st.SearchStrategy[object]:
    values: st.SearchStrategy[object]
    if isinstance(column.type, Boolean):
        values = st.booleans()
    elif column.name == "labels":
        values = st.dictionaries(_TEXT, _TEXT, max_size=2).map(json.dumps)
    elif isinstance(column.type, LargeBinary):
        values = st.binary(max_size=9)
    else:
        values = _NUMBER if isinstance(column.type, Integer) else _TEXT
    return st.none() | values if column.nullable else values


def _told_apart(table: Table, found: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Return rows whose keys and request ids differ, so that no index refuses one."""
    apart = [column.primary_key or column.name == "request_id" for column in table.columns]
    return [
        tuple(
            f"{value}{number}" if is_apart and isinstance(value, str) else value
            for value, is_apart in zip(row, apart, strict=True)
        )
        for number, row in enumerate(found)
    ]


def _many(table: Table) -> st.SearchStrategy[list[tuple[object, ...]]]:
    row = st.tuples(*(_values(column) for column in table.columns))
    return st.lists(row, max_size=3, unique_by=lambda values: values[0]).map(lambda found: _told_apart(table, found))


# Triggers make the index of labels, from those of the other tables.
_WRITTEN = {name: table for name, table in metadata.tables.items() if name != "labels"}
_DATABASES = st.fixed_dictionaries({name: _many(table) for name, table in _WRITTEN.items()})


@pytest.mark.grid
@examples(5)
@given(_DATABASES)
def test_any_rows_are_the_same_there_and_back(rows: Rows) -> None:
    there = postgres.database()
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, back = (f"sqlite:///{folder}/{name}.db" for name in ("source", "back"))
            with exclusive_connection(source) as connection:
                for name, table in _WRITTEN.items():
                    for row in rows[name]:
                        connection.execute(insert(table).values(row))
            written = _rows(source)
            counts = {name: len(found) for name, found in rows.items() if found}
            for one, other in ((source, there), (there, back)):
                assert _copy(one, other) == counts
                assert _rows(other) == written
    finally:
        postgres.drop(there)


async def test_a_run_and_its_commands_go_on_at_the_copy(file_url: str, postgres_url: str) -> None:
    run = Made()
    command = RunCommand(command_id=0, run_id=run.run_id, cancel=event_pb2.CancelRequested())
    async with open_store(file_url) as store:
        await store.log.create(run.new())
        posted = [await store.mailbox.post(command) for _ in range(3)]
    _copy(file_url, postgres_url)
    async with open_store(postgres_url) as store:
        assert [each.command_id for each in await store.mailbox.take(run.run_id)] == posted
        assert await store.mailbox.post(command) == posted[-1] + 1
        await store.log.append(run.run_id, epoch=1, log_events=run.next(delta(), completed()))
        assert [event.sequence for event in await store.log.read(run.run_id)] == [1, 2, 3]


@pytest.mark.parametrize("target", ["sqlite", "postgres"])
async def test_workers_that_had_a_lease_are_lost_at_the_copy(url: str, other_file_url: str, target: str) -> None:
    copied = other_file_url if target == "sqlite" else postgres.database(is_empty=True)
    async with open_store(url) as store:
        await store.log.create(Made(owner="killed").new())
    execute(url, "INSERT INTO workers VALUES ('killed', 5), ('idle', 7)")
    _copy(url, copied)
    assert _rows(copied) == _rows(url)
    async with open_store(copied) as store:
        assert [store.leases.has_crashed(worker) for worker in ("killed", "idle")] == [True, False]
        assert [run.owner for run in await open_runs(store)] == ["killed"]


async def test_rows_are_copied_a_bounded_number_of_bytes_at_a_time(file_url: str, postgres_url: str) -> None:
    run = Made()
    files = [StoredBlob(sha256=f"{n}", media_type="", data=bytes([n]) * 3_000_000) for n in range(3)]
    async with open_store(file_url, durability="process") as store:
        new = run.new()
        await store.log.create(replace(new, first=new.first._replace(blobs=files)))
        await store.log.append(run.run_id, epoch=1, log_events=run.next(*(delta() for _ in range(BATCH_ROWS))))
    seen: list[tuple[str, int]] = []
    copy_database(file_url, postgres_url, lambda table, rows: seen.append((table, rows)))
    assert [rows for table, rows in seen if table == "blobs"] == [1, 2, 3]
    assert [rows for table, rows in seen if table == "events"] == [BATCH_ROWS, BATCH_ROWS + 1]
    async with open_store(postgres_url) as store:
        assert [(await store.blobs.read(ANNE, run.session_id, f"{n}")).data for n in range(3)] == [
            file.data for file in files
        ]


async def test_a_database_with_rows_is_not_copied_to_and_is_left_alone(url: str, other_file_url: str) -> None:
    async with open_store(url) as store:
        await store.log.create(Made(number=1).new())
    async with open_store(other_file_url) as store:
        await store.log.create(Made(number=2).new())
    before = _rows(url)
    name = database_status(url).name
    with pytest.raises(ConfigurationError) as refused:
        _copy(other_file_url, url)
    assert refused.value.message == (
        f"The database {name} is not empty, it has rows in events, runs, sessions, usage_entries: copy to one that is "
        "empty or does not exist yet."
    )
    assert _rows(url) == before


def test_what_is_copied_has_to_be_there(file_url: str, postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"There is no database at '.*bough.db': name the one to copy"):
        _copy(file_url, postgres_url)
    assert not database_path(file_url).exists()


def test_a_database_is_not_copied_to_itself(url: str) -> None:
    upgrade_database(url)
    with pytest.raises(ConfigurationError, match="Both are the database"):
        _copy(url, url)


@pytest.mark.parametrize("is_target", [False, True], ids=["source", "target"])
def test_an_older_database_has_to_be_upgraded_first(file_url: str, other_file_url: str, is_target: bool) -> None:
    urls = [file_url, other_file_url]
    for each in urls:
        upgrade_database(each)
    execute(urls[is_target], "UPDATE alembic_version SET version_num = '0008'")
    with pytest.raises(ConfigurationError) as refused:
        _copy(*urls)
    path = database_path(urls[is_target])
    assert refused.value.message == (
        f"The database {path} has revision 0008, and this version of bough copies {HEAD}: run `bough db upgrade` with "
        f"BOUGH_DATABASE={path}."
    )


@pytest.mark.parametrize("is_target", [False, True], ids=["source", "target"])
async def test_nothing_is_copied_while_a_server_uses_either(url: str, other_file_url: str, is_target: bool) -> None:
    upgrade_database(other_file_url)
    urls = (other_file_url, url) if is_target else (url, other_file_url)
    async with open_store(url):
        with pytest.raises(ConfigurationError, match="in use by"):
            _copy(*urls)


async def test_a_text_that_postgresql_refuses_is_named_and_nothing_is_copied(file_url: str, postgres_url: str) -> None:
    runs = [Made(number=number) for number in (1, 2, 3)]
    async with open_store(file_url) as store:
        for run in runs:
            await store.log.create(run.new())
    wrong = runs[1].run_id
    execute(file_url, f"UPDATE runs SET input_excerpt = 'a' || char(0) WHERE run_id = '{wrong}'")
    with pytest.raises(ConfigurationError) as refused:
        _copy(file_url, postgres_url)
    assert refused.value.message == (
        f"The database {display_url(postgres_url)} does not take the row of runs with run_id '{wrong}': PostgreSQL "
        "text fields cannot contain NUL (0x00) bytes. Nothing was copied."
    )
    assert _is_empty(postgres_url)
    execute(file_url, "UPDATE runs SET input_excerpt = ''")
    assert _copy(file_url, postgres_url) == {"events": 3, "runs": 3, "sessions": 3, "usage_entries": 3}


async def test_a_source_that_cannot_be_read_is_told_from_the_target(file_url: str, postgres_url: str) -> None:
    async with open_store(file_url) as store:
        await store.log.create(Made().new())
    execute(file_url, "UPDATE runs SET input_excerpt = CAST(x'ff' AS TEXT)")
    with pytest.raises(ConfigurationError) as refused:
        _copy(file_url, postgres_url)
    assert refused.value.message.startswith(
        f"The database {database_path(file_url)} cannot be read at the first rows of runs: Could not decode to "
        "UTF-8 column 'input_excerpt'"
    )
    assert _is_empty(postgres_url)


async def test_a_target_that_is_lost_meanwhile_stays_empty(file_url: str, postgres_url: str) -> None:
    async with open_store(file_url) as store:
        await store.log.create(Made().new())

    def end_connections(table: str, _: int) -> None:
        if table == "runs":
            others = "FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()"
            execute(postgres_url, f"SELECT pg_terminate_backend(pid) {others}")

    with pytest.raises(ConfigurationError, match="cannot be used: terminating connection") as refused:
        copy_database(file_url, postgres_url, end_connections)
    assert display_url(postgres_url) in refused.value.message
    assert _is_empty(postgres_url)
    assert _copy(file_url, postgres_url)


async def test_a_copy_that_is_interrupted_leaves_the_target_empty(url: str, other_file_url: str) -> None:
    async with open_store(other_file_url) as store:
        await store.log.create(Made().new())

    def interrupt(table: str, _: int) -> None:
        if table == "runs":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_database(other_file_url, url, interrupt)
    assert _is_empty(url)
