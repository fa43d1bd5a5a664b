"""Tool calls in a record: whose they are, their state and what is shown of their arguments and results."""

import pytest

from bough.v1 import error_pb2, event_pb2, execution_pb2, input_pb2, invocation_pb2, message_pb2, step_pb2
from bough_server.tree.fold import fold
from tests.support.logs import AgentEvent, at, desk, failure, numbered, result_of

CALL = message_pb2.ToolCall(call_id="1", name="search", arguments_json='{"q": "é"}')


def started(invocation_id: str = "R", call: message_pb2.ToolCall = CALL, attempt: int = 1) -> AgentEvent:
    return AgentEvent(
        invocation_id=invocation_id,
        agent=invocation_id.lower(),
        attempt=attempt,
        step_id=f"{invocation_id}-3",
        step_index=3,
        tool_started=event_pb2.ToolStarted(call=call),
    )


def completed(*parts: message_pb2.Part, invocation_id: str = "R", call: message_pb2.ToolCall = CALL) -> AgentEvent:
    return AgentEvent(
        invocation_id=invocation_id, tool_completed=event_pb2.ToolCompleted(result=result_of(call, *parts))
    )


def asked(call: message_pb2.ToolCall = CALL, kind: str = "APPROVAL") -> AgentEvent:
    """A request about a call."""
    of_kind = input_pb2.InputKind.Value(f"INPUT_KIND_{kind}")
    request = input_pb2.InputRequest(input_id="i", kind=of_kind, call_id=call.call_id)
    request.call.name, request.call.arguments_json = call.name, call.arguments_json
    return AgentEvent(invocation_id="R", agent="r", input_requested=event_pb2.InputRequested(request=request))


def failed(error: error_pb2.AgentError, invocation_id: str = "R") -> AgentEvent:
    result = result_of(CALL, error=error)
    return AgentEvent(invocation_id=invocation_id, agent="r", tool_failed=event_pb2.ToolFailed(result=result))


def tools_of(*log: AgentEvent, **options: int) -> list[invocation_pb2.ToolInvocation]:
    return list(fold(numbered(log), invocation_pb2.InvocationOptions(**options)).tools)  # type: ignore[arg-type]


def text(value: str) -> message_pb2.Part:
    return message_pb2.Part(text=value)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([message_pb2.Part(data_json='{"a": [1, 2]}')], '{"a": [1, 2]}'),
        ([text('He said "é"')], '"He said \\"é\\""'),
        ([text("one"), text(" two"), message_pb2.Part(data_json="3")], '"one two3"'),
        ([message_pb2.Part(blob=message_pb2.Blob(uri="s3://x", media_type="image/png"))], '"s3://x"'),
        ([message_pb2.Part(blob=message_pb2.Blob(data=b"1", media_type="image/png"))], '"[image/png, 1 byte]"'),
        (
            [message_pb2.Part(blob=message_pb2.Blob(sha256="ab", media_type="image/png", size_bytes=300_200))],
            '"[image/png, 300 KB]"',
        ),
        ([], '""'),
    ],
)
def test_a_result_is_its_json_or_its_text_as_a_json_string(parts: list[message_pb2.Part], expected: str) -> None:
    assert tools_of(started(), completed(*parts))[0].result_json == expected


def test_the_same_call_id_in_two_invocations_is_two_calls() -> None:
    tools = tools_of(started("A"), started("B"), completed(text("b"), invocation_id="B"))
    assert [(tool.invocation_id, tool.agent, tool.state, tool.step_index, tool.step_id) for tool in tools] == [
        ("A", "a", execution_pb2.EXECUTION_STATE_RUNNING, 3, "A-3"),
        ("B", "b", execution_pb2.EXECUTION_STATE_SUCCEEDED, 3, "B-3"),
    ]


def test_a_call_of_the_first_step_has_an_index_and_a_call_outside_of_steps_has_none() -> None:
    first, outside = started("A"), started("B")
    first.step_index = 0
    outside.ClearField("step_id")
    outside.ClearField("step_index")
    tools = tools_of(first, outside)
    assert [(tool.HasField("step_index"), tool.step_index, tool.step_id) for tool in tools] == [
        (True, 0, "A-3"),
        (False, 0, ""),
    ]


