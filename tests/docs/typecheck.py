"""Check the types of the Python programs of the documentation, as strictly as the project's own.

Usage: python -m tests.docs.typecheck
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.docs import pages

_OPTIONS: Final = (
    "--strict",
    "--cache-dir=.mypy_cache/pages",  # what is kept for other options is of no use, and would be replaced
    "--no-error-summary",
    "--allow-untyped-defs",  # a short test or metric may be without annotations
    "--allow-incomplete-defs",
    "--disable-error-code=empty-body",  # a tool that the client runs needs no body but its docstring
)

_PLACE: Final = re.compile(r"^.*?/(\w+)/block_\d+/[^/]+\.py:(?=\d+: )", re.MULTILINE)


def programs(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each program of a page, whose lines have the numbers that they have in the page.

    A block without a name continues the one before it.
    """
    name, program = "", ""
    for block in pages.blocks(path, text):
        if block.kind != "python":
            continue
        if block.name:
            if name:
                yield name, program
            name, program = block.name, block.padded()
        else:
            program += block.padded(after=program.count("\n"))
    if name:
        yield name, program


def problems(texts: Mapping[str, str]) -> str:
    """Return what mypy says of the programs of pages, by page and line; empty if it has nothing to say."""
    modules = {re.sub(r"\W", "_", path): path for path in texts}
    with TemporaryDirectory() as folder:
        files = [
            _write(Path(folder, module, f"block_{number}", name), program)
            for module, path in modules.items()
            for number, (name, program) in enumerate(programs(path, texts[path]))
        ]
        # The folders make the names of modules, so that programs of one name are not one module.
        command = [sys.executable, "-m", "mypy", *_OPTIONS, *map(str, files)]
        environment = {**os.environ, "MYPYPATH": folder}
        checked = subprocess.run(command, cwd=pages.ROOT, env=environment, capture_output=True, text=True, check=False)
    said = _PLACE.sub(lambda place: f"{modules[place[1]]}:", checked.stdout) + checked.stderr
    return said.strip() or ("mypy failed." if checked.returncode else "")


def _write(file: Path, program: str) -> Path:
    file.parent.mkdir(parents=True)
    file.write_text(program, encoding="utf-8")
    return file


def main() -> int:
    """Check every page."""
    texts = {path: (pages.ROOT / path).read_text(encoding="utf-8") for path in pages.paths()}
    found = problems(texts)
    count = sum(1 for path, text in texts.items() for _ in programs(path, text))
    print(found or f"docs: {count} programs have sound types")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
