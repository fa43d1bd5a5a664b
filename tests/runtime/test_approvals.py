"""Tool calls that wait: for an approval, or for the client that runs them."""

from pathlib import Path

import pytest

from bough import approve, refuse, tool_outcome
from bough.v1 import agent_pb2, error_pb2, execution_pb2, input_pb2, message_pb2, policy_pb2, run_pb2
from bough_server.errors import AlreadyAnswered, InvalidRequest
from bough_server.models.model import ModelRequest
from bough_server.models.structured_output import result_text
from bough_server.tools.tool import tool
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, having, results_of, text_of
from tests.support.payment_agents import DAY, PAY, Till, asked, team, waiting, whole
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script

Request = input_pb2.InputRequest
Run = run_pb2.Run


@tool
def look(what: str) -> str:
    """Looks."""
    return f"{what} is red"


@tool(execution="client", answer_within=DAY)
def scan(reader: str) -> str:
    """Scans in the client."""
    raise AssertionError("the client scans")


@tool(execution="client", approval=True)
def guarded(reader: str) -> str:
    """Scans in the client, if it may."""
    raise AssertionError("the client scans")


async def test_an_approved_call_runs_once_and_the_model_is_asked_once_for_each_step(tmp_path: Path) -> None:
    till, heard = Till(), list[ModelRequest]()
    async with team(tmp_path, PAY, till.pay(approval=True), heard=heard) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["pay"]
        assert till.paid == []
        await it.resume(run, approve(request, note="fine"))
        log = await whole(it, run)
    assert (till.paid, len(heard), answer_of(log)) == ([7], 2, "Done.")
    assert (request.kind, request.call_id) == (input_pb2.INPUT_KIND_APPROVAL, request.call.call_id)
    first = names(log).index("p: run.interrupted")
    assert names(log)[first : first + 5] == [
        "p: run.interrupted",
        "p: run.resumed",
        "p: control.input_received",
        "p: tool.started",
        "p: tool.completed",
    ]
    assert log[-1].run_completed.tree_usage.model_calls == 2
    assert log[-1].run_completed.tree_usage.tool_calls == 1


async def test_edited_arguments_are_checked_and_are_what_the_tool_is_given(tmp_path: Path) -> None:
    till = Till()
    async with team(tmp_path, PAY, till.pay(approval=lambda arguments: arguments["amount"] > 5)) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["pay"]
        for unfit in ('{"amount": "much"}', "{}", '{"amount": 1, "to": "me"}', "[1]", "{", '{"amount": NaN}'):
            with pytest.raises(InvalidRequest):
                await it.resume(run, approve(request, arguments_json=unfit))
        await it.resume(run, approve(request, arguments_json='{"amount": 3}'))
        log = await whole(it, run)
    assert till.paid == [3]
    assert having(log, "tool_started")[0].tool_started.call.arguments_json == '{"amount": 3}'
    assert request.call.arguments_json == '{"amount": 7}'


async def test_a_call_that_the_predicate_accepts_needs_no_approval(tmp_path: Path) -> None:
    till = Till()
    async with team(tmp_path, PAY, till.pay(approval=lambda arguments: arguments["amount"] > 100)) as it:
        log = await it.turn("p")
    assert (till.paid, having(log, "input_requested")) == ([7], [])


async def test_a_refusal_is_a_failed_result_that_the_model_sees_and_counts_against_no_limit(tmp_path: Path) -> None:
    till, heard = Till(), list[ModelRequest]()
    turns = [calls(call("pay", amount=7)), calls(call("pay", amount=2)), "Done."]
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=1))
    tools = [till.pay(approval=lambda arguments: arguments["amount"] > 5)]
    link = agent_pb2.ToolLink(name="pay", max_calls_per_run=1)
    async with open_team(tmp_path, script(p=turns), llm("p", tools=[link]), tools=tools, heard=heard) as it:
        run = await it.start("p", policy=policy)
        request = (await waiting(it, run))["pay"]
        await it.resume(run, refuse(request, note="ask me first"))
        log = await whole(it, run)
        tree = await it.tree(log)
    refused, paid = results_of(log)
    assert refused.error.reason == error_pb2.ERROR_REASON_NOT_APPROVED
    assert (text_of(paid), till.paid) == ("paid 2", [2])
    assert "ask me first" in heard[1].messages[-1].parts[0].tool_result.error.message
    assert len(having(log, "tool_started")) == 1
    assert log[-1].run_completed.tree_usage.tool_calls == 1
    assert [one.state for one in tree.tools] == [
        execution_pb2.EXECUTION_STATE_FAILED,
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
    ]


