"""Children at once: who sees what, what a failure does to the others, and what is answered."""

import asyncio
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, execution_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.engine import keys
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context
from bough_server.tools.tool import tool
from tests.runtime.test_flows import BREAK, EXIT, FAILS, ends, heard_by, keys_of_children, paths
from tests.support.composite_agents import loop, parallel, sequence
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import call, calls, llm, open_team, script


def code(name: str, *parts: message_pb2.Part) -> FunctionAgent:
    """An agent in code that says so."""

    @agent(name=name, description="Says what it says.")
    async def says(ctx: Context, input: message_pb2.Message) -> message_pb2.Message:
        return message_pb2.Message(parts=parts)

    return says


async def test_lanes_see_what_was_before_them_and_their_own_and_afterwards_all_is_seen_in_their_order(
    tmp_path: Path,
) -> None:
    heard: list[ModelRequest] = []
    team = (
        sequence("s", "a", "p", "z"),
        parallel("p", "b", "c"),
        sequence("c", "c1", "q"),
        parallel("q", "d", "e"),
        *(llm(name) for name in ("a", "b", "c1", "d", "e", "z")),
    )
    turns = script(**{name: [f"From {name}"] for name in ("a", "b", "c1", "d", "e", "z")})
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        log = await harness.turn("s", "Go.")
        await check_replay(harness, log)

    def seen(*names: str) -> list[list[tuple[str, str]]]:
        return [[("USER", "Go."), *(("USER", f"For context: [{name}] said: From {name}.") for name in names)]]

    assert heard_by(heard, "b") == heard_by(heard, "c1") == seen("a")
    assert heard_by(heard, "d") == heard_by(heard, "e") == seen("a", "c1")
    assert heard_by(heard, "z") == seen("a", "b", "c1", "d", "e")
    assert sorted(paths(log)) == sorted(
        [
            ["s", "a"],
            ["s", "a", "p"],
            ["s", "a", "p", "b"],
            ["s", "a", "p", "c"],
            ["s", "a", "p", "c", "c1"],
            ["s", "a", "p", "c", "c1", "q"],
            ["s", "a", "p", "c", "c1", "q", "d"],
            ["s", "a", "p", "c", "c1", "q", "e"],
            ["s", "a", "p", "b", "c", "c1", "q", "d", "e", "z"],
        ]
    )


async def test_answers_of_parallel_agents_stand_in_the_order_of_the_list(tmp_path: Path) -> None:
    b_is_done = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "a":
            await b_is_done.wait()

    team = (parallel("p", "a", "b"), llm("a"), llm("b"))
    async with open_team(tmp_path, script(a=["From a."], b=["From b."]), *team, gate=gate) as harness:
        run = await harness.start("p")
        log = []
        async for event in harness.follow(run):
            log.append(event)
            if event.HasField("sub_agent_completed"):
                b_is_done.set()
        await check_replay(harness, log)
    assert [event.agent for event in having(log, "sub_agent_completed")] == ["b", "a"]
    assert answer_of(log) == "From a.\n\nFrom b."
    assert log[-1].run_completed.final_answer.author == "a, b"
    assert sorted(keys_of_children(log)) == ["g0", "g1"]


