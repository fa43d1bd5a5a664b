"""Mocks made of the tool results that a run recorded."""

from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import error_pb2, eval_set_pb2, execution_pb2, invocation_pb2, message_pb2
from bough_server import tool
from bough_server.evals.sets.cases_from_runs import extract_mocks, mocks_of
from bough_server.runs.admission import EvaluationRun
from tests.support.log_readings import masked
from tests.support.teams import call, calls, llm, open_team, script
from tests.support.tool_mocks import TURN, failing, mock, returning

ToolInvocation = invocation_pb2.ToolInvocation
SUCCEEDED, FAILED = execution_pb2.EXECUTION_STATE_SUCCEEDED, execution_pb2.EXECUTION_STATE_FAILED
RUNNING, CANCELLED = execution_pb2.EXECUTION_STATE_RUNNING, execution_pb2.EXECUTION_STATE_CANCELLED


def made(name: str, arguments_json: str, result_json: str = "", **fields: object) -> ToolInvocation:
    """A call that has started and, unless a field says otherwise, succeeded."""
    usual = {"call_id": "a", "agent": "p", "state": SUCCEEDED, "start_time": Timestamp(seconds=1)}
    return ToolInvocation(
        name=name,
        arguments_json=arguments_json,
        result_json=result_json,
        **{**usual, **fields},  # type: ignore[arg-type]
    )


def error(reason: str, message: str = "No.") -> error_pb2.AgentError:
    return error_pb2.AgentError(reason=f"ERROR_REASON_{reason}", message=message)  # type: ignore[arg-type]


def invocation(*tools: ToolInvocation) -> invocation_pb2.Invocation:
    return invocation_pb2.Invocation(tools=tools)


def with_arguments(one: eval_set_pb2.ToolMock, arguments_json: str) -> eval_set_pb2.ToolMock:
    one.arguments_match.equals_json = arguments_json
    return one


def test_no_mock_has_the_outcome_of_an_injected_fault() -> None:
    record = invocation(made("look", '{"what": "leaf"}', '"smudged"', fault_index=0), made("look", "{}", '"red"'))
    found = extract_mocks(record)
    assert list(found.tools) == [with_arguments(eval_set_pb2.ToolMock(name="look", result_json='"red"'), "{}")]
    (sentence,) = found.dropped
    assert sentence.endswith("had a fault that an evaluation injected, so no mock has its outcome.")


def test_each_outcome_of_an_ordinary_tool_becomes_a_mock_for_equal_arguments() -> None:
    failure = error_pb2.AgentError(
        reason=error_pb2.ERROR_REASON_TOOL_TIMEOUT, message="Too slow.", retryable=True, details_json='{"s": 1}'
    )
    record = invocation(
        made("look", '{"what": "leaf"}', '"red"'),
        made("list", "", "[1, 2.50]"),
        made("look", '{"what": "moss"}', state=FAILED, error=failure),
        made("drop", "{}", "null"),
    )
    expected = [
        mock("look", "red", what="leaf"),
        with_arguments(eval_set_pb2.ToolMock(name="list", result_json="[1, 2.50]"), "{}"),
        with_arguments(failing("look", "Too slow.", retryable=True, details_json='{"s": 1}'), '{"what": "moss"}'),
        with_arguments(returning("drop", message_pb2.Part(data_json="null")), "{}"),
    ]
    assert (mocks_of(record), extract_mocks(record).dropped) == (expected, [])


def test_a_mock_answers_the_arguments_that_an_approver_edited() -> None:
    record = invocation(made("pay", '{"n": 1}', '"paid"', executed_arguments_json='{"n": 2}'))
    assert mocks_of(record) == [mock("pay", "paid", n=2)]


def test_calls_that_no_ordinary_tool_answered_become_none() -> None:
    refused = [
        ToolInvocation(name="look", arguments_json="{}", state=FAILED, error=error(reason))
        for reason in ("UNKNOWN_TOOL", "BAD_ARGUMENTS", "NOT_APPROVED", "LIMIT_EXCEEDED", "TOOL_NOT_MOCKED")
    ]
    record = invocation(
        *refused,
        made("call_writer", '{"message": "go"}', '"text"', child_invocation_id="i"),
        made("transfer_to_agent", '{"agent_name": "b"}', '"Transferred to b."'),
        made("get_state", "{}", "1"),
        made("look", "{}", state=RUNNING),
        made("look", "{}", state=CANCELLED, error=error("CANCELLED")),
        made("look", "{}", state=FAILED, error=error("CANCELLED"), start_time=None),
    )
    found = extract_mocks(record)
    assert (found.tools, found.dropped) == ([], [])


