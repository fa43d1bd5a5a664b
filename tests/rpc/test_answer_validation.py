"""Errors of ResumeRun and ForkRun requests that break the schema's rules."""

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import ErrorInfo

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2, follow_pb2, fork_pb2, input_pb2, message_pb2, policy_pb2
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough_server.engine.input_requests import build_answer_event, is_same_answer, outcome_mistakes, result_of
from bough_server.interceptors.validation import violations
from tests.rpc.interceptor_server import behaving, outcome, status_details

OUT_OF_RANGE = Timestamp(nanos=-1)
SAID = [message_pb2.Part(text="hi")]


def approving(request_id: str) -> input_pb2.InputAnswer:
    return input_pb2.InputAnswer(input_id=request_id, approval=input_pb2.ApprovalDecision(approved=True))


def resuming(*answers: input_pb2.InputAnswer, **fields: Any) -> pb.ResumeRunRequest:
    return pb.ResumeRunRequest(**{"run_id": "r", "answers": answers or [approving("q")], **fields})


def edited(**fields: Any) -> fork_pb2.EditedResult:
    return fork_pb2.EditedResult(**{"call_id": "c", "outcome": message_pb2.ToolOutcome(), **fields})


def forking(**fields: Any) -> pb.ForkRunRequest:
    return pb.ForkRunRequest(**{"run_id": "r", "after_sequence": 1, **fields})


def changing(**changes: Any) -> pb.ForkRunRequest:
    return forking(changes=fork_pb2.ForkChanges(**changes))


def broken(request: Message) -> list[tuple[str, str]]:
    return [(violation.field, violation.description) for violation in violations(request)]


@pytest.mark.parametrize(
    ("request_", "field", "description"),
    [
        (resuming(run_id=""), "run_id", "must be at least 1 characters"),
        (resuming(run_id="r" * 65), "run_id", "must be at most 64 characters"),
        (pb.ResumeRunRequest(run_id="r"), "answers", "must contain at least 1 item(s)"),
        (
            resuming(*(approving(str(number)) for number in range(257))),
            "answers",
            "must contain no more than 256 item(s)",
        ),
        (resuming(approving("q"), approving("")), "answers[1].input_id", "must be at least 1 characters"),
        (
            resuming(approving("q"), input_pb2.InputAnswer(input_id="p")),
            "answers[1].answer",
            "exactly one field is required in oneof",
        ),
        (resuming(request_id="x" * 129), "request_id", "does not match regex pattern `^[!-~]{1,128}$`"),
        (resuming(after_sequence=-1), "after_sequence", "must be greater than or equal to 0"),
        (
            resuming(follow=follow_pb2.FollowOptions(event_names=["all"])),
            "follow.event_names[0]",
            "There is no event 'all'.",
        ),
        (
            resuming(follow=follow_pb2.FollowOptions(heartbeat_interval=Duration(nanos=1))),
            "follow.heartbeat_interval",
            "must be greater than or equal to 0.1s and less than or equal to 3600s",
        ),
    ],
)
def test_a_request_to_resume_that_breaks_a_rule_is_refused_by_its_field(
    request_: Message, field: str, description: str
) -> None:
    assert broken(request_) == [(field, description)]


@pytest.mark.parametrize(
    ("request_", "field", "description"),
    [
        (forking(run_id=""), "run_id", "must be at least 1 characters"),
        (forking(run_id="r" * 65), "run_id", "must be at most 64 characters"),
        (forking(after_sequence=0), "after_sequence", "must be greater than or equal to 1"),
        (forking(request_id="x" * 129), "request_id", "does not match regex pattern `^[!-~]{1,128}$`"),
        (forking(labels={"bough/x": "x"}), 'labels["bough/x"]', "must not begin with bough/, which is reserved"),
        (forking(labels={"a": "x" * 257}), 'labels["a"]', "must be at most 256 characters"),
        (forking(labels={f"n{number}": "" for number in range(65)}), "labels", "map must be at most 64 entries"),
        (
            forking(follow=follow_pb2.FollowOptions(view=9)),  # type: ignore[arg-type]
            "follow.view",
            "value must be one of the defined enum values",
        ),
        (
            changing(tool_results=[edited(), edited(call_id="")]),
            "changes.tool_results[1].call_id",
            "must be at least 1 characters",
        ),
        (
            changing(tool_results=[edited(), edited(outcome=None)]),
            "changes.tool_results[1].outcome",
            "value is required",
        ),
        (
            changing(input=message_pb2.Message()),
            "changes.input",
            "must have at least one part with text, data or a blob",
        ),
        (
            changing(input=message_pb2.Message(parts=[message_pb2.Part(text=" ")])),
            "changes.input",
            "must have at least one part with text, data or a blob",
        ),
        (
            changing(input=message_pb2.Message(parts=SAID, role=message_pb2.ROLE_ASSISTANT)),
            "changes.input",
            "must have the role USER, or none",
        ),
        (
            changing(input=message_pb2.Message(create_time=OUT_OF_RANGE, parts=SAID)),
            "changes.input.create_time",
            "is out of the range of a timestamp",
        ),
    ],
)
def test_a_request_to_fork_that_breaks_a_rule_is_refused_by_its_field(
    request_: Message, field: str, description: str
) -> None:
    assert broken(request_) == [(field, description)]


