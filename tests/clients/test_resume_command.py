"""Runs that wait for input: how `bough run`, `watch` and `resume` show them, and how they are answered."""

import signal
from dataclasses import replace

from google.protobuf import json_format

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2
from tests.clients.cli_process import Finished, bough
from tests.clients.run_events import RUN_ID, SESSION_ID
from tests.clients.stream_server import listening
from tests.clients.terminals import at_a_terminal
from tests.clients.waiting_run_server import (
    APPROVAL_ID,
    CARD_ID,
    QUESTION_ID,
    WaitingService,
    approval,
    card,
    ended,
    interrupted,
    question,
)

WAITS = f"""\
The run waits for 2 answers.
? lead/refunds asks for approval of refund {{"amount": 180}}
    Is that much to be paid?
    until 2023-11-14 22:13 UTC; then refused: too late
    takes true, false, or {{"approved": …, "arguments": {{…}}, "note": "…"}}
    id {APPROVAL_ID}
? lead/interviewer asks: Why does it come back?
    takes JSON that fits {{"type": "string"}}
    id {QUESTION_ID}
Answer with:
  bough --address 127.0.0.1:PORT resume {RUN_ID} --answer {APPROVAL_ID}=true --answer {QUESTION_ID}=JSON
"""


async def served(service: WaitingService, *arguments: str) -> Finished:
    """The outcome of a command, with the word PORT for the port."""
    async with listening(service) as port:
        ran = await bough(*arguments, port=port)
    return replace(ran, out=ran.out.replace(f":{port}", ":PORT"), err=ran.err.replace(f":{port}", ":PORT"))


async def test_a_run_that_waits_exits_3_with_what_it_asks_and_the_command_that_answers() -> None:
    service = WaitingService(interrupted(approval(), question()))
    ran = await served(service, "run", "lead", "hi", "--no-tree")
    assert (ran.code, ran.err) == (3, f"run {RUN_ID}\nsession {SESSION_ID}\n{WAITS}")
    assert ran.out.splitlines() == [
        "● lead",
        "│ One moment.",
        "│ ▸ lead/refunds",
        '│ │ ? asks for approval of refund {"amount": 180}',
        "│ │   until 2023-11-14 22:13 UTC; then refused: too late",
        "│ ▸ lead/interviewer",
        "│ │ ? asks: Why does it come back?",
        "▸ lead",
        "│ ‖ waits for 2 answers",
    ]


async def test_watching_a_run_that_waits_exits_3_as_well() -> None:
    service = WaitingService(interrupted(approval(), question()))
    watched = await served(service, "watch", RUN_ID, "--output", "answer")
    assert watched == Finished(code=3, out="", err=WAITS)
    seen = await served(service, "watch", RUN_ID, "--output", "answer", "--no-follow")
    assert seen == Finished(code=3, out="", err=WAITS)
    after = await served(service, "watch", RUN_ID, "--output", "answer", "--no-follow", "--after", "99")
    assert after == Finished(code=3, out="", err=WAITS)


async def test_watching_goes_on_past_an_interruption_that_was_answered() -> None:
    service = WaitingService(interrupted(approval()), ended())
    async with listening(service) as port:
        await bough("resume", RUN_ID, "--answer", f"{APPROVAL_ID}=true", port=port)
        watched = await bough("watch", RUN_ID, "--output", "plain", port=port)
    sequences = [int(line.split()[0]) for line in watched.out.splitlines()]
    assert (watched.code, sequences) == (0, list(range(1, len(service.events) + 1)))
    assert [request.after_sequence for request in service.asked[-2:]] == [0, 6]


async def test_without_a_terminal_and_without_answers_resume_says_what_is_open_and_exits_3() -> None:
    service = WaitingService(interrupted(approval(), question()))
    assert await served(service, "resume", RUN_ID) == Finished(code=3, out=WAITS, err="")
    assert service.resumed == []


async def test_given_answers_are_sent_by_kind_and_the_run_is_followed_on() -> None:
    service = WaitingService(interrupted(approval(), question(), card()), ended())
    resumed = await served(
        service,
        "resume",
        "last",
        *("--answer", '6f1c2d={"approved": true, "arguments": {"amount": 90}, "note": "half"}'),
        *("--answer", '00bbbb="it is broken"'),
        *("--answer", f'{CARD_ID}={{"last": 4242}}'),
        *("--output", "answer", "--request-id", "mine"),
    )
    assert resumed == Finished(code=0, out="All done.\n", err=f"run {RUN_ID}\n")
    (request,) = service.resumed
    approved = input_pb2.ApprovalDecision(approved=True, arguments_json='{"amount": 90}', note="half")
    result = message_pb2.ToolOutcome(parts=[message_pb2.Part(data_json='{"last": 4242}')])
    assert list(request.answers) == [
        input_pb2.InputAnswer(input_id=APPROVAL_ID, approval=approved),
        input_pb2.InputAnswer(input_id=QUESTION_ID, value_json='"it is broken"'),
        input_pb2.InputAnswer(input_id=CARD_ID, tool_outcome=result),
    ]
    assert (request.run_id, request.request_id) == (RUN_ID, "mine")


async def test_the_same_answer_again_reaches_the_server_although_nothing_is_open_any_more() -> None:
    service = WaitingService(interrupted(approval()), ended())
    async with listening(service) as port:
        for _ in range(2):
            resumed = await bough("resume", RUN_ID, "--answer", f"{APPROVAL_ID}=false", port=port)
    assert (resumed.code, len(service.resumed)) == (0, 2)
    assert service.resumed[0].answers == service.resumed[1].answers