def test_a_call_that_was_refused_never_began() -> None:
    refused = failure(error_pb2.ERROR_REASON_NOT_LINKED)
    assert tools_of(failed(refused)) == [
        invocation_pb2.ToolInvocation(
            call_id="1",
            name="search",
            arguments_json='{"q": "é"}',
            state=execution_pb2.EXECUTION_STATE_FAILED,
            error=refused,
            agent="r",
            invocation_id="R",
            sequence=1,
            end_time=at(1),
        )
    ]


def test_a_call_that_was_cancelled_says_so() -> None:
    tools = tools_of(started(), failed(failure(error_pb2.ERROR_REASON_CANCELLED)))
    assert [tool.state for tool in tools] == [execution_pb2.EXECUTION_STATE_CANCELLED]


def test_a_failed_call_does_not_fail_its_agent() -> None:
    record = fold(
        [
            started(),
            failed(failure(error_pb2.ERROR_REASON_TOOL_FAILED)),
            AgentEvent(invocation_id="R", run_completed=event_pb2.RunCompleted()),
        ]
    )
    assert record.agents[0].state == execution_pb2.EXECUTION_STATE_SUCCEEDED


def test_a_second_attempt_is_the_same_call() -> None:
    tools = tools_of(started(), started(attempt=2), completed(text("done")))
    assert [(tool.sequence, tool.start_time, tool.end_time) for tool in tools] == [(1, at(1), at(3))]


def test_a_call_id_that_is_used_again_loses_no_call() -> None:
    again = message_pb2.ToolCall(call_id="1", name="write")
    record = fold(numbered([started(), completed(text("a")), started(call=again), completed(text("b"), call=again)]))
    assert [(tool.name, tool.result_json) for tool in record.tools] == [("search", '"a"'), ("write", '"b"')]
    (reused,) = record.agents[0].anomalies
    assert (reused.kind, reused.invocation_id) == (invocation_pb2.ANOMALY_KIND_CALL_ID_REUSED, "R")
    assert reused.message == "One of its call ids stands for more than one call."
    assert record.tools_total == 2


def test_a_call_id_that_is_used_again_beyond_the_bound_is_counted_too() -> None:
    log = numbered([started(), completed(text("a")), started(), completed(text("b"))])
    for max_tools in (0, 1, 2):
        assert fold(log, invocation_pb2.InvocationOptions(max_tools=max_tools)).tools_total == 2


def test_the_first_end_of_a_call_counts() -> None:
    tools = tools_of(started(), completed(text("first")), completed(text("second")))
    assert [tool.result_json for tool in tools] == ['"first"']


def test_a_call_first_heard_of_by_its_output_is_named_by_its_end() -> None:
    output = AgentEvent(invocation_id="R", tool_output=event_pb2.ToolOutput(call_id="1", text="..."))
    tools = tools_of(output, completed(text("done")))
    assert [(tool.name, tool.arguments_json, tool.sequence) for tool in tools] == [("search", '{"q": "é"}', 1)]


def test_arguments_and_results_are_cut_between_characters_and_marked() -> None:
    cut = tools_of(started(), completed(text("ééé")), max_tool_args_bytes=8, max_tool_result_bytes=4)[0]
    assert (cut.arguments_json, cut.arguments_truncated) == ('{"q": "', True)
    assert (cut.result_json, cut.result_truncated) == ('"é', True)
    whole = tools_of(started(), completed(text("ééé")), max_tool_args_bytes=11, max_tool_result_bytes=8)[0]
    assert (whole.arguments_json, whole.arguments_truncated) == ('{"q": "é"}', False)
    assert (whole.result_json, whole.result_truncated) == ('"ééé"', False)


def edited(arguments_json: str) -> message_pb2.ToolCall:
    return message_pb2.ToolCall(call_id="1", name="search", arguments_json=arguments_json)


