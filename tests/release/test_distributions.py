"""The wheel and the sdist, built as the workflow of releases builds them: their contents, and what an index shows."""

import hashlib
import re
import shutil
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Final

import pytest
from packaging.metadata import Metadata

from tests.release.workflows import ROOT, shell
from tests.support.fresh_environments import pip, run_installing

SOURCES: Final = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore", "proto", "server", "clients")
IGNORED: Final = ("__pycache__", "node_modules", "target", "dist", "*.egg-info")

pytestmark = [pytest.mark.timeout(600), pytest.mark.wheel]


def checkout(folder: Path) -> Path:
    """A copy of what a release is built from, as the build leaves files in its folder."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*IGNORED))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def contents(wheel: Path) -> dict[str, str]:
    """The digest of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


async def test_the_sdist_builds_the_wheel_that_the_tree_builds_and_an_index_takes_both(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    # It builds the sdist from the tree, and the wheel from the sdist.
    out = await run_installing(
        *shell("release.yml", "Build the wheel and the sdist"), folder=folder, variables={"PATH": path}
    )
    await pip(sys.executable, "wheel", "--quiet", "--no-deps", "--wheel-dir", "of-the-tree", ".", folder=folder)

    (wheel,) = (folder / "out" / "python").glob("*.whl")
    (sdist,) = (folder / "out" / "python").glob("*.tar.gz")
    (of_the_tree,) = (folder / "of-the-tree").glob("*.whl")
    assert out.count("PASSED") == 2, out
    assert contents(wheel) == contents(of_the_tree)
    check_sdist(sdist)
    check_metadata(wheel)


def check_sdist(sdist: Path) -> None:
    """It has the schema, the sources and nothing that only the repository needs."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    roots = {"/".join(name.split("/")[:2]) if name.startswith("clients/") else name.split("/")[0] for name in names}
    files = {"LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO", "pyproject.toml", ".gitignore"}
    assert roots == {"proto", "server", "clients/python", *files}


def check_metadata(wheel: Path) -> None:
    """What an index shows is valid, and its links lead to the files of this version."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        read = Metadata.from_email(archive.read(name), validate=True)
        text = message_from_bytes(archive.read(name)).get_payload()
        has_licence = any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    description = read.description or str(text)
    links = re.findall(r"\]\(([^)]+)\)", description)
    broken = [link for link in links if not re.match(r"https?://|#", link)]
    ours = [link.partition(f"/blob/v{read.version}/")[2] for link in links if f"/blob/v{read.version}/" in link]
    assert (read.description_content_type, has_licence, broken) == ("text/markdown", True, [])
    assert ours
    assert [path for path in ours if not (ROOT / path.partition("#")[0]).exists()] == []
