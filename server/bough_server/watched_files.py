"""Files that are read again when they change: certificates, keys of callers."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog

from bough_server.errors import ConfigurationError
from bough_server.threads import run_in_thread

T = TypeVar("T")

POLL_SECONDS: Final = 1.0
"""Seconds between two polls."""

_log = structlog.get_logger(__name__)


class WatchedFile(Generic[T]):
    """What is read from a file, or from several that belong together; it is read again when one of them changes.

    `parse` gets the bytes of each file, in order, and raises ConfigurationError for what must not be used: then the
    last value stays, and `on_problem` is called once with the reason, in a thread. It is called at the second poll that
    finds the same, because files that belong together are replaced one after the other.
    """

    def __init__(
        self,
        paths: Path | Sequence[Path],
        parse: Callable[..., T],
        on_problem: Callable[[str], None],
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the files; `watch` calls `on_change` after each later change of the value. Raises ConfigurationError."""
        self._paths = (paths,) if isinstance(paths, Path) else tuple(paths)
        self._parse, self._on_problem, self._is_reported = parse, on_problem, False
        self._on_change = on_change
        self._seen = self._identify()
        self.value: T = self._read()
        """What was read last, without an error."""
        self.problem = ""
        """Why the files that are there now are not used; empty if they are."""

    async def watch(self) -> None:
        """Poll the files until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if await run_in_thread(self.poll):
                self._on_change()

    def poll(self) -> bool:
        """Read the files again if they have changed, or could not be used so far. Return whether the value is new."""
        found = self._identify()
        if found == self._seen and not self.problem:
            return False
        try:
            self.value = self._read()
        except ConfigurationError as error:
            is_same = (found, error.message) == (self._seen, self.problem)
            self._is_reported = is_same and self._is_reported
            if is_same and not self._is_reported:
                self._is_reported = True
                self._on_problem(error.message)
            self._seen, self.problem = found, error.message
            return False
        self._seen, self.problem, self._is_reported = found, "", False
        _log.info("read a file again that has changed", files=", ".join(map(str, self._paths)))
        return True

    def _identify(self) -> tuple[object, ...]:
        """Return what changes when a file does. Links are followed: mounted secrets are replaced by swapping one."""
        return tuple(map(_identify_file, self._paths))

    def _read(self) -> T:
        return self._parse(*map(_read_file, self._paths))


def _identify_file(path: Path) -> object:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
