"""Messages and exit codes of `bough db`, `bough serve` and an installation without an optional package."""

import asyncio
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from bough_server.cli.db import verdict_text
from bough_server.settings import Settings
from bough_server.store.opening import upgrade_database
from bough_server.store.sql.migrations import HEAD
from bough_server.store.sql.schema_version import DatabaseStatus
from bough_server.store.sqlite.database_path import database_path
from tests.clients.cli_process import Finished, bough, started
from tests.clients.stream_server import LoopbackService, listening
from tests.store.sql import execute
from tests.support.older_schema import BEFORE_LABELS, undo_labels
from tests.support.projects import llm, write_project


def _config(folder: Path, database: Path) -> Path:
    config = folder / "bough.yaml"
    config.write_text(f"storage:\n  url: {database}\n", encoding="utf-8")
    return config


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _stamp(database: Path, revision: str) -> None:
    connection = sqlite3.connect(database)
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()


@pytest.mark.parametrize(
    ("revision", "code", "state"),
    [
        (HEAD, 0, "current"),
        ("9999", 1, f"newer than {HEAD}, the newest that this version of bough supports: upgrade bough"),
    ],
)
async def test_the_status_of_a_database_says_what_helps(tmp_path: Path, revision: str, code: int, state: str) -> None:
    database = tmp_path / "bough.db"
    upgrade_database(str(database))
    _stamp(database, revision)
    config = str(_config(tmp_path, database))
    ended = await bough("--config", config, "db", "status")
    size, state = database.stat().st_size, state.replace("CONFIG", config)
    use = "0 servers, 0 open runs\n" if revision == HEAD else ""
    out = f"{database}: revision {revision}, {state}, {size:,} bytes\n{use}"
    assert ended == Finished(code=code, out=out, err="")


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("db", "upgrade"), ("db", "status"), ("db", "rebuild")])
async def test_a_database_that_is_too_old_is_refused_with_what_to_do(tmp_path: Path, command: tuple[str, ...]) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    database = database_path(Settings.load(config).storage.url)
    upgrade_database(str(database))
    _stamp(database, "0005")
    ended = await bough("--config", str(config), *command)
    sentence = (
        f"The database {str(database)!r} has revision 0005, which this version of bough cannot read: "
        "move the file away or delete it, and a new one is created.\n"
    )
    assert ended == Finished(code=2, out="", err=sentence)


