"""Limits: of the whole tree, of a definition, of a link; nesting resets none, and time is one of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest
from bough_server.runs.admission import RunDefaults
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of
from tests.support.run_harness import names
from tests.support.teams import call, calls, llm, open_team, script

EXCEEDED = error_pb2.ERROR_REASON_LIMIT_EXCEEDED


def within(**limits: Any) -> policy_pb2.RunPolicy:
    return policy_pb2.RunPolicy(limits=policy_pb2.Limits(**limits))


def bounded(name: str, **limits: Any) -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=name, limits=policy_pb2.Limits(**limits))


def lasting(name: str, seconds: int) -> agent_pb2.AgentLink:
    link = agent_pb2.AgentLink(agent=name)
    link.limits.wall_duration.FromSeconds(seconds)
    return link


@tool
def look() -> str:
    """Looks."""
    return "seen"


ASK_TWICE = script(
    p=[calls(call("call_c", message="one")), calls(call("call_c", message="two")), "Done."],
    c=[calls(call("look")), "c answers"],
)


@pytest.mark.parametrize(("most", "answer"), [(7, "Done."), (6, ""), (5, ""), (3, ""), (1, "")])
async def test_model_calls_are_counted_over_the_whole_tree(tmp_path: Path, most: int, answer: str) -> None:
    team = (llm("p", links=["c"]), llm("c", tools=["look"]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(model_calls=most))
        await check_replay(harness, log)
    assert answer_of(log) == answer
    assert len(having(log, "llm_started")) == most
    if not answer:
        assert log[-1].run_failed.error.reason == EXCEEDED
        assert log[-1].run_failed.end_reason == execution_pb2.END_REASON_LIMIT
        assert having(log, "llm_failed")[-1].llm_failed.error.reason == EXCEEDED


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4])
async def test_tool_calls_are_counted_over_the_whole_tree_and_a_refused_one_is_a_result(
    tmp_path: Path, most: int
) -> None:
    team = (llm("p", links=["c"]), llm("c", tools=["look"]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tool_calls=most))
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert len(having(log, "tool_started")) == most == log[-1].run_completed.tree_usage.tool_calls
    refused = [result.error.reason for result in results_of(log) if result.HasField("error")]
    assert set(refused) <= {EXCEEDED}
    assert bool(refused) is (most < 4)


async def test_a_limit_of_tool_calls_holds_for_calls_at_once(tmp_path: Path) -> None:
    turns = script(p=[calls(*[call("look")] * 10), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tool_calls=4))
        await check_replay(harness, log)
    assert len(having(log, "tool_started")) == 4
    assert [result.error.reason for result in results_of(log) if result.HasField("error")] == [EXCEEDED] * 6


@pytest.mark.parametrize(("depth", "deepest"), [(0, 0), (1, 1), (2, 2), (9, 2)])
async def test_depth_is_bounded_and_a_refused_child_never_starts(tmp_path: Path, depth: int, deepest: int) -> None:
    turns = script(a=[calls(call("call_b", message="b")), "a"], b=[calls(call("call_c", message="c")), "b"], c=["c"])
    async with open_team(tmp_path, turns, llm("a", links=["b"]), llm("b", links=["c"]), llm("c")) as harness:
        log = await harness.turn("a", policy=within(depth=depth))
        await check_replay(harness, log)
    assert max(event.depth for event in log) == deepest
    assert [result.error.reason for result in results_of(log) if result.HasField("error")] == [EXCEEDED] * (depth < 2)
    assert answer_of(log) == "a"


async def test_limits_of_a_link_and_of_a_definition_hold_for_each_call_and_only_lower(tmp_path: Path) -> None:
    """Each call of c may ask its model twice by its link; its definition's 9 and the run's 500 do not raise that."""
    many = script(
        p=[calls(call("call_c", message="one")), calls(call("call_c", message="two")), "Done."],
        c=[calls(call("look")), calls(call("look")), "too late"],
    )
    c = llm("c", tools=["look"])
    c.limits.model_calls = 9
    async with open_team(tmp_path, many, llm("p", links=[bounded("c", model_calls=2)]), c, tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert [event.agent for event in having(log, "llm_started")] == ["p", "c", "c", "p", "c", "c", "p"]
    failed = [event.sub_agent_failed for event in having(log, "sub_agent_failed")]
    assert [(end.error.reason, end.end_reason) for end in failed] == [(EXCEEDED, execution_pb2.END_REASON_LIMIT)] * 2


async def test_a_link_cannot_give_more_than_the_run_has_left(tmp_path: Path) -> None:
    team = (llm("p", links=[bounded("c", model_calls=100)]), llm("c", tools=["look"]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(model_calls=2))
        await check_replay(harness, log)
    assert len(having(log, "llm_started")) == 2
    assert log[-1].run_failed.error.reason == EXCEEDED


async def test_the_servers_maximum_wins_over_the_request(tmp_path: Path) -> None:
    defaults = RunDefaults(maximum=policy_pb2.Limits(model_calls=2))
    team = (llm("p", links=["c"]), llm("c", tools=["look"]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look], defaults=defaults) as harness:
        log = await harness.turn("p", policy=within(model_calls=100))
    assert log[0].run_started.policy.limits.model_calls == 2
    assert len(having(log, "llm_started")) == 2


async def test_a_tool_is_called_so_often_in_a_run_at_once_or_not_and_then_is_not_offered(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(p=[calls(*[call("look")] * 3), calls(call("look")), "Done."])
    link = agent_pb2.ToolLink(name="look", max_calls_per_run=2)
    async with open_team(tmp_path, turns, llm("p", tools=[link]), tools=[look], heard=heard) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert len(having(log, "tool_started")) == 2
    assert [result.error.reason for result in results_of(log)].count(EXCEEDED) == 2
    assert [list(event.llm_started.tool_names) for event in having(log, "llm_started")] == [["look"], [], []]
    assert [[tool.name for tool in request.tools] for request in heard] == [["look"], [], []]


async def test_a_tools_calls_are_counted_over_all_invocations_of_an_agent_in_the_run(tmp_path: Path) -> None:
    link = agent_pb2.ToolLink(name="look", max_calls_per_run=1)
    team = (llm("p", links=["c"]), llm("c", tools=[link]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    offered = [list(event.llm_started.tool_names) for event in having(log, "llm_started") if event.agent == "c"]
    assert offered == [["look"], [], [], []]
    assert [event.agent for event in having(log, "tool_started")].count("c") == 1


async def forever(agent: str, turn: int, chunk: int) -> None:
    if agent == "c":
        await asyncio.Event().wait()


CHILD_THAT_HANGS = script(p=[calls(call("call_c", message="go")), "Going on."], c=["never"])


async def test_a_child_whose_time_is_up_is_a_failed_result_and_its_caller_goes_on(tmp_path: Path) -> None:
    clock = HeldClock()
    team = (llm("p", links=[lasting("c", 5)]), llm("c"))
    async with open_team(tmp_path, CHILD_THAT_HANGS, *team, gate=forever, clock=clock) as harness:
        run = await harness.start("p")
        assert await clock.next_sleep() == 5
        clock.advance(5)
        log = await harness.log(run)
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert names(log)[4:] == [
        "p: tool.started",
        "c: sub_agent.started",
        "c: llm.started",
        "p: control.cancel_requested",
        "c: llm.failed",
        "c: step.failed",
        "c: sub_agent.failed",
        "p: tool.failed",
        "p: step.completed",
        "p: llm.started",
        *["p: llm.output_text.delta"] * 2,
        "p: llm.completed",
        "p: step.completed",
        "p: run.completed",
    ]
    child = having(log, "sub_agent_failed")[0].sub_agent_failed
    assert (child.error.reason, child.end_reason) == (EXCEEDED, execution_pb2.END_REASON_LIMIT)
    (result,) = results_of(log)
    assert result.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED
    assert result.child_invocation_id == child.error.invocation_id
    step = having(log, "step_completed")[0].step_completed.step
    assert [one.error.reason for one in step.tool_results] == [error_pb2.ERROR_REASON_SUB_AGENT_FAILED]
    assert [one.state for one in tree.agents] == [
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
        execution_pb2.EXECUTION_STATE_FAILED,
    ]


async def test_a_child_whose_time_is_up_aborts_where_its_failure_does(tmp_path: Path) -> None:
    clock = HeldClock()
    link = lasting("c", 5)
    link.on_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT
    async with open_team(
        tmp_path, CHILD_THAT_HANGS, llm("p", links=[link]), llm("c"), gate=forever, clock=clock
    ) as harness:
        run = await harness.start("p")
        await clock.next_sleep()
        clock.advance(5)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


async def test_code_goes_on_after_a_child_whose_time_is_up(tmp_path: Path) -> None:
    clock = HeldClock()

    @agent(description="Calls.", agents=[lasting("c", 5)])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        try:
            await ctx.dispatch("c", "go")
        except RunError as error:
            return f"went on: {error.message}"
        return "never"

    async with open_team(
        tmp_path, CHILD_THAT_HANGS, llm("c"), gate=forever, clock=clock, code_agents=[caller]
    ) as harness:
        run = await harness.start("caller")
        await clock.next_sleep()
        clock.advance(5)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "went on: The agent 'c' failed: The agent 'c' took longer than its wall_duration."


async def test_a_child_that_ends_in_time_leaves_no_timer(tmp_path: Path) -> None:
    clock = HeldClock()
    team = (llm("p", links=[lasting("c", 5)]), llm("c"))
    async with open_team(tmp_path, CHILD_THAT_HANGS, *team, clock=clock) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert answer_of(log) == "Going on."
    assert having(log, "cancel_requested") == []


@pytest.mark.parametrize("owner", ["request", "definition", "server"])
async def test_a_run_whose_time_is_up_fails_with_its_children_cancelled(tmp_path: Path, owner: str) -> None:
    p = llm("p", links=["c"])
    policy, defaults = policy_pb2.RunPolicy(), RunDefaults()
    limits = {"request": policy.limits, "definition": p.limits, "server": defaults.maximum}[owner]
    limits.wall_duration.FromMilliseconds(30)
    async with open_team(tmp_path, CHILD_THAT_HANGS, p, llm("c"), gate=forever, defaults=defaults) as harness:
        log = await harness.turn("p", policy=policy)
        await check_replay(harness, log)
    end = log[-1].run_failed
    assert (end.error.reason, end.end_reason) == (EXCEEDED, execution_pb2.END_REASON_LIMIT)
    bounded = "The agent 'p'" if owner == "definition" else "The run"
    assert end.error.message == f"{bounded} took longer than its wall_duration."
    assert having(log, "cancel_requested")[0].cancel_requested.reason == execution_pb2.CANCEL_REASON_LIMIT
    children = [event.sub_agent_failed.error.reason for event in having(log, "sub_agent_failed")]
    assert children in ([], [error_pb2.ERROR_REASON_CANCELLED])
