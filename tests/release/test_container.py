"""The image, without Docker: its commands in a new virtual environment, and what compose.yaml does with it."""

import asyncio
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough_server.settings import Settings
from tests.release import dockerfile
from tests.release.dockerfile import Image
from tests.release.workflows import ROOT
from tests.support.fresh_environments import environment, run


def service() -> dict[str, Any]:
    """The service of compose.yaml."""
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    (found,) = composed["services"].values()
    assert list(composed["volumes"]) == ["data"]
    return dict(found)


def lines_of(name: str) -> list[tuple[str, str]]:
    """The instructions of the Dockerfile of this name."""
    found = dockerfile.instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    return [each for each in found if each[0] == name]


def test_the_image_has_a_version_of_its_base_a_user_without_rights_and_no_secret() -> None:
    bases = {rest.split()[0] for _, rest in lines_of("FROM")}
    variables = " ".join(rest for _, rest in lines_of("ENV"))

    assert [base for base in bases if not re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base)] == []
    assert lines_of("USER") == [("USER", "10001:10001")]
    assert lines_of("ARG") == []
    assert re.findall(r"KEY|TOKEN|SECRET|PASSWORD", variables) == []


def test_a_composed_server_is_reached_from_this_machine_only_and_has_time_to_stop() -> None:
    composed = service()
    grace = re.fullmatch(r"(\d+)s", composed["stop_grace_period"])

    assert composed["ports"] == ["127.0.0.1:50051:50051"]
    assert "data:/var/lib/bough" in composed["volumes"]
    assert (composed["read_only"], composed["cap_drop"]) == (True, ["ALL"])
    assert grace is not None
    assert int(grace[1]) > Settings().server.drain_grace


def test_what_an_image_is_built_from_is_all_that_the_build_sees() -> None:
    copied = {word for _, rest in lines_of("COPY") if "--from=" not in rest for word in rest.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
    assert "*" in lines


@pytest.mark.wheel
@pytest.mark.timeout(600)
async def test_the_commands_of_the_image_build_serve_probe_and_stop(tmp_path: Path) -> None:
    image = await dockerfile.build(tmp_path, path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    project = image.folder
    shutil.copytree(ROOT / "examples" / "desk", project, dirs_exist_ok=True, ignore=shutil.ignore_patterns("var"))
    mounted = files(project)
    probe = [*image.health]

    async with serving(image, service()["command"]):
        healthy = await run(*placed(image, probe), folder=project, variables=image.variables)
    stopped = await run(*placed(image, probe), folder=project, variables=image.variables)
    async with serving(image, image.command):
        on_loopback = await run(*placed(image, probe), folder=project, variables=image.variables)

    assert (healthy[0], stopped[0], on_loopback[0]) == (0, 1, 0), (healthy, stopped, on_loopback)
    assert image.volumes == ["/var/lib/bough"]
    assert (tmp_path / "var" / "lib" / "bough" / "bough.db").is_file()
    assert files(project) == mounted, "it has to work with a project that it cannot write"


@asynccontextmanager
async def serving(image: Image, command: list[str]) -> AsyncIterator[None]:
    """A container's process, at a free port; SIGTERM has to end it with 0."""
    words = placed(image, [*image.entrypoint, *command, "--port", "0"])
    known = {**environment(), **image.variables}
    process = await asyncio.create_subprocess_exec(
        *words, cwd=image.folder, env=known, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    try:
        assert line.startswith("serving "), line
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert process.returncode == 0, err.decode()


def placed(image: Image, words: list[str]) -> list[str]:
    """A command with its program looked up where the image looks."""
    program = shutil.which(words[0], path=image.variables["PATH"])
    assert program is not None
    assert program.startswith(str(image.root)), f"{words[0]} is not the image's"
    return [program, *words[1:]]


def files(folder: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file())
