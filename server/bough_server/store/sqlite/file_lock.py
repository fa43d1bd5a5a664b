"""The lock of the process that owns a database; it names the address at which that process serves, for others."""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bough_server.errors import ConfigurationError, DatabaseInUse

_LOCK_BYTES: Final = 256
"""The size of a lock file."""

_READING_SECONDS: Final = 0.02
"""More seconds than it takes to read who owns a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOwner:
    """The process that a lock file names, and the address at which it serves; empty if it does not, or not yet."""

    process: str
    address: str = ""


class FileLock:
    """An advisory lock of the operating system on FILE.lock; the system releases it however the process ends.

    The file names the process that holds the lock, and its address while it serves.
    """

    def __init__(self, database: Path) -> None:
        """Acquire the lock.

        Raises DatabaseInUse if another process holds it, ConfigurationError if the file cannot be created.
        """
        try:
            self._descriptor = os.open(_lock_path(database), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"The folder {str(database.parent)!r} cannot be written ({error.strerror}): "
                "make it writable, or name another database."
            ) from error
        try:
            _acquire(self._descriptor)
        except OSError as error:
            owner = _read_owner(self._descriptor).process or "unknown"
            os.close(self._descriptor)
            raise DatabaseInUse(
                f"The database {str(database)!r} is in use by process {owner}: "
                "stop that process, reach it with --address, or name another database; only one process may use a file."
            ) from error
        self.publish("")

    def publish(self, address: str) -> None:
        """Name the address at which this process serves the database; empty: it does not serve."""
        content = f"{os.getpid()}\n{address}\n".encode()
        if len(content) > _LOCK_BYTES:
            content = f"{os.getpid()}\n".encode()
        # Always the same size: truncating the file would cost a disk flush.
        os.pwrite(self._descriptor, content.ljust(_LOCK_BYTES, b"\n"), 0)

    def release(self) -> None:
        """Release the lock. The file stays: deleting it could let two processes hold locks on different files."""
        os.close(self._descriptor)


def find_serving_owner(database: Path) -> LockOwner | None:
    """Return the owner of a database if it serves one; None if no live process has it, or none names an address."""
    try:
        descriptor = os.open(_lock_path(database), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not _read_owner(descriptor).address:
            return None
        try:
            # A shared lock fails only while a process holds the file; without one, the address is a killed server's.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            owner = _read_owner(descriptor)
            return owner if owner.address else None
        return None
    finally:
        os.close(descriptor)


def _lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


def _read_owner(descriptor: int) -> LockOwner:
    lines = os.pread(descriptor, _LOCK_BYTES, 0).decode(errors="replace").split("\n")
    process, address, *_ = [*lines, "", ""]
    return LockOwner(process=process.strip(), address=address.strip())


def _acquire(descriptor: int) -> None:
    """Lock a file, once more after a moment if that fails: a command may be reading who owns it. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        time.sleep(_READING_SECONDS)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
