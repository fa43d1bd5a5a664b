"""Swarms: members hand over to one another, what each is shown, who answers, and what ends them."""

from pathlib import Path

import pytest

from bough import reply
from bough.v1 import action_pb2, agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.models.model import ModelRequest
from bough_server.runtime.agent import Context, Outcome
from tests.runtime.test_flows import EXIT, FAILS, ends, heard_by, keys_of_children, paths
from tests.runtime.test_supervisors import shown_to
from tests.runtime.test_transfers import to, transfer
from tests.support.composite_agents import loop, sequence, supervisor, swarm
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.question_agents import open_requests
from tests.support.teams import call, calls, llm, open_team, script


def moves(log: list[event_pb2.AgentEvent]) -> list[tuple[str, str, str]]:
    """Who handed over to whom, by which call."""
    moved = [event.agent_transferred for event in having(log, "agent_transferred")]
    return [(one.from_agent, one.to_agent, one.call_id) for one in moved]


async def test_members_hand_over_to_one_another_until_one_answers(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"), text="Over to b.")], b=[calls(transfer("c"))], c=["From c."])
    team = (swarm("s", "a", "b", "c"), llm("a"), llm("b"), llm("c"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [
            ("s", "ANSWERED"),
            ("a", "TRANSFERRED"),
            ("b", "TRANSFERRED"),
            ("c", "ANSWERED"),
        ]
    assert keys_of_children(log) == ["h0", "h1", "h2"]
    assert paths(log) == [["s", "a"], ["s", "a", "b"], ["s", "a", "b", "c"]]
    begun = [event.sub_agent_started for event in having(log, "sub_agent_started")]
    assert [one.trigger for one in begun] == [
        execution_pb2.INVOCATION_TRIGGER_WORKFLOW,
        execution_pb2.INVOCATION_TRIGGER_TRANSFER,
        execution_pb2.INVOCATION_TRIGGER_TRANSFER,
    ]
    assert moves(log) == [("a", "b", "call_0_0"), ("b", "c", "call_0_0")]
    (first, second, _) = [event.sub_agent_completed for event in having(log, "sub_agent_completed")]
    assert (text_of(first.output), text_of(second.output)) == ("Over to b.", "")
    assert first.action == action_pb2.AgentAction(transfer=action_pb2.TransferAction(agent="b"))
    assert (answer_of(log), log[-1].run_completed.final_answer.author) == ("From c.", "c")


async def test_a_member_sees_what_was_said_before_it_but_no_transfer(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(
        a=[
            calls(transfer("b"), text="Over to b.", when="u"),
            {"when": "What now?", "text": "From a."},
        ],
        b=[calls(transfer("a", message="What now?"), text="Hm.")],
    )
    async with open_team(tmp_path, turns, swarm("s", "a", "b"), llm("a"), llm("b"), heard=heard) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
    assert shown_to(heard, "b") == [["USER: u", "USER: For context: [a] said: Over to b.."]]
    assert shown_to(heard, "a")[1] == [
        "USER: u",
        "ASSISTANT: Over to b.",
        "USER: For context: [b] said: Hm..",
        "USER: What now?",
    ]
    told = having(log, "sub_agent_started")[2].sub_agent_started.input
    assert (told.author, told.kind) == ("b", message_pb2.MESSAGE_KIND_SUB_AGENT_USER)


async def test_a_member_is_offered_the_others_with_their_descriptions_beside_its_own_links(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    team = (swarm("s", "a", "b", "c", entry="b"), llm("a"), llm("b", links=["a", to("d")]), llm("c"), llm("d"))
    async with open_team(tmp_path, script(b=["Done."]), *team, heard=heard) as harness:
        await harness.turn("s")
    (request,) = heard
    assert [spec.name for spec in request.tools] == ["call_a", "transfer_to_agent"]
    assert request.tools[1].description.endswith(
        "\n- d: Does what d does.\n- a: Does what a does.\n- c: Does what c does."
    )


async def test_a_transfer_along_a_link_of_a_members_own_stays_a_tail_call(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("d"))], d=["From d."])
    team = (swarm("s", "a", "b"), llm("a", links=[to("d")]), llm("b"), llm("d"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert keys_of_children(log) == ["h0", "h0/s0.x"]
    assert (answer_of(log), log[-1].run_completed.final_answer.author) == ("From d.", "d")


async def test_a_supervisor_hands_over_to_another_member_when_its_own_have_come_back(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("m")), calls(transfer("b"))], m=["From m."], b=["From b."])
    team = (swarm("s", "a", "b"), supervisor("a", "m"), llm("m"), llm("b"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert keys_of_children(log) == ["h0", "h0/h0", "h1"]
    assert (answer_of(log), moves(log)) == ("From b.", [("a", "m", "call_0_0"), ("a", "b", "call_1_0")])


async def test_an_agent_cannot_hand_over_to_itself_or_to_an_unknown_agent(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("a"), transfer("z"), transfer("b"))], b=["From b."])
    team = (swarm("s", "a", "b"), llm("a"), llm("b"), llm("z"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    refused = [result.error for result in results_of(log) if result.HasField("error")]
    assert [error.reason for error in refused] == [error_pb2.ERROR_REASON_UNKNOWN_AGENT] * 2
    assert refused[0].message == "There is no agent 'a' to transfer to. There are: b."
    assert answer_of(log) == "From b."


async def test_two_members_that_go_back_and_forth_are_stopped_with_their_path(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))] * 9, b=[calls(transfer("a"))] * 9)
    async with open_team(tmp_path, turns, swarm("s", "a", "b"), llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    assert len(having(log, "agent_transferred")) == 6
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert "a > b > a > b > a > b > a > b" in error.message


async def test_handing_over_to_members_counts_as_handoffs(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))], b=[calls(transfer("c"))], c=["never"])
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(transfers=1))
    async with open_team(tmp_path, turns, swarm("s", "a", "b", "c"), llm("a"), llm("b"), llm("c")) as harness:
        log = await harness.turn("s", policy=policy)
        await check_replay(harness, log)
    assert len(having(log, "agent_transferred")) == 1
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED


@pytest.mark.parametrize(
    "policy", [policy_pb2.SUB_AGENT_FAILURE_POLICY_UNSPECIFIED, policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE]
)
async def test_a_member_that_fails_fails_the_swarm_whatever_its_link_says(
    tmp_path: Path, policy: policy_pb2.SubAgentFailurePolicy.ValueType
) -> None:
    link = agent_pb2.AgentLink(agent="b", on_failure=policy)
    turns = script(a=[calls(transfer("b"))], b=[FAILS])
    async with open_team(tmp_path, turns, swarm("s", "a", link), llm("a"), llm("b")) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "FAILED"), ("a", "TRANSFERRED"), ("b", "FAILED")]
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


async def test_the_exit_of_a_member_ends_the_swarm_and_what_is_above_it(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))], b=[EXIT])
    team = (sequence("q", "s", "never"), swarm("s", "a", "b"), llm("a"), llm("b", tools=["exit"]), llm("never"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("q")
        await check_replay(harness, log)
        assert await ends(harness, log) == [
            ("q", "EXITED"),
            ("s", "EXITED"),
            ("a", "TRANSFERRED"),
            ("b", "EXITED"),
        ]
    assert answer_of(log) == "It is over."


async def test_the_break_of_a_member_ends_the_swarm_and_the_loop_above_it(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))], b=[calls(call("break_loop"), text="Good.")])
    team = (loop("l", "s", rounds=5), swarm("s", "a", "b"), llm("a"), llm("b", tools=["break_loop"]))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("l")
        await check_replay(harness, log)
        assert (await ends(harness, log))[:2] == [("l", "BROKE_LOOP"), ("s", "BROKE_LOOP")]
    assert (answer_of(log), len(having(log, "loop_iteration_started"))) == ("Good.", 1)


async def test_a_member_in_python_hands_over_by_its_outcome(tmp_path: Path) -> None:
    @agent
    async def a(ctx: Context, input: message_pb2.Message) -> Outcome:
        """Hands over."""
        said = message_pb2.Message(parts=[message_pb2.Part(text="I looked.")])
        return Outcome.transfer("b", "Go on.", output=said)

    heard: list[ModelRequest] = []
    async with open_team(
        tmp_path, script(b=["From b."]), swarm("s", "a", "b"), llm("b"), code_agents=[a], heard=heard
    ) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
    assert moves(log) == [("a", "b", "")]
    assert heard_by(heard, "b") == [[("USER", "u"), ("USER", "For context: [a] said: I looked.."), ("USER", "Go on.")]]
    assert answer_of(log) == "From b."


