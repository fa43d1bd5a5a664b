"""The workflows of .github: what they are allowed to do, what they depend on, and what the steps of a release check."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.release.workflows import ROOT, WORKFLOWS, read, shell, steps
from tests.support.fresh_environments import run

PROJECT = '[project]\nname = "bough-agents"\nversion = "1.2.3"\n'
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-12-01

### Added

- A thing.

## [1.2.2] - 2026-11-01

- Another.
"""


def test_nothing_is_allowed_to_write_but_what_publishes() -> None:
    release = read("release.yml")
    jobs = {name: job["permissions"] for name, job in release["jobs"].items()}

    assert read("ci.yml")["permissions"] == {"contents": "read"}
    assert release["permissions"] == {}
    assert jobs == {
        "check": {"contents": "read"},
        "build": {"contents": "read"},
        "pypi": {"id-token": "write"},
        "npm": {"id-token": "write"},
        "image": {"contents": "read", "packages": "write"},
        "github": {"contents": "write"},
    }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_have_a_major_version_and_see_neither_secrets_nor_credentials(path: Path) -> None:
    used = [step for step in steps(read(path.name)) if "uses" in step]
    loose = [step["uses"] for step in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@(release/)?v\d+", step["uses"])]
    kept = [
        step
        for step in used
        if step["uses"].startswith("actions/checkout@") and step["with"]["persist-credentials"] != "false"
    ]

    assert (loose, kept) == ([], [])
    assert "secrets." not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_ends_and_no_command_has_text_of_a_stranger_in_it(path: Path) -> None:
    jobs = read(path.name)["jobs"]
    endless = [name for name, job in jobs.items() if "uses" not in job and "timeout-minutes" not in job]
    pasted = [step["run"] for step in steps(read(path.name)) if "${{" in step.get("run", "")]

    assert (endless, pasted) == ([], [])


def test_nothing_is_published_before_everything_is_checked_and_built() -> None:
    jobs = read("release.yml")["jobs"]

    assert jobs["check"]["uses"] == "./.github/workflows/ci.yml"
    assert {name: job["needs"] for name, job in jobs.items() if "needs" in job} == {
        "pypi": ["check", "build"],
        "npm": ["check", "build"],
        "image": ["check", "build"],
        "github": ["pypi", "npm", "image"],
    }


async def test_a_tag_that_is_not_the_version_ends_the_release(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    command = shell("release.yml", "Compare the tag with the version")

    right = await run(*command, folder=tmp_path, variables={"GITHUB_REF_NAME": "v1.2.3"})
    wrong = await run(*command, folder=tmp_path, variables={"GITHUB_REF_NAME": "v1.2.4"})

    assert right == (0, "")
    assert wrong == (1, "The tag is v1.2.4, and pyproject.toml has version 1.2.3.\n")


async def test_the_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    command = shell("release.yml", "Take the notes from the changelog")

    right = await run(*command, folder=tmp_path, variables={"GITHUB_REF_NAME": "v1.2.3"})
    notes = (tmp_path / "out" / "release" / "notes.md").read_text(encoding="utf-8")
    wrong = await run(*command, folder=tmp_path, variables={"GITHUB_REF_NAME": "v1.2.4"})

    assert (right, notes.strip()) == ((0, ""), "### Added\n\n- A thing.")
    assert wrong == (1, "CHANGELOG.md has no section for v1.2.4.\n")


async def test_a_schema_that_is_not_the_promised_one_ends_the_release(tmp_path: Path) -> None:
    command = shell("release.yml", "Compare the schema with what the release promises")
    variables = {"GITHUB_REF_NAME": "v1.2.3"}
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "buf").symlink_to(Path(sys.executable).parent / "buf")
    (tmp_path / "proto" / "releases").mkdir(exist_ok=True)
    kept = tmp_path / "proto" / "releases" / "1.2.3.binpb"

    unkept = await run(*command, folder=tmp_path, variables=variables)
    shutil.copy(tmp_path / "out" / "schema.binpb", tmp_path / "proto" / "baseline.binpb")
    shutil.copy(tmp_path / "proto" / "baseline.binpb", kept)
    right = await run(*command, folder=tmp_path, variables=variables)
    kept.write_bytes(kept.read_bytes()[:-1])
    wrong = await run(*command, folder=tmp_path, variables=variables)

    assert (unkept[0], right) == (1, (0, ""))
    assert wrong[1].endswith(
        "The schema is not proto/releases/1.2.3.binpb: make both as docs/how-to/release.md says.\n"
    )
