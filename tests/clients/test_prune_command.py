"""`bough prune`: which sessions it deletes, and which it keeps."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from tests.clients.cli_process import Finished, bough
from tests.support.projects import llm, write_project

DAY_NS = 86_400_000_000_000
TOOLS = '''
from bough_server import tool


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays an amount."""
    return f"Paid {amount}."
'''


async def run(config: Path, session: str, agent: str = "alone") -> None:
    turn = ("run", agent, "hi", "--session", session, "--create-session", "--output", "answer")
    await bough("--config", str(config), "--embedded", *turn)


async def sessions(config: Path) -> set[str]:
    listed = await bough("--config", str(config), "--embedded", "sessions", "list", "--json")
    return {json.loads(line)["sessionId"] for line in listed.out.splitlines()}


def age(folder: Path, session: str, days: int) -> None:
    """Date the last run of a session back."""
    connection = sqlite3.connect(folder / "bough.db")
    with connection:
        connection.execute(
            "UPDATE sessions SET last_run_time_ns = ? WHERE session_id = ?", (time.time_ns() - days * DAY_NS, session)
        )
    connection.close()


@pytest.fixture
async def config(tmp_path: Path) -> Path:
    """A project with an old session, an old one that a waiting run holds, and a new one."""
    (tmp_path / "shop_tools.py").write_text(TOOLS, encoding="utf-8")
    script = {"alone": ["Hm."], "payer": [{"calls": [{"name": "pay", "arguments": {"amount": 5}}]}]}
    config = write_project(tmp_path, llm("alone"), llm("payer", tools=["pay"]), script=script, python=["shop_tools"])
    for session in ("old", "new"):
        await run(config, session)
    await run(config, "waiting", "payer")
    for session in ("old", "waiting"):
        age(tmp_path, session, 40)
    return config


async def test_sessions_without_a_recent_run_are_deleted_unless_a_run_holds_them(config: Path) -> None:
    command = ("prune", "--older-than", "30d", "--embedded", "--config", str(config))
    tried = await bough(*command, "--dry-run")
    before = await sessions(config)
    pruned = await bough(*command)
    again = await bough(*command)
    listed = await bough("--config", str(config), "--embedded", "runs", "--json")
    assert tried == Finished(code=0, out="old\n", err="1 session would be deleted.\n")
    assert before == {"old", "new", "waiting"}
    assert pruned == Finished(code=0, out="old\n", err="1 session deleted.\n")
    assert again == Finished(code=0, out="", err="0 sessions deleted.\n")
    assert await sessions(config) == {"new", "waiting"}
    assert {json.loads(line)["sessionId"] for line in listed.out.splitlines()} == {"new", "waiting"}


async def test_evaluations_that_ended_long_ago_are_deleted_with_their_runs(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    (tmp_path / "set.yaml").write_text(
        "name: s\nagent: alone\ncases: [{id: a, turns: [{user: Hm}, {user: Hm}]}]\n", encoding="utf-8"
    )
    embedded = ("--config", str(config), "--embedded")
    ids = []
    for _ in range(2):
        ended = await bough(*embedded, "eval", "run", str(tmp_path / "set.yaml"))
        ids.append(ended.err.split()[1])
    connection = sqlite3.connect(tmp_path / "bough.db")
    with connection:
        connection.execute("UPDATE runs SET end_time_ns = ? WHERE run_id = ?", (time.time_ns() - 40 * DAY_NS, ids[0]))
        of_evaluation = "SELECT DISTINCT session_id FROM runs WHERE evaluation_id = ?"
        old, new = (connection.execute(of_evaluation, (one,)).fetchone()[0] for one in ids)
    connection.close()
    age(tmp_path, old, 40)
    command = (*embedded, "prune", "--older-than", "30d")
    tried = await bough(*command, "--dry-run")
    pruned = await bough(*command)
    listed = await bough(*embedded, "eval", "list", "--json")
    runs = [await bough(*embedded, "runs", "--session", one, "--json") for one in (old, new)]
    printed = f"{old}\nevaluation {ids[0]}\n"
    assert tried == Finished(code=0, out=printed, err="1 session and 1 evaluation would be deleted.\n")
    assert pruned == Finished(code=0, out=printed, err="1 session and 1 evaluation deleted.\n")
    assert [json.loads(line)["evaluationId"] for line in listed.out.splitlines()] == [ids[1]]
    assert [len(one.out.splitlines()) for one in runs] == [0, 2]


async def test_an_age_is_required(config: Path) -> None:
    without = await bough("prune", "--config", str(config))
    wrong = await bough("prune", "--older-than", "old", "--config", str(config))
    assert (without.code, "--older-than" in without.err) == (2, True)
    assert (wrong.code, "must be a duration such as 10m" in wrong.err) == (2, True)
