"""The PostgreSQL database: its engines, its schema and the revision of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

from bough_server.errors import ConfigurationError
from bough_server.store.sql.migrations import HEAD
from bough_server.store.sql.options import Durability
from bough_server.store.sql.tables import metadata

_MIGRATION_LOCK: Final = 0x626F756768  # "bough"
"""The key of the advisory lock under which a server looks at the schema and changes it."""

CONNECT_SECONDS: Final = 10

_SYNCHRONOUS: Final = {"disk": "on", "process": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresStatus:
    """A PostgreSQL database and the revision of its schema; None for an empty one."""

    url: str
    """Without the password."""
    revision: str | None
    head: str
    size_bytes: int

    @property
    def is_current(self) -> bool:
        """True if this version reads and writes it without an upgrade."""
        return self.revision == self.head


def parsed(url: str) -> URL:
    """Return a storage URL for SQLAlchemy. Raises ConfigurationError, which never shows the password."""
    try:
        found = make_url(url.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "The storage URL is not one of PostgreSQL: use postgresql://USER@HOST:PORT/DATABASE."
        ) from None
    return found.set(drivername="postgresql+psycopg")


def shown(url: str) -> str:
    """Return a storage URL without its password."""
    return parsed(url).set(drivername="postgresql", password=None).render_as_string()


@contextmanager
def opening(url: str) -> Iterator[None]:
    """Raise a driver's error as a ConfigurationError that says what to do."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        said = " ".join(str(cause).split())
        raise ConfigurationError(
            f"The database {shown(url)} cannot be used: {said}. Check the address, the user and the password "
            "(PGPASSWORD, or a password file), and that the database exists."
        ) from error


def migrate(engine: Engine, url: str) -> None:
    """Create the schema, one server at a time. Raises ConfigurationError if the database is unusable."""
    with opening(url), engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        found = _revision(connection, url)
        if found is None:
            metadata.create_all(connection, checkfirst=False)
            connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
            connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
        elif found > HEAD:  # revisions are numbers of four digits
            raise ConfigurationError(
                f"The database {shown(url)} has revision {found}, which is newer than {HEAD}, the newest that this "
                "version of bough knows: use the newer version, or name another database."
            )


def _revision(connection: Connection, url: str) -> str | None:
    names = (
        connection.execute(
            text("SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() ORDER BY 1")
        )
        .scalars()
        .all()
    )
    if not names:
        return None
    if "alembic_version" not in names:
        raise ConfigurationError(
            f"The database {shown(url)} belongs to another program (it has the table {names[0]!r}): name another one."
        )
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())


def database_status(url: str) -> PostgresStatus:
    """Return the status of a database without changing it. Raises ConfigurationError."""
    engine = reader_engine(url, connections=1, busy_timeout=5.0)
    try:
        with opening(url), engine.connect() as connection:
            revision = _revision(connection, url)
            size = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
    finally:
        engine.dispose()
    return PostgresStatus(url=shown(url), revision=revision, head=HEAD, size_bytes=size)


def writer_engine(url: str, *, durability: Durability, busy_timeout: float) -> Engine:
    """Create an engine with one connection, for one thread."""
    options = _options(busy_timeout, synchronous_commit=_SYNCHRONOUS[durability])
    return create_engine(parsed(url), poolclass=StaticPool, connect_args=_arguments(options))


def reader_engine(url: str, *, connections: int, busy_timeout: float) -> Engine:
    """Create an engine whose connections read only, each read in a snapshot of its own."""
    options = _options(busy_timeout, default_transaction_read_only="on")
    return create_engine(
        parsed(url),
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        isolation_level="REPEATABLE READ",
        connect_args=_arguments(options),
    )


def _options(busy_timeout: float, **more: str) -> str:
    settings = {"lock_timeout": f"{int(busy_timeout * 1000)}ms", "timezone": "UTC", **more}
    return " ".join(f"-c {name}={value}" for name, value in settings.items())


def _arguments(options: str) -> dict[str, object]:
    return {
        "options": options,
        "connect_timeout": CONNECT_SECONDS,
        "application_name": f"bough {os.getpid()}",
        "prepare_threshold": 1,
    }
