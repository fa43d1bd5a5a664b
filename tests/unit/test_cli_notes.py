"""What happens to a run from outside in words: waiting, asking, answering, continuing, forking."""

from pathlib import Path

import pytest

from bough.v1 import event_pb2, execution_pb2, fork_pb2, input_pb2, message_pb2, policy_pb2, step_pb2
from bough_server.cli.options import Target
from bough_server.cli.render.notes import (
    answer_or_expiry_text,
    cancel_request_text,
    expiry_text,
    finish_text,
    fork_text,
    queue_text,
    request_text,
    resume_text,
)
from bough_server.cli.render.questions import answer_command, request_lines
from tests.clients.run_events import words
from tests.clients.waiting_run_server import APPROVAL_ID, CARD_ID, approval, card, question


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (approval(), 'asks for approval of refund {"amount": 180}'),
        (approval("{}"), "asks for approval of refund"),
        (question(), "asks: Why does it come back?"),
        (card(), 'asks the client to run read_card {"reader": "counter"}'),
        (
            card(input_pb2.INPUT_KIND_RECOVERY),
            'asks whether read_card {"reader": "counter"} may run again: its server was lost while it ran',
        ),
    ],
)
def test_a_request_says_what_it_is_for(request_: input_pb2.InputRequest, expected: str) -> None:
    assert request_text(request_) == expected


def test_a_request_that_expires_says_when_and_what_then() -> None:
    request = approval()
    assert expiry_text(request) == "until 2023-11-14 22:13 UTC; then refused: too late"
    request.ClearField("default_answer")
    assert expiry_text(request) == "until 2023-11-14 22:13 UTC; then it counts as not answered"
    assert expiry_text(question()) == ""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(approved=True)), "approved"),
        (
            input_pb2.InputAnswer(
                approval=input_pb2.ApprovalDecision(approved=True, arguments_json='{"a": 1}', note="ok")
            ),
            'approved with {"a": 1}: ok',
        ),
        (input_pb2.InputAnswer(approval=input_pb2.ApprovalDecision(note="no\nmoney")), "refused: no money"),
        (input_pb2.InputAnswer(value_json='"it is\\nbroken"'), "answered: it is broken"),
        (input_pb2.InputAnswer(value_json="[1]"), "answered: [1]"),
        (input_pb2.InputAnswer(value_json="not json"), "answered: not json"),
        (input_pb2.InputAnswer(value_json="[" * 5_000), f"answered: {'[' * 5_000}"),
        (
            input_pb2.InputAnswer(tool_outcome=message_pb2.ToolOutcome(parts=[message_pb2.Part(text="4242")])),
            "result: 4242",
        ),
        (
            input_pb2.InputAnswer(
                tool_outcome=message_pb2.ToolOutcome(failure=message_pb2.ToolFailure(message="no reader")),
            ),
            "result: no reader",
        ),
        (
            input_pb2.InputAnswer(
                tool_outcome=message_pb2.ToolOutcome(
                    parts=[message_pb2.Part(text="42??")], failure=message_pb2.ToolFailure(message="torn")
                ),
            ),
            "result: torn; 42??",
        ),
        (input_pb2.InputAnswer(source=input_pb2.ANSWER_SOURCE_EXPIRY), "no answer in time"),
        (
            input_pb2.InputAnswer(source=input_pb2.ANSWER_SOURCE_EXPIRY, value_json="1"),
            "no answer in time: answered: 1",
        ),
    ],
)
def test_an_answer_says_what_it_was(answer: input_pb2.InputAnswer, expected: str) -> None:
    assert answer_or_expiry_text(answer) == expected


def test_runs_say_why_they_wait_go_on_and_differ() -> None:
    assert queue_text(event_pb2.RunQueued(behind_run_id="r1")) == "waits for its session, behind run r1"
    assert [resume_text(event_pb2.RunResumed(cause=cause)) for cause in (1, 2, 3, 0)] == [
        "continued after its server was lost",
        "continued with an answer",
        "continued by another server",
        "continued",
    ]
    edited = message_pb2.ToolOutcome(parts=[message_pb2.Part(text="no\nowls")])
    changes = fork_pb2.ForkChanges(
        agents={
            "writer": fork_pb2.AgentOverride(model="big"),
            "lead": fork_pb2.AgentOverride(model="small", instruction="Be brief."),
        },
        input=words("Write about cats."),
        tool_results=[fork_pb2.EditedResult(call_id="c1", outcome=edited)],
    )
    origin = fork_pb2.ForkOrigin(run_id="r1", sequence=7)
    assert fork_text(event_pb2.RunForked(origin=origin, changes=changes)) == (
        "fork of run r1 after 7: model of lead is small; model of writer is big; another instruction of lead; "
        "input Write about cats.; result of c1: no owls"
    )
    assert fork_text(event_pb2.RunForked(origin=origin)) == "fork of run r1 after 7"
    background = policy_pb2.RunPolicy(background=True)
    assert fork_text(event_pb2.RunForked(origin=origin, policy=background)) == (
        "fork of run r1 after 7: another policy"
    )


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_FAIL_FAST), "fail_fast"),
        (
            event_pb2.CancelRequested(
                reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="ann", note="Wrong\ncustomer."
            ),
            "caller by ann: Wrong customer.",
        ),
        (
            event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_SUPERSEDED, by_run_id="r2"),
            "superseded by run r2",
        ),
    ],
)
def test_a_cancellation_says_why_and_who_asked_for_it(requested: event_pb2.CancelRequested, expected: str) -> None:
    assert cancel_request_text(requested) == expected


def test_an_answer_that_is_not_complete_says_why_its_model_stopped() -> None:
    reasons = {
        step_pb2.FINISH_REASON_UNSPECIFIED: "",
        step_pb2.FINISH_REASON_STOP: "",
        step_pb2.FINISH_REASON_TOOL_CALLS: "",
        step_pb2.FINISH_REASON_LENGTH: "length",
        step_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
        step_pb2.FINISH_REASON_REFUSAL: "refusal",
        step_pb2.FINISH_REASON_OTHER: "other: paused",
    }
    responses = [step_pb2.LlmResponse(finish_reason=reason, provider_finish_reason="paused") for reason in reasons]
    assert [finish_text(response) for response in responses] == list(reasons.values())
    assert set(reasons) == set(step_pb2.FinishReason.values())


def test_a_request_is_shown_with_all_of_a_long_prompt_and_what_it_takes() -> None:
    request = question("")
    request.prompt = "Why?\nBe honest."
    assert request_lines(request)[:4] == [
        "? lead/interviewer asks: Why? Be honest.",
        "    Why?",
        "    Be honest.",
        "    takes any JSON",
    ]


def test_a_shell_takes_the_command_that_answers() -> None:
    lost = card(input_pb2.INPUT_KIND_RECOVERY)
    command = Target(config=Path("my house/bough.yaml"), embedded=True).command
    assert answer_command("r1", [approval(), lost], command) == (
        f"bough --config 'my house/bough.yaml' --embedded resume r1 --answer {APPROVAL_ID}=true --answer {CARD_ID}=true"
    )
