"""The file of a storage URL; apart from the database, so that commands to a running server load no SQL."""

from pathlib import Path

from bough_server.errors import ConfigurationError


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
            f"The storage URL {url!r} is not supported: use a path such as ./var/bough.db, or sqlite:/// and a path."
        )
    if path in ("", ":memory:"):
        raise ConfigurationError("The storage URL names no file: use a path such as ./var/bough.db.")
    return Path(path)