def test_the_failure_that_a_client_reported_becomes_one_although_the_call_never_started() -> None:
    record = invocation(
        ToolInvocation(name="scan", arguments_json="{}", state=FAILED, error=error("TOOL_FAILED", "No reader.")),
    )
    assert mocks_of(record) == [with_arguments(failing("scan", "No reader."), "{}")]


def test_equal_calls_with_equal_outcomes_become_one_mock_and_others_are_named_and_dropped() -> None:
    record = invocation(
        made("look", '{"a": 1, "b": 2}', '{"x": 1, "y": 2}'),
        made("look", '{"b": 2, "a": 1}', '{"y": 2, "x": 1}', call_id="b"),
        made("look", '{"b": 2, "a": 1}', '{"y": 3}', call_id="c", agent="q"),
        made("look", '{"b": 2, "a": 1}', call_id="d", state=FAILED, error=error("TOOL_FAILED")),
        made("peek", '{"b": 2, "a": 1}', '{"y": 3}'),
    )
    found = extract_mocks(record)
    assert [one.name for one in found.tools] == ["look", "peek"]
    assert found.tools[0].result_json == '{"x": 1, "y": 2}'
    assert [sentence.partition(" had another outcome ")[0] for sentence in found.dropped] == [
        "The call 'c' of 'look' by 'q' with the arguments {\"b\": 2, \"a\": 1}",
        "The call 'd' of 'look' by 'p' with the arguments {\"b\": 2, \"a\": 1}",
    ]


def test_calls_whose_arguments_or_result_were_cut_are_named_and_dropped() -> None:
    record = invocation(
        made("look", '{"what": "' + "x" * 1_000, '"red"', arguments_truncated=True),
        made("look", "{}", '{"what": ', result_truncated=True),
    )
    found = extract_mocks(record)
    assert found.tools == []
    assert ["was not recorded whole" in sentence for sentence in found.dropped] == [True, True]
    assert all(len(sentence) < 400 for sentence in found.dropped)


@tool
def look(what: str) -> dict[str, object] | None:
    """Looks something up."""
    if what == "nothing":
        raise ValueError("there is nothing")
    return {"what": what, "size": 1.5} if what == "leaf" else None


@tool(name="look")
def broken(what: str) -> str:
    """Looks something up."""
    raise AssertionError("no mocked call runs the tool")


async def test_a_run_with_the_mocks_of_another_has_its_tree(tmp_path: Path) -> None:
    turns = script(
        p=[
            calls(call("look", what="leaf"), call("call_c", message="go")),
            calls(call("look", what="nothing")),
            "Done.",
        ],
        c=[calls(call("look", what="leaf"), call("look", what="moss")), "Found."],
    )
    members = llm("p", tools=["look"], links=["c"]), llm("c", tools=["look"])
    for folder in ("recorded", "mocked"):
        (tmp_path / folder).mkdir()
    async with open_team(tmp_path / "recorded", turns, *members, tools=[look]) as it:
        recorded = await it.tree(await it.turn("p"))
    mocks = eval_set_pb2.ToolMocks(tools=mocks_of(recorded), strict=True)
    async with open_team(tmp_path / "mocked", turns, *members, tools=[broken]) as it:
        case = EvaluationRun(ref=TURN, mocks=mocks)
        tree = await it.tree(await it.log(await it.start("p", case=case)))
    assert len(mocks.tools) == 3
    assert [one.state for one in tree.agents] == [SUCCEEDED, SUCCEEDED]
    assert outcomes(tree) == outcomes(recorded)
    assert masked([*tree.agents]) == masked([*recorded.agents])


def outcomes(tree: invocation_pb2.Invocation) -> list[tuple[object, ...]]:
    """What each call of a run came to."""
    return sorted((one.agent, one.arguments_json, one.state, one.result_json, one.error.message) for one in tree.tools)
