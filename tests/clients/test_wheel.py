"""The wheel in empty environments, as README installs it: the client alone, and the service with its commands."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_REACHED = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Could not find a version|No matching"
)
"""What pip says if neither an index nor its cache has a package."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.wheel]


async def run(*command: str, folder: Path) -> tuple[int | None, str]:
    """Run a program in a folder, with nothing of ours in its environment; return its exit code and its output."""
    ours = ("BOUGH_", "OTEL_", "PYTHON", "PYTEST_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=kept, stdout=PIPE, stderr=STDOUT)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def pip(python: Path | str, *arguments: str, folder: Path) -> None:
    """Run pip; skip the test if it reaches no index."""
    command = (str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "1", *arguments)
    code, out = await run(*command, folder=folder)
    if code != 0 and NOT_REACHED.search(out):
        pytest.skip(f"THE WHEEL IS NOT TESTED: pip reaches no index: {out.strip().splitlines()[-1]}")
    assert code == 0, out


async def built_wheel(folder: Path) -> Path:
    """Build the wheel of this project."""
    await pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT), folder=folder)
    return folder / next(name for name in os.listdir(folder) if name.endswith(".whl"))


async def test_an_empty_environment_gets_the_client_and_with_the_extra_the_service_and_its_commands(
    tmp_path: Path,
) -> None:
    wheel = await built_wheel(tmp_path)
    code, out = await run(sys.executable, "-m", "venv", "environment", folder=tmp_path)
    assert code == 0, out
    programs = tmp_path / "environment" / "bin"
    python = str(programs / "python")
    await pip(python, "install", "--quiet", "--no-compile", str(wheel), "pytest", folder=tmp_path)
    await check_base(python, str(programs / "bough"), tmp_path)
    await pip(python, "install", "--quiet", "--no-compile", f"{wheel}[server]", folder=tmp_path)
    await check_service(python, str(programs / "bough"), tmp_path)


async def check_base(python: str, bough: str, folder: Path) -> None:
    """The client is there, the command says what it needs, and pytest is not disturbed by the plugin."""
    imported = await run(python, "-W", "error", "-c", "import bough; bough.Client", folder=folder)
    command = await run(bough, "run", "guide", "Hello.", folder=folder)
    (folder / "test_it.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    tested = await run(python, "-m", "pytest", "-q", "test_it.py", folder=folder)
    assert imported == (0, "")
    assert command == (2, "This command needs the server packages: pip install 'bough[server]'\n")
    assert (tested[0], "1 passed" in tested[1]) == (0, True), tested[1]


async def check_service(python: str, bough: str, folder: Path) -> None:
    """A new project runs, and its tests pass."""
    made = await run(bough, "init", "demo", folder=folder)
    project = folder / "demo"
    answered = await run(bough, "run", "guide", "Hello.", "--embedded", "--output", "answer", folder=project)
    read = await run(bough, "tree", "last", "--embedded", "--json", folder=project)
    tested = await run(python, "-m", "pytest", "-q", "-W", "error", folder=project)
    schema = await run(bough, "schema", "agent", folder=project)
    assert made[0] == 0, made[1]
    assert (answered[0], answered[1].splitlines()[-1]) == (
        0,
        "It stays dry: walk along the harbor, then go for a swim.",
    )
    assert (read[0], tested[0], "2 passed" in tested[1], schema[0]) == (0, 0, True, 0), tested[1]
