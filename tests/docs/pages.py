"""The pages of the documentation and their code blocks, and what each page starts from."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

_NAME: Final = re.compile(r"# ([\w./-]+\.(?:yaml|py))$")
_FENCE: Final = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """How a page is tried: in an empty folder, in a copy of an example, or in the folder that holds all examples."""

    example: str = ""
    """The folder that is copied."""
    into: str = ""
    """The folder of the copy, below the page's; default: the page's."""
    failures: frozenset[str] = frozenset()
    """What fails in the runs of the page because it shows failures, as "agent: event: reason"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """The line of its first line of text, from 1."""
    kind: str
    info: str
    """What follows the kind after the fence."""
    text: str

    @property
    def place(self) -> str:
        """Its file and line."""
        return f"{self.page}:{self.line}"

    @property
    def name(self) -> str:
        """The name of the file that it is; empty if its first line has none."""
        match = _NAME.match(self.text.partition("\n")[0])
        return match[1] if match else ""

    def padded(self, after: int = 0) -> str:
        """Its text after as many lines as precede it in the page, of which some are there."""
        return "\n" * (self.line - 1 - after) + self.text


PAGES: Final[Mapping[str, Page]] = {
    "README.md": Page(),
    "CONTRIBUTING.md": Page(),
    "docs/README.md": Page(),
    "docs/how-to/answer-runs.md": Page(example="examples/approvals"),
    "docs/how-to/evaluate.md": Page(  # of the case in which a mocked agent fails
        failures=frozenset(
            {"forecaster: agent.sub_agent.failed: INTERNAL", "guide: agent.tool.failed: SUB_AGENT_FAILED"}
        )
    ),
    "docs/how-to/fork-and-replay.md": Page(example="examples/desk"),
    "docs/how-to/inject-faults.md": Page(failures=frozenset({"clerk: agent.tool.failed: TOOL_FAILED"})),
    "docs/tutorial/first-run.md": Page(example="examples/desk"),
    "docs/decisions/*.md": Page(),
    "docs/explanation/*.md": Page(),
    "docs/how-to/*.md": Page(),
    "docs/reference/*.md": Page(),
    "docs/tutorial/*.md": Page(),
    "examples/graphs/README.md": Page(  # the failure that a node of the article handles
        example="examples",
        into="examples",
        failures=frozenset(
            f"archivist: agent.{kind}.failed: MODEL_UNAVAILABLE" for kind in ("llm", "step", "sub_agent")
        ),
    ),
    "examples/*README.md": Page(example="examples", into="examples"),
}
"""Pages by path or pattern; a path comes before patterns."""

UNTRIED: Final[tuple[str, ...]] = ()
"""Pages whose blocks are not tried."""


def paths() -> list[str]:
    """Every page of the documentation, those of the examples included."""
    return [
        "README.md",
        "CONTRIBUTING.md",
        *(str(path.relative_to(ROOT)) for part in ("docs", "examples") for path in _pages(ROOT / part)),
    ]


def _pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.md"))


def page_of(path: str) -> Page | None:
    """How a page is tried; None for a page that is not registered."""
    if path in PAGES:
        return PAGES[path]
    return next((page for pattern, page in PAGES.items() if "*" in pattern and fnmatch(path, pattern)), None)


def blocks(path: str, text: str) -> list[Block]:
    """The blocks of a page, in order. Raises AssertionError for a fence that is not closed."""
    return list(_blocks(path, text))


def _blocks(path: str, text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            continue
        inside: list[str] = []
        for _, each in lines:
            if each.strip() == "```":
                break
            inside.append(each.removeprefix(opening[1]))
        else:
            raise AssertionError(f"{path}:{number}: this block is not closed.")
        kind, _, info = opening[2].strip().partition(" ")
        text = "\n".join(inside) + "\n"
        yield Block(page=path, line=number + 1, kind=kind, info=info.strip(), text=text)
