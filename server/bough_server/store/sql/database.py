"""The SQLite database: its engine, its schema and migrations, and the file lock of its owner."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool

from bough_server.errors import ConfigurationError
from bough_server.store.sql.migrations import FIRST, HEAD
from bough_server.store.sql.tables import metadata

_ADVICE = {
    sqlite3.SQLITE_NOTADB: "is no database: move it away, or name another one",
    sqlite3.SQLITE_BUSY: "is locked by another program: close that one, and try again",
    sqlite3.SQLITE_READONLY: "cannot be written: make the file and its folder writable, or name another one",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: make the file and its folder writable, or name another one",
    sqlite3.SQLITE_FULL: "cannot be written because the disk is full: make room, and try again",
    sqlite3.SQLITE_CORRUPT: "is damaged: restore it from a backup, or name another one",
}

Durability = Literal["disk", "process"]
"""What a commit survives: a power cut (synchronous=FULL), or only a killed process (NORMAL)."""

_SYNCHRONOUS: Final = {"disk": "FULL", "process": "NORMAL"}

_CHECKPOINT_PAGES: Final = 4_000
"""How long the write-ahead log gets, in pages of 4 KiB, before it is copied into the database: two flushes."""


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
    """Makes or upgrades the schema, in one transaction. Raises ConfigurationError for what it cannot read."""
    with opening(path), engine.begin() as connection:
        found = _revision(connection, path)
        if found is None:
            _make(connection)
        elif found != HEAD:
            _upgrade(connection, path, found)
        else:  # a file that cannot be written is found out now, not by the first run
            connection.execute(text("UPDATE alembic_version SET version_num = version_num"))


def database_status(url: str) -> DatabaseStatus:
    """What is in a database file, also while a server uses it; changes nothing.

    Raises ConfigurationError for one that is older than what this version can upgrade, or another program's.
    """
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
    if revision is not None and str(revision) < FIRST:  # revisions are numbers of four digits
        raise ConfigurationError(
            f"The database {str(path)!r} has revision {revision}, which this version of bough cannot read: "
            "move the file away or delete it, and a new one is created."
        )
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


def database_path(url: str) -> Path:
    """The file of a storage URL: a path, or `sqlite:///` and a path. Raises ConfigurationError for anything else."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme == "sqlite" and rest.startswith("/"):
        path = rest[1:]
    else:
        raise ConfigurationError(
            f"The storage URL {url!r} is not served: give a path, or sqlite:/// and a path, as in ./var/bough.db."
        )
    if path in ("", ":memory:"):
        raise ConfigurationError("The storage URL names no file: give a path, as in ./var/bough.db.")
    return Path(path)


def writer_engine(path: Path, *, durability: Durability, busy_timeout: float) -> Engine:
    """One connection for one thread; its transactions begin with the write lock (BEGIN IMMEDIATE)."""
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=StaticPool,
        connect_args={"timeout": busy_timeout, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        assert isinstance(connection, sqlite3.Connection)
        connection.isolation_level = None  # the driver begins nothing by itself
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.connection.cursor().execute("BEGIN IMMEDIATE")

    return engine


def reader_engine(path: Path, *, connections: int, busy_timeout: float) -> Engine:
    """Connections that cannot write; every statement is a transaction of its own, so none outlives a page."""
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        isolation_level="AUTOCOMMIT",
        connect_args={"timeout": busy_timeout, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        assert isinstance(connection, sqlite3.Connection)
        connection.execute("PRAGMA query_only = ON")

    return engine


class FileLock:
    """An advisory lock of the operating system on FILE.lock, which goes with the process however that ends."""

    def __init__(self, database: Path) -> None:
        """Takes the lock. Raises ConfigurationError where another process holds it, or the file cannot be made."""
        path = database.with_name(database.name + ".lock")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"The folder {str(database.parent)!r} cannot be written ({error.strerror}): "
                "make it writable, or name another database."
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise ConfigurationError(
                f"The database {str(database)!r} is in use by process {owner}: "
                "stop that one, speak to it by --address, or name another database; one process serves one file."
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Gives the lock back; the file stays, for the next owner."""
        os.close(self._descriptor)
