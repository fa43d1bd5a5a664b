"""Open the store of a URL, and do an operator's work on its database: a SQLite file, or PostgreSQL."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Final, Protocol, cast

import structlog
from sqlalchemy import Connection

from bough_server.clock import loop_time
from bough_server.distribution import install_command
from bough_server.errors import ConfigurationError, DatabaseUnreachable
from bough_server.store.sql.database_copy import CopyEnd, Report, copy_rows
from bough_server.store.sql.driver import Driver
from bough_server.store.sql.options import StoreOptions
from bough_server.store.sql.rebuild import rebuild
from bough_server.store.sql.schema_version import DatabaseStatus
from bough_server.store.sql.store import Store
from bough_server.store.sqlite import database as sqlite
from bough_server.store.sqlite.database_path import is_postgres
from bough_server.store.sqlite.driver import SQLITE
from bough_server.store.sqlite.store import open_sqlite

_DATABASE_SECONDS: Final = 0.5
"""Seconds between two tries to reach the database at the start."""

_log = structlog.get_logger(__name__)


class _Database(Protocol):
    """What the module of each database has."""

    def database_status(self, url: str) -> DatabaseStatus: ...
    def upgrade_database(self, url: str, *, keeps_backup: bool = True) -> DatabaseStatus: ...
    def exclusive_connection(self, url: str) -> AbstractContextManager[Connection]: ...
    def display_url(self, url: str) -> str: ...


def open_store(url: str, **options: Any) -> Store:
    """Open a database, creating or migrating it if necessary; the options are those of StoreOptions.

    Raises ConfigurationError with advice if it cannot be used.
    """
    opening = StoreOptions(**options)
    if opening.listen_url and not (is_postgres(url) and is_postgres(opening.listen_url)):
        raise ConfigurationError(
            "storage.listen_url is for notifications of PostgreSQL: postgresql://USER@HOST/DATABASE."
        )
    if is_postgres(url):
        opened: Store = _import_postgres("store").open_postgres(url, opening)
        return opened
    return open_sqlite(url, opening)


async def wait_for_store(opening: Callable[[], Store], seconds: float) -> Store:
    """Open a store, again and again if its database cannot be reached. Raises ConfigurationError."""
    ends, is_logged = loop_time() + seconds, False
    while True:
        try:
            return opening()
        except DatabaseUnreachable as error:
            if loop_time() + _DATABASE_SECONDS > ends:
                raise
            if not is_logged:
                _log.warning("waiting for the database", error=error.message, seconds=seconds)
                is_logged = True
        await asyncio.sleep(_DATABASE_SECONDS)


def database_status(url: str) -> DatabaseStatus:
    """Return the status of a database without changing it, also while servers use it.

    Raises ConfigurationError if it is too old for this version to upgrade, or belongs to another program.
    """
    return _database_of(url).database_status(url)


def upgrade_database(url: str, *, keeps_backup: bool = True) -> DatabaseStatus:
    """Create a database's tables, or upgrade them to this version; a copy of an older SQLite file stays beside it.

    Raises ConfigurationError while another process uses a SQLite file. Servers on PostgreSQL may run: those that start
    meanwhile wait.
    """
    return _database_of(url).upgrade_database(url, keeps_backup=keeps_backup)


def rebuild_projections(url: str) -> int:
    """Rebuild everything that is derived from logs, in one transaction; return the number of runs.

    Raises ConfigurationError if there is no database, and while a server uses it.
    """
    database = _database_of(url)
    found = database.database_status(url)
    if found.revision is None:
        raise ConfigurationError(f"There is no database at {found.name!r}: name the one to rebuild.")
    with database.exclusive_connection(url) as connection:
        return rebuild(connection)


def copy_database(source: str, target: str, report: Report) -> Mapping[str, int]:
    """Copy all rows of a database into an empty one, in one transaction; return the number of rows by table.

    The target is created if it does not exist. `report` is called as rows are copied. Raises ConfigurationError while a
    server uses one of them, if the target has rows, if the source needs an upgrade, and if a row cannot be copied; the
    target has no rows then.
    """
    source_status, target_status = database_status(source), database_status(target)
    if source_status.revision is None:
        raise ConfigurationError(f"There is no database at {source_status.name!r}: name the one to copy.")
    if source_status.name == target_status.name:
        raise ConfigurationError(f"Both are the database {source_status.name}: name another one to copy to.")
    for found in (source_status, target_status):
        if found.revision is not None and found.revision < found.head:  # both are four digits
            raise ConfigurationError(
                f"The database {found.name} has revision {found.revision}, and this version of bough copies "
                f"{found.head}: run `bough db upgrade` with BOUGH_DATABASE={found.name}."
            )
    with (
        _database_of(source).exclusive_connection(source) as reading,
        _database_of(target).exclusive_connection(target) as writing,
    ):
        return copy_rows(
            CopyEnd(name=source_status.name, connection=reading, driver=_driver_of(source)),
            CopyEnd(name=target_status.name, connection=writing, driver=_driver_of(target)),
            report,
        )


def display_database_url(url: str) -> str:
    """Return how a database is named in logs and messages: the path of its file, or its URL without the password."""
    return _database_of(url).display_url(url)


def _database_of(url: str) -> _Database:
    return cast("_Database", _import_postgres("database") if is_postgres(url) else sqlite)


def _driver_of(url: str) -> Driver:
    return cast("Driver", _import_postgres("driver").POSTGRES) if is_postgres(url) else SQLITE


def _import_postgres(module: str) -> Any:
    """Import a module of the store on PostgreSQL, whose driver may not be installed."""
    try:
        return import_module(f"bough_server.store.postgres.{module}")
    except ModuleNotFoundError as missing:
        if missing.name != "psycopg":
            raise
        raise ConfigurationError(
            f"The storage URL names PostgreSQL, whose driver is not installed: {install_command('postgres')}."
        ) from None
