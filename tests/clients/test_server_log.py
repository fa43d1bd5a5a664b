"""The server's log: starts, runs, refusals and exceptions of agents, in text and in JSON, without local variables."""

import json
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from tests.clients.cli_process import bough
from tests.support.processes import run_program, serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import connected

CODE = '''
from bough_server import Context, agent, rewriter, tool


@rewriter
def spoils(messages):
    raise LookupError("no such page")


@agent(name="broken", description="Breaks.", agents=["helper"], tools=["fails"])
async def broken(ctx: Context, input: str) -> str:
    password = "hunter2-of-an-agent"
    await ctx.dispatch("helper", "Help.")
    try:
        await ctx.call_tool("fails")
    except Exception:
        pass
    try:
        await ctx.step("look", look)
    except Exception:
        pass
    raise KeyError("no such drawer")


@agent(name="torn", description="Does two things at once.")
async def torn(ctx: Context, input: str) -> str:
    await ctx.gather(left, right)
    return "unreached"


async def left(ctx):
    raise ValueError("left")


async def right(ctx):
    raise ValueError("right")


@agent(name="curious", description="Asks.")
async def curious(ctx: Context, input: str) -> str:
    return str(await ctx.ask("Which one?"))


async def look():
    key = "hunter2-of-a-step"
    raise OSError("the shelf is gone")


@tool
def fails() -> str:
    """Fails."""
    token = "hunter2-of-a-tool"
    raise ValueError("out of paper")
'''


async def logged(folder: Path, **settings: object) -> tuple[str, dict[str, str]]:
    """What a server logs of a run that succeeds, one that breaks and a call that it refuses; and ids by their names."""
    (folder / "broken_agents.py").write_text(CODE, encoding="utf-8")
    script = {"helper": ["Here."], "alone": ["Yes."]}
    config = write_project(
        folder, llm("helper"), llm("alone"), script=script, python=["team_tools", "broken_agents"], **settings
    )
    async with serving(config) as server, connected(server.address) as remote:
        good = await remote.begin("alone").to_the_end()
        bad = await remote.begin("broken").to_the_end()
        with pytest.raises(aio.AioRpcError):
            await remote.run("00000000-0000-4000-8000-000000000000")
        address = server.address
    started = bad.events[0]
    ids = {"good": good.events[0].run_id, "bad": started.run_id, "root": started.invocation_id, "address": address}
    return server.said, ids


async def test_json_is_one_object_a_line_with_every_start_end_refusal_and_exception(tmp_path: Path) -> None:
    said, ids = await logged(tmp_path, log_format="json", log_level="debug")
    lines: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    assert [line["event"] for line in lines if line["level"] == "info"] == [
        "serving",
        *("run started", "run ended", "run started", "run ended"),
        "call refused",
        "stopping",
    ]
    serving_line, first, first_end, second, second_end, refused, _ = [line for line in lines if line["level"] == "info"]
    assert (serving_line["address"], serving_line["database"]) == (ids["address"], str(tmp_path / "bough.db"))
    assert (first["run_id"], first["agent"], first_end["state"]) == (ids["good"], "alone", "succeeded")
    assert (second["run_id"], second["agent"]) == (ids["bad"], "broken")
    assert (second_end["run_id"], second_end["state"], second_end["error"]) == (ids["bad"], "failed", "INTERNAL")
    assert (refused["method"], refused["code"], refused["reason"]) == (
        "/bough.v1.AgentService/GetRun",
        "NOT_FOUND",
        "NOT_FOUND",
    )
    debug = [line for line in lines if line["level"] == "debug"]
    assert [(line["event"], line["branch"], line["run_id"]) for line in debug] == [
        ("sub-agent started", "broken/helper", ids["bad"]),
        ("sub-agent ended", "broken/helper", ids["bad"]),
    ]
    failures = [line for line in lines if line["level"] in ("warning", "error")]
    assert [line["event"] for line in failures] == ["tool failed", "step failed", "agent failed"]
    own = {"run_id": ids["bad"], "agent": "broken", "invocation_id": ids["root"]}
    assert [own | line for line in failures] == failures
    for line, words, function in zip(
        failures,
        ("ValueError: out of paper", "OSError: the shelf is gone", "KeyError: 'no such drawer'"),
        ("in fails", "in look", "in broken"),
        strict=True,
    ):
        assert line["exception"].splitlines()[-1] == words
        assert function in line["exception"]
        assert "bough_server" not in line["exception"], "the stack begins in the operator's code"
    assert "hunter2" not in said


