"""A driver as a process: a line in, lines out up to the end of the call."""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.toolchains import ROOT

LINE_BYTES: Final = 64 * 1024 * 1024
"""The longest line of a driver: an event of 1 MiB is longer in JSON."""

STOP_SECONDS: Final = 20.0


class DriverFailed(Exception):
    """A driver ended, or said something that is not in its protocol."""


class DriverProcess:
    """Performs lines one after the other."""

    def __init__(self, process: Process, errors: Path) -> None:
        self._process, self._errors = process, errors
        self.is_killed = False

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    async def perform(self, line: Mapping[str, object]) -> AsyncIterator[dict[str, Any]]:
        """Send a line and yield what the driver prints, up to and with `end` or `transcoded`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        await self._process.stdin.drain()
        while printed := await self._process.stdout.readline():
            try:
                what: dict[str, Any] = json.loads(printed)
            except ValueError:
                raise DriverFailed(f"The driver printed what is not JSON: {printed[:500]!r}") from None
            yield what
            if "end" in what or "transcoded" in what:
                return
        await self._process.wait()
        raise DriverFailed(f"The driver ended with code {self._process.returncode}: {self._said()}")

    async def close(self) -> None:
        """End its input, and wait for its end with exit code 0, unless it was killed. Raises DriverFailed."""
        if self.is_killed:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise DriverFailed("The driver did not end with its input.") from None
        if code != 0:
            raise DriverFailed(f"The driver ended with code {code}: {self._said()}")

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self.is_killed = True
        if self._process.returncode is None:
            self._process.kill()

    def _said(self) -> str:
        return self._errors.read_text(encoding="utf-8", errors="replace")[-4000:]


@asynccontextmanager
async def driving(
    command: Sequence[str], address: str, errors: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[DriverProcess]:
    """Run a driver against an address; what it says on its standard error is added to a file.

    `environment` are further variables, by which a driver finds its certificates and its token.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BOUGH_")}
    with errors.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *command,
            address,
            stdin=PIPE,
            stdout=PIPE,
            stderr=file,
            cwd=ROOT,
            env={**inherited, **(environment or {})},
            limit=LINE_BYTES,
        )
    driver = DriverProcess(process, errors)
    try:
        yield driver
        await driver.close()
    finally:
        driver.kill()
        await process.wait()