async def test_a_command_that_reads_leaves_an_older_database_as_it_is(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    flags = ("--config", str(config), "--embedded")
    assert (await bough(*flags, "run", "alone", "hi")).code == 0
    database = database_path(Settings.load(config).storage.url)
    undo_labels(str(database))
    sentence = (
        f"The database {str(database)!r} has revision {BEFORE_LABELS}, and this version needs {HEAD}: "
        "run `bough db upgrade`.\n"
    )
    for words in (("runs",), ("tree", "last"), ("events", "last"), ("sessions", "list"), ("eval", "list")):
        assert await bough(*flags, *words) == Finished(code=2, out="", err=sentence)
    assert (await bough(*flags, "db", "status")).out.startswith(f"{database}: revision {BEFORE_LABELS}, needs {HEAD}")


@pytest.mark.parametrize("command", [("run", "alone", "hi"), ("db", "upgrade"), ("db", "upgrade", "--no-backup")])
async def test_an_upgrade_is_told_and_keeps_a_copy_that_the_older_version_reads(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm.", "Hm."]})
    flags = ("--config", str(config), "--embedded")
    assert (await bough(*flags, "run", "alone", "hi")).code == 0
    database = database_path(Settings.load(config).storage.url)
    undo_labels(str(database))
    copies = [database.with_name(f"{database.name}.{BEFORE_LABELS}{number}.bak") for number in ("", "-1")]
    copies[0].write_text("another copy", encoding="utf-8")
    ended = await bough(*flags, *command)
    assert (ended.code, (await bough(*flags, "runs")).code) == (0, 0)
    assert "upgraded the database" in ended.err
    assert f"from={BEFORE_LABELS}" in ended.err
    assert f"to={HEAD}" in ended.err
    assert copies[0].read_text(encoding="utf-8") == "another copy"
    assert (f"backup={copies[1]}" in ended.err, copies[1].exists()) == (command[-1] != "--no-backup",) * 2
    if copies[1].exists():
        assert execute(str(copies[1]), "SELECT version_num FROM alembic_version") == [(BEFORE_LABELS,)]
        assert execute(str(copies[1]), "SELECT count(*) FROM runs WHERE ended") == [(1,)]


async def test_the_doctor_advises_no_upgrade_of_a_newer_database(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    database = database_path(Settings.load(config).storage.url)
    upgrade_database(str(database))
    _stamp(database, "9999")
    (line,) = [one for one in (await bough("--config", str(config), "doctor")).out.splitlines() if "database" in one]
    words = f"revision 9999, newer than {HEAD}, the newest that this version of bough supports: upgrade bough"
    assert line == f"!!  database: {database}: {words}, {database.stat().st_size:,} bytes"


def test_the_status_of_a_database_that_can_be_upgraded_names_the_command() -> None:
    status = DatabaseStatus(name="bough.db", revision="0006", head="0007", size_bytes=4096)
    expected = "bough.db: revision 0006, needs 0007: run `bough --embedded db upgrade`, 4,096 bytes"
    assert verdict_text(status, "bough --embedded") == expected


@pytest.mark.parametrize("is_empty", [False, True], ids=["missing", "empty"])
async def test_rebuilding_where_there_is_no_database_is_refused_and_makes_none(tmp_path: Path, is_empty: bool) -> None:
    database = tmp_path / "bough.db"
    if is_empty:
        database.touch()
    config = _config(tmp_path, database)
    there = _sizes(tmp_path)
    ended = await bough("--config", str(config), "db", "rebuild")
    sentence = f"There is no database at {str(database)!r}: name the one to rebuild.\n"
    assert ended == Finished(code=2, out="", err=sentence)
    assert _sizes(tmp_path) == there


async def test_a_ready_file_that_cannot_be_written_is_refused_before_anything_serves(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    refusals = {
        tmp_path: f"The ready file {str(tmp_path)!r} is a folder: name a file in it.\n",
        tmp_path / "none" / "ready": (
            f"The ready file's folder {str(tmp_path / 'none')!r} does not exist: create it, or name another.\n"
        ),
    }
    for place, sentence in refusals.items():
        ended = await bough("--config", str(config), "serve", "--port", "0", "--ready-file", str(place))
        assert ended == Finished(code=2, out="", err=sentence)


async def test_the_ready_file_is_there_when_the_line_says_that_it_serves(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    ready = tmp_path / "ready"
    server = await started("--config", str(config), "serve", "--port", "0", "--ready-file", str(ready))
    assert server.stdout is not None
    line = (await server.stdout.readline()).decode()
    written = ready.read_text()
    server.send_signal(signal.SIGTERM)
    await server.communicate()
    assert (line, server.returncode) == (f"serving {written}", 0)


async def test_the_flag_for_the_default_model_wins_over_its_variable_before_a_server_is_looked_for(
    tmp_path: Path,
) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    async with listening(LoopbackService([])) as port:
        environment = {"BOUGH_DEFAULT_MODEL": "absent", "BOUGH_ADDRESS": f"127.0.0.1:{port}"}
        ended = await bough(
            "--config", str(config), "run", "alone", "hi", "--default-model", "default", environment=environment
        )
    sentence = (
        f"--default-model applies only to an embedded server, and a server runs at 127.0.0.1:{port}: "
        "add --embedded, or pass it to `bough serve`.\n"
    )
    assert ended == Finished(code=2, out="", err=sentence)


async def _main_without(module: str) -> Finished:
    program = f"import sys; sys.modules[{module!r}] = None; from bough_server.cli import main; main()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return Finished(code=process.returncode, out=out.decode(), err=err.decode())


async def test_an_installation_without_the_server_says_what_to_install() -> None:
    sentence = 'This command needs the server packages: pip install "bough-agents[server]"\n'
    assert await _main_without("typer") == Finished(code=2, out="", err=sentence)


async def test_a_module_of_its_own_that_is_missing_is_not_laid_to_the_installed_extras() -> None:
    ended = await _main_without("bough_server.cli.db")
    assert (ended.code, "pip install" in ended.err, "bough_server.cli.db" in ended.err) == (1, False, True)
