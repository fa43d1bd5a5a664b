"""Which database a storage URL names; apart from the databases, so that commands to a running server load no SQL."""

from pathlib import Path
from typing import Final

from bough_server.errors import ConfigurationError

_POSTGRES: Final = ("postgresql://", "postgres://")


def is_postgres(url: str) -> bool:
    """Return whether a storage URL names a PostgreSQL database; any other names a SQLite file."""
    return url.startswith(_POSTGRES)


def database_path(url: str) -> Path:
    """Return the file of a storage URL: a path, or `sqlite:///` and a path.

    Raises ConfigurationError for anything else.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme == "sqlite" and rest.startswith("/"):
        path = rest[1:]
    else:
        raise ConfigurationError(
            f"A storage URL that begins with {scheme!r} is not supported: use a path such as ./var/bough.db, "
            "sqlite:/// and a path, or postgresql://USER@HOST/DATABASE."
        )
    if path in ("", ":memory:"):
        raise ConfigurationError("The storage URL names no file: use a path such as ./var/bough.db.")
    return Path(path)
