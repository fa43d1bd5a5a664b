"""Tools of a case of an evaluation that mocks answer: the log is that of a run in which the tools ran."""

import json
from pathlib import Path

import pytest

from bough import approve, tool_outcome
from bough.v1 import agent_pb2, error_pb2, eval_set_pb2, event_pb2, execution_pb2, message_pb2, policy_pb2
from bough_server import Context, RunError, agent, file_part, tool
from bough_server.errors import InvalidRequest
from bough_server.log.blobs import blobs_anywhere
from bough_server.models.model import ModelRequest
from bough_server.runs.admission import EvaluationRun
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.truncation import MAX_TEXT_BYTES
from tests.durability.prefixes.recovery import cut_off
from tests.support.fork_agents import run_of
from tests.support.log_readings import answer_of, check_replay, having, masked, results_of, text_of
from tests.support.payment_agents import PAY, Till, team, waiting, whole
from tests.support.run_harness import ME, RunHarness, names
from tests.support.teams import call, calls, llm, open_team, script
from tests.support.tool_mocks import ToolMock, case_of, failing, mock, returning

NOT_MOCKED = error_pb2.ERROR_REASON_TOOL_NOT_MOCKED


@tool
def look(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"


@tool(name="look")
def broken(what: str) -> str:
    """Looks something up."""
    raise AssertionError("no mocked call runs the tool")


@tool(execution="client")
def scan(page: int) -> str:
    """Scans in the client."""
    raise AssertionError("the client scans")


LOOK = [calls(call("look", what="leaf"), call("look", what="root")), "Done."]


async def run(
    harness: RunHarness, case: EvaluationRun | None, agent: str = "p", policy: policy_pb2.RunPolicy | None = None
) -> list[event_pb2.AgentEvent]:
    """The log of a run of a case, which keeps the laws and replays."""
    log = await harness.log(await harness.start(agent, case=case, policy=policy))
    await check_replay(harness, log)
    return log


async def test_the_log_and_the_tree_of_mocked_calls_are_those_of_calls_that_ran(tmp_path: Path) -> None:
    case = case_of(mock("look", "leaf is red", what="leaf"), mock("look", "root is red"))
    for folder in ("real", "mocked"):
        (tmp_path / folder).mkdir()
    async with team(tmp_path / "real", LOOK, look) as it:
        real = await run(it, None)
        tree = await it.tree(real, include_steps=True)
    async with team(tmp_path / "mocked", LOOK, broken) as it:
        log = await run(it, case)
        mocked_tree = await it.tree(log, include_steps=True)
    begun = log[0].run_started
    assert (begun.evaluation, begun.mocks) == (case.ref, case.mocks)
    for field in ("evaluation", "mocks"):
        begun.ClearField(field)  # type: ignore[arg-type]
    answered = [event.tool_started for event in having(log, "tool_started")]
    assert sorted(start.mock_index for start in answered) == sorted(call.mock_index for call in mocked_tree.tools)
    assert {call.mock_index for call in mocked_tree.tools} == {0, 1}
    for start in (*answered, *mocked_tree.tools):
        start.ClearField("mock_index")
    assert names(log) == names(real)
    assert sorted(map(str, masked(log))) == sorted(map(str, masked(real)))
    assert masked([mocked_tree]) == masked([tree])


@pytest.mark.parametrize(
    ("result_json", "expected"),
    [
        ('"red"', message_pb2.Part(text="red")),
        ("null", message_pb2.Part(text="")),
        (
            '{"b": 1.50, "a": 12345678901234567890}',
            message_pb2.Part(data_json='{"b": 1.50, "a": 12345678901234567890}'),
        ),
        ("[]", message_pb2.Part(data_json="[]")),
        ("false", message_pb2.Part(data_json="false")),
    ],
)
async def test_a_mocked_result_is_recorded_as_a_returned_value_is(
    tmp_path: Path, result_json: str, expected: message_pb2.Part
) -> None:
    async with team(tmp_path, LOOK, broken) as it:
        log = await run(it, case_of(ToolMock(name="look", result_json=result_json)))
    assert [list(result.parts) for result in results_of(log)] == [[expected]] * 2


async def test_an_outcome_has_parts_a_failure_or_both_and_the_model_sees_them(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    partly = failing("look", "only half", message_pb2.Part(text="half"), retryable=True, details_json='{"left": 1}')
    partly.arguments_match.equals_json = '{"what": "leaf"}'
    both = returning("look", message_pb2.Part(text="a"), message_pb2.Part(data_json="[1]"))
    async with team(tmp_path, LOOK, broken, heard=heard) as it:
        log = await run(it, case_of(partly, both))
    failed, returned = sorted(results_of(log), key=lambda result: result.call.arguments_json)
    assert (text_of(failed), failed.error.message, failed.error.retryable) == ("half", "only half", True)
    assert (failed.error.reason, failed.error.details_json) == (error_pb2.ERROR_REASON_TOOL_FAILED, '{"left": 1}')
    assert (failed.error.agent, failed.HasField("start_time")) == ("p", True)
    assert [text_of(returned), returned.HasField("error")] == ["a[1]", False]
    seen = [part.tool_result.error.message for message in heard[1].messages[-2:] for part in message.parts]
    assert seen == ["only half", ""]
    assert answer_of(log) == "Done."


@pytest.mark.parametrize("is_outcome", [False, True])
async def test_a_mocked_text_is_bounded_as_that_of_a_tool(tmp_path: Path, is_outcome: bool) -> None:
    text = "x" * (MAX_TEXT_BYTES + 1)
    long = returning("look", message_pb2.Part(text=text)) if is_outcome else mock("look", text)
    async with team(tmp_path, [calls(call("look", what="leaf")), "Done."], broken) as it:
        (cut,) = results_of(await run(it, case_of(long)))
    assert (cut.parts[0].truncated, cut.parts[0].original_bytes) == (True, MAX_TEXT_BYTES + 1)
    assert len(cut.parts[0].text) <= MAX_TEXT_BYTES


async def test_the_first_mock_answers_that_matches_name_agent_and_arguments(tmp_path: Path) -> None:
    turns = script(
        p=[calls(call("look", what="leaf"), call("look", what="moss"), call("call_c", message="go")), "Done."],
        c=[calls(call("look", what="leaf"), call("look", what="bark")), "Found."],
    )
    mocks = (
        mock("other", "no"),
        mock("look", "a child's leaf", agent="c", what="leaf"),
        mock("look", "leaf", what="leaf"),
        mock("look", "never", what="leaf"),
        mock("look", "a child's", agent="c"),
    )
    members = llm("p", tools=["look"], links=["c"]), llm("c", inherit_tools=True)
    async with open_team(tmp_path, turns, *members, tools=[look]) as it:
        log = await run(it, case_of(*mocks))
    said = {(one.agent, one.call.arguments_json): text_of(one) for one in results_of(log) if one.call.name == "look"}
    assert said == {
        ("p", '{"what": "leaf"}'): "leaf",
        ("p", '{"what": "moss"}'): "moss is red",
        ("c", '{"what": "leaf"}'): "a child's leaf",
        ("c", '{"what": "bark"}'): "a child's",
    }


async def test_approvals_are_asked_before_mocks_which_see_the_edited_arguments(tmp_path: Path) -> None:
    till = Till()
    case = case_of(mock("pay", "as approved", amount=3), mock("pay", "as asked", amount=7), strict=True)
    async with team(tmp_path, PAY, till.pay(approval=True)) as it:
        started = await it.start("p", case=case)
        request = (await waiting(it, started))["pay"]
        await it.resume(started, approve(request, arguments_json='{"amount": 3}'))
        log = await whole(it, started)
    assert (till.paid, [text_of(result) for result in results_of(log)]) == ([], ["as approved"])


async def test_a_mocked_tool_of_the_client_asks_for_nothing_and_counts_against_limits(tmp_path: Path) -> None:
    turns = [calls(call("scan", page=1), call("scan", page=2), call("scan", page=3)), "Done."]
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=2))
    async with team(tmp_path, turns, scan) as it:
        log = await run(it, case_of(mock("scan", "a page")), policy=policy)
        tree = await it.tree(log)
    assert having(log, "input_requested") == []
    assert sorted(text_of(result) for result in results_of(log)) == ["", "a page", "a page"]
    failed = [one.error.reason for one in tree.tools if one.HasField("error")]
    assert failed == [error_pb2.ERROR_REASON_LIMIT_EXCEEDED]
    assert log[-1].run_completed.tree_usage.tool_calls == 2


