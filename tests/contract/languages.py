"""The drivers of the contract by language: the command that runs each, built once for its sources."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support import toolchains

CLIENTS: Final = toolchains.ROOT / "clients"

LANGUAGES: Final = ("python", "go", "typescript", "java")

_BUILD_SECONDS: Final = 600


def command_of(language: str) -> Sequence[str]:
    """Return the command of a language's driver, without its address; it is built if its sources have changed.

    Skips the test without the toolchain, and fails it if BOUGH_REQUIRE names that.
    """
    if language == "python":
        return (sys.executable, "-m", "tests.contract.drivers.python")
    toolchains.require(language)
    return _COMMANDS[language]()


def _go() -> Sequence[str]:
    folder = CLIENTS / "go"

    def build(into: Path) -> None:
        _run("go", "build", "-o", str(into / "driver"), "./internal/driver", folder=folder)

    return (str(toolchains.built("go-driver", [folder], build) / "driver"),)


def _typescript() -> Sequence[str]:
    folder = CLIENTS / "typescript"
    return ("node", str(folder / "driver"))


def _java() -> Sequence[str]:
    return ("java",)


_COMMANDS: Final[Mapping[str, Callable[[], Sequence[str]]]] = {"go": _go, "typescript": _typescript, "java": _java}


def _run(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed in {folder}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
