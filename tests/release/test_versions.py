"""All that a release publishes has one version, names one repository, and is installed by one name."""

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from bough_server.distribution import DISTRIBUTION

ROOT: Final = Path(__file__).parents[2]
REPOSITORY: Final = "https://github.com/bough-dev/bough"


def _python(text: str) -> str:
    return str(tomllib.loads(text)["project"]["version"])


def _npm(text: str) -> str:
    return str(json.loads(text)["version"])


def _npm_lock(text: str) -> str:
    return str(json.loads(text)["packages"][""]["version"])


def _maven(text: str) -> str:
    return ElementTree.fromstring(text).findtext("{http://maven.apache.org/POM/4.0.0}version", "")


def _go(text: str) -> str:
    (version,) = re.findall(r'^const Version = "(.*)"$', text, re.MULTILINE)
    return str(version)


PLACES: Final[Mapping[str, Callable[[str], str]]] = {
    "pyproject.toml": _python,
    "clients/go/version.go": _go,
    "clients/java/pom.xml": _maven,
    "clients/typescript/package.json": _npm,
    "clients/typescript/package-lock.json": _npm_lock,
}
"""The files that have the version, each with how it is read."""

PACKAGE: Final = "bough"
"""The Python package. A distribution of this name is another program."""

OTHER_PROGRAM: Final = re.compile(
    rf"""\b(install|add)\s+(-\S+\s+)*["'`]?{PACKAGE}(?![\w-])"""
    rf"""|\b{PACKAGE}\\?\[[a-z]"""  # with an extra; tests escape the bracket
    rf"""|\b{PACKAGE}\ @\ """
    rf"""|\b(version|distribution)\(["']{PACKAGE}["']\)"""
)
"""Where a text has the package's name as that of the distribution."""


def test_every_package_has_the_version_of_the_service() -> None:
    found = {place: read((ROOT / place).read_text(encoding="utf-8")) for place, read in PLACES.items()}

    assert found == dict.fromkeys(PLACES, found["pyproject.toml"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["pyproject.toml"])


def test_the_packages_lead_to_the_repository() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]

    assert urls["Source"] == REPOSITORY
    assert [url for url in urls.values() if not url.startswith(REPOSITORY)] == []
    assert json.loads((ROOT / "clients/typescript/package.json").read_text(encoding="utf-8"))["repository"] == {
        "type": "git",
        "url": f"git+{REPOSITORY}.git",
        "directory": "clients/typescript",
    }


def test_the_path_of_the_go_module_is_its_folder_in_the_repository() -> None:
    text = (ROOT / "clients/go/go.mod").read_text(encoding="utf-8")

    assert text.startswith(f"module {REPOSITORY.removeprefix('https://')}/clients/go\n")


def test_the_code_names_the_distribution_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["name"] == DISTRIBUTION
    assert [extra for extra in project["optional-dependencies"]["dev"] if extra.startswith(f"{DISTRIBUTION}[")] != []


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Every text file of the repository, by its path."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in listed.split("\0"):
        try:
            yield path, (ROOT / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # binary, or deleted and not committed


def test_no_text_says_to_install_the_other_program() -> None:
    found = {path: match[0] for path, text in tracked_texts() if (match := OTHER_PROGRAM.search(text))}

    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        f"pip install {PACKAGE}",
        f"`pip install\n'{PACKAGE}[server,postgres]'`",
        f'uv add --dev "{PACKAGE}[server]"',
        f"{PACKAGE}[server] in a requirement",
        f"{PACKAGE} @ git+https://github.com/bough-dev/bough",
        f'metadata.version("{PACKAGE}")',
    ],
)
def test_the_other_program_is_found_in_a_text(text: str) -> None:
    assert OTHER_PROGRAM.search(text)


def test_the_distribution_the_package_and_the_command_are_not_taken_for_the_other_program() -> None:
    text = 'pip install "bough-agents[server]"; pip uninstall bough; bough init; import bough; bough["laps"]'

    assert OTHER_PROGRAM.search(text) is None
