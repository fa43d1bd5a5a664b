"""The SQLite database: its engines, its schema and migrations, and the revision of a file."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, create_mock_engine, event, text
from sqlalchemy.dialects import registry, sqlite
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.util import LRUCache

from bough_server.errors import ConfigurationError
from bough_server.store.sql.migrations import FIRST, HEAD
from bough_server.store.sql.options import Durability
from bough_server.store.sql.schema_version import DatabaseStatus, build_upgrade_error, read_use, upgrade_schema
from bough_server.store.sql.tables import metadata
from bough_server.store.sqlite.database_path import database_path
from bough_server.store.sqlite.file_lock import FileLock, find_serving_owner

_ADVICE = {
    sqlite3.SQLITE_NOTADB: "is not a database: move it away, or name another one",
    sqlite3.SQLITE_BUSY: "is locked by another program: close that program, and try again",
    sqlite3.SQLITE_READONLY: "cannot be written: make the file and its folder writable, or name another one",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: make the file and its folder writable, or name another one",
    sqlite3.SQLITE_FULL: "cannot be written because the disk is full: free some space, and try again",
    sqlite3.SQLITE_CORRUPT: "is damaged: restore it from a backup, or name another one",
}

_SYNCHRONOUS: Final = {"disk": "FULL", "process": "NORMAL"}

_CHECKPOINT_PAGES: Final = 4_000
"""Size of the write-ahead log, in pages of 4 KiB, at which it is checkpointed into the database.

Each checkpoint costs two flushes to disk; SQLite's default is 1,000 pages.
"""


_COMPILED: Final[LRUCache[Any, Any]] = LRUCache(1_000)
"""The statements that this process has compiled, shared by its engines.

To compile one takes longer than to execute it, and engines would compile each their own.
"""


class SharedDialect(SQLiteDialect_pysqlite):
    """SQLite by the standard driver; equal to any other instance, because they all compile a statement to one text."""

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedDialect)

    def __hash__(self) -> int:
        return hash(SharedDialect)


registry.register("sqlite.shared", __name__, "SharedDialect")


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Raise a driver's error as a ConfigurationError that says what to do."""
    try:
        yield
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the primary code of an extended result code
        advice = _ADVICE.get(code, f"could not be opened ({cause}): check that it is a database of this program")
        raise ConfigurationError(f"The database {str(path)!r} {advice}.") from error


def display_url(url: str) -> str:
    """Return how a database is named in logs and messages."""
    return str(database_path(url))


def make_folder(path: Path) -> None:
    """Create the folder of a database if it is missing. Raises ConfigurationError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The folder {str(path.parent)!r} cannot be created ({error.strerror}): "
            "create it, or name another database."
        ) from error


def migrate(engine: Engine, path: Path, *, may_upgrade: bool = True, keeps_backup: bool = True) -> None:
    """Create or upgrade the schema in one transaction; with `keeps_backup` a copy of an older file stays beside it.

    Raises ConfigurationError if the file is unusable, or needs an upgrade that is not allowed.
    """
    with translate_errors(path), engine.begin() as connection:
        found = _revision(connection, path)
        if found is not None and found < HEAD and not may_upgrade:  # a new file has nothing to upgrade
            raise build_upgrade_error(repr(str(path)), found)
        if found is None:
            _create_schema(connection)
        elif found != HEAD:
            back_up = partial(_back_up, path, found) if keeps_backup else lambda: None
            upgrade_schema(connection, repr(str(path)), found, back_up=back_up)
        else:  # a write that changes nothing: a read-only file must fail now, not at the first run
            connection.execute(text("UPDATE alembic_version SET version_num = version_num"))


def _back_up(path: Path, revision: str) -> Path:
    """Copy a database file, with what is in its write-ahead log, beside it; return the copy."""
    names = (f"{path.name}.{revision}{f'-{number}' if number else ''}.bak" for number in count())
    copy = next(found for name in names if not (found := path.with_name(name)).exists())
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def database_status(url: str) -> DatabaseStatus:
    """Return the status of a database file without changing it, also while a server uses it.

    Raises ConfigurationError if the file is too old for this version to upgrade, or belongs to another program.
    """
    path = database_path(url)
    if not path.exists():
        return DatabaseStatus(name=str(path), revision=None, head=HEAD, size_bytes=0)
    engine = reader_engine(path, connections=1, busy_timeout=5.0)
    try:
        with translate_errors(path), engine.connect() as connection:
            revision = _revision(connection, path)
            servers = 0 if find_serving_owner(path) is None else 1
            use = read_use(connection, servers=servers) if revision == HEAD else None
    finally:
        engine.dispose()
    return DatabaseStatus(name=str(path), revision=revision, head=HEAD, size_bytes=path.stat().st_size, use=use)


def upgrade_database(url: str, *, keeps_backup: bool = True) -> DatabaseStatus:
    """Create a database, or upgrade it to this version. Raises ConfigurationError while another process uses it."""
    with exclusive_engine(url) as (engine, path):
        migrate(engine, path, keeps_backup=keeps_backup)
    return database_status(url)


@contextmanager
def exclusive_engine(url: str) -> Iterator[tuple[Engine, Path]]:
    """Open a writing engine for an operator's command; holds the file lock, so no server can use the file meanwhile.

    Yields the engine and the path of the file. Raises ConfigurationError.
    """
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


@contextmanager
def exclusive_connection(url: str) -> Iterator[Connection]:
    """Open a transaction on a current database that nothing else uses meanwhile. Raises ConfigurationError."""
    with exclusive_engine(url) as (engine, path):
        migrate(engine, path)
        with translate_errors(path), engine.begin() as connection:
            yield connection


def _revision(connection: Connection, path: Path) -> str | None:
    names = (
        connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")).scalars().all()
    )
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


def _create_schema(connection: Connection) -> None:
    """Create a new database's schema without loading Alembic; a test checks that the migrations lead to the same."""
    cursor = connection.connection.cursor()
    for statement in _compile_schema():
        cursor.execute(statement)
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


@cache
def _compile_schema() -> Sequence[str]:
    """Compile the schema's statements, which takes most of the time that a new database does."""
    statements: list[str] = []

    def collect(statement: ExecutableDDLElement, *_: object, **__: object) -> None:
        statements.append(str(statement.compile(dialect=sqlite.dialect())))

    metadata.create_all(create_mock_engine("sqlite://", collect), checkfirst=False)
    return (*statements, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")


def writer_engine(path: Path, *, durability: Durability, busy_timeout: float) -> Engine:
    """Create an engine with one connection, for one thread; its transactions take the write lock as they begin."""
    engine = create_engine(
        URL.create("sqlite+shared", database=str(path)),
        poolclass=StaticPool,
        hide_parameters=True,  # the log must not say what users and models do
        execution_options={"compiled_cache": _COMPILED},
        connect_args={"timeout": busy_timeout, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        assert isinstance(connection, sqlite3.Connection)
        connection.isolation_level = None  # else the driver begins transactions itself, without the write lock
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A deferred transaction that reads first may fail with SQLITE_BUSY when it writes, without waiting.
        connection.connection.cursor().execute("BEGIN IMMEDIATE")

    return engine


def reader_engine(path: Path, *, connections: int, busy_timeout: float) -> Engine:
    """Create an engine with read-only connections in autocommit mode.

    No read transaction outlives its statement, so none keeps the write-ahead log from being checkpointed.
    """
    engine = create_engine(
        URL.create("sqlite+shared", database=str(path)),
        poolclass=QueuePool,
        hide_parameters=True,
        execution_options={"compiled_cache": _COMPILED},
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