def test_arguments_that_an_approver_edited_are_beside_those_that_the_model_wrote() -> None:
    other = edited('{"q": "e"}')
    for ends in ((), (completed(text("x"), call=other),), (started(call=other, attempt=2), completed(call=other))):
        (tool,) = tools_of(asked(), started(call=other), *ends)
        assert (tool.arguments_json, tool.executed_arguments_json) == (CALL.arguments_json, other.arguments_json)
        assert not tool.executed_arguments_truncated
    (tool,) = tools_of(asked(), asked(call=other, kind="CLIENT_TOOL"), completed(text("x"), call=other))
    assert tool.executed_arguments_json == other.arguments_json


def test_arguments_that_are_not_edited_have_no_other_ones_beside_them() -> None:
    output = AgentEvent(invocation_id="R", tool_output=event_pb2.ToolOutput(call_id="1", text="..."))
    long = edited(f'"{"x" * 10_000}"')
    for log in (
        (asked(), started(), completed()),
        (asked(), failed(failure(error_pb2.ERROR_REASON_NOT_APPROVED))),
        (asked(call=long), started(call=long), completed(call=long)),
        (output, started(), started(attempt=2), completed()),
        (asked(), started(call=edited('{"q": "e"}')), started(attempt=2), completed()),
    ):
        (tool,) = tools_of(*log)
        assert tool.arguments_json
        assert (tool.executed_arguments_json, tool.executed_arguments_truncated) == ("", False)


def test_long_arguments_that_an_approver_edited_after_the_cut_are_cut_and_marked_too() -> None:
    written, executed = (edited(f'"{"x" * 10_000}{end}"') for end in "ab")
    (tool,) = tools_of(asked(call=written), started(call=executed))
    assert tool.executed_arguments_json == tool.arguments_json == '"' + "x" * 4_095
    assert (tool.arguments_truncated, tool.executed_arguments_truncated) == (True, True)


def test_a_result_that_the_log_cut_is_marked() -> None:
    event = completed(text("head"))
    event.tool_completed.result.truncated = True
    assert tools_of(started(), event)[0].result_truncated


def test_calls_beyond_the_bound_are_counted() -> None:
    calls = [message_pb2.ToolCall(call_id=str(number)) for number in range(5)]
    log = [event for call in calls for event in (started(call=call), completed(text("x"), call=call))]
    record = fold(log, invocation_pb2.InvocationOptions(max_tools=2))
    assert [(tool.call_id, tool.state) for tool in record.tools] == [
        ("0", execution_pb2.EXECUTION_STATE_SUCCEEDED),
        ("1", execution_pb2.EXECUTION_STATE_SUCCEEDED),
    ]
    assert record.tools_total == 5


def test_steps_come_only_where_they_are_asked_for() -> None:
    assert list(fold(desk()).steps) == []
    steps = fold(desk(), invocation_pb2.InvocationOptions(include_steps=True)).steps
    assert [(step.invocation_id, step.step_index) for step in steps] == [("C", 0), ("C", 1), ("L", 0), ("L", 1)]
    assert steps[2] == desk()[18].step_completed.step


def test_a_step_s_result_that_was_cut_is_filled_in_from_the_tool_s_own_end() -> None:
    whole = result_of(CALL, text("x" * 70_000))
    cut = result_of(CALL, text("x" * 100))
    cut.truncated, cut.original_bytes = True, whole.ByteSize()
    other = result_of(message_pb2.ToolCall(call_id="2"), text("short"))
    step = step_pb2.AgentStep(step_id="s", tool_results=[cut, other])
    log = [
        started(),
        AgentEvent(invocation_id="R", tool_completed=event_pb2.ToolCompleted(result=whole)),
        AgentEvent(invocation_id="R", step_failed=event_pb2.StepFailed(step=step)),
    ]
    record = fold(log, invocation_pb2.InvocationOptions(include_steps=True))
    assert list(record.steps) == [step_pb2.AgentStep(step_id="s", invocation_id="R", tool_results=[whole, other])]
    assert log[2].step_failed.step == step
