"""The programs of clients/java, built once for their sources by the command of clients/README.md."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.languages import stub_page
from tests.support.toolchains import ROOT, built, require

FOLLOW_RUN: Final = "dev.bough.example.FollowRun"
DRIVER: Final = "dev.bough.driver.Driver"

_FOLDER: Final = ROOT / "clients" / "java"
_BUILD_SECONDS: Final = 900.0


def java_program(name: str) -> Sequence[str]:
    """Return the command of a program, by its class. Skips the test without Java, or fails it if Java is required."""
    require("java")
    folder = built("java", (_FOLDER, stub_page.SCHEMA), _build)
    return (
        "java",
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-cp",
        f"{folder}/made/classes:{folder}/made/lib/*",
        name,
    )


def _build(folder: Path) -> None:
    stub_page.descriptors(folder)
    # What was downloaded before is not asked for again, and neither is the network.
    done = _maven(folder, "--offline")
    if done.returncode != 0:
        done = _maven(folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _maven(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (block,) = [each for each in stub_page.blocks("Java") if each.info == "clone java"]
    values = (f"-Dbough.build={folder}/made", f"-Dbough.descriptors={folder / stub_page.STRIPPED}")
    return subprocess.run(
        (*shlex.split(block.text), "-ntp", "-Dstyle.color=never", *options, *values),
        cwd=ROOT,
        env=stub_page.environment(folder),
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
    )