async def test_a_call_that_no_strict_mock_answers_fails_by_name_and_the_run_continues(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = [calls(call("look", what="x" * 2_000)), calls(call("look", what="leaf")), "Done."]
    policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(tool_calls=1))
    async with team(tmp_path, turns, broken, heard=heard) as it:
        log = await run(it, case_of(mock("look", "red", what="leaf"), strict=True), policy=policy)
        tree = await it.tree(log)
    refused, mocked = results_of(log)
    assert (refused.error.reason, refused.HasField("start_time"), text_of(mocked)) == (NOT_MOCKED, False, "red")
    assert "'look' by 'p'" in refused.error.message
    assert len(refused.error.message) < 900
    assert len(having(log, "tool_started")) == 1
    assert [one.error.reason for one in tree.tools] == [NOT_MOCKED, error_pb2.ERROR_REASON_UNSPECIFIED]
    assert heard[1].messages[-1].parts[0].tool_result.error.reason == NOT_MOCKED
    assert answer_of(log) == "Done."


async def test_strict_mocks_refuse_no_built_in_tool_and_no_agent(tmp_path: Path) -> None:
    at_once = calls(call("set_state", key="a", value=1), call("get_state"), call("call_c", message="go"))
    turns = script(
        p=[at_once, calls(call("transfer_to_agent", agent_name="d"))],
        c=["Found."],
        d=[calls(call("exit", final_answer="Out."))],
    )
    links = ["c", agent_pb2.AgentLink(agent="d", link_mode=agent_pb2.LINK_MODE_TRANSFER)]
    members = llm("p", tools=["set_state", "get_state"], links=links), llm("c"), llm("d", tools=["exit"])
    async with open_team(tmp_path, turns, *members) as it:
        log = await run(it, case_of(mock("call_c", "no"), strict=True))
    assert having(log, "tool_failed") == []
    assert answer_of(log) == "Out."


