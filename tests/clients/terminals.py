"""Commands at a terminal, where a user types after a prompt."""

import asyncio
import os
import pty
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.clients.cli_process import started
from tests.support.processes import Forked


class Terminal:
    """A command at its terminal; standard output is a pipe."""

    def __init__(self, descriptor: int, process: Forked | Process) -> None:
        self.process = process
        self._descriptor, self._seen = descriptor, ""

    async def until(self, prompt: str) -> str:
        """Read until the output has the prompt; return what was before it."""
        while prompt not in self._seen:
            self._seen += (await asyncio.to_thread(os.read, self._descriptor, 65536)).decode()
        before, _, self._seen = self._seen.partition(prompt)
        return before

    def type(self, line: str) -> None:
        """Type a line, or a control character."""
        os.write(self._descriptor, line.encode())

    async def end(self) -> tuple[int, str]:
        """Wait for the end of the command; return its exit code and its standard output."""
        assert self.process.stdout is not None
        out = await self.process.stdout.read()
        return await self.process.wait(), out.decode()


@asynccontextmanager
async def at_a_terminal(
    *arguments: str, port: int | None = None, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Terminal]:
    """Run a command with a terminal as its standard input and standard error."""
    ours, its = pty.openpty()
    process = await started(*arguments, port=port, environment=environment, stdin=its, stderr=its)
    os.close(its)
    try:
        yield Terminal(ours, process)
    finally:
        os.close(ours)


@asynccontextmanager
async def program_at_a_terminal(*command: str, folder: Path, environment: Mapping[str, str]) -> AsyncIterator[Terminal]:
    """Run another program in a folder, with a terminal as its standard input and standard error."""
    ours, its = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdin=its, stdout=PIPE, stderr=its
    )
    os.close(its)
    try:
        yield Terminal(ours, process)
    finally:
        os.close(ours)
