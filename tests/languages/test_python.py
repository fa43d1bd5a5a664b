"""The four examples of the Python client against a real server, as a person would run them."""

import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "clients" / "python" / "examples"
SLOW = [{"chunks": [f"word{number} " for number in range(40)], "delay_ms": 20}]


@asynccontextmanager
async def _program(name: str, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAMS / name), *arguments), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _output(name: str, *arguments: str, typed: str = "") -> tuple[int | None, str, str]:
    """Run a program to its end; return its exit code and what it wrote."""
    async with _program(name, *arguments) as process:
        out, err = await process.communicate(typed.encode())
        return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def _example(name: str, folder: Path) -> AsyncIterator[Serving]:
    """Serve one of the project's examples on the scripted model, from a copy: a server leaves files beside it."""
    copy = shutil.copytree(ROOT / "examples" / name, folder / name)
    environment = {"BOUGH_DATABASE": str(folder / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    async with serving(copy / "bough.yaml", environment=environment) as server:
        yield server


async def test_run_shows_the_tree_while_it_grows(tmp_path: Path) -> None:
    async with _example("desk", tmp_path) as server:
        code, out, err = await _output("run.py", "lead", "Why do leaves turn red?", server.address)
    assert (code, err) == (0, "")
    live, answer, tree = out.split("\n\n")
    assert [line for line in live.splitlines() if "{" not in line] == ["lead", "  researcher", "  writer"]
    assert '  researcher\n    search_notes {"topic"' in live
    assert answer.startswith("In autumn")
    assert tree.splitlines() == [
        "lead: 6 model calls, 2 tool calls",
        "lead/researcher: 2 model calls, 1 tool calls",
        "lead/writer: 1 model calls, 0 tool calls",
    ]


async def test_approve_answers_what_a_run_waits_for(tmp_path: Path) -> None:
    typed = '4711\n"it does not fit"\ny\n'
    asked = ("approve.py", "lead", "Orders 1001 and 1002 come back.")
    async with _example("approvals", tmp_path) as server:
        code, out, err = await _output(*asked, server.address, typed=typed)
    assert (code, err) == (0, "")
    assert out == (
        'lead calls read_card {"reader": "counter"}: '
        "interviewer asks: Orders 1001 and 1002 come back. May we ask why? "
        'refunds wants to call refund {"order_id": "1002", "amount": 180}. Approve? [y/n] '
        "Thank you. Whatever was approved is on its way to your card.\n"
    )


async def test_rejoin_survives_a_server_that_is_killed(tmp_path: Path, free_tcp_port: int) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": SLOW})
    port = ("--port", str(free_tcp_port))
    async with (
        serving(config, arguments=port) as server,
        _program("rejoin.py", "alone", "hi", server.address) as program,
    ):
        assert program.stdout is not None
        first = [await program.stdout.readline() for _ in range(8)]
        await server.kill()
        async with serving(config, arguments=port):
            rest, err = await program.communicate()
    *events, answer = (b"".join(first) + rest).decode().splitlines()
    assert [int(line.split()[0]) for line in events] == list(range(1, len(events) + 1))
    assert events[-1].split()[1:] == ["alone", "run_completed"]
    assert answer == "".join(f"word{number} " for number in range(40))
    assert program.returncode == 0
    assert err.decode().startswith("dropped, rejoining: ")


async def test_eval_ends_as_ci_expects(tmp_path: Path, free_tcp_port: int) -> None:
    request = ROOT / "examples" / "eval" / "request.json"
    wrong = tmp_path / "wrong.json"
    await asyncio.to_thread(_expect_another_answer, request, wrong)
    async with _example("desk", tmp_path) as server:
        passed = await _output("eval.py", str(request), server.address)
        failed = await _output("eval.py", str(wrong), server.address)
    unreachable = await _output("eval.py", str(request), f"127.0.0.1:{free_tcp_port}")
    assert (passed[0], passed[2]) == (0, "")
    assert passed[1].endswith("\ndesk: 7 of 7 trials passed\n")
    assert "leaves #0: passed\n" in passed[1]
    assert (failed[0], failed[2]) == (1, "")
    assert "leaves #0: failed" in failed[1]
    assert failed[1].endswith("\ndesk: 6 of 7 trials passed\n")
    assert unreachable[:2] == (2, "")
    assert f"127.0.0.1:{free_tcp_port}" in unreachable[2]


def _expect_another_answer(request: Path, wrong: Path) -> None:
    """Write a request again whose first case expects an answer that the desk never has."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    asked["eval_set"]["cases"][0]["turns"][0]["expect"]["answer"] = {"exact": "The desk never says this."}
    wrong.write_text(json.dumps(asked), encoding="utf-8")