def test_every_item_that_breaks_a_rule_of_its_list_is_named() -> None:
    request = resuming(approving(""), approving("q"), approving(""), input_pb2.InputAnswer(input_id="p"))
    assert broken(request) == [
        ("answers[0].input_id", "must be at least 1 characters"),
        ("answers[2].input_id", "must be at least 1 characters"),
        ("answers[3].answer", "exactly one field is required in oneof"),
    ]


@pytest.mark.parametrize(
    "request_",
    [
        resuming(),
        resuming(approving("q"), input_pb2.InputAnswer(input_id="p", value_json="null"), after_sequence=0),
        resuming(input_pb2.InputAnswer(input_id="p", value_json="")),
        resuming(*(approving(str(number)) for number in range(256))),
        forking(),
        changing(agents={"lead": fork_pb2.AgentOverride(model="m", instruction="")}, tool_results=[edited(), edited()]),
        changing(input=message_pb2.Message(parts=[message_pb2.Part(text="hi")])),
    ],
)
def test_answers_and_changes_that_break_no_rule_are_let_through(request_: Message) -> None:
    assert broken(request_) == []


def test_what_becomes_of_a_busy_session_is_one_of_what_is_known() -> None:
    def asking(wish: int) -> pb.RunRequest:
        said = message_pb2.Message(parts=[message_pb2.Part(text="hi")])
        policy = policy_pb2.RunPolicy(on_busy_session=wish)  # type: ignore[arg-type]  # numbers that are none as well
        return pb.RunRequest(agent="echo", input=said, policy=policy)

    assert [broken(asking(wish)) for wish in range(4)] == [[]] * 4
    assert [broken(asking(wish)) for wish in (-1, 4)] == [
        [("policy.on_busy_session", "value must be one of the defined enum values")]
    ] * 2


@pytest.mark.parametrize(
    ("method", "request_", "fields"),
    [
        ("ResumeRun", resuming(approving("q"), approving(""), run_id=""), ["run_id", "answers[1].input_id"]),
        ("ForkRun", forking(run_id="", after_sequence=0), ["run_id", "after_sequence"]),
    ],
)
async def test_they_are_refused_before_their_handlers_with_every_field_that_is_wrong(
    method: str, request_: Message, fields: list[str]
) -> None:
    async with behaving(add_AgentServiceServicer_to_server) as channel:
        received, error = await outcome(getattr(AgentServiceStub(channel), method)(request_))
    assert (received, error is not None) == ([], True)
    assert error is not None
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    info, bad_request = status_details(error)
    assert info == ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev")
    assert [violation.field for violation in bad_request.field_violations] == fields


@pytest.mark.parametrize("text", ["nope", "[]", '{"a": Infinity}'])
def test_metadata_of_an_outcome_is_a_json_object(text: str) -> None:
    parts = [message_pb2.Part(text="42", metadata_json=metadata) for metadata in ('{"a": 1}', text)]
    assert outcome_mistakes(message_pb2.ToolOutcome(parts=parts[:1])) == []
    assert outcome_mistakes(message_pb2.ToolOutcome(parts=parts)) == [
        "The metadata_json of a part is not a JSON object."
    ]


def test_of_an_outcome_only_content_and_metadata_are_kept() -> None:
    part = message_pb2.Part(text="42", metadata_json="{}", truncated=True, original_bytes=9)
    kept = [message_pb2.Part(text="42", metadata_json="{}")]
    answer = input_pb2.InputAnswer(input_id="q", tool_outcome=message_pb2.ToolOutcome(parts=[part]))
    event = build_answer_event(event_pb2.AgentEvent(), answer)
    assert event.input_received.answer.tool_outcome == message_pb2.ToolOutcome(parts=kept)
    assert result_of(answer.tool_outcome, message_pb2.ToolCall()).parts == kept
    assert is_same_answer(event.input_received.answer, answer)
