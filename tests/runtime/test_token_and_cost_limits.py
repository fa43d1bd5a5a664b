"""Bounds of tokens and cost: of a whole subtree, reserved before a call goes out, then what was reported."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, model_pb2, policy_pb2
from bough_server.tools.tool import tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.teams import call, calls, llm, open_team, script

EXCEEDED = error_pb2.ERROR_REASON_LIMIT_EXCEEDED
PLENTY = 10**9
USED = {"usage": {"input_tokens": 1_000, "output_tokens": 500}}
"""1,500 tokens, and 2,000,000 nanos at the scripted models' price."""


def within(**limits: Any) -> policy_pb2.RunPolicy:
    return policy_pb2.RunPolicy(limits=policy_pb2.Limits(**limits))


def bounded(name: str, **limits: Any) -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=name, limits=policy_pb2.Limits(**limits))


def said(text: str) -> dict[str, object]:
    return {"text": text, **USED}


@tool
def look() -> str:
    """Looks."""
    return "seen"


ASK_TWICE = script(
    p=[calls(call("call_c", message="one"), **USED), calls(call("call_c", message="two"), **USED), said("Done.")],
    c=[calls(call("look"), **USED), said("c answers")],
)
TEAM = (llm("p", links=["c"]), llm("c", tools=["look"]))
"""Seven calls: p, c, c, p, c, c, p."""


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def refusals(log: Sequence[event_pb2.AgentEvent]) -> list[str]:
    errors = [event.llm_failed.error for event in having(log, "llm_failed")]
    return [error.message for error in errors if error.reason == EXCEEDED]


@pytest.mark.parametrize(
    ("bound", "of_a_call", "unit"), [("tokens", 1_500, "tokens"), ("cost_nanos", 2_000_000, "billionths of cost")]
)
@pytest.mark.parametrize("most", [0, 1, 2, 4, 6, 7])
async def test_what_calls_use_is_counted_over_the_whole_tree(
    tmp_path: Path, bound: str, of_a_call: int, unit: str, most: int
) -> None:
    """There is room for the estimate of one call more than were made, but for none after that."""
    limit = most * of_a_call - 1 if most else 0
    async with open_team(tmp_path, ASK_TWICE, *TEAM, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(**{bound: limit}))
        await check_replay(harness, log)
    assert len(having(log, "llm_started")) == most
    if most == 7:
        assert answer_of(log) == "Done."
        return
    assert (log[-1].run_failed.error.reason, log[-1].run_failed.end_reason) == (
        EXCEEDED,
        execution_pb2.END_REASON_LIMIT,
    )
    assert f"The limit of {limit} {unit} for the run is reached: " in refusals(log)[-1]
    assert all(not event.attempt for event in having(log, "llm_failed")), "a refused call is not sent"


async def test_a_bound_of_a_link_holds_for_each_call_and_nesting_resets_none(tmp_path: Path) -> None:
    team = (llm("p", links=[bounded("c", tokens=1_500)]), llm("c", tools=["look"]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tokens=PLENTY))
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert [event.agent for event in having(log, "llm_started")] == ["p", "c", "p", "c", "p"]
    failed = [event.sub_agent_failed for event in having(log, "sub_agent_failed")]
    assert [(end.error.reason, end.end_reason) for end in failed] == [(EXCEEDED, execution_pb2.END_REASON_LIMIT)] * 2
    assert ["for each call of the agent 'c'" in words for words in refusals(log)] == [True] * 2


async def test_a_link_cannot_give_more_than_the_run_has_left(tmp_path: Path) -> None:
    team = (llm("p", links=[bounded("c", tokens=PLENTY)]), llm("c", tools=["look"]))
    async with open_team(tmp_path, ASK_TWICE, *team, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tokens=2_999))
        await check_replay(harness, log)
    assert [event.agent for event in having(log, "llm_started")] == ["p", "c"]


