"""Answers made from plain values, by a request or by its id."""

import pytest

from bough import approve, refuse, reply, tool_outcome
from bough.requests import fork_request, resume_request
from bough.v1 import agent_service_pb2, fork_pb2, input_pb2, message_pb2, policy_pb2

REQUEST = input_pb2.InputRequest(input_id="ask-1", kind=input_pb2.INPUT_KIND_APPROVAL)
Answer = input_pb2.InputAnswer


@pytest.mark.parametrize("request_or_id", [REQUEST, "ask-1"])
def test_a_call_is_approved_or_refused(request_or_id: input_pb2.InputRequest | str) -> None:
    approved = input_pb2.ApprovalDecision(approved=True, arguments_json='{"amount": 5}', note="Less.")
    refused = input_pb2.ApprovalDecision(approved=False, note="Too much.")
    assert approve(request_or_id) == Answer(input_id="ask-1", approval=input_pb2.ApprovalDecision(approved=True))
    assert approve(request_or_id, arguments_json='{"amount": 5}', note="Less.") == Answer(
        input_id="ask-1", approval=approved
    )
    assert refuse(request_or_id) == Answer(input_id="ask-1", approval=input_pb2.ApprovalDecision())
    assert refuse(request_or_id, note="Too much.") == Answer(input_id="ask-1", approval=refused)


def test_a_refusal_without_a_note_is_still_an_answer() -> None:
    assert refuse("ask-1").WhichOneof("answer") == "approval"


def test_a_client_s_tool_gives_a_text_parts_or_a_failure() -> None:
    parts = [message_pb2.Part(data_json="{}"), message_pb2.Part(text="and this")]
    failure = message_pb2.ToolFailure(message="Too slow.", retryable=True)
    raised = message_pb2.ToolFailure(message="No such file.")
    unnamed = message_pb2.ToolFailure(message="KeyError")
    values = ("", "done", parts, failure, OSError("No such file."), KeyError())
    outcomes = [
        message_pb2.ToolOutcome(parts=[message_pb2.Part(text="")]),
        message_pb2.ToolOutcome(parts=[message_pb2.Part(text="done")]),
        message_pb2.ToolOutcome(parts=parts),
        message_pb2.ToolOutcome(failure=failure),
        message_pb2.ToolOutcome(failure=raised),
        message_pb2.ToolOutcome(failure=unnamed),
    ]
    assert [tool_outcome(REQUEST, value) for value in values] == [
        Answer(input_id="ask-1", tool_outcome=outcome) for outcome in outcomes
    ]


def test_a_failure_may_have_a_text_or_parts_beside_it() -> None:
    parts = [message_pb2.Part(text="half of it")]
    outcome = message_pb2.ToolOutcome(parts=parts, failure=message_pb2.ToolFailure(message="torn"))
    expected = Answer(input_id="ask-1", tool_outcome=outcome)
    assert tool_outcome("ask-1", "half of it", failure=OSError("torn")) == expected
    assert tool_outcome("ask-1", parts, failure=message_pb2.ToolFailure(message="torn")) == expected


def test_a_question_is_answered_with_anything_that_json_can_write() -> None:
    assert reply("ask-1", {"names": ["Jürgen"], "sure": None}) == Answer(
        input_id="ask-1", value_json='{"names": ["Jürgen"], "sure": null}'
    )
    assert reply(REQUEST, "plain") == Answer(input_id="ask-1", value_json='"plain"')
    with pytest.raises(ValueError, match="JSON"):
        reply(REQUEST, float("nan"))
    with pytest.raises(TypeError):
        reply(REQUEST, object())


def test_answers_and_forks_get_a_request_id_of_their_own_unless_they_have_one() -> None:
    answers = [reply("ask-1", 1)]
    assert resume_request("r1", answers, request_id="mine", after_sequence=0) == agent_service_pb2.ResumeRunRequest(
        run_id="r1", answers=answers, request_id="mine", after_sequence=0
    )
    changes = fork_pb2.ForkChanges(agents={"lead": fork_pb2.AgentOverride(model="other")})
    policy = policy_pb2.RunPolicy(background=True)
    assert fork_request(
        "r1", 7, changes=changes, allow_open_effects=True, request_id="mine", policy=policy, labels={"why": "test"}
    ) == agent_service_pb2.ForkRunRequest(
        run_id="r1",
        after_sequence=7,
        changes=changes,
        allow_open_effects=True,
        request_id="mine",
        policy=policy,
        labels={"why": "test"},
    )
    made = [resume_request("r1", answers).request_id, resume_request("r1", answers).request_id]
    made += [fork_request("r1", 7).request_id, fork_request("r1", 7).request_id]
    assert len(set(made) - {""}) == 4
    assert not resume_request("r1", answers).HasField("after_sequence")
