"""Read a Dockerfile, and carry out in a folder what its stages do, without Docker."""

import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.fresh_environments import run_installing

ROOT: Final = Path(__file__).parents[2]

_PATH: Final = re.compile(r"(?<![\w.])/(?=(?:src|opt|srv|var)\b)")
"""The beginning of a path of the image, of the folders that it uses."""


@dataclass(slots=True, kw_only=True)
class Image:
    """What the last stage of a Dockerfile says about the containers that it becomes."""

    root: Path
    """The folder that stands for the root of the image's files."""
    variables: dict[str, str] = field(default_factory=dict)
    folder: Path = Path("/")
    user: str = "root"
    volumes: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def placed(self, text: str) -> str:
        """A text with the image's paths below the folder that stands for its root."""
        return _PATH.sub(f"{self.root}/", text)


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments; continued lines are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined)]


async def build(root: Path, *, path: str) -> Image:
    """Carry out the Dockerfile below a folder, with the programs of `path`, and return the image of its last stage.

    The stages share the folder, so that what one copies from another is there. Downloads may come from pip's cache.
    """
    image = Image(root=root)
    for name, rest in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        if name == "FROM":
            image = Image(root=root, variables={"PATH": path})
        elif name == "RUN":
            (root / "tmp").mkdir(exist_ok=True)
            command = ("sh", "-ec", image.placed(rest))
            await run_installing(*command, folder=image.folder, variables=image.variables)
        elif name == "COPY":
            _copy(image, shlex.split(rest))
        else:
            _describe(image, name, rest)
    return image


def _copy(image: Image, words: list[str]) -> None:
    flags = [word for word in words if word.startswith("--")]
    *sources, target = [word for word in words if not word.startswith("--")]
    if any(flag.startswith("--from=") for flag in flags):
        assert [Path(image.placed(source)).exists() for source in sources] == [True] * len(sources)
        assert sources == [target], "the stages share a folder: a copy between them has to keep its path"
        return
    folder = image.folder / target
    for source in sources:
        assert is_sent(source), f".dockerignore leaves {source} out"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, folder)


def is_sent(path: str) -> bool:
    """Whether .dockerignore, which leaves out everything but what it names, lets a path into the build."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    return "*" in lines and f"!{path}" in lines


def _describe(image: Image, name: str, rest: str) -> None:
    if name == "ENV":
        for word in shlex.split(rest):
            key, _, value = word.partition("=")
            if not key.startswith("PIP_"):  # a test may use pip's cache
                image.variables[key] = image.placed(value).replace("$PATH", image.variables["PATH"])
    elif name == "WORKDIR":
        image.folder = Path(image.placed(rest))
        image.folder.mkdir(parents=True, exist_ok=True)
    elif name == "USER":
        image.user = rest
    elif name == "VOLUME":
        image.volumes.append(rest)
    elif name == "HEALTHCHECK":
        image.health = json.loads(rest.partition(" CMD ")[2])
    elif name == "ENTRYPOINT":
        image.entrypoint = json.loads(rest)
    elif name == "CMD":
        image.command = json.loads(rest)
    else:
        assert name == "EXPOSE", f"the test does not know {name}"
