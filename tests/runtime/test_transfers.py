"""Transfers: who answers in whose place, what each sees, what is refused, and where it ends."""

from pathlib import Path

import pytest

from bough.v1 import action_pb2, agent_pb2, error_pb2, event_pb2, execution_pb2, follow_pb2, policy_pb2
from bough_server.log.views import Selection
from bough_server.models.model import ModelRequest
from tests.runtime.test_flows import EXIT, FAILS, ends, heard_by, keys_of_children, look, paths
from tests.support.composite_agents import sequence
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.run_harness import names
from tests.support.teams import call, calls, llm, open_team, script


def to(name: str, **fields: object) -> agent_pb2.AgentLink:
    """A link by transfer."""
    return agent_pb2.AgentLink(agent=name, link_mode=agent_pb2.LINK_MODE_TRANSFER, **fields)  # type: ignore[arg-type]


def transfer(name: str, **arguments: object) -> dict[str, object]:
    return call("transfer_to_agent", agent_name=name, **arguments)


async def test_the_target_answers_in_the_place_of_its_caller_which_ends_right_after_it(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(r=[calls(transfer("c"), text="I hand over.")], c=["From c."])
    async with open_team(tmp_path, turns, llm("r", links=[to("c")]), llm("c"), heard=heard) as harness:
        log = await harness.turn("r", "Go.")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("r", "TRANSFERRED"), ("c", "ANSWERED")]
    assert names(log)[-12:] == [
        "r: tool.started",
        "r: tool.completed",
        "r: step.completed",
        "r: control.agent_transferred",
        "c: sub_agent.started",
        "c: llm.started",
        *["c: llm.output_text.delta"] * 2,
        "c: llm.completed",
        "c: step.completed",
        "c: sub_agent.completed",
        "r: run.completed",
    ]
    (moved,) = having(log, "agent_transferred")
    (begun,) = having(log, "sub_agent_started")
    assert moved.agent_transferred == event_pb2.AgentTransferred(
        from_agent="r", to_agent="c", call_id="call_0_0", to_invocation_id=begun.invocation_id
    )
    assert begun.sub_agent_started.trigger == execution_pb2.INVOCATION_TRIGGER_TRANSFER
    assert keys_of_children(log) == ["s0.x"]
    assert text_of(results_of(log)[0]) == "Transferred to c."
    assert having(log, "tool_completed")[0].tool_completed.action == action_pb2.AgentAction(
        transfer=action_pb2.TransferAction(agent="c")
    )
    assert (answer_of(log), log[-1].run_completed.final_answer.author) == ("From c.", "c")
    assert heard_by(heard, "c") == [[("USER", "Go."), ("USER", "For context: [r] said: I hand over..")]]


async def test_targets_are_offered_with_their_descriptions_and_are_no_tools(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    team = (llm("r", links=[to("c"), "d", to("e")]), llm("c"), llm("d"), llm("e"))
    async with open_team(tmp_path, script(r=["Done."]), *team, heard=heard) as harness:
        await harness.turn("r")
    assert [spec.name for spec in heard[0].tools] == ["call_d", "transfer_to_agent"]
    offered = heard[0].tools[1]
    assert offered.description.endswith("\n- c: Does what c does.\n- e: Does what e does.")
    assert '"enum": ["c", "e"]' in offered.input_schema_json


async def test_an_agent_hands_back_to_who_handed_over_to_it(tmp_path: Path) -> None:
    turns = script(r=[calls(transfer("c"), text="Over to c."), "Done."], c=[calls(transfer("r"), text="Back.")])
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, turns, llm("r", links=[to("c")]), llm("c"), heard=heard) as harness:
        log = await harness.turn("r", "Go.")
        tree = await harness.tree(log)
        await check_replay(harness, log)
    assert [(one.depth, one.name, list(one.run_path)) for one in tree.agents] == [
        (0, "r", ["r"]),
        (1, "c", ["r", "c"]),
        (2, "r", ["r", "c", "r"]),
    ]
    assert len({one.invocation_id for one in tree.agents}) == 3
    assert answer_of(log) == "Done."
    assert heard_by(heard, "r")[1] == [
        ("USER", "Go."),
        ("ASSISTANT", "Over to c."),
        ("USER", "For context: [c] said: Back.."),
    ]


@pytest.mark.parametrize("is_called", [False, True])
async def test_an_agent_that_was_called_or_is_not_allowed_to_does_not_transfer_back(
    tmp_path: Path, is_called: bool
) -> None:
    heard: list[ModelRequest] = []
    made = calls(call("call_c", message="go") if is_called else transfer("c"))
    link = "c" if is_called else to("c")
    team = (llm("r", links=[link]), llm("c", disallow_transfer_to_parent=not is_called))
    async with open_team(tmp_path, script(r=[made, "Done."], c=["From c."]), *team, heard=heard) as harness:
        log = await harness.turn("r")
        await check_replay(harness, log)
    assert [request.tools for request in heard if request.agent == "c"] == [[]]


