"""The pytest plugin in a project of its users: scripted teams, their trees, and projects that cannot be used."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import structlog

from bough_server.testing.team import ServerThread
from tests.clients.test_init_command import pytest_in
from tests.support.projects import llm, write_project

TOOLS = '''
from bough_server import tool


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays an amount."""
    return f"Paid {amount}."
'''


def write_shop(folder: Path, tests: str) -> None:
    """Write a project of a model with a key that is not set, and these tests."""
    write_project(
        folder,
        llm("desk", calls=["cashier"]),
        llm("cashier", tools=["pay"]),
        models={
            "default": {"provider": "openai", "model": "m", "api_key_env": "NO_SUCH_KEY"},
            "scripted": {"provider": "scripted", "script": "script.yaml"},
        },
        script={"desk": ["No."]},
        python=["shop_tools"],
    )
    (folder / "shop_tools.py").write_text(TOOLS, encoding="utf-8")
    script = {
        "desk": [{"calls": [{"name": "call_cashier", "arguments": {"message": "Pay 5."}}]}, "Done."],
        "cashier": [{"calls": [{"name": "pay", "arguments": {"amount": 5}}]}, "Paid."],
    }
    (folder / "test_shop.py").write_text(f"SCRIPT = {json.dumps(script)}\n\n{tests}", encoding="utf-8")


async def test_a_team_answers_by_the_script_of_the_project_or_of_the_test(tmp_path: Path) -> None:
    write_shop(
        tmp_path,
        """
import pathlib

import bough
from bough_server.testing import Teams


def test_by_the_projects_script(bough_team: Teams):
    run = bough_team().run("desk", "Hello.")
    assert (run.state, run.answer, run.tree, run.error) == ("succeeded", "No.", ["desk"], "")
    assert repr(run) == f"<run {run.collected.run_id} succeeded: ['desk']>"


def test_a_run_that_waits_is_answered(bough_team):
    team = bough_team(SCRIPT)
    waiting = team.run("desk", "Pay the man.")
    assert waiting.state == "input_required"
    assert waiting.tree == ["desk: running", "  cashier (pay): input_required"]
    [request] = waiting.open_requests
    paid = waiting.resume(bough.approve(request))
    assert (paid.state, paid.answer) == ("succeeded", "Done.")
    assert paid.tree == ["desk", "  cashier (pay)"]
    assert paid.calls("pay") == [{"amount": 5}]
    assert [event.sequence for event in paid.events] == list(range(1, len(paid.events) + 1))


def test_a_session_has_several_runs_and_teams_share_nothing(bough_team):
    file = pathlib.Path(__file__).parent / "bough.yaml"
    team, other = bough_team(), bough_team({"desk": ["Other."]}, config=file)
    first = team.run("desk", "Hello.")
    second = team.run("desk", "Again.", session_id=first.session_id)
    assert first.session_id == second.session_id != other.run("desk", "Hello.").session_id
    assert len(list(other.client.list_runs())) == 1


def test_a_run_that_fails_says_why(bough_team):
    run = bough_team({"desk": [{"error": {"reason": "UNAVAILABLE", "message": "Away."}}]}).run("desk", "Hello.")
    assert (run.state, run.tree) == ("failed", ["desk: failed"])
    assert "Away." in run.error
""",
    )

    code, out = await pytest_in(tmp_path)

    assert (code, "4 passed" in out) == (0, True), out


async def test_a_project_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    projects = {
        "none": ("", "There is no bough.yaml in"),
        "unscripted": (
            "models: {default: {provider: local}}",
            "has no scripted model: add one to bough.yaml, or pass `bough_team`",
        ),
        "mistaken": ("modles: {}", "bough.yaml:1: modles: There is no such setting."),
    }
    for name, (config, _) in projects.items():
        folder = tmp_path / name
        folder.mkdir()
        if config:
            (folder / "bough.yaml").write_text(config, encoding="utf-8")
        test = f"def test_{name}(bough_team):\n    bough_team()\n"
        (folder / f"test_{name}.py").write_text(test, encoding="utf-8")

    code, out = await pytest_in(tmp_path)

    failed = dict(zip(sorted(projects), re.split(r"^_+ test_\w+ _+$", out, flags=re.MULTILINE)[1:], strict=True))
    assert {name: words in failed[name] for name, (_, words) in projects.items()} == dict.fromkeys(projects, True), out
    assert (code, "3 failed" in out) == (1, True), out


async def test_a_session_of_pytest_that_uses_no_team_does_not_load_the_server(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\ndef test_it():\n"
        "    loaded = {name for name in sys.modules if name.startswith(('bough', 'grpc', 'google'))}\n"
        "    assert loaded == {'bough_server', 'bough_server.testing'}\n",
        encoding="utf-8",
    )

    code, out = await pytest_in(tmp_path)

    assert code == 0, out


def test_the_thread_of_all_teams_survives_a_task_that_raises_a_keyboard_interrupt() -> None:
    async def stray() -> None:
        raise KeyboardInterrupt("stray")

    with structlog.testing.capture_logs() as logged, ServerThread() as loop:
        with pytest.raises(KeyboardInterrupt, match="stray"):
            asyncio.run_coroutine_threadsafe(stray(), loop).result(10)
        assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "alive"), loop).result(10) == "alive"
    assert [line["event"] for line in logged] == ["a task or callback of operators' code tried to end the server"]