async def test_a_run_that_waits_again_after_its_answers_exits_3_again() -> None:
    service = WaitingService(interrupted(approval()), interrupted(question())[-2:])
    resumed = await served(service, "resume", RUN_ID, "--answer", f"{APPROVAL_ID}=true", "--output", "json")
    kinds = [json_format.Parse(line, event_pb2.AgentEvent()).WhichOneof("payload") for line in resumed.out.splitlines()]
    assert kinds == ["run_resumed", "input_received", "input_requested", "run_interrupted"]
    assert (resumed.code, f"--answer {QUESTION_ID}=JSON" in resumed.err) == (3, True)


async def test_a_run_that_fails_after_its_answers_exits_1() -> None:
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, message="The model is away.")
    failed = event_pb2.AgentEvent(invocation_id="id-of-lead", run_failed=event_pb2.RunFailed(error=error))
    service = WaitingService(interrupted(approval()), [failed])
    resumed = await served(service, "resume", RUN_ID, "--answer", f"{APPROVAL_ID}=true", "--output", "answer")
    said = f"run {RUN_ID}\nThe run failed: MODEL_UNAVAILABLE: The model is away.\n"
    assert resumed == Finished(code=1, out="", err=said)


async def test_answers_that_are_none_are_sentences_and_nothing_is_sent() -> None:
    service = WaitingService(interrupted(approval()))
    for answer, words in (
        ("true", "has no value: write INPUT_ID=JSON"),
        ("aaaa=true", "'aaaa' is too short to name a request"),
        ("ffffffff=true", f"The run has no request 'ffffffff'; its requests: {APPROVAL_ID}."),
        (f"{APPROVAL_ID}=yes", "is not JSON"),
        (f"{APPROVAL_ID}=1", "the answer must be true, false, or"),
    ):
        resumed = await served(service, "resume", RUN_ID, "--answer", answer)
        assert (resumed.code, resumed.out, words in resumed.err) == (2, "", True), resumed.err
    twice = await served(service, "resume", RUN_ID, "--answer", "6f1c2d=true", "--answer", "00aaaa=true")
    assert (twice.code, twice.err) == (2, f"Request {APPROVAL_ID} has two answers: give only one.\n")
    assert service.resumed == []


async def test_a_run_that_asks_nothing_cannot_be_resumed() -> None:
    service = WaitingService([*interrupted(), *ended()])
    sentence = f"Run {RUN_ID} has no open requests: its state is succeeded.\n"
    assert await served(service, "resume", RUN_ID) == Finished(code=2, out="", err=sentence)


async def test_a_turn_says_what_is_to_happen_where_its_session_is_busy() -> None:
    service = WaitingService(interrupted(approval()))
    await served(service, "run", "lead", "hi", "--on-busy", "cancel-interrupted")
    (request,) = service.asked
    assert request.policy == policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_CANCEL_INTERRUPTED)


async def test_a_terminal_is_asked_one_request_after_the_other() -> None:
    service = WaitingService(interrupted(approval(), question(), card()), ended())
    async with listening(service) as port, at_a_terminal("resume", RUN_ID, "--output", "answer", port=port) as terminal:
        await terminal.until("Approve?")
        terminal.type("n too much\n")
        await terminal.until("Your answer")
        terminal.type("défectueux\n")
        await terminal.until("Its result")
        terminal.type("error: no reader\n")
        assert await terminal.end() == (0, "All done.\n")
    refused = input_pb2.ApprovalDecision(approved=False, note="too much")
    failure = message_pb2.ToolFailure(message="no reader")
    assert list(service.resumed[0].answers) == [
        input_pb2.InputAnswer(input_id=APPROVAL_ID, approval=refused),
        input_pb2.InputAnswer(input_id=QUESTION_ID, value_json='"défectueux"'),
        input_pb2.InputAnswer(input_id=CARD_ID, tool_outcome=message_pb2.ToolOutcome(failure=failure)),
    ]


async def test_a_terminal_is_asked_again_if_the_run_waits_again() -> None:
    service = WaitingService(interrupted(approval()), interrupted(question())[-2:])
    async with listening(service) as port, at_a_terminal("resume", RUN_ID, "--output", "answer", port=port) as terminal:
        await terminal.until("Approve?")
        terminal.type("y\n")
        await terminal.until("Your answer")
        service.rest = list(ended())
        terminal.type("it is broken\n")
        assert await terminal.end() == (0, "All done.\n")
    assert [request.answers[0].input_id for request in service.resumed] == [APPROVAL_ID, QUESTION_ID]


async def test_ctrl_c_at_a_question_leaves_the_run_waiting() -> None:
    service = WaitingService(interrupted(approval()))
    async with listening(service) as port, at_a_terminal("resume", RUN_ID, port=port) as terminal:
        await terminal.until("Approve?")
        terminal.process.send_signal(signal.SIGINT)
        code, _ = await terminal.end()
    assert (code, service.resumed, service.cancelled_runs) == (130, [], [])


async def test_a_user_who_answers_nothing_leaves_the_run_waiting() -> None:
    service = WaitingService(interrupted(approval()))
    async with listening(service) as port, at_a_terminal("resume", RUN_ID, port=port) as terminal:
        await terminal.until("Approve?")
        terminal.type("\n")
        await terminal.until("No request was answered: the run still waits.")
        code, _ = await terminal.end()
    assert (code, service.resumed) == (3, [])
