"""A record within its bounds: what is cut first, how it is marked, and what is left when little fits."""

import pytest

from bough.v1 import error_pb2, event_pb2, invocation_pb2, message_pb2, step_pb2
from bough_server.tree.bounds import MAX_BYTES, Bounds, fit, head
from bough_server.tree.fold import fold
from tests.support.logs import AgentEvent, desk, says, shape


def message(*texts: str) -> message_pb2.Message:
    return message_pb2.Message(parts=[message_pb2.Part(text=text) for text in texts])


def test_absent_bounds_are_the_defaults_and_zero_is_zero() -> None:
    assert Bounds.of(None) == Bounds.of(invocation_pb2.InvocationOptions())
    assert Bounds.of(None) == Bounds(
        include_steps=False,
        max_agents=1_000,
        max_tools=2_000,
        max_tool_args_bytes=4_096,
        max_tool_result_bytes=4_096,
        max_bytes=3_670_016,
    )
    assert Bounds.of(invocation_pb2.InvocationOptions(max_agents=0)).max_agents == 0


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, ("", True)), (1, ("a", True)), (2, ("a", True)), (3, ("aé", True)), (7, ("aé😀", False))],
)
def test_the_head_of_a_text_ends_between_characters(limit: int, expected: tuple[str, bool]) -> None:
    assert head("aé😀", limit) == expected


def test_a_record_that_fits_stays_as_it_is() -> None:
    record = fold(desk())
    size = record.ByteSize()
    assert fold(desk(), invocation_pb2.InvocationOptions(max_bytes=size)) == record


def test_agents_beyond_the_bound_are_the_last_of_the_preorder() -> None:
    record = fold(desk(), invocation_pb2.InvocationOptions(max_agents=1))
    assert shape(record) == [(0, "L", "lead")]
    assert record.agents_total == 2
    assert record.tree_usage == fold(desk()).tree_usage
    assert record.agents[0].child_count == 1


def test_the_longest_texts_are_cut_first_to_one_length_and_marked() -> None:
    record = invocation_pb2.Invocation(
        user_content=message("a" * 10_000), final_response=message("b" * 500, "c" * 9_000), agent="lead"
    )
    fit(record, 5_000)
    long, short, second = record.user_content.parts[0], *record.final_response.parts
    assert 4_900 <= record.ByteSize() <= 5_000
    assert len(long.text) == len(second.text) > 2_000
    assert (long.truncated, long.original_bytes) == (True, 10_000)
    assert (second.truncated, second.original_bytes) == (True, 9_000)
    assert short == message_pb2.Part(text="b" * 500)


def test_inputs_outputs_tools_and_steps_share_what_there_is() -> None:
    long = "x" * 20_000
    call = message_pb2.ToolCall(call_id="1", arguments_json=long)
    record = invocation_pb2.Invocation(
        intermediate_responses=[message(long)],
        agents=[invocation_pb2.AgentInvocation(input=message(long), output=message(long))],
        tools=[invocation_pb2.ToolInvocation(arguments_json=long, result_json=long)],
        steps=[
            step_pb2.AgentStep(
                llm_response=step_pb2.LlmResponse(message=says(long, call)),
                tool_results=[message_pb2.ToolResult(call=call, parts=[message_pb2.Part(data_json=long)])],
            )
        ],
    )
    fit(record, 20_000)
    agent, tool, step = record.agents[0], record.tools[0], record.steps[0]
    spoken, asked = step.llm_response.message.parts
    result = step.tool_results[0]
    texts = [
        record.intermediate_responses[0].parts[0].text,
        agent.input.parts[0].text,
        agent.output.parts[0].text,
        tool.arguments_json,
        tool.result_json,
        spoken.text,
        asked.tool_call.arguments_json,
        result.call.arguments_json,
        result.parts[0].data_json,
    ]
    assert len({len(text) for text in texts}) == 1
    assert 2_000 < len(texts[0]) < 20_000 / 9
    assert all((tool.arguments_truncated, tool.result_truncated, spoken.truncated, asked.truncated, result.truncated))
    assert result.parts[0] == message_pb2.Part(data_json=texts[0], truncated=True, original_bytes=20_000)
    assert record.ByteSize() <= 20_000


