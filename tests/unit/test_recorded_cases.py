"""Cases made of runs: what the user said, what is expected, what people answered, and what a case cannot hold."""

from bough.v1 import eval_set_pb2 as sets
from bough.v1 import event_pb2, input_pb2, invocation_pb2, message_pb2
from bough_server.evals.sets.cases_from_runs import case_of, extract_answers

Part = message_pb2.Part
ALL = ("agents", "tools", "answer")
APPROVAL, QUESTION = input_pb2.INPUT_KIND_APPROVAL, input_pb2.INPUT_KIND_QUESTION
CLIENT_TOOL = input_pb2.INPUT_KIND_CLIENT_TOOL


def said(*parts: Part, answer: Part | None = None) -> invocation_pb2.Invocation:
    """A run in which a user said that."""
    final = message_pb2.Message(parts=[answer]) if answer is not None else None
    return invocation_pb2.Invocation(user_content=message_pb2.Message(parts=parts), final_response=final)


def recorded(invocation: invocation_pb2.Invocation) -> tuple[sets.EvalTurn, list[str]]:
    """The turn of its case, and what the case leaves out."""
    case, left_out = case_of(invocation, "a", parts=ALL, with_mocks=False)
    return case.turns[0], list(left_out)


def test_a_text_is_what_the_user_says_and_the_answer_is_expected_exactly() -> None:
    turn, left_out = recorded(said(Part(text="Hi"), Part(text=" there"), answer=Part(text=" Hello.\n")))

    assert (turn.user, turn.expect.answer.exact, left_out) == ("Hi there", "Hello.", [])


def test_json_of_the_user_stays_json() -> None:
    turn, left_out = recorded(said(Part(text="Sum"), Part(data_json="[1, 2]")))

    assert (turn.user, left_out) == ("", [])
    assert list(turn.input.parts) == [Part(text="Sum"), Part(data_json="[1, 2]")]


def test_files_and_what_was_cut_are_left_out_with_a_sentence_each() -> None:
    photo = Part(blob=message_pb2.Blob(sha256="ab"))
    turn, left_out = recorded(said(Part(text="See", truncated=True), photo, answer=Part(text="Lo", truncated=True)))

    assert (turn.user, turn.expect.HasField("answer")) == ("See", False)
    assert left_out == [
        "What the user said is too long for the record, and was cut in the case.",
        "The user sent files, which the case does not have.",
        "The answer is too long to be expected, so the case expects none.",
    ]


def test_arguments_that_were_cut_are_not_expected() -> None:
    run = said(Part(text="Hi"))
    run.tools.add(name="search", call_id="c1", agent="lead", arguments_json='{"q": "le', arguments_truncated=True)
    run.tools.add(name="pay", arguments_json='{"n": 1}', sequence=1)
    turn, left_out = recorded(run)

    assert [(one.name, one.arguments_json) for one in turn.expect.tools] == [("search", ""), ("pay", '{"n": 1}')]
    assert left_out == [
        """The call 'c1' of 'search' by 'lead' with the arguments {"q": "le was not recorded whole: any arguments of """
        "it will do."
    ]


def test_arguments_that_an_approver_edited_are_expected_instead_of_those_that_the_model_wrote() -> None:
    run = said(Part(text="Hi"))
    run.tools.add(name="pay", arguments_json='{"n": 1}', arguments_truncated=True, executed_arguments_json='{"n": 2}')
    run.tools.add(
        name="pay",
        arguments_json='{"n": 1}',
        executed_arguments_json='{"n": 3',
        executed_arguments_truncated=True,
        sequence=1,
    )
    turn, left_out = recorded(run)

    assert [one.arguments_json for one in turn.expect.tools] == ['{"n": 2}', ""]
    assert left_out == [
        """The call '' of 'pay' by '' with the arguments {"n": 3 was not recorded whole: any arguments of it will do."""
    ]


def test_of_a_record_without_all_agents_and_calls_none_are_expected() -> None:
    run = said(Part(text="Hi"))
    run.agents.add(name="lead")
    run.tools.add(name="pay")
    run.agents_total, run.tools_total = 2, 3
    turn, left_out = recorded(run)

    assert (list(turn.expect.agents), list(turn.expect.tools)) == ([], [])
    assert left_out == [
        "The record does not have all agents of the run, so the case expects none.",
        "The record does not have all tool calls of the run: those have no mocks, and none is expected.",
    ]


def asked(input_id: str, kind: input_pb2.InputKind.ValueType, about: str) -> event_pb2.AgentEvent:
    """A request of the agent `refunds`, about a tool or with a prompt."""
    request = input_pb2.InputRequest(input_id=input_id, kind=kind, agent_path=["lead", "refunds"])
    if kind == QUESTION:
        request.prompt = about
    else:
        request.call.name, request.call_id = about, input_id
    return event_pb2.AgentEvent(input_requested=event_pb2.InputRequested(request=request))


def answered(answer: input_pb2.InputAnswer) -> event_pb2.AgentEvent:
    return event_pb2.AgentEvent(input_received=event_pb2.InputReceived(answer=answer))


def approval(input_id: str, approved: bool, arguments_json: str = "") -> input_pb2.InputAnswer:
    decision = input_pb2.ApprovalDecision(approved=approved, arguments_json=arguments_json)
    return input_pb2.InputAnswer(input_id=input_id, approval=decision)


def outcome(input_id: str, *parts: Part) -> input_pb2.InputAnswer:
    return input_pb2.InputAnswer(input_id=input_id, tool_outcome=message_pb2.ToolOutcome(parts=parts))


def test_approvals_questions_and_tools_of_the_client_are_answered_as_they_were() -> None:
    events = [
        asked("1", APPROVAL, "refund"),
        answered(approval("1", True, '{"amount": 2}')),
        asked("2", QUESTION, "Why?"),
        answered(input_pb2.InputAnswer(input_id="2", value_json='"broken"')),
        asked("3", CLIENT_TOOL, "read_card"),
        answered(outcome("3", Part(text="4242"), Part(data_json="[1]"))),
    ]
    decision = input_pb2.ApprovalDecision(approved=True, arguments_json='{"amount": 2}')
    first = sets.EvalAnswer(agent="refunds", tool="refund", approval=decision)
    second = sets.EvalAnswer(agent="refunds", question="Why?", value_json='"broken"')
    read = message_pb2.ToolOutcome(parts=[Part(text="4242"), Part(data_json="[1]")])
    third = sets.EvalAnswer(agent="refunds", tool="read_card", tool_outcome=read)

    assert extract_answers(events, with_mocks=False) == ([first, second, third], [])
    assert extract_answers(events, with_mocks=True) == ([first, second], [])


def test_answers_that_a_case_cannot_tell_apart_or_give_are_said() -> None:
    events = [
        asked("1", APPROVAL, "refund"),
        asked("2", APPROVAL, "refund"),
        asked("3", CLIENT_TOOL, "read_card"),
        answered(approval("1", True)),
        answered(approval("2", False)),
        answered(input_pb2.InputAnswer(input_id="3")),
        answered(approval("unknown", True)),
    ]
    kept, sentences = extract_answers(events, with_mocks=False)

    assert [answer.approval.approved for answer in kept] == [True]
    assert sentences == [
        "'refund' was answered in another way before, which is kept for both.",
        "The answer about 'read_card' is none that a case can give.",
    ]