async def test_a_link_may_ask_where_the_tool_does_not(tmp_path: Path) -> None:
    link = agent_pb2.ToolLink(name="look", requires_approval=True)
    turns = script(lead=[calls(call("call_p", message="go")), "All."], p=[calls(call("look", what="leaf")), "Red."])
    async with open_team(tmp_path, turns, llm("lead", links=["p"]), llm("p", tools=[link]), tools=[look]) as it:
        run = await it.start("lead")
        request = (await waiting(it, run))["look"]
        await it.resume(run, approve(request))
        log = await whole(it, run)
    assert list(request.agent_path) == ["lead", "p"]
    assert [text_of(result) for result in results_of(log)] == ["leaf is red", "Red."]


BOTH = [calls(call("pay", amount=7), call("look", what="leaf"), call("scan", reader="a"), call("guarded", reader="b"))]


async def test_calls_beside_those_that_wait_end_first_and_results_are_in_call_order(tmp_path: Path) -> None:
    till, heard = Till(), list[ModelRequest]()
    tools = [till.pay(approval=True), look, scan, guarded]
    async with team(tmp_path, [*BOTH, "Done."], *tools, heard=heard) as it:
        run = await it.start("p")
        requests = await waiting(it, run)
        assert {name: one.kind for name, one in requests.items()} == {
            "pay": input_pb2.INPUT_KIND_APPROVAL,
            "scan": input_pb2.INPUT_KIND_CLIENT_TOOL,
            "guarded": input_pb2.INPUT_KIND_APPROVAL,
        }
        assert [text_of(one) for one in results_of(await it.until_interrupted(run))] == ["leaf is red"]
        await it.resume(run, tool_outcome(requests["scan"], "4242"), approve(requests["guarded"]))
        requests = await waiting(it, run, 2)
        assert requests.keys() == {"pay", "guarded"}
        assert requests["guarded"].kind == input_pb2.INPUT_KIND_CLIENT_TOOL
        failed = message_pb2.ToolFailure(message="no reader")
        await it.resume(run, tool_outcome(requests["guarded"], failed), refuse(requests["pay"]))
        log = await whole(it, run)
    assert len(heard) == 2
    assert having(log, "tool_started")[0].tool_started.call.name == "look"
    assert len(having(log, "tool_started")) == 1
    (step, _) = having(log, "step_completed")
    assert [(one.call.name, text_of(one) or one.error.message) for one in step.step_completed.step.tool_results] == [
        ("pay", "The call of 'pay' was refused."),
        ("look", "leaf is red"),
        ("scan", "4242"),
        ("guarded", "no reader"),
    ]


SCAN = [calls(call("scan", reader="a")), "Done."]


async def test_a_client_s_result_is_checked_and_what_only_the_server_knows_is_the_server_s(tmp_path: Path) -> None:
    async with team(tmp_path, SCAN, scan) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["scan"]
        Part, Outcome = message_pb2.Part, message_pb2.ToolOutcome
        unfit = [
            Outcome(),
            Outcome(parts=[Part(tool_call=message_pb2.ToolCall(name="pay"))]),
            Outcome(parts=[Part(tool_result=message_pb2.ToolResult())]),
            Outcome(parts=[Part(data_json="{")]),
            Outcome(parts=[Part(text="x"), Part()]),
            Outcome(parts=[Part()], failure=message_pb2.ToolFailure(message="no")),
            Outcome(failure=message_pb2.ToolFailure(message="no", details_json="[]")),
        ]
        for outcome in unfit:
            with pytest.raises(InvalidRequest) as refused:
                await it.resume(run, input_pb2.InputAnswer(input_id=request.input_id, tool_outcome=outcome))
            assert [one.field for one in refused.value.violations] == ["answers[0].tool_outcome"]
        given = Outcome(parts=[Part(data_json='{"card": "4242"}')])
        await it.resume(run, input_pb2.InputAnswer(input_id=request.input_id, tool_outcome=given))
        log = await whole(it, run)
        tree = await it.tree(log)
    (result,) = results_of(log)
    assert result == message_pb2.ToolResult(
        call=request.call, parts=given.parts, agent="p", invocation_id=log[0].invocation_id
    )
    assert [(one.name, one.result_json, one.child_invocation_id) for one in tree.tools] == [
        ("scan", '{"card": "4242"}', "")
    ]


