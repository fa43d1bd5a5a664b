"""The lock that lets one process write a database file; holding it proves that an earlier owner is gone."""

import fcntl
import os
from pathlib import Path

from bough_server.errors import ConfigurationError


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
