"""The drivers of the contract by language: the command that runs each, built once for its sources."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.languages import go_client, java_programs, typescript_client
from tests.support import toolchains

LANGUAGES: Final = ("python", "go", "typescript", "java")

BUILD_SECONDS: Final = 900
"""How long a test may take that builds a driver; steps of scenarios have shorter bounds."""


def command_of(language: str) -> Sequence[str]:
    """Return the command of a language's driver, without its address; it is built if its sources have changed.

    Skips the test without the toolchain, and fails it if BOUGH_REQUIRE names that.
    """
    if language != "python":
        toolchains.require(language)
    return COMMANDS[language]()


def why_missing(language: str) -> str:
    """Return why a driver cannot be run here; empty if it can."""
    absent = [command for command in toolchains.COMMANDS.get(language, ()) if shutil.which(command) is None]
    return f"the driver of {language} needs {' and '.join(absent)}" if absent else ""


def _python() -> Sequence[str]:
    return (sys.executable, "-m", "tests.contract.drivers.python")


def _go() -> Sequence[str]:
    return (str(go_client.programs() / "driver"),)


def _typescript() -> Sequence[str]:
    return ("node", str(typescript_client.package() / "dist" / "dev" / "driver" / "driver.js"))


def _java() -> Sequence[str]:
    return java_programs.java_program(java_programs.DRIVER)


COMMANDS: Final[Mapping[str, Callable[[], Sequence[str]]]] = {
    "python": _python,
    "go": _go,
    "typescript": _typescript,
    "java": _java,
}
"""What builds each driver if need be, and returns its command."""
