"""Records of runs that wait: in a queue, for answers from outside, and for a server that comes back."""

import pytest

from bough.v1 import error_pb2, event_pb2, execution_pb2, input_pb2, invocation_pb2, message_pb2, usage_pb2
from bough_server.tree.fold import fold
from tests.support.logs import AgentEvent, at, failure, numbered, result_of, tokens
from tests.support.waiting_run_log import (
    APPROVAL,
    CLIENT_TOOL,
    PAY,
    WHICH,
    asking_desk,
    clerk,
    interrupted,
    lead,
    received,
    requested,
    resumed,
    told,
)

PENDING, RUNNING, WAITING = (
    execution_pb2.EXECUTION_STATE_PENDING,
    execution_pb2.EXECUTION_STATE_RUNNING,
    execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
)
SUCCEEDED, FAILED = execution_pb2.EXECUTION_STATE_SUCCEEDED, execution_pb2.EXECUTION_STATE_FAILED

States = dict[str, execution_pb2.ExecutionState.ValueType]


def tree_of(*log: AgentEvent) -> invocation_pb2.Invocation:
    return fold(numbered(log))


def agents_of(record: invocation_pb2.Invocation) -> States:
    return {agent.invocation_id: agent.state for agent in record.agents}


def tools_of(record: invocation_pb2.Invocation) -> States:
    return {tool.call_id: tool.state for tool in record.tools}


@pytest.mark.parametrize(
    ("through", "run", "agents", "tools"),
    [
        (1, RUNNING, {"L": RUNNING}, {}),
        (2, PENDING, {"L": PENDING}, {}),
        (3, RUNNING, {"L": RUNNING}, {}),
        (8, RUNNING, {"L": RUNNING, "C": RUNNING}, {"delegate": RUNNING, "pay": WAITING}),
        (10, RUNNING, {"L": RUNNING, "C": RUNNING}, {"delegate": RUNNING, "pay": WAITING, "scan": WAITING}),
        (11, WAITING, {"L": WAITING, "C": WAITING}, {"delegate": RUNNING, "pay": WAITING, "scan": WAITING}),
        (12, RUNNING, {"L": RUNNING, "C": RUNNING}, {"delegate": RUNNING, "pay": WAITING, "scan": WAITING}),
        (13, RUNNING, {"L": RUNNING, "C": RUNNING}, {"delegate": RUNNING, "pay": RUNNING, "scan": WAITING}),
        (16, RUNNING, {"L": RUNNING, "C": RUNNING}, {"delegate": RUNNING, "pay": RUNNING, "scan": WAITING}),
        (18, WAITING, {"L": WAITING, "C": WAITING}, {"delegate": RUNNING, "pay": SUCCEEDED, "scan": WAITING}),
        (20, RUNNING, {"L": RUNNING, "C": RUNNING}, {"delegate": RUNNING, "pay": SUCCEEDED, "scan": WAITING}),
        (23, RUNNING, {"L": RUNNING, "C": SUCCEEDED}, {"delegate": SUCCEEDED, "pay": SUCCEEDED, "scan": RUNNING}),
        (33, SUCCEEDED, {"L": SUCCEEDED, "C": SUCCEEDED}, dict.fromkeys(("delegate", "pay", "scan"), SUCCEEDED)),
    ],
)
def test_a_run_its_agents_and_its_calls_are_in_the_state_that_their_events_say(
    through: int, run: execution_pb2.ExecutionState.ValueType, agents: States, tools: States
) -> None:
    record = fold(asking_desk()[:through])
    assert (record.state, agents_of(record), tools_of(record)) == (run, agents, tools)
    assert record.complete == (through == 33)


def test_a_turn_that_was_continued_many_times_has_no_anomalies() -> None:
    for through in range(len(asking_desk()) + 1):
        record = fold(asking_desk()[:through])
        assert list(record.anomalies) == []
        assert [list(agent.anomalies) for agent in record.agents] == [[] for _ in record.agents]


def test_who_does_not_ask_is_running_above_one_who_does() -> None:
    log = [event for event in asking_desk()[:10] if event.sequence not in (8, 9)]
    record = tree_of(*log, interrupted(WHICH))
    assert (record.state, agents_of(record)) == (WAITING, {"L": RUNNING, "C": WAITING})
    assert tools_of(record) == {"delegate": RUNNING}