@pytest.mark.parametrize("size", [300, 255])
async def test_long_answers_of_lanes_are_parts_of_their_own_where_one_text_cannot_hold_them(
    tmp_path: Path, size: int
) -> None:
    said = [letter * size * 1024 for letter in "ab"]
    team = [code(name, message_pb2.Part(text=text)) for name, text in zip("ab", said, strict=True)]
    async with open_team(tmp_path, script(), parallel("p", "a", "b"), code_agents=team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    parts = [part.text for part in log[-1].run_completed.final_answer.parts]
    assert parts == (said if size == 300 else ["\n\n".join(said)])


@pytest.mark.parametrize(
    ("answers", "kept"),
    [
        (['{"n":1.50}', "[2]", "3"], '[{"n":1.50},[2],3]'),
        (['{"n":1.50}', None, "3"], '[{"n":1.50},3]'),
        (['{"n":1.50}'], '{"n":1.50}'),
    ],
)
async def test_answers_of_lanes_that_are_json_are_kept_as_a_list_of_them(
    tmp_path: Path, answers: list[str | None], kept: str
) -> None:
    names = "abc"[: len(answers)]
    team = [
        code(name, *([] if answer is None else [message_pb2.Part(data_json=answer)]))
        for name, answer in zip(names, answers, strict=True)
    ]
    lead = parallel("p", *names)
    lead.output_key = "all"
    async with open_team(tmp_path, script(), lead, code_agents=team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    [change] = having(log, "session_state_changed")[0].session_state_changed.state_changes
    assert (change.key, change.value_json) == ("all", kept)


async def test_no_more_lanes_run_at_once_than_allowed(tmp_path: Path) -> None:
    team = (parallel("p", "a", "b", "c", max_concurrency=1), *(llm(name) for name in "abc"))
    async with open_team(tmp_path, script(a=["a"], b=["b"], c=["c"]), *team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    edges = [event for event in log if event.HasField("sub_agent_started") or event.HasField("sub_agent_completed")]
    assert [event.agent for event in edges] == ["a", "a", "b", "b", "c", "c"]


async def test_a_failure_waits_for_the_other_lanes_and_then_fails_their_caller(tmp_path: Path) -> None:
    team = (parallel("p", "a", "b"), llm("a"), llm("b"))
    async with open_team(tmp_path, script(a=[FAILS], b=["From b."]), *team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("p", "FAILED"), ("a", "FAILED"), ("b", "ANSWERED")]


async def test_a_link_may_let_lanes_do_without_its_agent(tmp_path: Path) -> None:
    optional = agent_pb2.AgentLink(agent="a", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE)
    team = (parallel("p", optional, "b", fails_fast=True), llm("a"), llm("b"))
    async with open_team(tmp_path, script(a=[FAILS], b=["From b."]), *team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("p", "ANSWERED"), ("a", "FAILED"), ("b", "ANSWERED")]
    assert answer_of(log) == "From b."


@pytest.mark.parametrize("abort", [False, True])
async def test_a_failure_that_is_not_waited_with_ends_the_other_lanes(tmp_path: Path, abort: bool) -> None:
    waiting = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "b":
            waiting.set()
            await asyncio.Event().wait()
        await waiting.wait()

    policy = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT) if abort else None
    team = (parallel("p", "a", "b", "c", fails_fast=not abort, max_concurrency=2), *(llm(name) for name in "abc"))
    async with open_team(tmp_path, script(a=[FAILS], b=["b"], c=["c"]), *team, gate=gate) as harness:
        log = await harness.turn("p", policy=policy)
        await check_replay(harness, log)
        assert await ends(harness, log) == [("p", "FAILED"), ("a", "FAILED"), ("b", "CANCELLED")]
    (wish,) = having(log, "cancel_requested")
    reason = execution_pb2.CANCEL_REASON_ABORT if abort else execution_pb2.CANCEL_REASON_FAIL_FAST
    assert (wish.cancel_requested.effect_scope, wish.cancel_requested.reason) == ("g1", reason)


async def test_an_exit_in_a_lane_ends_what_is_above_when_the_others_have_ended(tmp_path: Path) -> None:
    team = (
        sequence("s", "p", "z"),
        parallel("p", "a", "b"),
        llm("a"),
        llm("b", tools=["exit"]),
        llm("z"),
    )
    async with open_team(tmp_path, script(a=["From a."], b=[EXIT]), *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "EXITED"), ("p", "EXITED"), ("a", "ANSWERED"), ("b", "EXITED")]
    assert answer_of(log) == "It is over."


async def test_a_break_in_a_lane_ends_the_loop_around(tmp_path: Path) -> None:
    team = (loop("l", "p", rounds=9), parallel("p", "a", "b"), llm("a"), llm("b", tools=["break_loop"]))
    async with open_team(tmp_path, script(a=["From a."], b=[BREAK]), *team) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
        assert await ends(harness, log) == [
            ("l", "BROKE_LOOP"),
            ("p", "BROKE_LOOP"),
            ("a", "ANSWERED"),
            ("b", "BROKE_LOOP"),
        ]
    assert answer_of(log) == "From a."


async def test_two_lanes_of_four_ask_while_the_others_finish_and_only_those_two_go_on(tmp_path: Path) -> None:
    @tool(approval=True)
    def pay(sum: int) -> str:
        """Pays."""
        return f"paid {sum}"

    asking = [calls(call("pay", sum=1)), "Paid."]
    turns = script(a=asking, b=["From b."], c=asking, d=["From d."])
    team = (parallel("p", *"abcd"), *(llm(name, tools=["pay"]) for name in "ac"), *(llm(name) for name in "bd"))
    async with open_team(tmp_path, turns, *team, tools=[pay]) as harness:
        run = await harness.start("p")
        begun = await harness.until_interrupted(run)
        (interrupted,) = having(begun, "run_interrupted")
        asked = interrupted.run_interrupted.requests
        assert sorted(keys.owner(event.effect_key) for event in having(begun, "input_requested")) == [
            "g0/s0.t0",
            "g2/s0.t0",
        ]
        assert sorted(event.agent for event in having(begun, "sub_agent_completed")) == ["b", "d"]
        yes = [
            input_pb2.InputAnswer(input_id=one.input_id, approval=input_pb2.ApprovalDecision(approved=True))
            for one in asked
        ]
        await harness.resume(run, *yes)
        log = await harness.log(run)
        await check_replay(harness, log)
    assert {event.agent for event in log[len(begun) :] if event.HasField("llm_started")} == {"a", "c"}
    assert answer_of(log) == "Paid.\n\nFrom b.\n\nPaid.\n\nFrom d."
