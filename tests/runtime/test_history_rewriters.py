"""How agents are shown what others said and did: for context, word for word, or by a function of the operator's."""

from pathlib import Path

import pytest

from bough.v1 import agent_pb2, error_pb2, message_pb2
from bough_server.functions import rewriter
from bough_server.messages import text_of
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import tool
from tests.runtime.test_flows import heard_by, paths
from tests.runtime.test_supervisors import shown_to
from tests.runtime.test_transfers import transfer
from tests.support.composite_agents import parallel, sequence, supervisor
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.teams import call, calls, llm, open_team, script

OVER = agent_pb2.AgentLink(agent="reader", link_mode=agent_pb2.LINK_MODE_TRANSFER)


@tool
def tool1(arguments: str = "") -> str:
    """Gives the first result."""
    return "tool result 1"


@tool
def x() -> str:
    """Gives x."""
    return "1"


@tool
def y() -> str:
    """Gives y."""
    return "2"


async def test_a_call_and_its_result_are_two_messages_of_the_user_for_context(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(MyAgent=[calls(call("tool1", arguments="arguments1")), calls(transfer("reader"))], reader=["Read."])
    team = [llm("MyAgent", links=[OVER], tools=["tool1"]), llm("reader")]
    async with open_team(tmp_path, turns, *team, tools=[tool1], heard=heard) as harness:
        await check_replay(harness, await harness.turn("MyAgent", "user query"))
    assert heard_by(heard, "reader") == [
        [
            ("USER", "user query"),
            ("USER", 'For context: [MyAgent] called tool: `tool1` with arguments: {"arguments": "arguments1"}.'),
            ("USER", "For context: [MyAgent] `tool1` tool returned result: tool result 1."),
        ]
    ]


async def test_text_and_two_calls_in_one_message_are_one_message_for_context(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(A=[calls(call("x"), call("y"), text="hi"), calls(transfer("reader"))], reader=["Read."])
    team = [llm("A", links=[OVER], tools=["x", "y"]), llm("reader")]
    async with open_team(tmp_path, turns, *team, tools=[x, y], heard=heard) as harness:
        await check_replay(harness, await harness.turn("A", "u"))
    assert heard_by(heard, "reader") == [
        [
            ("USER", "u"),
            (
                "USER",
                "For context: [A] said: hi. [A] called tool: `x` with arguments: {}. "
                "[A] called tool: `y` with arguments: {}.",
            ),
            ("USER", "For context: [A] `x` tool returned result: 1."),
            ("USER", "For context: [A] `y` tool returned result: 2."),
        ]
    ]


@pytest.mark.parametrize("skips", [False, True])
async def test_a_supervisor_sees_its_own_call_in_its_role_and_its_member_sees_the_user_alone(
    tmp_path: Path, skips: bool
) -> None:
    heard: list[ModelRequest] = []
    turns = script(S=[calls(transfer("A")), "Done."], A=["r"])
    lead = supervisor("S", "A", skip_transfer_messages=skips)
    lead.supervisor.llm.max_steps = 2  # the script goes by what its model is shown of itself: nothing, where it skips
    async with open_team(tmp_path, turns, lead, llm("A"), heard=heard) as harness:
        await check_replay(harness, await harness.turn("S", "u"))
    own = [] if skips else ["ASSISTANT: calls transfer_to_agent", "TOOL: Transferred to A."]
    assert shown_to(heard, "S")[1] == ["USER: u", *own, "USER: For context: [A] said: r."]
    assert heard_by(heard, "A")[0] == [("USER", "u")]


async def test_the_path_of_a_lane_begins_where_it_forked(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(a=["A."], b=["B."]), parallel("P", "a", "b"), llm("a"), llm("b")) as harness:
        log = await harness.turn("P")
        await check_replay(harness, log)
    assert sorted(paths(log)) == [["P", "a"], ["P", "b"]]


@rewriter
def tagged(message: message_pb2.Message) -> list[message_pb2.Message]:
    """Names its author in a tag; what tools say is left out."""
    said = text_of(message)
    text = f"<{message.author}>{said}</{message.author}>"
    return [message_pb2.Message(parts=[message_pb2.Part(text=text)])] if said else []


async def test_an_agent_with_a_rewriter_is_shown_what_that_makes_and_others_are_not(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(A=[calls(call("x"), text="hi"), "r"], B=["b 1", "b 2"], C=["c 1", "c 2"])
    team = [sequence("s", "A", "B", "C"), llm("A", tools=["x"]), llm("B", history_rewriter="tagged"), llm("C")]
    parts = {"tools": [x], "functions": [tagged], "heard": heard}
    async with open_team(tmp_path, turns, *team, **parts) as harness:  # type: ignore[arg-type]
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
        heard.clear()
        await check_replay(harness, await harness.turn("s", "v", session_id=log[0].session_id))
    first = [("USER", "u"), ("USER", "<A>hi</A>"), ("USER", "<A>r</A>")]
    assert heard_by(heard, "B")[0][:5] == [*first, ("ASSISTANT", "b 1"), ("USER", "<C>c 1</C>")]
    assert ("USER", "For context: [A] said: r.") in heard_by(heard, "C")[0]


async def test_a_rewriter_of_a_supervisor_is_shown_no_transfers_where_it_skips_them(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    lead = supervisor("S", "A", "B", skip_transfer_messages=True)
    lead.supervisor.llm.history_rewriter = "all_of_it"
    seen: list[message_pb2.Message] = []

    @rewriter
    def all_of_it(message: message_pb2.Message) -> list[message_pb2.Message]:
        seen.append(message)
        return [message_pb2.Message(parts=[message_pb2.Part(text=f"{message.author}: {text_of(message)}")])]

    over = agent_pb2.AgentLink(agent="B", link_mode=agent_pb2.LINK_MODE_TRANSFER)
    turns = script(S=[calls(transfer("A")), "Done."], A=[calls(transfer("B"), text="Over.")], B=["b"])
    team = [lead, llm("A", links=[over]), llm("B")]
    async with open_team(tmp_path, turns, *team, functions=[all_of_it], heard=heard) as harness:
        await check_replay(harness, await harness.turn("S", "u"))
    assert shown_to(heard, "S")[1] == ["USER: u", "USER: A: Over.", "USER: B: b"]
    assert not any(part.HasField("tool_call") for message in seen for part in message.parts)


async def test_a_rewriter_that_raises_fails_its_agent_in_the_log_and_in_its_replay(tmp_path: Path) -> None:
    broken = rewriter(name="broken")(lambda message: [message.nothing])  # type: ignore[attr-defined]
    team = [llm("lead", links=["b"]), llm("b", history_rewriter="broken")]
    turns = script(lead=[calls(call("call_b", message="go"), text="I ask."), "I see."], b=["never"])
    async with open_team(tmp_path, turns, *team, functions=[broken]) as harness:
        log = await harness.turn("lead", "u")
        await check_replay(harness, log)
    failed = next(iter(having(log, "llm_failed"))).llm_failed.error
    assert (failed.reason, failed.agent) == (error_pb2.ERROR_REASON_INTERNAL, "b")
    assert failed.message.startswith("The rewriter 'broken' raised AttributeError")
    assert answer_of(log) == "I see."


@pytest.mark.parametrize("overflow", ["sliding_window", "summarize"])
async def test_a_rewriter_that_raises_fails_an_agent_with_a_bounded_history_the_same_way(
    tmp_path: Path, overflow: str
) -> None:
    broken = rewriter(name="broken")(lambda message: [message.nothing])  # type: ignore[attr-defined]
    b = llm("b", history_rewriter="broken")
    getattr(b.history, overflow).max_tokens = 1_000
    turns = script(lead=[calls(call("call_b", message="go"), text="I ask."), "I see."], b=["never"])
    async with open_team(tmp_path, turns, llm("lead", links=["b"]), b, functions=[broken]) as harness:
        log = await harness.turn("lead", "u")
        await check_replay(harness, log)
    assert [event.llm_failed.error.agent for event in having(log, "llm_failed")] == ["b"]
    assert answer_of(log) == "I see."
