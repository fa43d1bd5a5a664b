"""Commands that only read, with an embedded server, on a database whose server was killed."""

import asyncio
import json
from pathlib import Path

from tests.clients.cli_process import bough, started
from tests.support.projects import llm, write_project

TOOLS = '''
from asyncio import Event
from pathlib import Path

from bough_server import tool


@tool
async def dig() -> str:
    """Digs, without an end."""
    with Path(__file__).with_name("dug").open("a") as dug:
        dug.write("x")
    await Event().wait()
    return "nothing"
'''

COMMANDS = (
    ("runs", "--json"),
    ("tree", "last"),
    ("watch", "last", "--no-follow", "--output", "json"),
    ("sessions", "list"),
    ("agents", "list"),
)


async def test_looking_at_a_run_that_was_left_open_neither_continues_it_nor_wears_it_out(tmp_path: Path) -> None:
    (tmp_path / "digging.py").write_text(TOOLS)
    script = {"digger": [{"calls": [{"name": "dig"}]}, {"text": "Found."}]}
    config = write_project(tmp_path, llm("digger", tools=["dig"]), script=script, python=["digging"])
    flags = ("--config", str(config), "--embedded")
    process = await started(*flags, "run", "digger", "Dig.", "--output", "json")
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"toolStarted" not in (line := await process.stdout.readline()):
            assert line
    process.kill()
    await process.communicate()
    before = await bough(*flags, "events", "last", "--json")
    for command in COMMANDS:
        assert (await bough(*flags, *command)).code == 0
    after = await bough(*flags, "events", "last", "--json")
    assert after.out == before.out
    assert "toolStarted" in json.loads(after.out.splitlines()[-1])


STRAYS = """
import asyncio

from bough_server import Context, agent


def fail() -> None:
    raise KeyboardInterrupt("stray")


async def failing() -> None:
    fail()


@agent(description="Awaits a task that raises KeyboardInterrupt.")
async def waits(ctx: Context, input: str) -> str:
    await asyncio.create_task(failing())
    return "unreached"


@agent(description="Schedules a callback that raises KeyboardInterrupt.")
async def calls(ctx: Context, input: str) -> str:
    asyncio.get_running_loop().call_soon(fail)
    await ctx.sleep(0.1)
    return "Still here."
"""


async def test_a_stray_exception_of_an_agents_task_fails_the_run_and_does_not_end_the_command(tmp_path: Path) -> None:
    (tmp_path / "strays.py").write_text(STRAYS)
    flags = (
        "--config",
        str(write_project(tmp_path, llm("lead"), script={"lead": ["Hm."]}, python=["strays"])),
        "--embedded",
    )
    failed = await bough(*flags, "run", "waits", "Go.", "--output", "answer")
    answered = await bough(*flags, "run", "calls", "Go.", "--output", "answer")
    assert (failed.code, "The run failed: INTERNAL: KeyboardInterrupt: stray" in failed.err) == (1, True), failed.err
    assert (answered.code, answered.out) == (0, "Still here.\n"), answered.err
    said = "a task or callback of operators' code tried to end the command"
    assert (said in failed.err, said in answered.err) == (True, True)
