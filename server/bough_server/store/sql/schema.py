"""A database file's schema: which revision it has, and bringing it up to this version's; it touches no row of data."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError

from bough_server.errors import ConfigurationError
from bough_server.store.sql.engine import database_path, reader_engine, writer_engine
from bough_server.store.sql.lock import FileLock
from bough_server.store.sql.migrations import HEAD
from bough_server.store.sql.tables import metadata

_ADVICE = {
    sqlite3.SQLITE_NOTADB: "is no database: move it away, or name another one",
    sqlite3.SQLITE_BUSY: "is locked by another program: close that one, and try again",
    sqlite3.SQLITE_READONLY: "cannot be written: make the file and its folder writable, or name another one",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: make the file and its folder writable, or name another one",
    sqlite3.SQLITE_FULL: "cannot be written because the disk is full: make room, and try again",
    sqlite3.SQLITE_CORRUPT: "is damaged: restore it from a backup, or name another one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """A database file and the revision of its schema; None for a file that is missing or empty."""

    path: Path
    revision: str | None
    head: str
    size_bytes: int

    @property
    def is_current(self) -> bool:
        """Whether this version reads and writes it as it is."""
        return self.revision == self.head


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Turns a driver's errors into a ConfigurationError that says what to do."""
    try:
        yield
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        advice = _ADVICE.get(code, f"could not be opened ({cause}): see that it is a database of this program")
        raise ConfigurationError(f"The database {str(path)!r} {advice}.") from error


def make_folder(path: Path) -> None:
    """Makes the folder of a database that is not there yet. Raises ConfigurationError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The folder {str(path.parent)!r} cannot be made ({error.strerror}): make it, or name another database."
        ) from error


def migrate(engine: Engine, path: Path) -> None:
    """Makes or upgrades the schema, in one transaction. Raises ConfigurationError for a newer or a foreign file."""
    with opening(path), engine.begin() as connection:
        found = _revision(connection, path)
        if found is None:
            _make(connection)
        elif found != HEAD:
            _upgrade(connection, path, found)
        else:  # a file that cannot be written is found out now, not by the first run
            connection.execute(text("UPDATE alembic_version SET version_num = version_num"))


def database_status(url: str) -> DatabaseStatus:
    """What is in a database file, also while a server uses it; changes nothing."""
    path = database_path(url)
    if not path.exists():
        return DatabaseStatus(path=path, revision=None, head=HEAD, size_bytes=0)
    engine = reader_engine(path, connections=1, busy_timeout=5.0)
    try:
        with opening(path), engine.connect() as connection:
            revision = _revision(connection, path)
    finally:
        engine.dispose()
    return DatabaseStatus(path=path, revision=revision, head=HEAD, size_bytes=path.stat().st_size)


def upgrade_database(url: str) -> DatabaseStatus:
    """Makes a database or brings it up to this version. Raises ConfigurationError while another process has it."""
    with exclusive_engine(url) as (engine, path):
        migrate(engine, path)
    return database_status(url)


@contextmanager
def exclusive_engine(url: str) -> Iterator[tuple[Engine, Path]]:
    """A writing connection for an operator's command, while no server has the file."""
    path = database_path(url)
    make_folder(path)
    lock = FileLock(path)
    try:
        engine = writer_engine(path, durability="disk", busy_timeout=5.0)
        try:
            yield engine, path
        finally:
            engine.dispose()
    finally:
        lock.release()


def _revision(connection: Connection, path: Path) -> str | None:
    names = inspect(connection).get_table_names()
    if not names:
        return None
    if "alembic_version" not in names:
        raise ConfigurationError(
            f"The database {str(path)!r} belongs to another program (it has the table {names[0]!r}): name another one."
        )
    revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if revision is None else str(revision)


def _make(connection: Connection) -> None:
    """A new database's schema: what the migrations come to, as a test compares, without loading what runs them."""
    metadata.create_all(connection)
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def _upgrade(connection: Connection, path: Path, found: str) -> None:
    from alembic import command  # costs what a server that finds its schema need not pay
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found not in known:
        raise ConfigurationError(
            f"The database {str(path)!r} has revision {found}, which is newer than {HEAD}, the newest that this "
            "version of bough knows: use the newer version, or name another database."
        )
    command.upgrade(config, "head")
