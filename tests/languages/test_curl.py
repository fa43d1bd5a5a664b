"""The recipes of clients/curl, run as a reader would, with grpcurl and with buf curl."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from bough_server.auth.access import SERVICES
from tests.docs import pages
from tests.docs.pages import Block
from tests.support.processes import serving
from tests.support.toolchains import ROOT, built, require

PAGE: Final = "clients/curl/README.md"
MARK: Final = "=== recipe of line "


def blocks(tool: str) -> list[Block]:
    """The page's blocks of commands that are there for a tool: those of its section, and those of no tool's."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    titles = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.startswith("## ")]

    def is_there(block: Block) -> bool:
        title = next((title for number, title in reversed(titles) if number < block.line), "")
        return not title.startswith("## With ") or title == f"## With {tool}"

    return [block for block in pages.blocks(PAGE, text) if block.kind == "sh" and is_there(block)]


def script(recipes: Sequence[Block], *, desk: str, shop: str) -> str:
    """The recipes as one script for the addresses of two servers; a line before the output of each says which it is."""
    parts = (f"echo '{MARK}{block.line}'\n{block.text}" for block in recipes)
    return "".join(parts).replace("127.0.0.1:50051", desk).replace("127.0.0.1:50052", shop)


def expected(block: Block) -> list[str]:
    """What a recipe says that it prints."""
    return re.findall(r"^# => (.+)$", block.text, re.MULTILINE)


def joined(text: str) -> str:
    """A text without white space, in which the two tools differ."""
    return re.sub(r"\s+", "", text)


def grpcurl() -> Path:
    """The folder of the grpcurl that `make grpcurl` installs."""

    def install(folder: Path) -> None:
        subprocess.run(["make", "--silent", "grpcurl", f"BIN={folder}"], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^GRPCURL := .*@(v[\d.]+)$", makefile, re.MULTILINE)
    return built(f"grpcurl-{version}", [], install)


async def programs(tool: str) -> Path:
    """The folder of a tool. Skips the test if it is grpcurl and there is no Go to build it."""
    if tool == "grpcurl":
        require("grpcurl")
        return await asyncio.to_thread(grpcurl)
    return Path(sys.executable).parent


async def run(text: str, *, folder: Path, tool: Path) -> tuple[int | None, str, str]:
    """Run a script as a reader in a folder; return its exit code, its output and its errors."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", text),
        cwd=folder,
        env={"HOME": str(folder), "PATH": f"{tool}:/usr/bin:/bin"},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def example(name: str, folder: Path) -> Path:
    """A copy of an example, as a server leaves files beside its configuration; return the configuration."""
    ignored = shutil.ignore_patterns("var", "__pycache__")
    return shutil.copytree(ROOT / "examples" / name, folder / name, ignore=ignored) / "bough.yaml"


@pytest.mark.timeout(600)  # the first build of grpcurl takes minutes
@pytest.mark.parametrize("tool", ["grpcurl", "buf curl"])
async def test_every_recipe_prints_what_it_says(tool: str, tmp_path: Path) -> None:
    path = await programs(tool)
    recipes = blocks(tool)
    home = tmp_path / "home"
    home.mkdir()
    async with serving(example("desk", tmp_path)) as desk, serving(example("approvals", tmp_path)) as shop:
        text = script(recipes, desk=desk.address, shop=shop.address)
        code, out, err = await run(text, folder=home, tool=path)

    printed = {int(line): rest for line, _, rest in (part.partition("\n") for part in out.split(MARK)[1:])}
    last = max(printed)
    assert (code, err) == (0, ""), f"{PAGE}:{last}: exit code {code}\n{err}\n{printed[last]}"
    assert list(printed) == [block.line for block in recipes]
    missing = [
        f"{block.place}: {words}"
        for block in recipes
        for words in expected(block)
        if joined(words) not in joined(printed[block.line])
    ]
    assert missing == [], out


def test_there_is_a_recipe_for_every_method() -> None:
    called = set(re.findall(r"\bcall (\w+/\w+) ", "".join(block.text for block in blocks("grpcurl"))))

    assert called == {f"{service.name}/{method.name}" for service in SERVICES for method in service.methods}


@pytest.mark.parametrize("tool", ["grpcurl", "buf curl"])
def test_every_recipe_that_calls_says_what_it_prints(tool: str) -> None:
    silent = [block.place for block in blocks(tool) if re.search(r"^(call|grpcurl|buf) ", block.text, re.MULTILINE)]

    assert silent == [block.place for block in blocks(tool) if expected(block)]


async def test_grpcurl_is_not_installed_without_go_and_the_reader_is_told_what_to_do(tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    shell = shutil.which("sh")
    assert shell is not None
    command = f"{make} --silent --directory {ROOT} grpcurl BIN={tmp_path} SHELL={shell}"

    process = await asyncio.create_subprocess_shell(command, env={"PATH": str(tmp_path)}, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()

    assert (process.returncode, out, os.listdir(tmp_path)) == (2, b"", [])
    assert "install Go from https://go.dev/dl" in err.decode()
