"""The output that pages show of the desk is that of its script, but for times."""

import pytest

from tests.clients.cli_process import bough
from tests.docs import pages
from tests.docs.project import remove_times

DESK = pages.ROOT / "examples" / "desk" / "bough.yaml"


@pytest.fixture(scope="module")
async def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of what `make run MODEL=scripted` shows, without times."""
    database = tmp_path_factory.mktemp("desk") / "bough.db"
    environment = {"BOUGH_DATABASE": str(database), "BOUGH_DEFAULT_MODEL": "scripted", "COLUMNS": "80"}
    command = ("--config", str(DESK), "--embedded", "run", "lead", "Why do leaves turn red?")
    ran = await bough(*command, environment=environment)
    assert ran.code == 0, ran.err
    return lines_of(ran.out)


def lines_of(text: str) -> list[str]:
    return remove_times(text).splitlines()


@pytest.mark.parametrize("path", ["README.md", "docs/tutorial/first-run.md"])
def test_a_page_shows_how_a_run_of_the_desk_begins_and_its_tree(path: str, output: list[str]) -> None:
    blocks = pages.blocks(path, (pages.ROOT / path).read_text(encoding="utf-8"))
    (run,) = [lines_of(block.text) for block in blocks if block.text.startswith("● lead\n")]
    (tree,) = [lines_of(block.text) for block in blocks if block.text.startswith("agent ")]

    assert run == output[: len(run)]
    assert tree == output[-len(tree) :]
