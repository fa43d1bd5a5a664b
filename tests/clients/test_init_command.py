"""`bough init`: a new project chats, and its own tests pass, in a new home and without a key."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from bough_server.cli.project_files import PROJECT_FILES
from tests.clients.cli_process import Finished, bough
from tests.support.processes import PATIENCE_SECONDS

ANSWER = "It stays dry: walk along the harbor, then go for a swim."


async def pytest_in(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Run pytest in a folder as its user does, in a new home; return its exit code and its output."""
    home = folder / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BOUGH_", "OTEL_", "PYTEST_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *arguments),
        cwd=folder,
        env={**kept, "HOME": str(home)},
        stdout=PIPE,
        stderr=STDOUT,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, _ = await process.communicate()
    return process.returncode, out.decode()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_new_project_chats_and_passes_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = await bough("init", "demo")
    project = tmp_path / "demo"
    monkeypatch.chdir(project)
    said = "What can I do in Oslo today?\n\nAnd tomorrow?\n"
    home = {"HOME": str(tmp_path / "home")}
    chatted = await bough("chat", "--embedded", "--output", "answer", said=said, environment=home)
    listed = await bough("runs", "--embedded", "--session", "last", "--json", environment=home)
    checked = await bough("agents", "validate", "agents", environment=home)
    tested = await pytest_in(project)

    assert (made.code, made.out.splitlines()) == (0, [f"demo/{name}" for name in PROJECT_FILES])
    assert made.err.splitlines()[:3] == ["Try it:", "  cd demo", "  bough chat"]
    assert (chatted.code, chatted.out) == (0, f"{ANSWER}\n{ANSWER}\n")
    assert (listed.code, listed.out.count('"state": "EXECUTION_STATE_SUCCEEDED"')) == (0, 2), listed
    assert (checked.code, checked.out) == (0, "")
    assert (tested[0], "2 passed" in tested[1]) == (0, True), tested[1]


async def test_a_folder_whose_name_looks_like_an_option_can_be_entered_as_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = await bough("init", "--", "-rf")
    assert (made.code, made.err.splitlines()[1]) == (0, "  cd ./-rf")


async def test_files_that_exist_are_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.yaml").write_text("mine", encoding="utf-8")

    refused = await bough("init")

    sentence = "script.yaml exists: name another folder, or move the file away.\n"
    assert refused == Finished(code=2, out="", err=sentence)
    assert names(tmp_path) == ["script.yaml"]


async def test_a_folder_with_other_files_becomes_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")

    made = await bough("init", ".")

    assert (made.code, "cd " in made.err) == (0, False)
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in PROJECT_FILES} == PROJECT_FILES