async def test_text_is_for_people_with_the_same_lines(tmp_path: Path) -> None:
    said, ids = await logged(tmp_path)
    assert f"run_id={ids['bad']}" in said
    assert [said.count(words) for words in ("run started", "run ended", "call refused", "sub-agent")] == [2, 2, 1, 0]
    assert "KeyError: 'no such drawer'" in said
    assert "hunter2" not in said


async def test_of_paths_that_fail_at_the_same_time_each_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "broken_agents.py").write_text(CODE, encoding="utf-8")
    config = write_project(tmp_path, llm("helper"), script={}, python=["team_tools", "broken_agents"])
    async with serving(config) as server, connected(server.address) as remote:
        await remote.begin("torn").to_the_end()
    assert [server.said.count(words) for words in ("\nValueError: left\n", "\nValueError: right\n")] == [1, 1]


async def test_a_function_of_a_definition_that_raises_is_logged_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "broken_agents.py").write_text(CODE, encoding="utf-8")
    reader = {**llm("reader"), "llm": {"instruction": "Read.", "history_rewriter": "spoils"}}
    chain = {"name": "chain", "description": "Helps.", "sequence": {}, "sub_agents": ["helper", "reader"]}
    script = {"helper": ["Here."], "reader": ["Unreached."]}
    config = write_project(
        tmp_path, chain, reader, llm("helper"), script=script, python=["team_tools", "broken_agents"]
    )
    async with serving(config) as server, connected(server.address) as remote:
        await remote.begin("chain").to_the_end()
    assert (server.said.count("agent failed"), server.said.count("\nLookupError: no such page\n")) == (1, 1)
    assert "in spoils" in server.said


async def test_a_run_that_waits_is_logged_so_and_so_is_its_end_by_a_call(tmp_path: Path) -> None:
    (tmp_path / "broken_agents.py").write_text(CODE, encoding="utf-8")
    config = write_project(
        tmp_path, llm("helper"), script={}, python=["team_tools", "broken_agents"], log_format="json"
    )
    async with serving(config) as server, connected(server.address) as remote:
        waiting = await remote.begin("curious").to_the_end()
        cancelled = await bough("--address", server.address, "cancel", "last")
    assert (waiting.events[-1].WhichOneof("payload"), cancelled.code) == ("run_interrupted", 0)
    lines = [json.loads(line) for line in server.said.splitlines()]
    waits, ended = [line for line in lines if line["event"] in ("run waits for input", "run ended")]
    assert (waits["run_id"], waits["requests"]) == (waiting.events[0].run_id, 1)
    assert (ended["run_id"], ended["state"], ended["reason"]) == (waiting.events[0].run_id, "cancelled", "caller")


LIBRARY = """
import logging

from bough_server.observability.logs import configure_logging

configure_logging("info", "json")
logging.getLogger("library").warning("slow: %s", "disk")
logging.getLogger("library").info("unheard")
try:
    secret = "hunter2"
    raise ValueError("gone")
except ValueError:
    logging.getLogger("library").exception("failed")
"""


async def test_lines_of_libraries_are_json_as_well(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LIBRARY, encoding="utf-8")
    ended = await run_program(str(program), folder=tmp_path)
    slow, failed = [json.loads(line) for line in ended.err.splitlines()]
    assert (slow["event"], slow["level"], slow["logger"]) == ("slow: disk", "warning", "library")
    assert failed["exception"].splitlines()[-1] == "ValueError: gone"
    assert "hunter2" not in ended.err
