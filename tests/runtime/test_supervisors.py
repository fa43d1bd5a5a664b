"""Supervisors: members come back by ending, what each is shown, and what ends the whole."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.models.model import ModelRequest
from tests.runtime.test_flows import EXIT, FAILS, ends, heard_by, keys_of_children, paths
from tests.runtime.test_transfers import transfer
from tests.support.composite_agents import supervisor
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import call, calls, llm, open_team, script


def shown_to(heard: list[ModelRequest], agent: str) -> list[list[str]]:
    """What the model of an agent was shown, request by request: roles with texts, calls and results."""
    return [[_line(message) for message in request.messages] for request in heard if request.agent == agent]


def _line(message: message_pb2.Message) -> str:
    said = "".join(part.text for part in message.parts)
    said += "".join(f"calls {part.tool_call.name}" for part in message.parts if part.HasField("tool_call"))
    for part in message.parts:
        said += "".join(result.text for result in part.tool_result.parts)
    return f"{message_pb2.Role.Name(message.role).removeprefix('ROLE_')}: {said}"


@pytest.mark.parametrize("skips", [False, True])
async def test_a_supervisor_goes_on_after_a_member_and_is_shown_what_it_said(tmp_path: Path, skips: bool) -> None:
    heard: list[ModelRequest] = []
    turns = script(s=[calls(transfer("a"), text="To a."), "Done."], a=["r"])
    team = (supervisor("s", "a", skip_transfer_messages=skips), llm("a"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "ANSWERED"), ("a", "ANSWERED")]
    own = ["ASSISTANT: To a."] if skips else ["ASSISTANT: To a.calls transfer_to_agent", "TOOL: Transferred to a."]
    assert shown_to(heard, "s")[1] == ["USER: u", *own, "USER: For context: [a] said: r."]
    assert shown_to(heard, "a") == [["USER: u", "USER: For context: [s] said: To a.."]]
    assert keys_of_children(log) == ["h0"]
    assert [request.tools for request in heard if request.agent == "a"] == [[]]
    assert answer_of(log) == "Done."


async def test_a_member_of_a_supervisor_that_says_nothing_beside_the_call_sees_only_the_user(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(s=[calls(transfer("a")), "Done."], a=["r"])
    async with open_team(tmp_path, turns, supervisor("s", "a"), llm("a"), heard=heard) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
    assert heard_by(heard, "a") == [[("USER", "u")]]


async def test_members_are_numbered_and_seen_on_the_path(tmp_path: Path) -> None:
    turns = script(s=[calls(transfer("a")), calls(transfer("b")), "Done."], a=["From a."], b=["From b."])
    async with open_team(tmp_path, turns, supervisor("s", "a", "b"), llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert keys_of_children(log) == ["h0", "h1"]
    assert paths(log) == [["s", "a"], ["s", "a", "b"]]
    assert [event.agent_transferred.to_agent for event in having(log, "agent_transferred")] == ["a", "b"]
    assert {event.sub_agent_started.trigger for event in having(log, "sub_agent_started")} == {
        execution_pb2.INVOCATION_TRIGGER_TRANSFER
    }


async def test_the_exit_of_a_member_ends_a_supervisor_and_the_one_above_it(tmp_path: Path) -> None:
    turns = script(s=[calls(transfer("t"))], t=[calls(transfer("a"))], a=[EXIT])
    team = (supervisor("s", "t"), supervisor("t", "a"), llm("a", tools=["exit"]))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "EXITED"), ("t", "EXITED"), ("a", "EXITED")]
    assert answer_of(log) == "It is over."


async def test_a_supervisor_is_told_of_a_member_that_failed_and_goes_on(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(s=[calls(transfer("a")), "Without a."], a=[FAILS])
    async with open_team(tmp_path, turns, supervisor("s", "a"), llm("a"), heard=heard) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "ANSWERED"), ("a", "FAILED")]
    assert shown_to(heard, "s")[1][-1] == (
        "USER: For context: [a] failed: The model 'default' failed: It fails by its script."
    )


async def test_a_member_may_be_linked_as_a_tool(tmp_path: Path) -> None:
    tool = agent_pb2.AgentLink(agent="b", link_mode=agent_pb2.LINK_MODE_TOOL)
    turns = script(s=[calls(call("call_b", message="go")), calls(transfer("a")), "Done."], a=["a"], b=["b"])
    async with open_team(tmp_path, turns, supervisor("s", "a", tool), llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert keys_of_children(log) == ["s0.t0", "h0"]


async def test_handing_over_to_members_counts_as_handoffs(tmp_path: Path) -> None:
    turns = script(s=[calls(transfer("a"))] * 5, a=["a"])
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(transfers=2))
    async with open_team(tmp_path, turns, supervisor("s", "a"), llm("a")) as harness:
        log = await harness.turn("s", policy=policy)
        await check_replay(harness, log)
    assert len(having(log, "agent_transferred")) == 2
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