def test_a_queued_run_has_not_begun_before_it_is_dequeued() -> None:
    waiting, begun = fold(asking_desk()[:2]), fold(asking_desk()[:3])
    assert not waiting.HasField("start_time")
    assert not waiting.agents[0].HasField("start_time")
    assert (begun.start_time, begun.agents[0].start_time) == (at(3), at(3))


def test_a_queued_run_that_another_server_takes_over_waits_on() -> None:
    record = tree_of(*asking_desk()[:2], resumed(event_pb2.RESUME_CAUSE_RECOVERY))
    assert (record.state, agents_of(record), record.HasField("start_time")) == (PENDING, {"L": PENDING}, False)


def test_a_queued_run_that_is_cancelled_never_began() -> None:
    record = tree_of(*asking_desk()[:2], lead(run_cancelled=event_pb2.RunCancelled()))
    assert (record.state, record.complete) == (execution_pb2.EXECUTION_STATE_CANCELLED, True)
    assert not record.HasField("start_time")
    assert record.end_time == at(3)


def test_an_interrupted_run_has_a_start_and_no_end() -> None:
    record = fold(asking_desk()[:11])
    assert record.start_time == at(3)
    assert not record.HasField("end_time")
    assert [agent.HasField("end_time") for agent in record.agents] == [False, False]


def test_a_call_that_asks_is_there_from_its_request_on_and_starts_when_it_starts() -> None:
    asked = invocation_pb2.ToolInvocation(
        call_id="pay",
        name="pay",
        arguments_json='{"amount": 7}',
        state=WAITING,
        agent="lead",
        invocation_id="L",
        step_index=0,
        step_id="L-0",
        sequence=8,
    )
    assert fold(asking_desk()[:11]).tools[1] == asked
    asked.state, asked.result_json = SUCCEEDED, '"paid"'
    asked.start_time.CopyFrom(at(14))
    asked.end_time.CopyFrom(at(17))
    assert fold(asking_desk()).tools[1] == asked


def test_a_call_of_the_client_s_never_starts_and_ends_with_what_the_client_gave() -> None:
    assert fold(asking_desk()).tools[2] == invocation_pb2.ToolInvocation(
        call_id="scan",
        name="scan",
        arguments_json="{}",
        result_json='"scanned"',
        state=SUCCEEDED,
        agent="lead",
        invocation_id="L",
        step_index=0,
        step_id="L-0",
        sequence=9,
        end_time=at(24),
    )


def test_a_call_has_the_step_and_the_arguments_of_its_request() -> None:
    event = lead(step_id="s", step_index=4, input_requested=requested(APPROVAL))
    edited = message_pb2.ToolCall(call_id="pay", name="pay", arguments_json='{"amount": 1}')
    record = tree_of(event, lead(tool_started=event_pb2.ToolStarted(call=edited)))
    assert [(tool.step_index, tool.arguments_json) for tool in record.tools] == [(4, '{"amount": 7}')]


def test_arguments_of_a_call_that_asks_are_cut_too() -> None:
    log = [lead(input_requested=requested(APPROVAL))]
    (tool,) = fold(log, invocation_pb2.InvocationOptions(max_tool_args_bytes=4)).tools
    assert (tool.arguments_json, tool.arguments_truncated) == ('{"am', True)


def test_a_call_that_was_refused_failed_and_was_never_counted() -> None:
    error = failure(error_pb2.ERROR_REASON_NOT_APPROVED)
    record = tree_of(
        lead(input_requested=requested(APPROVAL)),
        lead(input_received=received(APPROVAL)),
        lead(tool_failed=event_pb2.ToolFailed(result=result_of(PAY, error=error))),
    )
    (tool,) = record.tools
    assert (tool.state, tool.error, tool.HasField("start_time")) == (FAILED, error, False)
    assert record.tree_usage == usage_pb2.Usage()


