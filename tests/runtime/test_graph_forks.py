"""Forks of graphs, with another output of a node."""

import json
from pathlib import Path
from typing import Any

import pytest

from bough_server import Context, node
from bough_server.agents.function import agent
from bough_server.errors import InvalidRequest
from tests.support.graph_runs import echo, error_of, giving
from tests.support.graphs import graph
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import llm, open_team, script


async def test_a_fork_with_another_output_of_a_node_runs_nothing_before_it(tmp_path: Path) -> None:
    ran: list[str] = []

    @node
    def first(value: Any) -> str:
        ran.append("first")
        return "f"

    @node
    def last(value: Any) -> str:
        ran.append(f"last {value}")
        return f"{value}!"

    text = """
    graph:
      nodes: [{name: first, function: first}, {name: mid, agent: a}, {name: last, function: last}, {name: other}]
      edges: [[START, first, mid], [last, END], [other, END]]
      branches: [{source: mid, path: "", cases: {other: other}, otherwise: last}]
    sub_agents: [a]
    """
    turns = script(a=[{"text": "x", "error": {"reason": "UNAVAILABLE"}}])
    async with open_team(tmp_path, turns, graph(text), llm("a"), functions=[first, last]) as harness:
        run = await harness.start("lead")
        log = [event async for event in harness.follow(run)]
        assert error_of(log)[0] == "SUB_AGENT_FAILED"
        end = having(log, "node_failed")[0]
        for output, expected in (("edited", ["last edited"]), ("other", [])):
            ran.clear()
            edits = [{"sequence": end.sequence, "output_json": json.dumps(output)}]
            forked = await harness.fork(run, end.sequence, node_outputs=edits)
            again = [event async for event in harness.follow(forked)]
            await check_replay(harness, again)
            assert (ran, answer_of(again)) == (expected, "edited!" if expected else "other")
        assert again[end.sequence - 1].run_forked.origin.sequence == end.sequence - 1


async def test_a_fork_gives_an_output_to_a_visit_that_failed_before_its_work(tmp_path: Path) -> None:
    @node
    def add(value: int) -> int:
        return value + 1

    text = "graph: {nodes: [{name: any, function: any}, {name: add, function: add}], edges: [[START, any, add, END]]}"
    async with open_team(tmp_path, script(), graph(text), functions=[giving("any", "x"), add]) as harness:
        run = await harness.start("lead")
        log = [event async for event in harness.follow(run)]
        end = having(log, "node_failed")[0]
        edits = [{"sequence": end.sequence, "output_json": "7"}]
        forked = await harness.fork(run, end.sequence, node_outputs=edits)
        again = [event async for event in harness.follow(forked)]
        await check_replay(harness, again)
    assert answer_of(again) == "7"


async def test_a_fork_edits_no_visit_whose_work_is_under_way_where_it_starts(tmp_path: Path) -> None:
    done: list[str] = []

    @agent
    async def slow(ctx: Context, input: str) -> str:
        """Does something after the other node."""
        for _ in range(3):
            await ctx.now()

        async def act() -> None:
            done.append("slow")

        await ctx.step("act", act)
        return "slow"

    text = """
    graph:
      nodes: [{name: a, function: echo}, {name: b, agent: slow}, {name: z, join: ALL, input: {a: a, b: b}}]
      edges: [[START, a, z, END], [START, b, z]]
    sub_agents: [slow]
    """
    async with open_team(tmp_path, script(), graph(text), functions=[echo], code_agents=[slow]) as harness:
        run = await harness.start("lead")
        log = [event async for event in harness.follow(run)]
        first, second = having(log, "node_completed")[:2]
        edits = [{"sequence": end.sequence, "output_json": '"edited"'} for end in (first, second)]
        with pytest.raises(InvalidRequest, match=f"work of the visit was under way at sequence {first.sequence - 1}"):
            await harness.fork(run, second.sequence, node_outputs=edits)
        forked = await harness.fork(run, second.sequence, node_outputs=edits[1:])
        again = [event async for event in harness.follow(forked)]
    assert (json.loads(answer_of(again)), done) == ({"a": "hello", "b": "edited"}, ["slow"])