async def test_calls_of_code_in_lanes_are_mocked_and_refused_like_those_of_models(tmp_path: Path) -> None:
    @agent(description="Looks at much at once.", tools=["look"], name="coder")
    async def coder(ctx: Context, input: str) -> str:
        async def seen(ctx: Context, what: str) -> str:
            try:
                return json.dumps(await ctx.call_tool("look", what=what))
            except RunError as error:
                return error_pb2.ErrorReason.Name(error.reason)

        return ", ".join(await ctx.map(seen, ["leaf", "root", "moss"]))

    case = case_of(mock("look", {"is": "red"}, what="leaf"), mock("look", "green", what="moss"), strict=True)
    async with open_team(tmp_path, script(), code_agents=[coder], tools=[broken]) as it:
        log = await run(it, case, "coder")
    assert answer_of(log) == '{"is": "red"}, ERROR_REASON_TOOL_NOT_MOCKED, "green"'


async def test_mocks_that_answer_nothing_leave_the_tools_running(tmp_path: Path) -> None:
    async with team(tmp_path, LOOK, look) as it:
        log = await run(it, case_of())
    assert sorted(text_of(result) for result in results_of(log)) == ["leaf is red", "root is red"]


async def test_a_used_request_id_returns_the_earlier_run_whatever_the_case(tmp_path: Path) -> None:
    async with team(tmp_path, LOOK, broken) as it:
        first = await it.start("p", request_id="once", case=case_of(mock("look", "red")))
        again = await it.start("p", request_id="once", case=case_of(mock("look", "green")))
        await it.log(first)
    assert again.run_id == first.run_id


async def test_a_queued_run_of_a_case_keeps_its_mocks_over_a_crash(tmp_path: Path) -> None:
    till = Till()
    queue = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
    case = case_of(mock("pay", "mocked"))
    tools = [till.pay(waits=True)]
    async with team(tmp_path, PAY, *tools) as it:
        first = await it.start("p")
        await till.began.wait()
        second = await it.start("p", session_id=first.session_id, policy=queue, case=case)
        await it.crash()
    till.go_on.set()
    async with team(tmp_path, PAY, *tools) as it:
        await it.runs.recover()
        await it.log(first)
        log = await whole(it, second)
    assert [text_of(result) for result in results_of(log)] == ["mocked"]
    assert till.paid == [7]


