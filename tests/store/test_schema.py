"""The schema of a SQLite file: made, migrated, refused."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.sql.compiler import SQLCompiler

from bough_server.errors import ConfigurationError, NotFound
from bough_server.log.blobs import StoredBlob
from bough_server.store.opening import database_status, open_store, rebuild_projections, upgrade_database
from bough_server.store.ports.evaluations import EvaluationFilter
from bough_server.store.ports.log import RequestIdTaken
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.sql import migrations
from bough_server.store.sql.schema_version import DatabaseStatus
from bough_server.store.sql.tables import metadata
from bough_server.store.sqlite.database import exclusive_engine
from bough_server.store.sqlite.database_path import database_path
from tests.store.evaluation_logs import MadeEvaluation
from tests.store.logs import ANNE, Made, completed, delta
from tests.support.open_runs import open_runs


@pytest.fixture
def url(file_url: str) -> str:
    """A SQLite file that is not there yet."""
    return file_url


def _execute(url: str, statement: str) -> None:
    connection = sqlite3.connect(database_path(url))
    with connection:
        connection.execute(statement)
    connection.close()


def _migrations() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    return config


def _schema(connection: Connection) -> set[str]:
    statements = connection.execute(text("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")).scalars()
    spaced = {" ".join(statement.replace('"', "").split()) for statement in statements}
    return {one.replace("( ", "(").replace(" )", ")").replace(" ,", ",") for one in spaced}


def test_migrating_an_empty_database_gives_the_tables_that_the_code_names(url: str) -> None:
    config = _migrations()
    with exclusive_engine(url) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_a_new_database_has_the_schema_that_the_migrations_come_to(tmp_path: Path) -> None:
    config = _migrations()
    with exclusive_engine(str(tmp_path / "migrated.db")) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        migrated = _schema(connection)
    made = str(tmp_path / "made.db")
    upgrade_database(made)
    with exclusive_engine(made) as (engine, _), engine.connect() as connection:
        tables_and_indexes = {statement for statement in migrated if "alembic_version" not in statement}
        assert {one for one in _schema(connection) if "alembic_version" not in one} == tables_and_indexes


_OLDER = """
    INSERT INTO runs (run_id, tenant_id, user_id, session_id, create_time_ns, epoch, owner, last_sequence, ended, agent,
        state, labels, input_excerpt, tree_usage, request_id, request_digest, origin_run_id, origin_sequence, kind,
        evaluation_id, case_id, set_name)
    SELECT 'older-' || kind, 'acme', 'anne', '', 1, 1, '', 2, 1, 'lead', 3, '{}', '', x'', '', '', '', 0, kind,
        CASE kind WHEN 0 THEN 'older-1' ELSE '' END, CASE kind WHEN 0 THEN 'one' ELSE '' END, 'desk'
    FROM (SELECT 0 AS kind UNION SELECT 1);
    INSERT INTO events SELECT run_id, 1, 20 + 180 * kind, x'' FROM runs;
    INSERT INTO run_commands (run_id, user_id) VALUES ('older-1', 'anne');
