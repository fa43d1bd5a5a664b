"""Files that are read again when they change, such as those with keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from bough_server.clock import Clock
from bough_server.errors import ConfigurationError
from bough_server.threads import run_in_thread

T = TypeVar("T")

_SECONDS: Final = 1.0
"""Seconds between two looks at a file."""

_Version: TypeAlias = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """The value of a file that people or programs replace while the server runs."""

    def __init__(
        self,
        path: Path,
        parse: Callable[[Path], T],
        on_problem: Callable[[ConfigurationError], None],
        *,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the file. Raises ConfigurationError, as `parse` does.

        Later versions that cannot be parsed are passed to `on_problem`, once each, and the value stays as it is.
        """
        self._path, self._parse, self._on_problem = path, parse, on_problem
        self._clock, self._on_change = clock, on_change
        self._version = _version_of(path)
        self.value = parse(path)
        """What the file holds."""

    async def watch(self) -> None:
        """Look at the file once a second, until cancelled."""
        while True:
            await self._clock.sleep(_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Read the file if it has changed. A secret that is mounted as a link changes its file's inode."""
        version = await run_in_thread(_version_of, self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self.value = await run_in_thread(self._parse, self._path)
        except ConfigurationError as error:
            self._on_problem(error)
            return
        self._on_change()


def _version_of(path: Path) -> _Version | None:
    """Return what changes with the content of a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