async def test_a_client_s_tool_may_fail_and_give_content_of_which_the_model_sees_both(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    failure = message_pb2.ToolFailure(message="The feeder is jammed.", retryable=True, details_json='{"page": 2}')
    given = message_pb2.ToolOutcome(parts=[message_pb2.Part(text="page 1")], failure=failure)
    async with team(tmp_path, SCAN, scan, heard=heard) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["scan"]
        answer = input_pb2.InputAnswer(input_id=request.input_id, tool_outcome=given)
        await it.resume(run, answer)
        await it.resume(run, answer)
        other = input_pb2.InputAnswer(input_id=request.input_id, tool_outcome=message_pb2.ToolOutcome(failure=failure))
        with pytest.raises(AlreadyAnswered) as refused:
            await it.resume(run, other)
        log = await whole(it, run)
        tree = await it.tree(log)
    assert refused.value.details == {"input_id": request.input_id}
    assert having(log, "tool_failed")[0].tool_failed.result == message_pb2.ToolResult(
        call=request.call,
        parts=given.parts,
        agent="p",
        invocation_id=log[0].invocation_id,
        error=error_pb2.AgentError(
            reason=error_pb2.ERROR_REASON_TOOL_FAILED,
            message="The feeder is jammed.",
            agent="p",
            invocation_id=log[0].invocation_id,
            retryable=True,
            details_json='{"page": 2}',
        ),
    )
    told = heard[1].messages[-1].parts[0].tool_result
    assert result_text(told) == "Error: The feeder is jammed.\npage 1"
    assert tree.tools[0].state == execution_pb2.EXECUTION_STATE_FAILED


async def test_a_client_s_tool_that_is_answered_counts_once_against_its_limit(tmp_path: Path) -> None:
    link = agent_pb2.ToolLink(name="scan", max_calls_per_run=1)
    turns = script(p=[calls(call("scan", reader="counter")), calls(call("scan", reader="gate")), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=[link]), tools=[scan]) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["scan"]
    async with open_team(tmp_path, turns, llm("p", tools=[link]), tools=[scan]) as it:
        await it.resume(run, tool_outcome(request, "4711"))
        log = await whole(it, run)
    scanned, refused = results_of(log)
    assert (result_text(scanned), scanned.HasField("error")) == ("4711", False)
    assert refused.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED


async def test_a_huge_result_of_a_client_is_cut_for_the_model_and_kept_whole_in_the_log(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with team(tmp_path, SCAN, scan, heard=heard) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["scan"]
        await it.resume(run, tool_outcome(request, "x" * 500_000))
        log = await whole(it, run)
    assert len(text_of(results_of(log)[0])) == 500_000
    assert len(text_of(heard[1].messages[-1].parts[0].tool_result)) < 65_536


async def test_a_wait_of_days_goes_through_restarts_and_counts_against_no_time(tmp_path: Path) -> None:
    clock, till = HeldClock(), Till()
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits())
    policy.limits.wall_duration.seconds = 60
    tools = [till.pay(approval=True)]
    async with team(tmp_path, PAY, *tools, clock=clock) as it:
        run = await it.start("p", policy=policy, deadline_time_ns=clock.now_ns() + 30 * 10**9)
        request = (await waiting(it, run))["pay"]
    for _ in range(3):
        clock.advance(DAY)
        async with team(tmp_path, PAY, *tools, clock=clock) as it:
            await it.runs.recover()
            assert await asked(it, run) == {"pay": request}
    clock.advance(DAY)
    async with team(tmp_path, PAY, *tools, clock=clock) as it:
        await it.runs.recover()
        await it.resume(run, approve(request))
        log = await whole(it, run)
    assert (till.paid, answer_of(log)) == ([7], "Done.")
    assert len(having(log, "run_resumed")) == 1


@pytest.mark.parametrize("when", ["interrupted", "down"])
@pytest.mark.parametrize("name", ["pay", "scan"])
async def test_an_approval_that_is_not_answered_in_time_is_a_failed_result(
    tmp_path: Path, name: str, when: str
) -> None:
    clock, till = HeldClock(), Till()
    turns = PAY if name == "pay" else SCAN
    tools = [till.pay(approval=True, answer_within=DAY) if name == "pay" else scan]
    async with team(tmp_path, turns, *tools, clock=clock) as it:
        await it.runs.recover()
        run = await it.start("p")
        request = (await waiting(it, run))[name]
        if when == "interrupted":
            await clock.next_sleep()
            clock.advance(DAY)
            log = await whole(it, run)
    if when == "down":
        clock.advance(2 * DAY)
        async with team(tmp_path, turns, *tools, clock=clock) as it:
            await it.runs.recover()
            log = await whole(it, run)
    (result,) = results_of(log)
    assert (result.error.reason, till.paid) == (error_pb2.ERROR_REASON_INPUT_EXPIRED, [])
    (answer,) = (event.input_received.answer for event in having(log, "input_received"))
    assert answer == input_pb2.InputAnswer(input_id=request.input_id, source=input_pb2.ANSWER_SOURCE_EXPIRY)
    assert answer_of(log) == "Done."


async def test_a_run_that_waits_is_cancelled_with_its_calls_and_keeps_its_results(tmp_path: Path) -> None:
    till = Till()
    async with team(tmp_path, [*BOTH, "Done."], till.pay(approval=True), look, scan, guarded) as it:
        run = await it.start("p")
        await waiting(it, run)
        await it.runs.cancel(ME, run.run_id)
        log = await whole(it, run)
        tree = await it.tree(log)
        assert (await it.runs.get(ME, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_CANCELLED
        await waiting(it, await it.start("p", session_id=run.session_id))
    assert [one.state for one in tree.tools] == [
        execution_pb2.EXECUTION_STATE_CANCELLED,
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
    ] + [execution_pb2.EXECUTION_STATE_CANCELLED] * 2
    (step,) = having(log, "step_failed")
    assert [one.call.name for one in step.step_failed.step.tool_results] == ["pay", "look", "scan", "guarded"]
    assert log[-1].run_cancelled.tree_usage.tool_calls == 1


async def test_an_abort_beside_a_call_that_waits_closes_its_request(tmp_path: Path) -> None:
    turns = script(
        boss=[calls(call("call_lead", message="go")), calls(call("scan", reader="a")), "Boss."],
        lead=[calls(call("scan", reader="b"), call("call_bad", message="go")), "never"],
        bad=[{"text": "x", "error": {"reason": "UNAVAILABLE"}}],
    )
    link = agent_pb2.AgentLink(agent="bad", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)
    team_of = [llm("boss", links=["lead"], tools=["scan"]), llm("lead", links=[link], tools=["scan"]), llm("bad")]
    async with open_team(tmp_path, turns, *team_of, tools=[scan]) as it:
        run = await it.start("boss")
        request = (await waiting(it, run))["scan"]
        log = await it.until_interrupted(run)
        assert list(log[-1].run_interrupted.requests) == [request]
        assert list(request.agent_path) == ["boss"]
        closed = having(log, "input_requested")[0].input_requested.request
        with pytest.raises(InvalidRequest, match="has ended"):
            await it.resume(run, tool_outcome(closed, "x"))
        await it.resume(run, tool_outcome(request, "4242"))
        log = await whole(it, run)
    assert answer_of(log) == "Boss."
