"""Every block of README.md, docs/ and the READMEs of examples/ is run, imported, validated or compared."""

from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.project import Project

TRIED = [path for path in pages.paths() if path not in pages.UNTRIED]
MOST_SKIPPED = 4
"""The most blocks of commands that are not run, because they need more than this machine."""


@pytest.mark.parametrize("path", TRIED)
async def test_the_blocks_of_a_page_are_what_they_say(path: str, tmp_path: Path) -> None:
    page = pages.page_of(path)
    assert page is not None, f"{path} is not registered: add it to PAGES in tests/docs/pages.py."

    async with Project(tmp_path, page) as project:
        for block in pages.blocks(path, (pages.ROOT / path).read_text(encoding="utf-8")):
            await project.take(block)
        await project.judge()
        failed = project.failures()
    assert failed <= page.failures


def test_every_registered_page_exists() -> None:
    named = [path for path in pages.PAGES if "*" not in path]

    assert [path for path in [*named, *pages.UNTRIED] if not (pages.ROOT / path).is_file()] == []


def test_few_commands_are_skipped() -> None:
    skipped = [
        block.place
        for path in TRIED
        for block in pages.blocks(path, (pages.ROOT / path).read_text(encoding="utf-8"))
        if block.kind == "sh" and block.info
    ]

    assert len(skipped) <= MOST_SKIPPED, skipped