async def _reserved(folder: Path, turns: str, *team: agent_pb2.AgentDefinition) -> list[int]:
    """What the calls of a run reserve, in order, where there is plenty."""
    async with open_team(folder, turns, *team, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tokens=PLENTY))
    return [event.llm_started.reserved_tokens for event in having(log, "llm_started")]


async def test_two_children_at_once_do_not_both_take_the_last_tokens(tmp_path: Path) -> None:
    """There is room for either of their calls, and one token too few for both: the first takes it, in both orders."""
    turns = script(
        p=[calls(call("call_b", message="go"), call("call_c", message="go"), **USED), said("never")],
        b=[{"text": "b", "usage": {"input_tokens": 1, "output_tokens": 1}}],
        c=[{"text": "c", "usage": {"input_tokens": 1, "output_tokens": 1}}],
    )
    team = (llm("p", links=["b", "c"]), llm("b"), llm("c"))
    _, *both, _ = await _reserved(made(tmp_path / "plenty"), turns, *team)
    began = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent != "p":
            began.set()
            await refused.wait()

    refused = asyncio.Event()
    async with open_team(tmp_path, turns, *team, gate=gate) as harness:
        run = await harness.start("p", policy=within(tokens=1_500 + sum(both) - 1))
        async for event in harness.follow(run):
            if event.HasField("llm_failed"):
                refused.set()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert [event.agent for event in having(log, "llm_started")] in (["p", "b"], ["p", "c"], ["p", "b", "p"])
    assert len(refusals(log)) >= 1
    assert len([result for result in results_of(log) if result.HasField("error")]) == 1


async def test_usage_that_is_not_reported_counts_as_it_was_reserved(tmp_path: Path) -> None:
    turns = script(p=[calls(call("look")), calls(call("look")), "Done."])
    reserved = await _reserved(made(tmp_path / "plenty"), turns, llm("p", tools=["look"]))
    for most in (1, 2, 3):
        async with open_team(made(tmp_path / str(most)), turns, llm("p", tools=["look"]), tools=[look]) as harness:
            log = await harness.turn("p", policy=within(tokens=sum(reserved[:most])))
            await check_replay(harness, log)
        assert len(having(log, "llm_started")) == most
        assert bool(refusals(log)) is (most < 3)


async def test_the_most_that_may_be_written_is_reserved_and_given_back(tmp_path: Path) -> None:
    settings = model_pb2.ModelSettings(max_output_tokens=5_000)
    p = llm("p", tools=["look"], settings=settings)
    turns = script(p=[calls(call("look"), **USED), said("Done.")])
    async with open_team(tmp_path, turns, p, tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tokens=6_700, cost_nanos=13_000_000))
        first, second = (event.llm_started for event in having(log, "llm_started"))
        refused = await harness.turn("p", policy=within(tokens=5_000))
    assert answer_of(log) == "Done."
    assert 5_000 < first.reserved_tokens < second.reserved_tokens < 5_200
    assert first.reserved_cost_nanos == 1_000 * (first.reserved_tokens + 5_000), "what is written costs twice as much"
    assert having(refused, "llm_started") == []


async def test_nothing_is_estimated_where_nothing_bounds_it(tmp_path: Path) -> None:
    async with open_team(tmp_path, ASK_TWICE, *TEAM, tools=[look]) as harness:
        log = await harness.turn("p")
    assert {event.llm_started.reserved_tokens for event in having(log, "llm_started")} == {0}


@pytest.mark.parametrize(("spare", "answers"), [(-1, 1), (0, 2)])
async def test_what_attempts_lost_counts_as_well(tmp_path: Path, spare: int, answers: int) -> None:
    lost = {"reason": "TRANSPORT", "after_chunks": 1, "times": 1, "usage": {"input_tokens": 100, "output_tokens": 0}}
    turns = script(p=[calls(call("look"), text="I look.", error=lost, **USED), said("Done.")])
    _, second = await _reserved(made(tmp_path / "plenty"), turns, llm("p", tools=["look"]))
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=[look]) as harness:
        log = await harness.turn("p", policy=within(tokens=1_600 + second + spare))
        await check_replay(harness, log)
    assert having(log, "llm_retrying")[0].llm_retrying.lost_usage.input_tokens == 100
    assert len(having(log, "llm_completed")) == answers


