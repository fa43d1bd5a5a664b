"""Metrics of runs: what happens in this process is counted once, whichever process continues or forks a run."""

import asyncio
from pathlib import Path

import pytest

from bough import approve
from bough.v1 import agent_pb2, policy_pb2
from bough_server.tools.tool import tool
from tests.support.log_readings import answer_of, having
from tests.support.metric_values import Counted
from tests.support.run_harness import ME
from tests.support.teams import call, calls, llm, open_team, script

USED = {"usage": {"input_tokens": 7, "output_tokens": 3}}
"""13,000 nanos at the scripted models' price."""


@tool
def look(what: str = "") -> str:
    """Looks."""
    if what == "nothing":
        raise ValueError("there is nothing")
    return "seen"


LOST = {"reason": "TRANSPORT", "after_chunks": 1, "times": 1, "usage": {"input_tokens": 2, "output_tokens": 0}}
TURNS = script(
    p=[
        calls(call("call_c", message="go"), call("look", what="nothing"), call("stranger"), **USED),
        {"text": "All done.", "error": LOST, **USED},
    ],
    c=[calls(call("look"), **USED), {"text": "c answers", **USED}],
)
TEAM = (llm("p", links=["c"], tools=["look"]), llm("c", tools=["look"]))


def check_whole(*parts: Counted) -> None:
    """What processes counted together of one run of the team."""

    def of(name: str, *by: str, times: bool = False) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for part in parts:
            for key, value in (part.times if times else part.of)(name, *by).items():
                found[key] = found.get(key, 0) + value
        return found

    assert of("bough.agent.invocations", "agent", "kind", "state", "end_reason") == {
        ("p", "llm", "succeeded", "answered"): 1,
        ("c", "llm", "succeeded", "answered"): 1,
    }
    assert of("bough.agent.duration", "agent", times=True) == {("p",): 1, ("c",): 1}
    assert of("bough.agent.cost", "agent") == {("p",): 28_000, ("c",): 26_000}
    assert of("gen_ai.client.inference.usage.input_tokens", "gen_ai.agent.name") == {("p",): 16, ("c",): 14}
    assert of("gen_ai.client.inference.usage.output_tokens", "gen_ai.agent.name") == {("p",): 6, ("c",): 6}
    assert of("gen_ai.client.inference.duration", "gen_ai.agent.name", times=True) == {("p",): 2, ("c",): 2}
    assert of("bough.tool.duration", "tool", "outcome", "error.type", times=True) == {
        ("look", "succeeded", ""): 1,
        ("look", "failed", "TOOL_FAILED"): 1,
    }
    assert of("bough.run.duration", "agent", "state", times=True) == {("p", "succeeded"): 1}
    assert of("bough.runs.active") == {(): 0}


async def test_a_run_is_counted_agent_by_agent(tmp_path: Path) -> None:
    counted = Counted()
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], metrics=counted.metrics) as harness:
        log = await harness.turn("p")
    assert answer_of(log) == "All done."
    check_whole(counted)


async def test_a_recovery_counts_only_what_it_adds(tmp_path: Path) -> None:
    """The server dies while c's second answer streams: the run is whole in what both have counted."""
    before, after = Counted(), Counted()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if (agent, turn, chunk) == ("c", 1, 1):
            await asyncio.Event().wait()

    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], gate=gate, metrics=before.metrics) as harness:
        run = await harness.start("p")
        seen = set[str]()
        async for event in harness.follow(run):
            seen |= {str(event.WhichOneof("payload"))} if event.agent == "p" else set()
            if event.agent == "c" and event.HasField("llm_output_text_delta") and "tool_failed" in seen:
                break
        await harness.crash()
    assert before.of("bough.agent.invocations") == {}
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], metrics=after.metrics) as harness:
        await harness.runs.recover()
        assert answer_of(await harness.log(run)) == "All done."
        await harness.until_over(run)
    check_whole(before, after)


@pytest.mark.parametrize("cause", ["lost", "released"])
async def test_a_run_of_an_earlier_server_is_counted_by_how_that_left_it(tmp_path: Path, cause: str) -> None:
    counted, began = Counted(), asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        began.set()
        await asyncio.Event().wait()

    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], gate=gate) as harness:
        await harness.runs.recover()
        run = await harness.start("p")
        await began.wait()
        if cause == "lost":
            await harness.crash()
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], metrics=counted.metrics) as harness:
        await harness.runs.recover()
        assert answer_of(await harness.log(run)) == "All done."
    assert counted.of("bough.run.takeovers", "cause") == {(cause,): 1}


async def test_a_server_that_was_taken_for_lost_counts_it(tmp_path: Path) -> None:
    counted = Counted()
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], metrics=counted.metrics) as harness:
        await harness.runs.worker.replace_lease()
    assert counted.of("bough.leases.lost") == {(): 1}


async def test_a_fork_counts_nothing_of_its_origin(tmp_path: Path) -> None:
    counted = Counted()
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look]) as harness:
        origin = await harness.start("p")
        log = await harness.log(origin)
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], metrics=counted.metrics) as harness:
        fork = await harness.fork(origin, having(log, "step_completed")[-2].sequence)
        assert answer_of(await harness.log(fork)) == "All done."
    assert counted.of("bough.agent.invocations", "agent") == {("p",): 1}
    assert counted.times("bough.tool.duration", "tool") == {}
    assert counted.times("gen_ai.client.inference.duration", "gen_ai.agent.name") == {("p",): 1}


async def test_a_refused_call_is_no_model_call_and_its_agent_ends_by_its_limit(tmp_path: Path) -> None:
    counted = Counted()
    async with open_team(tmp_path, TURNS, *TEAM, tools=[look], metrics=counted.metrics) as harness:
        await harness.turn("p", policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(model_calls=0)))
    assert counted.of("bough.agent.invocations", "agent", "state", "end_reason") == {("p", "failed", "limit"): 1}
    assert counted.times("gen_ai.client.inference.duration") == {}


async def test_a_run_that_waits_is_not_active_and_its_cancel_is_counted(tmp_path: Path) -> None:
    counted = Counted()

    @tool(approval=True)
    def pay() -> str:
        """Pays."""
        return "paid"

    turns = script(p=[calls(call("pay"), **USED), {"text": "Done.", **USED}])
    link = agent_pb2.ToolLink(name="pay")
    async with open_team(tmp_path, turns, llm("p", tools=[link]), tools=[pay], metrics=counted.metrics) as harness:
        answered, left = await harness.start("p"), await harness.start("p")
        asked = [await harness.until_interrupted(run) for run in (answered, left)]
        for run in (answered, left):
            await harness.until_over(run)
        assert counted.of("bough.runs.active") == {(): 0}
        await harness.resume(answered, approve(asked[0][-1].run_interrupted.requests[0]))
        await harness.log(answered)
        await harness.runs.cancel(ME, left.run_id)
        await harness.log(left)
    assert counted.of("bough.agent.invocations", "agent", "state", "end_reason") == {
        ("p", "succeeded", "answered"): 1,
        ("p", "cancelled", "cancelled"): 1,
    }
    assert counted.times("bough.run.duration", "state") == {("succeeded",): 1, ("cancelled",): 1}
    assert counted.times("bough.tool.duration", "tool", "outcome") == {("pay", "succeeded"): 1}
