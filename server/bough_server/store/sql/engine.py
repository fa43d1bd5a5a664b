"""Connections to a SQLite file, each set up for what it is for; what is done with them is its users' concern."""

import sqlite3
from pathlib import Path
from typing import Final, Literal

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool

from bough_server.errors import ConfigurationError

Durability = Literal["disk", "process"]
"""What a commit survives: a power cut (synchronous=FULL), or only a killed process (NORMAL)."""

_SYNCHRONOUS: Final = {"disk": "FULL", "process": "NORMAL"}

_CHECKPOINT_PAGES: Final = 4_000
"""How long the write-ahead log gets, in pages of 4 KiB, before it is copied into the database: two flushes."""


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