@pytest.mark.parametrize(("spare", "answer"), [(0, "Done."), (-1, "")])
async def test_a_call_that_was_open_at_a_crash_reserves_again_and_counts_once(
    tmp_path: Path, spare: int, answer: str
) -> None:
    async def gate(agent: str, turn: int, chunk: int) -> None:
        if chunk == 1:
            await asyncio.Event().wait()

    used = {"usage": {"input_tokens": 900, "output_tokens": 0}}
    turns = script(p=[calls(call("look"), text="I look.", **used), said("Done.")])
    p = llm("p", tools=["look"])
    _, second = await _reserved(made(tmp_path / "plenty"), turns, p)
    async with open_team(tmp_path, turns, p, tools=[look], gate=gate) as harness:
        run = await harness.start("p", policy=within(tokens=900 + second + spare))
        async for event in harness.follow(run):
            if event.HasField("llm_output_text_delta"):
                break
        await harness.crash()
    async with open_team(tmp_path, turns, p, tools=[look]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert [event.llm_retrying.reason for event in having(log, "llm_retrying")] == [event_pb2.RETRY_REASON_RECOVERED]
    assert answer_of(log) == answer


async def test_a_fork_counts_what_its_origin_used_before(tmp_path: Path) -> None:
    turns = script(p=[calls(call("look"), **USED), calls(call("look"), **USED), said("Done.")])
    async with open_team(tmp_path, turns, llm("p", tools=["look"]), tools=[look]) as harness:
        origin = await harness.start("p", policy=within(tokens=3_010))
        log = await harness.log(origin)
        ended = having(log, "step_completed")[0]
        fork = await harness.fork(origin, ended.sequence)
        again = await harness.log(fork)
        await check_replay(harness, again)
    assert len(having(log, "llm_completed")) == len(having(again, "llm_completed")) == 2
    assert refusals(log)
    assert text_of(log[-1].run_completed.final_answer) == ""
    assert refusals(again) == refusals(log)


async def _with_a_child_cut(folder: Path, limit: int, *, crashes: bool) -> list[event_pb2.AgentEvent]:
    """A run whose child's time is up while its model is asked; no usage is reported."""
    clock, is_held, is_asked = HeldClock(), crashes, asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "c":
            is_asked.set()
        if agent == "c" or (is_held and turn == 1):
            await asyncio.Event().wait()

    turns = script(p=[calls(call("call_c", message="go")), calls(call("look"), text="I look."), "Done."], c=["never"])
    link = agent_pb2.AgentLink(agent="c")
    link.limits.wall_duration.FromSeconds(5)
    team = (llm("p", links=[link], tools=["look"]), llm("c"))
    async with open_team(folder, turns, *team, tools=[look], gate=gate, clock=clock) as harness:
        run = await harness.start("p", policy=within(tokens=limit))
        await clock.next_sleep()
        await is_asked.wait()
        clock.advance(5)
        if not crashes:
            log = await harness.log(run)
            await check_replay(harness, log)
            return log
        async for event in harness.follow(run):
            if event.HasField("llm_started") and event.agent == "p" and event.step_index == 1:
                break
        await harness.crash()
    is_held = False
    async with open_team(folder, turns, *team, tools=[look], gate=gate, clock=clock) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
        return log


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize(("spare", "answer"), [(0, "Done."), (-1, "")])
async def test_a_call_of_a_child_that_was_cut_counts_for_its_caller_after_a_crash_too(
    tmp_path: Path, crashes: bool, spare: int, answer: str
) -> None:
    plenty = await _with_a_child_cut(made(tmp_path / "plenty"), PLENTY, crashes=False)
    reserved = sum(event.llm_started.reserved_tokens for event in having(plenty, "llm_started"))
    log = await _with_a_child_cut(made(tmp_path / "bounded"), reserved + spare, crashes=crashes)
    assert answer_of(log) == answer
