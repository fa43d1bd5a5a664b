"""The ledger of runs: what each invocation of a tree used itself, and what impossible usage becomes."""

from pathlib import Path

from structlog.testing import capture_logs

from bough.v1 import usage_pb2
from bough_server.log.usage import MAX_TOKENS, bound_tokens
from bough_server.store.ports.runs import Page
from bough_server.store.ports.usage import UsageFilter
from tests.runtime.test_compaction import LONG, summarize
from tests.support.log_readings import check_replay, having
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import call, calls, llm, open_team, script

USED = {"usage": {"input_tokens": 10, "output_tokens": 5}}


async def own_usage(harness: RunHarness, run_id: str) -> dict[str, usage_pb2.Usage]:
    """Return what each invocation of a run used itself, as the ledger has it."""
    group_by = [usage_pb2.USAGE_DIMENSION_INVOCATION]
    groups, _ = await harness.store.usage.list_groups(ME, UsageFilter(run_id=run_id), group_by, Page(size=100))
    assert all(group.charge_nanos == group.usage.cost_nanos for group in groups)
    return {group.invocation_id: group.usage for group in groups}


async def test_of_a_tree_of_children_of_one_name_the_ledger_has_what_each_used_itself(tmp_path: Path) -> None:
    turns = script(
        root=[
            calls(call("call_clerk", message="a"), call("call_clerk", message="b"), **USED),
            {"text": "Done.", **USED},
        ],
        clerk=[calls(call("call_helper", message=LONG), **USED), {"text": f"Well. {LONG}", **USED}],
        helper=[{"text": "Helped.", **USED}],
        **{"root.summary": [{"text": "In short.", **USED}]},
    )
    root = llm("root", links=["clerk"], model="large")
    root.history.CopyFrom(summarize(200))
    team = (root, llm("clerk", links=["helper"], model="small"), llm("helper", model="tiny"))
    async with open_team(tmp_path, turns, *team) as harness:
        before = await harness.turn("root", LONG)
        log = await harness.turn("root", LONG, session_id=before[0].session_id)
        await check_replay(harness, log)
        tree = await harness.tree(log)
        used = await own_usage(harness, log[0].run_id)
        lines = await harness.store.usage.list_for_run(log[0].run_id)
    assert having(log, "history_compacted")
    assert [agent.name for agent in tree.agents] == ["root", "clerk", "helper", "clerk", "helper"]
    for agent in tree.agents:
        expected = usage_pb2.Usage()
        expected.CopyFrom(agent.usage)
        expected.tool_calls = 0
        assert used[agent.invocation_id] == expected, agent.name
    assert sum(usage.cost_nanos for usage in used.values()) == tree.tree_usage.cost_nanos
    assert {(line.user_id, line.model) for line in lines} == {("local", name) for name in ("large", "small", "tiny")}


async def test_what_a_fork_used_itself_is_all_that_it_did_not_inherit(tmp_path: Path) -> None:
    turns = script(
        root=[calls(call("call_clerk", message="a"), **USED), {"text": "Done.", **USED}],
        clerk=[{"text": "Well.", **USED}],
    )
    async with open_team(tmp_path, turns, llm("root", links=["clerk"]), llm("clerk")) as harness:
        origin = await harness.start("root")
        log = await harness.log(origin)
        fork = await harness.fork(origin, having(log, "sub_agent_completed")[0].sequence - 1)
        tree = await harness.tree(await harness.log(fork))
        used = await own_usage(harness, fork.run_id)
    own = tree.tree_usage.cost_nanos - tree.inherited_usage.cost_nanos
    assert 0 < own < tree.tree_usage.cost_nanos
    assert sum(usage.cost_nanos for usage in used.values()) == own


async def test_impossible_usage_is_bounded_and_logged(tmp_path: Path) -> None:
    usage = {"input_tokens": 10**18, "output_tokens": 0}
    with capture_logs() as logged:
        async with open_team(tmp_path, script(p=[{"text": "Hm.", "usage": usage}]), llm("p")) as harness:
            log = await harness.turn("p")
            (line,) = await harness.store.usage.list_for_run(log[0].run_id)
    assert (line.usage.input_tokens, line.usage.output_tokens) == (MAX_TOKENS, 0)
    assert line.charge.nanos == line.usage.cost_nanos == MAX_TOKENS * 1_000
    (warned,) = [entry for entry in logged if "impossible" in entry["event"]]
    assert (warned["model"], warned["input_tokens"]) == ("default", 10**18)
    below = usage_pb2.Usage(input_tokens=-1, output_tokens=7)
    assert bound_tokens(below) == {"input_tokens": -1}
    assert below == usage_pb2.Usage(input_tokens=0, output_tokens=7)