def test_reasoning_and_bytes_are_cut_too() -> None:
    parts = [
        message_pb2.Part(reasoning=message_pb2.Reasoning(text="é" * 2_000)),
        message_pb2.Part(blob=message_pb2.Blob(data=b"\x00" * 3_000, media_type="image/png")),
    ]
    record = invocation_pb2.Invocation(user_content=message_pb2.Message(parts=parts))
    fit(record, 1_100)
    thought, image = record.user_content.parts
    assert set(thought.reasoning.text) == {"é"}
    assert (thought.truncated, thought.original_bytes) == (True, 4_000)
    assert image == message_pb2.Part(
        blob=message_pb2.Blob(media_type="image/png"), truncated=True, original_bytes=3_000
    )


def test_an_error_s_message_is_cut_with_an_ellipsis_and_its_details_go() -> None:
    error = error_pb2.AgentError(message="m" * 5_000, details_json='{"a": "' + "d" * 5_000 + '"}')
    record = invocation_pb2.Invocation(error=error)
    fit(record, 1_024)
    assert record.error.message.endswith("m…")
    assert record.error.details_json == ""
    assert record.ByteSize() <= 1_024


def test_a_text_that_the_log_had_cut_keeps_its_original_size() -> None:
    part = message_pb2.Part(text="a" * 5_000, truncated=True, original_bytes=900_000)
    record = invocation_pb2.Invocation(user_content=message_pb2.Message(parts=[part]))
    fit(record, 1_024)
    assert record.user_content.parts[0].original_bytes == 900_000


def test_where_texts_are_not_enough_steps_then_tools_then_agents_go_from_the_end() -> None:
    log = [
        event
        for number in range(60)
        for event in (
            AgentEvent(invocation_id=f"invocation-{number}", agent=f"agent-{number}"),
            AgentEvent(
                invocation_id=f"invocation-{number}",
                tool_started=event_pb2.ToolStarted(call=message_pb2.ToolCall(call_id="1", name="search")),
            ),
        )
    ]
    names = [f"agent-{number}" for number in range(60)]
    without_tools = fold(log, invocation_pb2.InvocationOptions(max_tools=0)).ByteSize()
    fewer_tools = fold(log, invocation_pb2.InvocationOptions(max_bytes=without_tools + 500))
    fewer_agents = fold(log, invocation_pb2.InvocationOptions(max_bytes=without_tools - 500))
    assert 5 < len(fewer_tools.tools) < 20
    assert [agent.name for agent in fewer_tools.agents] == names
    assert fewer_tools.agents_total == 60
    assert list(fewer_agents.tools) == []
    assert 40 < len(fewer_agents.agents) < 60
    assert [agent.name for agent in fewer_agents.agents] == names[: len(fewer_agents.agents)]
    assert (fewer_agents.agents_total, fewer_agents.tools_total) == (60, 60)
    assert fewer_agents.ByteSize() <= without_tools - 500


def test_what_fits_nowhere_is_left_out_and_said() -> None:
    labels = {f"label-{number}": "v" * 200 for number in range(64)}
    record = invocation_pb2.Invocation(
        invocation_id="R", labels=labels, user_content=message("hi"), as_of_sequence=7, agents_total=1
    )
    fit(record, 1_024)
    assert record == invocation_pb2.Invocation(
        invocation_id="R",
        user_content=message("hi"),
        as_of_sequence=7,
        agents_total=1,
        anomalies=[
            invocation_pb2.Anomaly(
                kind=invocation_pb2.ANOMALY_KIND_CUT,
                message="Parts of this record were left out because they do not fit max_bytes.",
            )
        ],
    )


def test_metadata_that_does_not_fit_is_left_out_whole() -> None:
    object_json = '{"a":"' + "x" * 5_000 + '"}'
    small = '{"b":1}'
    said = message("hi")
    said.metadata_json, said.parts[0].metadata_json = object_json, small
    record = invocation_pb2.Invocation(user_content=said)
    fit(record, 1_024)
    expected = message("hi")
    expected.parts[0].metadata_json = small
    assert record == invocation_pb2.Invocation(user_content=expected)


def test_a_default_record_of_much_text_stays_under_the_default_bound() -> None:
    log = [
        AgentEvent(
            invocation_id=str(number), sub_agent_completed=event_pb2.SubAgentCompleted(output=message("é" * 100_000))
        )
        for number in range(40)
    ]
    record = fold(log)
    assert MAX_BYTES - 1_000 < record.ByteSize() <= MAX_BYTES
    assert len(record.agents) == 40
    assert all(agent.output.parts[0].truncated for agent in record.agents)
