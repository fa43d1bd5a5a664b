"""The record of our own runs: whole, still going, failed and cancelled."""

from google.protobuf import json_format

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.tree.fold import ANOMALY, fold, fold_log
from tests.support.logs import (
    QUESTION,
    RUN_ID,
    SESSION_ID,
    AgentEvent,
    at,
    desk,
    failure,
    numbered,
    says,
    stamped,
    stored,
    tokens,
)


def tree_of(*told: AgentEvent) -> invocation_pb2.Invocation:
    return fold(numbered(told))


def test_a_whole_turn_is_a_record_with_everything_in_it() -> None:
    record = fold(stamped(desk()))
    assert record == invocation_pb2.Invocation(
        invocation_id="L",
        run_id=RUN_ID,
        session_id=SESSION_ID,
        agent="lead",
        labels={"team": "desk"},
        user_content=QUESTION,
        final_response=says("One."),
        intermediate_responses=[says("Let me ask.")],
        tools=[
            invocation_pb2.ToolInvocation(
                call_id="ask",
                name="call_researcher",
                arguments_json='{"message": "Find it."}',
                result_json='"It is one."',
                state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
                agent="lead",
                invocation_id="L",
                child_invocation_id="C",
                step_index=0,
                step_id="L-0",
                sequence=5,
                start_time=at(5),
                end_time=at(18),
            ),
            invocation_pb2.ToolInvocation(
                call_id="look",
                name="search",
                arguments_json='{"q": "it"}',
                result_json='{"it": 1}',
                state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
                agent="researcher",
                invocation_id="C",
                step_index=0,
                step_id="C-0",
                sequence=9,
                start_time=at(9),
                end_time=at(10),
            ),
        ],
        agents=_desk_agents(),
        state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
        tree_usage=tokens(55, 8, model_calls=4, tool_calls=2),
        start_time=at(1),
        end_time=at(24),
        as_of_sequence=24,
        complete=True,
        agents_total=2,
        tools_total=2,
    )


def _desk_agents() -> list[invocation_pb2.AgentInvocation]:
    lead = invocation_pb2.AgentInvocation(
        invocation_id="L",
        name="lead",
        branch="lead",
        run_path=["lead"],
        kind=execution_pb2.AGENT_KIND_LLM,
        trigger=execution_pb2.INVOCATION_TRIGGER_ROOT,
        revision="r1",
        child_count=1,
        state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
        end_reason=execution_pb2.END_REASON_ANSWERED,
        start_time=at(1),
        end_time=at(24),
        usage=tokens(25, 3, model_calls=2, tool_calls=1),
        tree_usage=tokens(55, 8, model_calls=4, tool_calls=2),
        step_count=2,
        input=QUESTION,
        output=says("One."),
        trace_id="a" * 32,
        span_id="b" * 16,
    )
    researcher = invocation_pb2.AgentInvocation(
        invocation_id="C",
        parent_invocation_id="L",
        name="researcher",
        branch="lead/researcher",
        run_path=["lead", "researcher"],
        kind=execution_pb2.AGENT_KIND_LLM,
        trigger=execution_pb2.INVOCATION_TRIGGER_TOOL,
        call_id="ask",
        revision="r2",
        depth=1,
        state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
        end_reason=execution_pb2.END_REASON_ANSWERED,
        start_time=at(6),
        end_time=at(17),
        usage=tokens(30, 5, model_calls=2, tool_calls=1),
        tree_usage=tokens(30, 5, model_calls=2, tool_calls=1),
        step_count=2,
        input=says("Find it."),
        output=says("It is one."),
        trace_id="a" * 32,
        span_id="c" * 16,
    )
    return [lead, researcher]


def test_stored_bytes_and_parsed_events_make_the_same_record() -> None:
    for include_steps in (False, True):
        options = invocation_pb2.InvocationOptions(include_steps=include_steps)
        for end in range(len(desk()) + 1):
            log = desk()[:end]
            from_bytes = fold_log(stored(log), run_id=RUN_ID, session_id=SESSION_ID, options=options)
            if log:
                assert from_bytes == fold(stamped(log), options)
            else:
                assert from_bytes == invocation_pb2.Invocation(
                    run_id=RUN_ID, session_id=SESSION_ID, tree_usage=usage_pb2.Usage()
                )


def test_a_delta_of_a_stored_log_is_counted_and_not_parsed() -> None:
    log = stored(desk()[:3])
    unreadable = type(log[2])(3, log[2].kind, b"\xff")
    assert fold_log([*log[:2], unreadable], run_id="r", session_id="s").as_of_sequence == 3


def test_a_running_run_has_a_tree() -> None:
    record = fold(desk()[:8])
    assert (record.state, record.complete) == (execution_pb2.EXECUTION_STATE_RUNNING, False)
    assert [agent.state for agent in record.agents] == [execution_pb2.EXECUTION_STATE_RUNNING] * 2
    assert not record.HasField("end_time")
    assert [agent.anomalies[:] for agent in record.agents] == [[], []]
    assert record.tools[0].child_invocation_id == "C"


def test_a_failed_run_and_a_cancelled_child_say_so() -> None:
    cancelled = failure(error_pb2.ERROR_REASON_CANCELLED)
    failed = failure(error_pb2.ERROR_REASON_DEADLINE_EXCEEDED)
    record = tree_of(
        *desk()[:8],
        AgentEvent(invocation_id="C", sub_agent_failed=event_pb2.SubAgentFailed(error=cancelled)),
        AgentEvent(invocation_id="L", run_failed=event_pb2.RunFailed(error=failed)),
    )
    assert [(agent.state, agent.error) for agent in record.agents] == [
        (execution_pb2.EXECUTION_STATE_FAILED, failed),
        (execution_pb2.EXECUTION_STATE_CANCELLED, cancelled),
    ]
    assert (record.state, record.error, record.complete) == (execution_pb2.EXECUTION_STATE_FAILED, failed, True)
    assert not record.HasField("final_response")


