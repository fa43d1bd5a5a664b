"""The program of `make run`: what it prints, and that its exit code is that of the run."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.support.processes import PATIENCE_SECONDS

PROGRAM = Path(__file__).parents[2] / "examples" / "first_run.py"
QUESTION = '$ bough run lead "Why do leaves turn red?"'


async def test_it_shows_its_question_and_its_answer_once_and_then_the_tree(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BOUGH_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), "--model", "scripted", "--port", "0", "--once"),
        env={**kept, "BOUGH_DATABASE": str(tmp_path / "bough.db"), "COLUMNS": "80"},
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate()
    lines = out.decode().splitlines()
    assert (process.returncode, err.decode().splitlines()[0].startswith("run ")) == (0, True)
    assert lines[0].startswith("note: the scripted model answers")
    assert lines[1:3] == [QUESTION, "● lead"]
    # The writer, one level deeper, says the same as the lead.
    assert sum("In autumn a tree stops making" in line and not line.startswith("│ │") for line in lines) == 1
    assert lines[-1].startswith("succeeded · 3 agents · 6 model calls")
