"""Programs in other languages, run to their end."""

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.support.processes import PATIENCE_SECONDS


async def finished_program(*command: str, folder: Path) -> tuple[int | None, list[str]]:
    """Run a program; return its exit code and the lines of its standard output, then those of its standard error."""
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, (out + err).decode().splitlines()
