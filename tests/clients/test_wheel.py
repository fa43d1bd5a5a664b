"""The wheel in empty environments, as README installs it: the client alone, and the service with its commands."""

import asyncio
import json
import os
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.clients.terminals import program_at_a_terminal
from tests.docs import commands, pages
from tests.support.fresh_environments import environment, pip, run

ROOT = Path(__file__).parents[2]
OTHERS = {"pip", "setuptools", "pytest", "iniconfig", "packaging", "pluggy", "pygments", "Pygments"}
"""What the environment has besides what the client needs: pip, pytest and what that needs."""

LEFT_OPEN = (("Its result", "4711"), ("Your answer", "no reason"), ("Approve?", ""))
"""What the shop asks at first, and answers of which the last leaves a question open."""

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
    blocks = write_readme(folder)
    path = f"{programs}:{os.environ['PATH']}"
    for block in blocks:
        code, out = await run("bash", "-euc", block.text, folder=folder, variables={"PATH": path})
        assert code == 0, f"{block.place}: {out}"
    tested = await run(python, "-m", "pytest", "-q", "test_team.py", folder=folder)
    assert (tested[0], "1 passed" in tested[1]) == (0, True), tested[1]
    assert sum("eval run" in block.text for block in blocks) == 1
    assert "report.html" in os.listdir(folder)
    await check_terminals(folder / "clone", path)


async def check_terminals(clone: Path, path: str) -> None:
    """What README types at a terminal, in a clone, does what it says; CI runs `make` itself."""
    shutil.copytree(ROOT / "examples", clone / "examples", ignore=shutil.ignore_patterns("var", "__pycache__"))
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "activate").touch()
    approvals = clone / "examples" / "approvals"
    known = {**environment(), "PATH": f"{path}:{Path(sys.executable).parent}", "COLUMNS": "80"}
    async with served(clone, known) as address:
        made, chat, run_it, desk, wait, later, by_hand = typed_in_readme()
        by_hand = by_hand.replace("127.0.0.1:50051", address)
        said = [
            await type_in(clone, chat, [("> ", "Hello."), ("\n> ", "/quit")], known),
            await type_in(clone, desk, [], {**known, "BOUGH_ADDRESS": address}),
            # The approval is left open by the first command, and given in the second.
            await type_in(clone, wait, [*LEFT_OPEN, ("Approve?", "y")], known),
            await type_in(approvals, later, [("Approve?", "n")], known),
        ]
        if shutil.which("grpcurl", path=known["PATH"]):  # recipes with it are tested where it can be built
            assert "runCompleted" in await type_in(clone, by_hand, [], known)
    assert (made.splitlines()[1:], run_it) == (["make run", "make test"], "make run")
    words = ("It stays dry", "lead", "on its way to your card", "replays to its end")
    for out, word in zip(said, words, strict=True):
        assert word in out


def typed_in_readme() -> list[str]:
    """What is typed in the blocks of README that show a terminal."""
    blocks = pages.blocks("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))
    typed = [commands.typed(block.text).strip() for block in blocks if block.kind == "console"]
    return [text for text in typed if text]


@asynccontextmanager
async def served(clone: Path, known: dict[str, str]) -> AsyncIterator[str]:
    """The desk, served as `make run MODEL=scripted` does; its address."""
    serve = ("bough", "--config", "examples/desk/bough.yaml", "serve", "--port", "0", "--default-model", "scripted")
    server = await asyncio.create_subprocess_exec(*serve, cwd=clone, env=known, stdout=PIPE)
    assert server.stdout is not None
    try:
        yield (await server.stdout.readline()).decode().removeprefix("serving ").strip()
    finally:
        server.terminate()
        await server.wait()


async def type_in(folder: Path, typed: str, answers: Sequence[tuple[str, str]], known: dict[str, str]) -> str:
    """Run what is typed in a shell at a terminal, with an answer after each prompt; return its standard output.

    The last command has to succeed.
    """
    async with program_at_a_terminal("bash", "-uc", typed, folder=folder, environment=known) as terminal:
        for prompt, answer in answers:
            await terminal.until(prompt)
            terminal.type(f"{answer}\n")
        code, out = await terminal.end()
    assert code == 0, f"{typed}: {out}"
    return out


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
