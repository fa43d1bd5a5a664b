"""Programs in new virtual environments, with nothing of ours around them; they need an index of packages."""

import asyncio
import os
import re
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

NOT_REACHED: Final = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Could not find a version|No matching"
)
"""What pip says if neither an index nor its cache has a package."""

_OURS: Final = ("BOUGH_", "OTEL_", "PYTHON", "PYTEST_", "VIRTUAL_ENV")


def environment() -> dict[str, str]:
    """The variables of this process without ours and those of Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}


async def run(*command: str, folder: Path, variables: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Run a program in a folder, with nothing of ours in its environment; return its exit code and its output."""
    known = {**environment(), **(variables or {})}
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=known, stdout=PIPE, stderr=STDOUT)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def run_installing(*command: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a program that installs packages and return its output; skip the test if it reaches no index."""
    code, out = await run(*command, folder=folder, variables=variables)
    if code != 0 and NOT_REACHED.search(out):
        pytest.skip(f"THE RELEASE IS NOT TESTED: pip reaches no index: {out.strip().splitlines()[-1]}")
    assert code == 0, out
    return out


async def pip(python: Path | str, *arguments: str, folder: Path) -> str:
    """Run pip and return its output; skip the test if it reaches no index."""
    command = (str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "1", *arguments)
    return await run_installing(*command, folder=folder)