async def test_a_transfer_may_tell_its_target_something(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(r=[calls(transfer("c", message="Be short."))], c=["From c."])
    async with open_team(tmp_path, turns, llm("r", links=[to("c")]), llm("c"), heard=heard) as harness:
        log = await harness.turn("r", "Go.")
        await check_replay(harness, log)
    assert heard_by(heard, "c") == [[("USER", "Go."), ("USER", "Be short.")]]


@pytest.mark.parametrize("skips", [False, True])
async def test_in_the_next_turn_transfers_are_shown_to_those_that_do_not_skip_them(tmp_path: Path, skips: bool) -> None:
    heard: list[ModelRequest] = []
    turns = script(r=[{"when": "Two.", "text": "Done."}, calls(transfer("c"))], c=["From c."])
    team = (llm("r", links=[to("c")], skip_transfer_messages=skips), llm("c"))
    async with open_team(tmp_path, turns, *team, heard=heard) as harness:
        first = await harness.turn("r", "One.")
        heard.clear()
        log = await harness.turn("r", "Two.", session_id=first[0].session_id)
        await check_replay(harness, log)
    shown = [("ASSISTANT", ""), ("TOOL", "")] if not skips else []
    assert heard_by(heard, "r") == [
        [("USER", "One."), *shown, ("USER", "For context: [c] said: From c.."), ("USER", "Two.")]
    ]


async def test_a_transfer_to_an_unknown_agent_lists_the_known_ones_and_the_model_may_try_again(tmp_path: Path) -> None:
    turns = script(r=[calls(transfer("x")), calls(transfer("c"))], c=["From c."])
    async with open_team(tmp_path, turns, llm("r", links=[to("c"), to("d")]), llm("c"), llm("d")) as harness:
        log = await harness.turn("r")
        await check_replay(harness, log)
    failed = results_of(log)[0].error
    assert failed.reason == error_pb2.ERROR_REASON_UNKNOWN_AGENT
    assert failed.message == "There is no agent 'x' to transfer to. There are: c, d."
    assert answer_of(log) == "From c."


async def test_of_two_transfers_in_an_answer_the_first_runs_and_the_other_is_told_so(tmp_path: Path) -> None:
    made = calls(transfer("x"), call("look", what="leaf"), transfer("d"), transfer("c"))
    team = (llm("r", links=[to("c"), to("d")], tools=["look"]), llm("c"), llm("d"))
    async with open_team(tmp_path, script(r=[made], c=["From c."], d=["From d."]), *team, tools=[look]) as harness:
        log = await harness.turn("r")
        await check_replay(harness, log)
    results = {result.call.call_id: result for result in results_of(log)}
    assert [results[f"call_0_{place}"].error.reason for place in range(4)] == [
        error_pb2.ERROR_REASON_UNKNOWN_AGENT,
        0,
        0,
        error_pb2.ERROR_REASON_BAD_ARGUMENTS,
    ]
    assert results["call_0_3"].error.message == (
        "An answer can take one of break_loop, exit, transfer_to_agent, and an earlier call took transfer_to_agent. "
        "This call was not carried out."
    )
    assert answer_of(log) == "From d."
    assert len(having(log, "agent_transferred")) == 1


async def test_agents_that_hand_over_in_circles_are_stopped_and_the_path_is_named(tmp_path: Path) -> None:
    turns = script(a=[calls(transfer("b"))] * 9, b=[calls(transfer("a"))] * 9)
    async with open_team(tmp_path, turns, llm("a", links=[to("b")]), llm("b", links=[to("a")])) as harness:
        log = await harness.turn("a")
        await check_replay(harness, log)
        assert {reason for _, reason in await ends(harness, log)} == {"LIMIT"}
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert "in circles: a > b > a > b > a > b > a > b" in error.message
    assert len(having(log, "agent_transferred")) == 6


@pytest.mark.parametrize(("limit", "made"), [(None, 20), (2, 2), (0, 0)])
async def test_there_are_no_more_handoffs_than_the_limit(tmp_path: Path, limit: int | None, made: int) -> None:
    turns = script(a=[calls(transfer("b"))] * 30, b=[calls(transfer("c"))] * 30, c=[calls(transfer("a"))] * 30)
    team = (llm("a", links=[to("b")]), llm("b", links=[to("c")]), llm("c", links=[to("a")]))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("a", policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(transfers=limit)))
        await check_replay(harness, log)
    assert len(having(log, "agent_transferred")) == made
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert f"{made} transfers" in log[-1].run_failed.error.message


async def test_what_the_target_fails_with_its_caller_fails_with(tmp_path: Path) -> None:
    turns = script(r=[calls(transfer("c"))], c=[FAILS])
    async with open_team(tmp_path, turns, llm("r", links=[to("c")]), llm("c")) as harness:
        log = await harness.turn("r")
        await check_replay(harness, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_MODEL_UNAVAILABLE


async def test_an_exit_of_the_target_ends_what_its_caller_is_in(tmp_path: Path) -> None:
    team = (sequence("s", "r", "z"), llm("r", links=[to("c")]), llm("c", tools=["exit"]), llm("z"))
    async with open_team(tmp_path, script(r=[calls(transfer("c"))], c=[EXIT]), *team) as harness:
        log = await harness.turn("s")
        await check_replay(harness, log)
        assert await ends(harness, log) == [("s", "EXITED"), ("r", "TRANSFERRED"), ("c", "EXITED")]
    assert answer_of(log) == "It is over."
    assert paths(log) == [["s", "r"], ["s", "r", "c"]]


async def test_a_transfer_is_seen_in_a_summary_at_any_depth(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_r", message="go")), "Done."], r=[calls(transfer("c"))], c=["From c."])
    team = (llm("p", links=["r"]), llm("r", links=[to("c")]), llm("c"))
    async with open_team(tmp_path, turns, *team) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    selection = Selection(follow_pb2.EVENT_VIEW_SUMMARY, ())
    shown = [event for event in log if selection.apply(event) is not None]
    assert "r: control.agent_transferred" in names(shown)
    assert text_of(results_of(log)[-1]) == "From c."
