"""The workflows of .github as data, and their commands as GitHub runs them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> dict[str, Any]:
    """A workflow by the name of its file. GitHub reads `on` as a name, YAML 1.1 as true: every scalar is a text."""
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    workflow: dict[str, Any] = yaml.load(text, Loader=yaml.BaseLoader)
    return workflow


def steps(workflow: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of all jobs."""
    for job in workflow["jobs"].values():
        yield from job.get("steps", ())


def shell(name: str, step: str) -> tuple[str, ...]:
    """The commands of a step of a workflow, as GitHub starts them."""
    (text,) = (each["run"] for each in steps(read(name)) if each.get("name") == step)
    return ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text)
