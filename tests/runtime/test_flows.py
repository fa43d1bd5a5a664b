"""Sequences and loops: order, what each child sees, who has spoken, and what ends them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from bough.v1 import action_pb2, agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import tool
from tests.support.composite_agents import loop, sequence
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import RunHarness, names
from tests.support.teams import call, calls, llm, open_team, script

CONTINUE = policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE
FAILS = {"text": "Half", "error": {"reason": "UNAVAILABLE", "after_chunks": 1}}
EXIT = calls(call("exit", final_answer="It is over."))
BREAK = calls(call("break_loop"))


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


def heard_by(heard: Sequence[ModelRequest], agent: str) -> list[list[tuple[str, str]]]:
    """What the model of an agent was shown, request by request: roles and texts."""
    return [
        [(message_pb2.Role.Name(one.role).removeprefix("ROLE_"), text_of(one)) for one in request.messages]
        for request in heard
        if request.agent == agent
    ]


def paths(log: Sequence[event_pb2.AgentEvent]) -> list[list[str]]:
    return [list(event.sub_agent_started.run_path) for event in having(log, "sub_agent_started")]


def keys_of_children(log: Sequence[event_pb2.AgentEvent]) -> list[str]:
    return [event.effect_key for event in having(log, "sub_agent_started")]


async def ends(harness: RunHarness, log: Sequence[event_pb2.AgentEvent]) -> list[tuple[str, str]]:
    """Everybody with why it ended, in preorder."""
    tree = await harness.tree(log)
    return [(one.name, execution_pb2.EndReason.Name(one.end_reason).removeprefix("END_REASON_")) for one in tree.agents]


async def test_a_sequence_runs_its_children_in_order_and_answers_with_the_last_answer(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(a=["From a."], b=["From b."])
    async with open_team(tmp_path, turns, sequence("s", "a", "b"), llm("a"), llm("b"), heard=heard) as harness:
        log = await harness.turn("s", "Go.")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "ANSWERED"), ("a", "ANSWERED"), ("b", "ANSWERED")]
        stored = await harness.messages(log[0].session_id)
    deltas = ["llm.output_text.delta"] * 2
    child = ["sub_agent.started", "llm.started", *deltas, "llm.completed", "step.completed"]
    assert names(log) == [
        "s: run.started",
        *(f"{name}: {event}" for name in ("a", "b") for event in [*child, "sub_agent.completed"]),
        "s: run.completed",
    ]
    assert answer_of(log) == "From b."
    assert paths(log) == [["s", "a"], ["s", "a", "b"]]
    assert keys_of_children(log) == ["c0", "c1"]
    assert {event.sub_agent_started.trigger for event in having(log, "sub_agent_started")} == {
        execution_pb2.INVOCATION_TRIGGER_WORKFLOW
    }
    assert heard_by(heard, "a") == [[("USER", "Go.")]]
    assert heard_by(heard, "b") == [[("USER", "Go."), ("USER", "For context: [a] said: From a..")]]
    assert [(one.message.kind, one.message.author, text_of(one.message)) for one in stored] == [
        (message_pb2.MESSAGE_KIND_USER, "user", "Go."),
        (message_pb2.MESSAGE_KIND_SUB_AGENT_ASSISTANT, "a", "From a."),
        (message_pb2.MESSAGE_KIND_SUB_AGENT_ASSISTANT, "b", "From b."),
        (message_pb2.MESSAGE_KIND_ASSISTANT, "b", "From b."),
    ]


async def test_what_a_sequence_hands_on_is_shown_once_in_the_next_turn(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(a=["From a."], b=["From b."])
    async with open_team(tmp_path, turns, sequence("s", "a", "b"), llm("a"), llm("b"), heard=heard) as harness:
        first = await harness.turn("s", "One.")
        heard.clear()
        log = await harness.turn("s", "Two.", session_id=first[0].session_id)
        await check_replay(harness, log)
    assert heard_by(heard, "a") == [
        [("USER", "One."), ("ASSISTANT", "From a."), ("USER", "For context: [b] said: From b.."), ("USER", "Two.")]
    ]


async def test_nested_sequences_are_nodes_and_say_nothing_twice(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    team = (sequence("s", "t", "c"), sequence("t", "a", "b"), *(llm(name) for name in "abc"))
    turns = script(a=["From a."], b=["From b."], c=["From c."])
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        log = await harness.turn("s", "Go.")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert [(one.depth, one.name) for one in tree.agents] == [(0, "s"), (1, "t"), (2, "a"), (2, "b"), (1, "c")]
    assert paths(log) == [["s", "t"], ["s", "t", "a"], ["s", "t", "a", "b"], ["s", "t", "a", "b", "c"]]
    assert heard_by(heard, "c") == [
        [
            ("USER", "Go."),
            ("USER", "For context: [a] said: From a.."),
            ("USER", "For context: [b] said: From b.."),
        ]
    ]


async def test_a_child_that_sees_no_history_is_told_what_its_sequence_was_told(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    blind = agent_pb2.AgentLink(agent="b", history=agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE))
    turns = script(a=["From a."], b=["From b."])
    async with open_team(tmp_path, turns, sequence("s", "a", blind), llm("a"), llm("b"), heard=heard) as harness:
        log = await harness.turn("s", "Go.")
        await check_replay(harness, log)
    assert heard_by(heard, "b") == [[("USER", "Go.")]]


async def test_an_exit_ends_a_sequence_with_its_result_and_no_later_agent_is_called(tmp_path: Path) -> None:
    team = (sequence("s", "t", "c"), sequence("t", "a", "b"), llm("a", tools=["exit"]), llm("b"), llm("c"))
    async with open_team(tmp_path, script(a=[EXIT]), *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "EXITED"), ("t", "EXITED"), ("a", "EXITED")]
    assert answer_of(log) == "It is over."
    assert len(having(log, "llm_started")) == 1
    ended = having(log, "tool_completed")[0].tool_completed
    final = message_pb2.Message(parts=[message_pb2.Part(text="It is over.")])
    exit_with_it = action_pb2.AgentAction(exit=action_pb2.ExitAction(final_answer=final))
    assert ended.action == exit_with_it
    assert [event.sub_agent_completed.action for event in having(log, "sub_agent_completed")] == [exit_with_it] * 2
    assert log[-1].run_completed.action == exit_with_it


async def test_an_exit_inside_an_agent_called_as_a_tool_ends_only_that_agent(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_s", message="go")), "p is done."], a=[EXIT])
    team = (llm("p", links=["s"]), sequence("s", "a", "b"), llm("a", tools=["exit"]), llm("b"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("p", "ANSWERED"), ("s", "EXITED"), ("a", "EXITED")]
    assert answer_of(log) == "p is done."
    result = having(log, "tool_completed")[-1].tool_completed
    assert text_of(result.result) == "It is over."
    assert not result.HasField("action")


async def test_a_failure_ends_a_sequence(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(a=[FAILS]), sequence("s", "a", "b"), llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "FAILED"), ("a", "FAILED")]
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


async def test_a_link_may_let_a_sequence_go_on_after_a_failure(tmp_path: Path) -> None:
    optional = agent_pb2.AgentLink(agent="a", on_failure=CONTINUE)
    turns = script(a=[FAILS], b=["From b."])
    async with open_team(tmp_path, turns, sequence("s", optional, "b"), llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "ANSWERED"), ("a", "FAILED"), ("b", "ANSWERED")]
    assert answer_of(log) == "From b."


async def test_a_run_that_aborts_on_failures_fails_with_a_child_of_a_sequence(tmp_path: Path) -> None:
    abort = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)
    async with open_team(tmp_path, script(a=[FAILS]), sequence("s", "a", "b"), llm("a"), llm("b")) as harness:
        log = await harness.turn("s", policy=abort)
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "FAILED"), ("a", "FAILED")]


async def test_a_loop_runs_its_rounds_and_says_that_they_are_used_up(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(a=["a 1", "a 2", "a 3"], b=["b 1", "b 2", "b 3"])
    async with open_team(tmp_path, turns, loop("l", "a", "b", rounds=3), llm("a"), llm("b"), heard=heard) as harness:
        log = await harness.turn("l", "Go.")
        await check_replay(harness, log)
        assert (await ends(harness, log))[0] == ("l", "ITERATIONS_EXHAUSTED")
    assert answer_of(log) == "b 3"
    assert [event.loop_iteration_started.iteration for event in having(log, "loop_iteration_started")] == [0, 1, 2]
    assert keys_of_children(log) == ["l0.c0", "l0.c1", "l1.c0", "l1.c1", "l2.c0", "l2.c1"]
    assert paths(log)[:4] == [["l", "a"], ["l", "a", "b"], ["l", "a", "b", "a"], ["l", "a", "b", "a", "b"]]
    assert heard_by(heard, "a")[1] == [
        ("USER", "Go."),
        ("ASSISTANT", "a 1"),
        ("USER", "For context: [b] said: b 1."),
    ]


async def test_a_loop_of_one_child_asks_it_to_go_on(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(a=["1", "2"]), loop("l", "a", rounds=2), llm("a"), heard=heard) as harness:
        log = await harness.turn("l", "Go.")
        await check_replay(harness, log)
    assert heard_by(heard, "a")[1] == [("USER", "Go."), ("ASSISTANT", "1"), ("USER", "Go on.")]
    assert answer_of(log) == "2"


async def test_a_break_of_the_first_child_ends_a_loop_in_its_first_round(tmp_path: Path) -> None:
    turns = script(a=[{**BREAK, "text": "Good enough."}])
    async with open_team(
        tmp_path, turns, loop("l", "a", "b", rounds=9), llm("a", tools=["break_loop"]), llm("b")
    ) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("l", "BROKE_LOOP"), ("a", "BROKE_LOOP")]
    assert answer_of(log) == "Good enough."
    assert not log[-1].run_completed.HasField("action")


async def test_who_breaks_a_loop_leaves_it_the_answer_before(tmp_path: Path) -> None:
    turns = script(writer=["Draft 1.", "Draft 2."], critic=["Shorter.", {**BREAK, "text": "Good."}])
    team = (loop("l", "writer", "critic", rounds=9), llm("writer"), llm("critic", tools=["break_loop"]))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
    assert answer_of(log) == "Draft 2."


async def test_a_break_ends_the_nearest_loop_through_a_sequence_and_not_the_one_around(tmp_path: Path) -> None:
    team = (
        loop("outer", "inner", rounds=2),
        loop("inner", "s", rounds=5),
        sequence("s", "a", "b"),
        llm("a", tools=["break_loop"]),
        llm("b"),
    )
    async with open_team(tmp_path, script(a=[BREAK, BREAK]), *team) as harness:
        log = await harness.turn("outer")
        await check_replay(harness, log)
        assert await ends(harness, log) == [
            ("outer", "ITERATIONS_EXHAUSTED"),
            *[("inner", "BROKE_LOOP"), ("s", "BROKE_LOOP"), ("a", "BROKE_LOOP")] * 2,
        ]


async def test_a_break_inside_an_agent_called_as_a_tool_does_not_end_a_loop(tmp_path: Path) -> None:
    asks = calls(call("call_c", message="go"))
    turns = script(a=[asks, "a goes on.", asks, "a goes on."], c=[BREAK])
    team = (loop("l", "a", rounds=2), llm("a", links=["c"]), llm("c", tools=["break_loop"]))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
        assert (await ends(harness, log))[0] == ("l", "ITERATIONS_EXHAUSTED")
    assert answer_of(log) == "a goes on."


async def test_a_failure_ends_a_loop_in_its_round(tmp_path: Path) -> None:
    turns = script(a=["1", "2", FAILS])
    async with open_team(tmp_path, turns, loop("l", "a", rounds=10), llm("a")) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
        assert (await ends(harness, log))[0] == ("l", "FAILED")
    assert len(having(log, "loop_iteration_started")) == 3


async def test_children_of_a_sequence_inherit_its_callers_tools_and_model(tmp_path: Path) -> None:
    turns = script(
        p=[calls(call("call_s", message="go")), "Done."], a=[calls(call("look", what="leaf")), "The leaf is red."]
    )
    team = (llm("p", links=["s"], tools=["look"], model="big"), sequence("s", "a"), llm("a", inherit_tools=True))
    async with open_team(tmp_path, turns, *team, tools=[look]) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert {event.agent: event.llm_started.model for event in having(log, "llm_started")} == {"p": "big", "a": "big"}
    assert text_of(having(log, "tool_completed")[0].tool_completed.result) == "leaf is red"


async def test_an_agent_after_a_child_that_ran_out_of_time_comes_after_those_that_spoke_in_it(tmp_path: Path) -> None:
    clock = HeldClock()
    short = agent_pb2.AgentLink(agent="inner", on_failure=CONTINUE)
    short.limits.wall_duration.FromSeconds(5)

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "b":
            await clock.next_sleep()
            clock.advance(5)
            await asyncio.Event().wait()

    team = (sequence("s", short, "c"), sequence("inner", "a", "b"), *(llm(name) for name in "abc"))
    turns = script(a=["From a."], b=["never"], c=["From c."])
    async with open_team(tmp_path, turns, *team, gate=gate, clock=clock) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert paths(log)[-1] == ["s", "inner", "a", "c"]
