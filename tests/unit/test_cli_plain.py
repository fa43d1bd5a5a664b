"""Events as separate lines, and the amounts in them."""

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bough.v1 import error_pb2, event_pb2, execution_pb2, input_pb2, message_pb2, session_pb2, step_pb2, usage_pb2
from bough_server.cli.render.format import (
    amount_text,
    clip,
    clip_middle,
    cost_text,
    error_text,
    pluralize,
    seconds_text,
    state_text,
    tokens_text,
)
from bough_server.cli.render.plain import plain_line
from tests.clients.run_events import AgentEvent, Turn, desk, words
from tests.clients.waiting_run_server import approval


def test_each_event_is_one_line() -> None:
    assert [plain_line(event) for event in desk()[:8]] == [
        "    1 22:13:20.000 lead agent.run.started Write about owls.",
        "    2 22:13:21.000 lead agent.llm.started test/default",
        "    3 22:13:22.000 lead agent.llm.reasoning.delta The researcher knows.",
        "    4 22:13:23.000 lead agent.llm.output_text.delta Let me",
        "    5 22:13:24.000 lead agent.llm.output_text.delta ask.",
        "    6 22:13:25.000 lead agent.llm.completed Let me ask.",
        '    7 22:13:26.000 lead agent.tool.started call_researcher {"message": "Facts about owls"}',
        "    8 22:13:27.000 lead/researcher agent.sub_agent.started Facts about owls",
    ]


def test_a_retry_names_its_attempt_its_reason_and_its_delay() -> None:
    turn = Turn()
    retrying = event_pb2.LlmRetrying(
        reason=event_pb2.RETRY_REASON_RATE_LIMITED,
        error=error_pb2.AgentError(message="Too many calls."),
        delay=duration_pb2.Duration(seconds=2),
    )
    event = turn.add("lead", attempt=2, llm_retrying=retrying)
    line = "    1 22:13:20.000 lead agent.llm.retrying (attempt 2) rate_limited: Too many calls. (again in 2.0 s)"
    assert plain_line(event) == line


def test_a_retry_by_another_model_names_it() -> None:
    turn = Turn()
    error = error_pb2.AgentError(message="It broke off.")
    retrying = event_pb2.LlmRetrying(
        reason=event_pb2.RETRY_REASON_BAD_RESPONSE, error=error, next_model="reserve", delay=duration_pb2.Duration()
    )
    line = plain_line(turn.add("lead", attempt=2, llm_retrying=retrying))
    assert line.endswith("agent.llm.retrying (attempt 2) bad_response: It broke off. (again with reserve in 0 ms)")


def test_kinds_and_ends_that_are_no_plain_answer_stand_before_the_words() -> None:
    turn = Turn()
    kind = execution_pb2.AGENT_KIND_LOOP
    turn.add("lead/haiku", sub_agent_started=event_pb2.SubAgentStarted(kind=kind, input=words("Autumn.")))
    broken = event_pb2.SubAgentCompleted(output=words("Leaves."), end_reason=execution_pb2.END_REASON_BROKE_LOOP)
    turn.add("lead/haiku", sub_agent_completed=broken)
    spent = event_pb2.RunCompleted(
        final_answer=words("Enough."), end_reason=execution_pb2.END_REASON_ITERATIONS_EXHAUSTED
    )
    turn.add("lead", run_completed=spent)
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead/haiku agent.sub_agent.started (loop) Autumn.",
        "lead/haiku agent.sub_agent.completed (broke the loop) Leaves.",
        "lead agent.run.completed (iterations used up) Enough.",
    ]


def test_plans_values_and_summaries_are_one_line_each() -> None:
    turn = Turn()
    items = [event_pb2.PlanItem(text=text) for text in ("Ask who\ncomes.", "Order a cake.")]
    turn.add("lead", plan_made=event_pb2.PlanMade(items=items))
    turn.add("lead", plan_revised=event_pb2.PlanRevised(items=items[1:]))
    turn.add("lead", plan_revised=event_pb2.PlanRevised())
    changes = [
        session_pb2.SessionStateChange(key="guests", value_json="6"),
        session_pb2.SessionStateChange(key="draft"),
    ]
    turn.add("lead", session_state_changed=event_pb2.SessionStateChanged(state_changes=changes))
    summary = words("Six\ncome.")
    summary.summary_range.CopyFrom(message_pb2.SummaryRange(from_position=1, to_position=9))
    turn.add("lead", history_compacted=event_pb2.HistoryCompacted(run_message_count=1, summary=summary))
    assert [plain_line(event).split(maxsplit=3)[3] for event in turn.events] == [
        "agent.plan.made 2 steps: Ask who comes.; Order a cake.",
        "agent.plan.revised 1 step: Order a cake.",
        "agent.plan.revised nothing",
        "agent.control.session_state_changed guests = 6, draft deleted",
        "agent.control.history_compacted summarized messages 1 to 9 of the session and 1 message of this run: "
        "Six come.",
    ]