"""


async def test_evaluations_of_before_are_dropped_with_a_line_in_the_log_and_their_runs_are_kept(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _migrations()
    with exclusive_engine(url) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0010")
        for statement in _OLDER.split(";"):
            connection.execute(text(statement)) if statement.strip() else None
    async with open_store(url) as store:
        listed, _ = await store.runs.list(ANNE, RunFilter(), Page(size=9))
        assert [(run.run_id, run.HasField("evaluation")) for run in listed] == [("older-0", False)]
        assert await store.evaluations.list(ANNE, EvaluationFilter(), Page(size=9)) == ([], "")
        assert len(await store.log.read("older-0")) == 1
        with pytest.raises(NotFound):
            await store.log.read("older-1")
        assert await store.mailbox.take("older-1") == []
    assert "dropped evaluations in the format of an older version" in capsys.readouterr().out


def _make_older(url: str, revision: str) -> None:
    """Creates a file as a version of before the first revision left it."""
    database_path(url).parent.mkdir()
    _execute(url, "CREATE TABLE letters (letter_id INTEGER PRIMARY KEY, run_id VARCHAR NOT NULL)")
    _execute(url, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    _execute(url, f"INSERT INTO alembic_version VALUES ('{revision}')")


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004", "0005"])
def test_a_database_of_before_the_first_revision_is_refused_in_a_sentence_that_says_what_to_do(
    url: str, revision: str
) -> None:
    _make_older(url, revision)
    before = database_path(url).read_bytes()
    for opening in (open_store, upgrade_database, database_status, rebuild_projections):
        with pytest.raises(ConfigurationError) as refused:
            opening(url)
        assert refused.value.message == (
            f"The database {str(database_path(url))!r} has revision {revision}, which this version of bough cannot "
            "read: move the file away or delete it, and a new one is created."
        )
    connection = sqlite3.connect(database_path(url))
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    connection.close()
    assert names == [("alembic_version",), ("letters",)]
    assert len(database_path(url).read_bytes()) == len(before)


async def test_a_new_database_is_created_when_the_older_one_was_moved_away(url: str) -> None:
    _make_older(url, "0005")
    path = database_path(url)
    path.rename(path.with_name("older.db"))
    async with open_store(url):
        assert database_status(url).is_current


def test_the_first_revision_is_the_oldest_that_is_read() -> None:
    assert ScriptDirectory.from_config(_migrations()).get_bases() == [migrations.FIRST]


def test_the_code_names_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(_migrations()).get_heads() == [migrations.HEAD]


def test_the_status_says_what_there_is_and_changes_nothing(url: str) -> None:
    path = database_path(url)
    assert database_status(url) == DatabaseStatus(name=str(path), revision=None, head=migrations.HEAD, size_bytes=0)
    assert not path.exists()
    made = upgrade_database(url)
    assert (made.revision, made.is_current, made.size_bytes > 0) == (migrations.HEAD, True, True)
    assert database_status(str(path)) == made


async def test_the_status_is_told_while_a_server_runs(url: str) -> None:
    async with open_store(url):
        assert database_status(url).is_current
        with pytest.raises(ConfigurationError, match="in use by process"):
            upgrade_database(url)


async def test_a_process_compiles_each_statement_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_and_use(name: str) -> None:
        store = open_store(str(tmp_path / name))
        try:
            assert await open_runs(store) == []
        finally:
            await store.close()

    await open_and_use("first.db")
    monkeypatch.setattr(SQLCompiler, "__init__", None)
    await open_and_use("second.db")


async def test_opening_makes_the_folder_and_the_tables(url: str) -> None:
    assert not database_path(url).parent.exists()
    async with open_store(url):
        assert database_status(url).is_current


async def test_an_empty_file_is_an_older_database(url: str) -> None:
    database_path(url).parent.mkdir()
    database_path(url).touch()
    async with open_store(url):
        assert database_status(url).is_current


def test_a_newer_database_is_refused_in_a_sentence_with_both_revisions(url: str) -> None:
    upgrade_database(url)
    _execute(url, "UPDATE alembic_version SET version_num = '9999'")
    for opening in (open_store, upgrade_database):
        with pytest.raises(ConfigurationError) as refused:
            opening(url)
        assert refused.value.message == (
            f"The database {str(database_path(url))!r} has revision 9999, which is newer than {migrations.HEAD}, the "
            "newest that this version of bough knows: use the newer version, or name another database."
        )
    assert database_status(url).revision == "9999"


def test_another_programs_database_is_refused_and_left_alone(url: str) -> None:
    database_path(url).parent.mkdir()
    _execute(url, "CREATE TABLE recipes (name TEXT)")
    with pytest.raises(ConfigurationError, match=r"another program \(it has the table 'recipes'\)"):
        open_store(url)
    connection = sqlite3.connect(database_path(url))
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    connection.close()


@pytest.mark.parametrize("url", ["mysql://host/bough", "sqlite://", "sqlite:///:memory:", "", "sqlite://host/x"])
def test_a_url_that_names_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="storage URL"):
        database_path(url)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("var/bough.db", "var/bough.db"),
        ("sqlite:///var/bough.db", "var/bough.db"),
        ("sqlite:////var/bough.db", "/var/bough.db"),
    ],
)
def test_a_url_is_a_path_or_sqlite_and_a_path(url: str, path: str) -> None:
    assert database_path(url) == Path(path)


async def test_a_database_of_before_files_is_upgraded_and_keeps_them_from_then_on(url: str) -> None:
    config = _migrations()
    with exclusive_engine(url) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
    assert database_status(url).revision == "0007"
    run, file = Made(), StoredBlob(sha256="ab", media_type="image/png", data=b"photo")
    async with open_store(url) as store:
        new = run.new()
        await store.log.create(replace(new, first=new.first._replace(blobs=[file])))
        assert (await store.blobs.read(ANNE, run.session_id, "ab")).data == b"photo"
    assert database_status(url).revision == migrations.HEAD


async def test_a_database_of_before_evaluations_is_upgraded_with_all_that_it_holds(url: str, tmp_path: Path) -> None:
    ended, running, newer = Made(number=1, request_id="ask", labels={"n": "1"}), Made(number=2), tmp_path / "newer.db"
    async with open_store(str(newer)) as store:
        await store.log.create(ended.new())
        await store.log.append(ended.run_id, epoch=1, log_events=ended.next(delta(), completed()))
        await store.log.create(running.new())
        before = [await store.runs.get(ANNE, run.run_id) for run in (ended, running)]
        log = list(await store.log.read(ended.run_id))
    _copy_as_0008(url, newer)
    async with open_store(url) as store:
        assert [await store.runs.get(ANNE, run.run_id) for run in (ended, running)] == before
        assert list(await store.log.read(ended.run_id)) == log
        assert await store.runs.find_request(ANNE, "ask") == before[0]
        with pytest.raises(RequestIdTaken):
            await store.log.create(Made(number=3, request_id="ask").new())
        await store.log.create_evaluation(MadeEvaluation(request_id="ask").new())
        assert [one.run.run_id for one in await open_runs(store)] == [running.run_id]
        await store.log.append(running.run_id, epoch=1, log_events=running.next(completed()))
    assert rebuild_projections(url) == 2
    async with open_store(url) as store:
        assert await store.runs.get(ANNE, ended.run_id) == before[0]


def _copy_as_0008(url: str, newer: Path) -> None:
    """Creates a database of revision 0008 with all rows of a newer one."""
    config = _migrations()
    with exclusive_engine(url) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0008")
    connection = sqlite3.connect(database_path(url), isolation_level=None)
    connection.execute("ATTACH ? AS newer", (str(newer),))
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'alembic_version'")
    for (name,) in names.fetchall():
        if name.startswith("sqlite_"):
            continue
        columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA table_info({name})"))
        connection.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM newer.{name}")
    assert "kind" not in {row[1] for row in connection.execute("PRAGMA table_info(runs)")}
    connection.close()