@pytest.mark.parametrize("rule", ["retry", "fail", "ask"])
async def test_a_mock_answers_again_after_a_crash_at_any_event_whatever_the_tool_s_rule(
    tmp_path: Path, rule: str
) -> None:
    till = Till()
    tools = [till.pay(on_recovery=rule)]
    (tmp_path / "whole").mkdir()
    async with team(tmp_path / "whole", PAY, *tools) as it:
        origin = await run(it, case_of(mock("pay", "mocked", amount=7), strict=True))
    for through in range(1, len(origin)):
        folder = tmp_path / str(through)
        cut_off(tmp_path / "whole", origin[:through], folder)
        async with team(folder, PAY, *tools) as it:
            await it.runs.recover()
            log = await whole(it, run_of(origin))
        (end,) = having(log, "tool_completed")
        was_open = origin[through - 1].HasField("tool_started")
        assert (text_of(end.tool_completed.result), end.attempt) == ("mocked", 2 if was_open else 1)
        assert having(log, "input_requested") == []
    assert (till.paid, till.keys) == ([], [])


FILE = b"\x89PNG a file"


async def test_files_of_mocks_are_kept_beside_the_log_and_the_model_gets_their_bytes(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    case = case_of(returning("look", message_pb2.Part(text="Here."), file_part(FILE, "image/png")))
    async with team(tmp_path, LOOK, broken, heard=heard) as it:
        log = await run(it, case)
    files = [blob for event in log for blob in blobs_anywhere(event)]
    assert files
    assert not any(blob.data for blob in files)
    assert {blob.data for message in heard[1].messages for blob in blobs_anywhere(message)} == {FILE}
    assert case.mocks is not None
    assert case.mocks.tools[0].outcome.parts[1].blob.data == FILE


WRONG = [
    (ToolMock(name="look"), "mocks.tools[1].result_json"),
    (ToolMock(name="look", result_json="{"), "mocks.tools[1].result_json"),
    (ToolMock(name="look", result_json="[NaN]"), "mocks.tools[1].result_json"),
    (ToolMock(name="look", result_json="[" * 100_000), "mocks.tools[1].result_json"),
    (ToolMock(name="exit", result_json="1"), "mocks.tools[1].name"),
    (ToolMock(name="look", outcome=message_pb2.ToolOutcome()), "mocks.tools[1].outcome"),
    (returning("look", message_pb2.Part(tool_call=message_pb2.ToolCall(name="x"))), "mocks.tools[1].outcome"),
    (
        ToolMock(name="look", result_json="1", arguments_match=eval_set_pb2.ValueMatcher(regex="(")),
        "mocks.tools[1].arguments_match",
    ),
    (mock("look", "x" * 1024 * 1024), "mocks"),
    (
        returning("look", message_pb2.Part(blob=message_pb2.Blob(sha256="0" * 64))),
        "mocks.tools[1].outcome.parts[0].blob.sha256",
    ),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG)
async def test_mocks_that_cannot_be_used_are_refused_by_field_and_nothing_starts(
    tmp_path: Path, wrong: ToolMock, field: str
) -> None:
    case = case_of(mock("look", "red"), wrong)
    async with team(tmp_path, LOOK, look) as it:
        origin = await it.start("p")
        await it.log(origin)
        with pytest.raises(InvalidRequest) as refused:
            await it.start("p", case=case)
        assert [one.field for one in refused.value.violations] == [field]
        with pytest.raises(InvalidRequest) as refused:
            await it.fork(origin, 1, case=case)
        assert [one.field for one in refused.value.violations] == [field]
        runs, _ = await it.runs.list(ME, RunFilter(), Page(size=10))
    assert [one.run_id for one in runs] == [origin.run_id]


async def test_a_client_that_answered_is_not_asked_about_by_mocks_of_a_fork(tmp_path: Path) -> None:
    turns = [calls(call("scan", page=1)), "Done."]
    async with team(tmp_path, turns, scan) as it:
        origin = await it.start("p")
        request = (await waiting(it, origin))["scan"]
        await it.resume(origin, tool_outcome(request, "from the client"))
        log = await whole(it, origin)
        asked, answered = (having(log, kind)[0].sequence for kind in ("input_requested", "input_received"))
        case = case_of(mock("scan", "mocked"))
        kept = await whole(it, await it.fork(origin, answered, case=case))
        mocked = await whole(it, await it.fork(origin, asked, case=case))
        row = (await it.runs.get(ME, mocked[0].run_id)).run
    assert [text_of(result) for result in results_of(kept)] == ["from the client"]
    assert [text_of(result) for result in results_of(mocked)] == ["mocked"]
    assert (row.state, list(row.open_requests)) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, [])