def test_rounds_and_transfers_say_which_and_to_whom() -> None:
    turn = Turn()
    turn.add("lead", loop_iteration_started=event_pb2.LoopIterationStarted(iteration=2))
    turn.add("lead", agent_transferred=event_pb2.AgentTransferred(from_agent="lead", to_agent="refunds"))
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead agent.control.loop_iteration_started iteration 3",
        "lead agent.control.agent_transferred lead to refunds",
    ]


def test_what_happens_to_a_run_from_outside_is_one_line_each() -> None:
    turn = Turn()
    turn.add("lead", run_queued=event_pb2.RunQueued(behind_run_id="r1"))
    turn.add("lead/refunds", input_requested=event_pb2.InputRequested(request=approval()))
    turn.add("lead", run_interrupted=event_pb2.RunInterrupted(requests=[approval()]))
    turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_ANSWER))
    answer = input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(approved=True))
    turn.add("lead/refunds", input_received=event_pb2.InputReceived(answer=answer))
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead agent.run.queued waits for its session, behind run r1",
        'lead/refunds agent.control.input_requested asks for approval of refund {"amount": 180} '
        "until 2023-11-14 22:13 UTC; then refused: too late",
        "lead agent.run.interrupted waits for 1 answer",
        "lead agent.run.resumed continued with an answer",
        "lead/refunds agent.control.input_received approved",
    ]


def test_ends_say_why_they_came() -> None:
    turn = Turn()
    cut = step_pb2.LlmResponse(message=words("Owls are"), finish_reason=step_pb2.FINISH_REASON_LENGTH)
    turn.add("lead", llm_completed=event_pb2.LlmCompleted(response=cut))
    requested = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="ann", note="Enough.")
    turn.add("lead", cancel_requested=requested)
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_CANCELLED, message="It was cancelled.")
    reason = execution_pb2.CANCEL_REASON_CALLER
    turn.add("lead/a", sub_agent_failed=event_pb2.SubAgentFailed(error=error, cancel_reason=reason))
    turn.add("lead", run_cancelled=event_pb2.RunCancelled(error=error, cancel_reason=reason))
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead agent.llm.completed (length) Owls are",
        "lead agent.control.cancel_requested caller by ann: Enough.",
        "lead/a agent.sub_agent.failed (caller) CANCELLED: It was cancelled.",
        "lead agent.run.cancelled (caller) CANCELLED: It was cancelled.",
    ]


@pytest.mark.parametrize("payload", [field.name for field in AgentEvent.DESCRIPTOR.oneofs_by_name["payload"].fields])
def test_every_kind_of_event_has_a_line(payload: str) -> None:
    event = AgentEvent(sequence=9, branch="lead")
    getattr(event, payload).SetInParent()
    line = plain_line(event)
    assert line.startswith("    9 00:00:00.000 lead ")
    assert "\n" not in line
    assert "unknown" not in line


def test_a_payload_that_is_not_known_keeps_its_sequence() -> None:
    assert plain_line(AgentEvent(sequence=9)) == "    9 00:00:00.000 - unknown"


@given(st.text())
def test_no_text_breaks_the_line(text: str) -> None:
    line = plain_line(AgentEvent(sequence=1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=text)))
    assert line.isprintable() or not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line)
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.04, "40 ms"),
        (0.0994, "99 ms"),
        (0.4, "0.4 s"),
        (59.94, "59.9 s"),
        (59.96, "1 m 00 s"),
        (185, "3 m 05 s"),
        (3599.9, "1 h 00 m"),
        (7800, "2 h 10 m"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_amounts_tell_unknown_from_nothing() -> None:
    nothing = usage_pb2.Usage(total_tokens=0, cost_nanos=0, currency_code="EUR")
    assert (tokens_text(nothing), cost_text(nothing)) == ("0", "0.0000 EUR")
    assert (tokens_text(usage_pb2.Usage()), cost_text(usage_pb2.Usage())) == ("-", "-")
    assert tokens_text(usage_pb2.Usage(input_tokens=1_200, output_tokens=4)) == "1,204"
    assert (pluralize(1, "agent"), pluralize(1_200, "agent")) == ("1 agent", "1,200 agents")


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (1, "<0.000001"),
        (999, "<0.000001"),
        (1_500, "0.000002"),
        (12_000, "0.000012"),
        (999_999, "0.001000"),
        (1_250_000, "0.0013"),
        (2_500_000_000, "2.5000"),
        (1_234_567_890_000, "1,234.5679"),
    ],
)
def test_costs_are_billionths_shown_as_far_as_they_matter(nanos: int, text: str) -> None:
    assert amount_text(usage_pb2.Usage(cost_nanos=nanos, currency_code="USD")) == text
    assert cost_text(usage_pb2.Usage(cost_nanos=nanos, currency_code="USD")) == f"{text} USD"


def test_states_and_errors_are_words() -> None:
    assert state_text(execution_pb2.EXECUTION_STATE_INPUT_REQUIRED) == "input_required"
    assert error_text(error_pb2.AgentError()) == "no reason given"
    assert error_text(error_pb2.AgentError(message="It\nbroke.")) == "It broke."


@given(st.text(), st.integers(1, 50))
def test_clipped_text_fits(text: str, width: int) -> None:
    assert cell_len(clip(text, width)) <= max(width, 1)
    assert len(clip_middle(text, width)) <= width
