"""Open the store of a URL: a SQLite file, or PostgreSQL."""

from typing import Any

from bough_server.store.sql.options import StoreOptions
from bough_server.store.sql.store import Store

POSTGRES_SCHEMES = ("postgresql://", "postgres://")


def is_postgres(url: str) -> bool:
    """Return whether a storage URL names a PostgreSQL database; any other names a SQLite file."""
    return url.startswith(POSTGRES_SCHEMES)


def open_store(url: str, **options: Any) -> Store:
    """Open a database, creating or migrating it if necessary; the options are those of StoreOptions.

    Raises ConfigurationError with advice if it cannot be used.
    """
    if is_postgres(url):
        from bough_server.store.postgres.store import open_postgres

        return open_postgres(url, StoreOptions(**options))
    from bough_server.store.sqlite.store import open_sqlite

    return open_sqlite(url, StoreOptions(**options))
