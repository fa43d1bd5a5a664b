"""The page of stubs: its sections, and their blocks executed in the order of the page in an empty folder."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.toolchains import ROOT

CLIENTS: Final = ROOT / "clients"
PAGE: Final = CLIENTS / "README.md"
SCHEMA: Final = ROOT / "proto"
STRIPPED: Final = "bough-stripped.binpb"
BLOCK_SECONDS: Final = 900.0
"""How long a block may take the first time, when it downloads and compiles libraries."""

_BLOCK: Final = re.compile(r"^```(\S+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBlock:
    """A fenced block: commands (`sh`), a command with what it prints (`console`), or a file, named after the kind."""

    kind: str
    info: str
    text: str


def blocks(heading: str) -> Sequence[PageBlock]:
    """Return the blocks of a section of the page."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"\n## {heading}\n")
    end = text.find("\n## ", start + 1)
    found = [
        PageBlock(kind=kind, info=info.strip(), text=body)
        for kind, info, body in _BLOCK.findall(text[start : end if end > 0 else len(text)])
    ]
    assert found, heading
    return found


def descriptors(folder: Path) -> None:
    """Write both descriptor sets as `make descriptors` does."""
    command = (sys.executable, "-m", "proto.generate", "--descriptors", str(folder))
    subprocess.run(command, cwd=ROOT, check=True, timeout=BLOCK_SECONDS)


def follow(heading: str, folder: Path) -> None:
    """Do what a section says in an empty folder, which gets the descriptor set first.

    Blocks of a clone and of installations for which the machine has packages are not executed.
    """
    descriptors(folder)
    for block in blocks(heading):
        if block.kind == "sh" and not block.info:
            run(block.text, folder)
        elif block.kind not in ("sh", "console"):
            (folder / block.info).write_text(block.text, encoding="utf-8")


def run(commands: str, folder: Path) -> str:
    """Execute the commands of a block as a shell would, with buf and what was installed in the PATH.

    Returns their standard output; a command that fails stops the block.
    """
    done = subprocess.run(
        ("sh", "-euc", commands),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=BLOCK_SECONDS,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path) -> Mapping[str, str]:
    """Return the environment of a newcomer whose PATH has what the page installs."""
    installed = folder / "bin"
    programs = (str(installed), str(Path(sys.executable).parent), os.environ["PATH"])
    # Maven ends before what its virtual machine would optimize pays: half of the computing is saved.
    options = f"{os.environ.get('MAVEN_OPTS', '')} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return {**os.environ, "GOBIN": str(installed), "PATH": os.pathsep.join(programs), "MAVEN_OPTS": options}