def test_a_running_call_that_recovery_asks_about_waits() -> None:
    again = input_pb2.InputRequest(
        input_id="again", invocation_id="L", call_id="pay", kind=input_pb2.INPUT_KIND_RECOVERY, call=PAY
    )
    started = lead(attempt=1, tool_started=event_pb2.ToolStarted(call=PAY))
    asks = lead(input_requested=requested(again))
    waiting = tree_of(started, resumed(event_pb2.RESUME_CAUSE_RECOVERY), asks, interrupted(again))
    assert [(tool.state, tool.start_time) for tool in waiting.tools] == [(WAITING, at(1))]
    assert agents_of(waiting) == {"L": WAITING}
    ended = tree_of(started, asks, lead(tool_completed=told(PAY, "it was paid")), interrupted())
    assert [(tool.state, tool.sequence, tool.result_json) for tool in ended.tools] == [(SUCCEEDED, 1, '"it was paid"')]
    assert agents_of(ended) == {"L": RUNNING}


def test_a_call_that_ends_asks_no_more() -> None:
    cancelled = failure(error_pb2.ERROR_REASON_CANCELLED)
    record = tree_of(
        lead(input_requested=requested(APPROVAL)),
        lead(tool_failed=event_pb2.ToolFailed(result=result_of(PAY, error=cancelled))),
        lead(input_received=received(APPROVAL)),
        lead(input_requested=requested(CLIENT_TOOL)),
    )
    assert tools_of(record) == {"pay": execution_pb2.EXECUTION_STATE_CANCELLED, "scan": WAITING}


def test_an_interruption_says_which_requests_are_open() -> None:
    left = input_pb2.InputRequest(input_id="left", invocation_id="L", kind=input_pb2.INPUT_KIND_QUESTION)
    record = tree_of(lead(input_requested=requested(left)), clerk(input_requested=requested(WHICH)), interrupted(WHICH))
    assert agents_of(record) == {"L": RUNNING, "C": WAITING}


def test_an_interruption_makes_no_invocation_and_no_call_of_those_it_names() -> None:
    record = tree_of(interrupted(APPROVAL, WHICH))
    assert agents_of(record) == {"L": WAITING}
    assert list(record.tools) == []


def test_an_interrupted_run_that_is_cancelled_has_ended() -> None:
    record = tree_of(*asking_desk()[:11], lead(run_cancelled=event_pb2.RunCancelled()))
    assert record.state == execution_pb2.EXECUTION_STATE_CANCELLED
    assert set(tools_of(record).values()) == {execution_pb2.EXECUTION_STATE_UNSPECIFIED}


def test_events_of_the_run_count_where_they_name_no_invocation() -> None:
    queued = AgentEvent(run_queued=event_pb2.RunQueued())
    assert fold([queued]) == invocation_pb2.Invocation(state=PENDING, tree_usage=usage_pb2.Usage())
    waits = AgentEvent(run_interrupted=event_pb2.RunInterrupted(requests=[WHICH]))
    record = fold([clerk(input_requested=requested(WHICH)), waits])
    assert (record.state, agents_of(record)) == (WAITING, {"C": WAITING})


def test_attempts_of_a_call_are_one_call_that_is_counted_once() -> None:
    ended, going = fold(asking_desk()), fold(asking_desk()[:-1])
    used = tokens(20, 5, model_calls=3, model_calls_without_usage=1, tool_calls=2)
    assert ended.agents[0].usage == going.agents[0].usage == used
    assert (ended.agents[0].step_count, going.agents[0].step_count) == (2, 2)
    assert ended.tools_total == 3


def test_calls_beyond_the_bound_are_counted_once_for_all_their_attempts() -> None:
    starts = [lead(attempt=attempt, tool_started=event_pb2.ToolStarted(call=PAY)) for attempt in (1, 2, 3)]
    record = fold(starts, invocation_pb2.InvocationOptions(max_tools=0))
    assert (record.tools_total, record.tree_usage.tool_calls) == (1, 1)


def test_a_model_call_that_begins_again_is_the_same_step() -> None:
    begins = [lead(effect_key="s0.m", attempt=attempt, llm_started=event_pb2.LlmStarted()) for attempt in (1, 2)]
    assert fold(begins).agents[0].step_count == 1
