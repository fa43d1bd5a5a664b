"""All that a release publishes has one version, and names one repository."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

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
