"""The teams of examples/support, research and pipeline, from the question to what is left in their databases."""

import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import run_pb2
from tests.clients.cli_process import Finished, bough
from tests.docs import pages

EXAMPLES = pages.ROOT / "examples"

READERS = ["harbor", "almanac", "newspaper"]

Team = Callable[..., Awaitable[Finished]]
"""Runs a command of a team with a server embedded in it."""


def copy(name: str, folder: Path) -> Team:
    """A copy of an example, with its commands."""
    ignored = shutil.ignore_patterns("var", "__pycache__", "*.sqlite3")
    shutil.copytree(EXAMPLES / name, folder / name, ignore=ignored)
    environment = {"BOUGH_DATABASE": str(folder / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    return partial(bough, "--config", str(folder / name / "bough.yaml"), "--embedded", environment=environment)


@pytest.mark.parametrize(
    ("answer", "paid"),
    [("true", [(1002, 129.0)]), ('{"approved": true, "arguments": {"amount": 60}}', [(1002, 60.0)]), ("false", [])],
)
async def test_the_support_desk_pays_what_was_approved_and_once(
    answer: str, paid: list[tuple[int, float]], tmp_path: Path
) -> None:
    team = copy("support", tmp_path)
    ran = await team("run", "support", "ann@example.com: my floor lamp is broken.", "--no-input")
    (waiting,) = (await team("runs", "--json")).out.splitlines()
    (request,) = json_format.Parse(waiting, run_pb2.Run()).open_requests
    answer = answer.replace('{"amount"', '{"order_id": 1002, "amount"')
    resumed = await team("resume", "last", "--answer", f"{request.input_id}={answer}", "--output", "answer")
    replayed = await team("replay", "last")
    with closing(sqlite3.connect(tmp_path / "support" / "shop.sqlite3")) as shop:
        refunds = shop.execute("SELECT order_id, amount FROM refunds").fetchall()
    assert (ran.code, list(request.agent_path)) == (3, ["support", "cashier"])
    assert (resumed.code, replayed.code, refunds) == (0, 0, paid), resumed.err
    assert resumed.out == "I found your order 1002, the floor lamp. Whatever was approved is on its way to you.\n"


async def test_three_readers_search_at_the_same_time_and_an_editor_writes_what_they_found(tmp_path: Path) -> None:
    team = copy("research", tmp_path)
    ran = await team("run", "research", "Why does high water come later each day?", "--output", "plain")
    found = await team("events", "last", "--types", "tool.completed")
    started = [line.split()[2] for line in ran.out.splitlines() if ".started" in line and "sub_agent" in line]
    assert (ran.code, started[1:]) == (0, [f"research/readers/{name}" for name in READERS] + ["research/editor"])
    assert "That is why the harbor can publish its times a year ahead." in ran.out
    for text in ("Flood at 6:10", "The moon rises about fifty minutes later", "a year ahead"):
        assert text in found.out


async def test_an_invoice_is_read_until_its_sums_are_right_and_one_that_stays_wrong_is_not_booked(
    tmp_path: Path,
) -> None:
    team = copy("pipeline", tmp_path)
    invoice = (EXAMPLES / "pipeline" / "invoice.txt").read_text(encoding="utf-8")
    booked = await team("run", "invoices", "-", "--output", "answer", said=invoice)
    state = await team("sessions", "state", "last")
    script = tmp_path / "pipeline" / "scripts" / "pipeline.yaml"
    script.write_text(script.read_text(encoding="utf-8").replace('"amount": 13}', '"amount": 12}'), encoding="utf-8")
    refused = await team("run", "invoices", "-", "--output", "plain", said=invoice)
    assert (booked.code, booked.out) == (0, "Booked R-17: 2 items, 49.50 EUR.\n"), booked.err
    assert '{"article": "brush", "amount": 13' in state.out
    assert refused.code == 1
    assert "The invoice could not be read. The items come to 48.5, the total is 49.5." in refused.out


@pytest.mark.parametrize(
    ("agent", "said", "answer"),
    [
        (
            "article",
            '{"question": "Why are the tides late?"}',
            "The tide comes about fifty minutes later each day because the moon does.",
        ),
        ("assistant", "What makes the tides?", "The moon makes the tides."),
        ("polisher", "The moon makes the tides.", "The moon pulls the sea."),
        ("word_count", "to be or\nnot to be", "6 words in 2 lines, 3 in the longest."),
    ],
)
async def test_graphs_answer_without_a_failed_visit_that_is_not_handled(
    agent: str, said: str, answer: str, tmp_path: Path
) -> None:
    team = copy("graphs", tmp_path)
    ran = await team("run", agent, said, "--output", "answer")
    failed = await team("events", "last", "--types", "graph.node_failed")
    assert (ran.code, ran.out) == (0, f"{answer}\n"), ran.err
    assert ("SUB_AGENT_FAILED" in failed.out) is (agent == "article")
    assert len(failed.out.splitlines()) == (agent == "article")


async def test_a_refund_in_a_dag_waits_for_its_answer_alone_and_is_drawn_with_its_path(tmp_path: Path) -> None:
    team = copy("graphs", tmp_path)
    ran = await team("run", "refund", "lamp", "--no-input")
    (waiting,) = (await team("runs", "--json")).out.splitlines()
    (request,) = json_format.Parse(waiting, run_pb2.Run()).open_requests
    resumed = await team("resume", "last", "--answer", f"{request.input_id}=true", "--output", "answer")
    nodes = (await team("tree", "last", "--nodes")).out
    drawn = (await team("agents", "draw", "refund", "--run", "last")).out
    assert (ran.code, resumed.code) == (3, 0), resumed.err
    assert resumed.out == "We are sorry that your lamp is broken. 129.00 EUR are on their way.\n"
    assert [line.split()[2] for line in nodes.splitlines() if "✓" in line][-2:] == ["sure", "decide"]
    assert "  n3 ==> END" in drawn
    assert '  n0["sure x1<br/>ask"]' in drawn


async def test_a_fork_of_an_article_with_a_better_verdict_ends_with_the_first_draft(tmp_path: Path) -> None:
    team = copy("graphs", tmp_path)
    await team("run", "article", '{"question": "Why are the tides late?"}', "--output", "answer")
    nodes = (await team("tree", "last", "--nodes")).out.splitlines()
    review = next(line.split()[0] for line in nodes if "2 review from draft -> draft" in line)
    edited = f'{review}={{"verdict": "good"}}'
    forked = await team("fork", "last", "--after", review, "--node-output", edited, "--output", "answer", "--no-tree")
    refused = await team("fork", "last", "--after", "3", "--node-output", "2=1")
    assert (forked.code, forked.out) == (0, "The tide is late.\n"), forked.err
    assert refused.code == 2
    assert "There is no node_completed or node_failed at sequence 2." in refused.err
