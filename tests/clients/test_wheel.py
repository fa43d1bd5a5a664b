"""The wheel in empty environments, as README installs it: the client alone, and the service with its commands."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.support.fresh_environments import pip, run

ROOT = Path(__file__).parents[2]
OTHERS = {"pip", "setuptools", "pytest", "iniconfig", "packaging", "pluggy", "pygments", "Pygments"}
"""What the environment has besides what the client needs: pip, pytest and what that needs."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.wheel]


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
    await check_readme(python, programs, tmp_path / "readme")


async def check_base(python: str, bough: str, folder: Path) -> None:
    """The client is there, the command says what it needs, and pytest is not disturbed by the plugin."""
    listed = json.loads(await pip(python, "list", "--format", "json", folder=folder))
    ours = {package["name"].replace("-", "_") for package in listed} - OTHERS
    imported = await run(python, "-W", "error", "-c", "import bough; bough.Client", folder=folder)
    command = await run(bough, "run", "guide", "Hello.", folder=folder)
    (folder / "test_it.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    tested = await run(python, "-m", "pytest", "-q", "test_it.py", folder=folder)
    assert ours == {"bough_agents", "googleapis_common_protos", "grpcio", "protobuf", "typing_extensions"}
    assert imported == (0, "")
    assert command == (2, 'This command needs the server packages: pip install "bough-agents[server]"\n')
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


async def check_readme(python: str, programs: Path, folder: Path) -> None:
    """The files of README, in a separate folder, are a team whose commands and whose test succeed."""
    commands = write_readme(folder)
    path = f"{programs}:{os.environ['PATH']}"
    for block in commands:
        code, out = await run("bash", "-euc", block.text, folder=folder, variables={"PATH": path})
        assert code == 0, f"{block.place}: {out}"
    tested = await run(python, "-m", "pytest", "-q", "test_team.py", folder=folder)
    assert (tested[0], "1 passed" in tested[1]) == (0, True), tested[1]
    assert sum("eval run" in block.text for block in commands) == 1
    assert "report.html" in os.listdir(folder)


def write_readme(folder: Path) -> list[pages.Block]:
    """Write the files of README, and return its commands."""
    commands: list[pages.Block] = []
    for block in pages.blocks("README.md", (ROOT / "README.md").read_text(encoding="utf-8")):
        if block.name:
            (folder / block.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.name).write_text(block.text, encoding="utf-8")
        elif block.kind == "sh":
            commands.append(block)
    return commands
