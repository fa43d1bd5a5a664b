"""The schema of a database file: made, migrated, refused."""

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from bough.v1 import agent_service_pb2, event_pb2
from bough_server.errors import ConfigurationError
from bough_server.store.ports import Principal, RunRecord
from bough_server.store.sql import migrations
from bough_server.store.sql.database import (
    DatabaseStatus,
    database_path,
    database_status,
    exclusive_engine,
    upgrade_database,
)
from bough_server.store.sql.store import open_store
from bough_server.store.sql.tables import metadata
from bough_server.store.worker_ports import Letter


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


_OLDER_RUN = (
    "INSERT INTO runs VALUES ('r1', 'acme', 'anne', 's1', 7, 2, 1, 0, 'lead', 2, '{}', 8, NULL, NULL, NULL, 'ask', 'd')"
)
_OLDER_SESSION = "INSERT INTO sessions VALUES ('s1', 'acme', 'anne', '{}', 7, 7, 'r1', 0)"


async def test_a_database_of_the_first_schema_is_upgraded_with_what_is_in_it(url: str) -> None:
    config = _migrations()
    with exclusive_engine(url) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for statement in (_OLDER_RUN, _OLDER_SESSION):
            connection.exec_driver_sql(statement)
    async with open_store(url) as store:
        (record,) = await store.runs.open_runs()
        expected = agent_service_pb2.Run(
            run_id="r1", session_id="s1", agent="lead", state=event_pb2.STATE_RUNNING, last_sequence=1
        )
        expected.create_time.FromNanoseconds(7)
        expected.start_time.FromNanoseconds(8)
        principal = Principal(tenant_id="acme", user_id="anne")
        assert record == RunRecord(run=expected, principal=principal, epoch=2, request_digest="d")
        assert await store.runs.holder("s1") == record
        assert await store.runs.find_request(principal, "ask") == record


async def test_letters_that_wait_outlive_an_upgrade(url: str) -> None:
    config = _migrations()
    with exclusive_engine(url) as (engine, _), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        connection.exec_driver_sql("INSERT INTO letters VALUES (7, 'r1', 1, NULL, 'anne')")
    async with open_store(url) as store:
        assert await store.mailbox.take("r1") == [
            Letter(letter_id=7, run_id="r1", cancel=event_pb2.CANCEL_REASON_CALLER, user_id="anne")
        ]


def test_the_code_names_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(_migrations()).get_heads() == [migrations.HEAD]


def test_the_status_says_what_there_is_and_changes_nothing(url: str) -> None:
    path = database_path(url)
    assert database_status(url) == DatabaseStatus(path=path, revision=None, head=migrations.HEAD, size_bytes=0)
    assert not path.exists()
    made = upgrade_database(url)
    assert (made.revision, made.is_current, made.size_bytes > 0) == (migrations.HEAD, True, True)
    assert database_status(str(path)) == made


async def test_the_status_is_told_while_a_server_runs(url: str) -> None:
    async with open_store(url):
        assert database_status(url).is_current
        with pytest.raises(ConfigurationError, match="in use by process"):
            upgrade_database(url)


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


@pytest.mark.parametrize("url", ["postgresql://host/bough", "sqlite://", "sqlite:///:memory:", "", "sqlite://host/x"])
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