def test_an_invocation_without_an_end_in_a_run_that_ended_is_an_anomaly() -> None:
    record = tree_of(*desk()[:8], AgentEvent(invocation_id="L", run_cancelled=event_pb2.RunCancelled()))
    assert record.state == record.agents[0].state == execution_pb2.EXECUTION_STATE_CANCELLED
    assert record.agents[0].anomalies == []
    assert record.agents[1].state == execution_pb2.EXECUTION_STATE_UNSPECIFIED
    no_end = invocation_pb2.ANOMALY_KIND_NO_END
    assert record.agents[1].anomalies == [
        invocation_pb2.Anomaly(kind=no_end, message="It has no end, although the run has ended.", invocation_id="C")
    ]
    assert record.anomalies == [
        invocation_pb2.Anomaly(kind=no_end, message="Tool calls without an end in a run that has ended: 1.")
    ]


def test_the_end_of_a_run_that_names_no_invocation_is_the_root_s() -> None:
    record = tree_of(desk()[0], AgentEvent(run_completed=event_pb2.RunCompleted(final_answer=says("Done."))))
    assert record.agents[0].state == execution_pb2.EXECUTION_STATE_SUCCEEDED
    assert record.agents[0].output == record.final_response == says("Done.")


def test_times_that_json_cannot_say_are_left_out_and_named() -> None:
    started = event_pb2.AgentEvent(run_id="r", sequence=1, invocation_id="R", agent="a")
    started.record_time.seconds = 2**60
    started.run_started.invocation_id = "R"
    started.run_started.deadline_time.seconds = 2**60
    record = fold([started])
    assert not record.HasField("start_time")
    assert not record.agents[0].HasField("start_time")
    assert record.anomalies == [ANOMALY]
    assert json_format.Parse(json_format.MessageToJson(record), invocation_pb2.Invocation()) == record


def test_a_start_says_who_transferred_and_in_which_iteration_it_runs() -> None:
    first = event_pb2.SubAgentStarted(from_invocation_id="a", iteration=0)
    record = tree_of(
        AgentEvent(invocation_id="R", agent="r", run_started=event_pb2.RunStarted(invocation_id="R")),
        AgentEvent(invocation_id="a", parent_invocation_id="R", sub_agent_started=event_pb2.SubAgentStarted()),
        AgentEvent(invocation_id="b", parent_invocation_id="R", sub_agent_started=first),
    )
    root, one, other = record.agents
    assert [root.HasField("iteration"), one.HasField("iteration")] == [False, False]
    assert (one.from_invocation_id, other.from_invocation_id) == ("", "a")
    assert (other.HasField("iteration"), other.iteration) == (True, 0)


def test_the_settings_are_those_of_the_last_call_of_a_step() -> None:
    def asks(key: str, step_id: str, settings: model_pb2.ModelSettings | None) -> AgentEvent:
        started = event_pb2.LlmStarted(settings=settings)
        return AgentEvent(invocation_id="R", effect_key=key, step_id=step_id, llm_started=started)

    warm, cold = model_pb2.ModelSettings(temperature=0.7), model_pb2.ModelSettings(temperature=0, max_output_tokens=9)
    first = asks("s0.m", "R-0", warm)
    assert tree_of(first).agents[0].settings == warm
    assert tree_of(first, asks("s1.m", "R-1", cold), asks("s1.compact", "", warm)).agents[0].settings == cold
    assert not tree_of(first, asks("s1.m", "R-1", None)).agents[0].HasField("settings")


def test_an_end_by_cancellation_says_why_as_far_as_the_events_do() -> None:
    cancelled = execution_pb2.END_REASON_CANCELLED
    fail_fast, superseded = execution_pb2.CANCEL_REASON_FAIL_FAST, execution_pb2.CANCEL_REASON_SUPERSEDED
    ended = event_pb2.SubAgentFailed(end_reason=cancelled, cancel_reason=fail_fast)
    failed = event_pb2.SubAgentFailed(end_reason=execution_pb2.END_REASON_FAILED, cancel_reason=fail_fast)
    run_ended = event_pb2.RunCancelled(end_reason=cancelled, cancel_reason=superseded)
    record = tree_of(
        AgentEvent(invocation_id="R", run_started=event_pb2.RunStarted(invocation_id="R")),
        AgentEvent(invocation_id="a", parent_invocation_id="R", sub_agent_failed=ended),
        AgentEvent(invocation_id="b", parent_invocation_id="R", sub_agent_failed=failed),
        AgentEvent(invocation_id="R", run_cancelled=run_ended),
    )
    assert [agent.cancel_reason for agent in record.agents] == [superseded, fail_fast, 0]


def test_metadata_of_messages_and_parts_is_in_the_record() -> None:
    asked = says("Hm.", message_pb2.ToolCall(call_id="1", name="look"))
    asked.metadata_json, asked.parts[0].metadata_json = '{"a":1}', '{"b":2}'
    completed = event_pb2.LlmCompleted(response=step_pb2.LlmResponse(message=asked))
    started = event_pb2.RunStarted(invocation_id="R", input=asked)
    record = tree_of(
        AgentEvent(invocation_id="R", run_started=started), AgentEvent(invocation_id="R", llm_completed=completed)
    )
    (said,) = record.intermediate_responses
    assert (said.metadata_json, said.parts[0].metadata_json) == ('{"a":1}', '{"b":2}')
    assert record.user_content == record.agents[0].input == asked
