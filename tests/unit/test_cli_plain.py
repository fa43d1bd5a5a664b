"""Events as lines of their own, and the amounts in them."""

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2, state_pb2
from bough_server.cli.render.format import (
    clip,
    clip_middle,
    cost_text,
    counted,
    error_text,
    seconds_text,
    state_text,
    tokens_text,
)
from bough_server.cli.render.plain import plain_line
from tests.clients.turns import AgentEvent, Turn, desk, words
from tests.clients.waiting import approval


def test_each_event_is_one_line() -> None:
    assert [plain_line(event) for event in desk()[:8]] == [
        "    1 22:13:20.000 lead run.started Write about owls.",
        "    2 22:13:21.000 lead llm.started test/default",
        "    3 22:13:22.000 lead llm.reasoning_delta The researcher knows.",
        "    4 22:13:23.000 lead llm.output_delta Let me",
        "    5 22:13:24.000 lead llm.output_delta ask.",
        "    6 22:13:25.000 lead llm.completed Let me ask.",
        '    7 22:13:26.000 lead tool.started call_researcher {"message": "Facts about owls"}',
        "    8 22:13:27.000 lead/researcher sub_agent.started Facts about owls",
    ]


def test_a_retry_names_its_attempt_its_reason_and_its_delay() -> None:
    turn = Turn()
    retrying = event_pb2.LlmRetrying(
        reason=event_pb2.RETRY_REASON_RATE_LIMITED,
        error=error_pb2.AgentError(message="Too many calls."),
        delay=duration_pb2.Duration(seconds=2),
    )
    event = turn.add("lead", attempt=2, llm_retrying=retrying)
    line = "    1 22:13:20.000 lead llm.retrying (attempt 2) rate limited: Too many calls. (again in 2.0 s)"
    assert plain_line(event) == line


def test_a_retry_by_another_model_names_it() -> None:
    turn = Turn()
    error = error_pb2.AgentError(message="It broke off.")
    retrying = event_pb2.LlmRetrying(
        reason=event_pb2.RETRY_REASON_BAD_RESPONSE, error=error, next_model="reserve", delay=duration_pb2.Duration()
    )
    line = plain_line(turn.add("lead", attempt=2, llm_retrying=retrying))
    assert line.endswith("llm.retrying (attempt 2) bad response: It broke off. (again with reserve in 0 ms)")


def test_kinds_and_ends_that_are_no_plain_answer_stand_before_the_words() -> None:
    turn = Turn()
    kind = event_pb2.AGENT_KIND_LOOP
    turn.add("lead/haiku", sub_agent_started=event_pb2.SubAgentStarted(kind=kind, input=words("Autumn.")))
    broken = event_pb2.SubAgentCompleted(output=words("Leaves."), end_reason=event_pb2.END_REASON_BROKE_LOOP)
    turn.add("lead/haiku", sub_agent_completed=broken)
    spent = event_pb2.RunCompleted(final_answer=words("Enough."), end_reason=event_pb2.END_REASON_ITERATIONS_EXHAUSTED)
    turn.add("lead", run_completed=spent)
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead/haiku sub_agent.started (loop) Autumn.",
        "lead/haiku sub_agent.completed (broke the loop) Leaves.",
        "lead run.completed (rounds used up) Enough.",
    ]


def test_plans_values_and_summaries_are_one_line_each() -> None:
    turn = Turn()
    items = [event_pb2.PlanItem(text=text) for text in ("Ask who\ncomes.", "Order a cake.")]
    turn.add("lead", plan_made=event_pb2.PlanMade(items=items))
    turn.add("lead", plan_revised=event_pb2.PlanRevised(items=items[1:]))
    turn.add("lead", plan_revised=event_pb2.PlanRevised())
    changes = [state_pb2.StateChange(key="guests", value_json="6"), state_pb2.StateChange(key="draft")]
    turn.add("lead", state_changed=event_pb2.StateChanged(changes=changes))
    summary = event_pb2.HistoryCompacted(from_position=1, to_position=9, run_messages=1, summary=words("Six\ncome."))
    turn.add("lead", history_compacted=summary)
    assert [plain_line(event).split(maxsplit=3)[3] for event in turn.events] == [
        "plan.made 2 steps: Ask who comes.; Order a cake.",
        "plan.revised 1 step: Order a cake.",
        "plan.revised nothing",
        "control.state_changed guests = 6, draft deleted",
        "control.history_compacted summarized messages 1 to 9 of the session and 1 message of this run: Six come.",
    ]


def test_rounds_and_transfers_say_which_and_to_whom() -> None:
    turn = Turn()
    turn.add("lead", loop_round_started=event_pb2.LoopRoundStarted(round=2))
    turn.add("lead", agent_transferred=event_pb2.AgentTransferred(from_agent="lead", to_agent="refunds"))
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead control.loop_round_started round 3",
        "lead control.agent_transferred lead to refunds",
    ]


def test_what_happens_to_a_run_from_outside_is_one_line_each() -> None:
    turn = Turn()
    turn.add("lead", run_queued=event_pb2.RunQueued(behind_run_id="r1"))
    turn.add("lead/refunds", input_requested=event_pb2.InputRequested(request=approval()))
    turn.add("lead", run_interrupted=event_pb2.RunInterrupted(requests=[approval()]))
    turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_ANSWER))
    answer = input_pb2.InputAnswer(approval=input_pb2.Approval(approved=True))
    turn.add("lead/refunds", input_received=event_pb2.InputReceived(answer=answer))
    assert [plain_line(event).split(maxsplit=2)[2] for event in turn.events] == [
        "lead run.queued waits for its session, behind run r1",
        'lead/refunds control.input_requested asks for approval of refund {"amount": 180} '
        "until 2023-11-14 22:13 UTC; then refused: too late",
        "lead run.interrupted waits for 1 answer",
        "lead run.resumed continued with an answer",
        "lead/refunds control.input_received approved",
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
    line = plain_line(AgentEvent(sequence=1, llm_output_delta=event_pb2.LlmOutputDelta(text=text)))
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
    nothing = message_pb2.Usage(total_tokens=0, cost_micros=0)
    assert (tokens_text(nothing), cost_text(nothing)) == ("0", "0.0000")
    assert (tokens_text(message_pb2.Usage()), cost_text(message_pb2.Usage())) == ("-", "-")
    assert tokens_text(message_pb2.Usage(input_tokens=1_200, output_tokens=4)) == "1,204"
    assert (counted(1, "agent"), counted(1_200, "agent")) == ("1 agent", "1,200 agents")


def test_states_and_errors_are_words() -> None:
    assert state_text(event_pb2.STATE_INPUT_REQUIRED) == "input required"
    assert error_text(error_pb2.AgentError()) == "no reason given"
    assert error_text(error_pb2.AgentError(message="It\nbroke.")) == "It broke."


@given(st.text(), st.integers(1, 50))
def test_clipped_text_fits(text: str, width: int) -> None:
    assert cell_len(clip(text, width)) <= max(width, 1)
    assert len(clip_middle(text, width)) <= width