async def test_a_member_in_python_tells_another_one_no_call(tmp_path: Path) -> None:
    @agent
    async def a(ctx: Context, input: message_pb2.Message) -> Outcome:
        """Hands over with a call."""
        called = message_pb2.Part(tool_call=message_pb2.ToolCall(name="look", call_id="c"))
        return Outcome.transfer("b", message_pb2.Message(parts=[called]))

    async with open_team(tmp_path, script(b=["From b."]), swarm("s", "a", "b"), llm("b"), code_agents=[a]) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert error.message == "The message to 'b' contains a tool call or a tool result; write it as text."


async def test_a_member_in_python_that_names_a_call_it_never_made_hands_over_all_the_same(tmp_path: Path) -> None:
    @agent
    async def a(ctx: Context, input: message_pb2.Message) -> Outcome:
        """Hands over."""
        return Outcome.transfer("b", call_id="call_0_0")

    async with open_team(tmp_path, script(b=["From b."]), swarm("s", "a", "b"), llm("b"), code_agents=[a]) as harness:
        log = await harness.turn("s", "u")
        await check_replay(harness, log)
    assert answer_of(log) == "From b."


@pytest.mark.parametrize("is_member", [False, True])
async def test_code_that_hands_over_to_no_other_member_fails(tmp_path: Path, is_member: bool) -> None:
    @agent
    async def a(ctx: Context, input: message_pb2.Message) -> Outcome:
        """Transfers to no agent."""
        return Outcome.transfer("z")

    team = (swarm("s", "a", "b"), llm("b"), llm("z"))
    async with open_team(tmp_path, script(), *team, code_agents=[a]) as harness:
        log = await harness.turn("s" if is_member else "a")
        await check_replay(harness, log)
    error = having(log, "sub_agent_failed" if is_member else "run_failed")[0]
    failed = error.sub_agent_failed.error if is_member else error.run_failed.error
    assert failed.reason == error_pb2.ERROR_REASON_UNKNOWN_AGENT
    assert failed.message == (
        "The agent 'a' transferred to 'z', which is no other member of its swarm. "
        + ("There are: b." if is_member else "There are none.")
    )


async def test_members_have_their_own_places_in_two_turns_of_a_session(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(a=[calls(transfer("b"), text="Over.")], b=["From b."])
    async with open_team(tmp_path, turns, swarm("s", "a", "b"), llm("a"), llm("b"), heard=heard) as harness:
        first = await harness.start("s", "one")
        async for _ in harness.follow(first):
            pass
        second = await harness.start("s", "two", session_id=first.session_id)
        log = [event async for event in harness.follow(second)]
        await check_replay(harness, log)
    assert answer_of(log) == "From b."
    assert shown_to(heard, "b")[-1][-2:] == ["USER: two", "USER: For context: [a] said: Over.."]


async def test_a_swarm_waits_for_what_a_member_asks_over_a_restart(tmp_path: Path) -> None:
    @agent
    async def b(ctx: Context, input: message_pb2.Message) -> Outcome:
        """Hands over to whom it is told."""
        return Outcome.transfer(str(await ctx.ask("Who?")))

    turns = script(a=[calls(transfer("b"))], c=["From c."])
    team = (swarm("s", "a", "b", "c"), llm("a"), llm("c"))
    async with open_team(tmp_path, turns, *team, code_agents=[b]) as harness:
        run = await harness.start("s")
        asked = open_requests(await harness.until_interrupted(run))["Who?"]
    async with open_team(tmp_path, turns, *team, code_agents=[b]) as harness:
        await harness.resume(run, reply(asked, "c"))
        log = await harness.log(run)
        await check_replay(harness, log)
    assert (answer_of(log), moves(log)) == ("From c.", [("a", "b", "call_0_0"), ("b", "c", "")])


async def test_a_member_keeps_no_answer_where_it_hands_over(tmp_path: Path) -> None:
    a, b = llm("a"), llm("b")
    a.output_key = b.output_key = "answer"
    turns = script(a=[calls(transfer("b"), text="Over.")], b=["From b."])
    async with open_team(tmp_path, turns, swarm("s", "a", "b"), a, b) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
    changes = [
        change for event in having(log, "session_state_changed") for change in event.session_state_changed.state_changes
    ]
    assert [change.value_json for change in changes] == ['"From b."']
