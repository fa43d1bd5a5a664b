"""The live view: agents as they speak, in whole lines that no other agent's words get into."""

from collections.abc import Iterable

from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bough.v1 import error_pb2, event_pb2, execution_pb2, fork_pb2, input_pb2, message_pb2, step_pb2
from bough_server.cli.render.live import LiveView
from tests.clients.run_events import AgentEvent, Turn, desk, words
from tests.clients.waiting_run_server import APPROVAL_ID, approval


def shown(events: Iterable[AgentEvent], *, width: int = 80) -> list[str]:
    view = LiveView(width)
    return [line.plain for event in events for line in view.feed(event)]


def status(events: Iterable[AgentEvent], *, now: float = 0.0) -> list[str]:
    view = LiveView()
    for event in events:
        view.feed(event, 0.0)
    return [line.plain for line in view.status(now)]


def delta(text: str) -> event_pb2.LlmOutputTextDelta:
    return event_pb2.LlmOutputTextDelta(text=text)


def test_a_turn_reads_as_nested_blocks() -> None:
    assert shown(desk()) == [
        "● lead",
        "│ The researcher knows.",
        "│ Let me ask.",
        '│ → call_researcher {"message": "Facts about owls"}',
        "│ ● researcher",
        "│ │ Searching.",
        '│ │ → search {"query": "owls"}',
        "│ │ ← search  Owls are birds.  0.4 s",
        "│ │ Owls are birds.",
        "│ ✓ researcher  2.0 s, 1,204 tokens",
        "│ ← call_researcher  0.4 s",
        "│ Owls hunt at night.",
        "✓ lead  9.0 s, 1,204 tokens",
    ]


def test_parallel_agents_speak_in_whole_lines_under_their_names() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/a", "")
    turn.child_start("lead/b", "")
    for a, b in (("one ", "uno "), ("two\n", "dos\n"), ("three", "tres")):
        turn.add("lead/a", llm_output_text_delta=delta(a))
        turn.add("lead/b", llm_output_text_delta=delta(b))
    turn.child_end("lead/b", "")
    turn.child_end("lead/a", "")
    assert shown(turn.events) == [
        "● lead",
        "│ ● a",
        "│ ● b",
        "│ ▸ lead/a",
        "│ │ one two",
        "│ ▸ lead/b",
        "│ │ uno dos",
        "│ │ tres",
        "│ ✓ b  2.0 s, 1,204 tokens",
        "│ ▸ lead/a",
        "│ │ three",
        "│ ✓ a  2.0 s, 1,204 tokens",
    ]


def test_two_executions_of_one_agent_are_told_apart() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/writer", "")
    turn.child_start("lead/writer#2", "")
    turn.model("lead/writer", "First.")
    turn.model("lead/writer#2", "Second.")
    assert shown(turn.events)[1:] == [
        "│ ● writer",
        "│ ● writer #2",
        "│ ▸ lead/writer",
        "│ │ First.",
        "│ ▸ lead/writer #2",
        "│ │ Second.",
    ]


def test_a_retry_is_said_and_drops_the_unfinished_line() -> None:
    turn = Turn()
    turn.start()
    turn.add("lead", llm_output_text_delta=delta("Owls are fi"))
    turn.add("lead", attempt=2, llm_retrying=event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TIMEOUT))
    turn.model("lead", "Owls are birds.", attempt=2)
    assert shown(turn.events) == ["● lead", "│ ↻ retry 1: timeout", "│ Owls are birds."]


def test_a_retry_says_that_lines_on_the_screen_do_not_count() -> None:
    turn = Turn()
    turn.start()
    turn.add("lead", llm_output_text_delta=delta("Owls are fish.\nAnd"))
    error = error_pb2.AgentError(message="The connection was cut.")
    retrying = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TRANSPORT, error=error)
    turn.add("lead", attempt=2, llm_retrying=retrying)
    turn.add("lead", attempt=1, llm_output_text_delta=delta("late"))
    turn.model("lead", "Owls are birds.", attempt=2)
    assert shown(turn.events) == [
        "● lead",
        "│ Owls are fish.",
        "│ ↻ retry 1: transport: The connection was cut.",
        "│   the text of this step so far is discarded",
        "│ Owls are birds.",
    ]


def test_branches_of_one_agent_with_the_same_step_numbers_lose_no_text() -> None:
    turn = Turn()
    turn.start()

    def said(branch: str, attempt: int = 1, **payload: object) -> None:
        turn.add("lead", attempt=attempt, **payload).step_id = f"step-of-{branch}"

    said("one", llm_output_text_delta=delta("Owls are fish.\n"))
    said("two", llm_output_text_delta=delta("Bats are"))
    said("one", 2, llm_retrying=event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TIMEOUT))
    said("one", llm_output_text_delta=delta("late"))
    said("one", 2, llm_output_text_delta=delta("Owls are birds."))
    said("two", llm_output_text_delta=delta(" mammals."))
    for branch, attempt, text in (("one", 2, "Owls are birds."), ("two", 1, "Bats are mammals."), ("three", 1, "Yes.")):
        response = step_pb2.LlmResponse(message=words(text))
        said(branch, attempt, llm_completed=event_pb2.LlmCompleted(response=response))
    assert shown(turn.events)[1:] == [
        "│ Owls are fish.",
        "│ ↻ retry 1: timeout",
        "│   the text of this step so far is discarded",
        "│ Bats are",
        "│ Owls are birds.",
        "│  mammals.",
        "│ Yes.",
    ]


def test_an_answer_without_deltas_is_shown_when_it_is_whole() -> None:
    turn = Turn()
    turn.start()
    turn.model("lead", "Owls.")
    events = [event for event in turn.events if not event.HasField("llm_output_text_delta")]
    assert shown(events) == ["● lead", "│ Owls."]


def test_a_summary_shows_the_text_of_sub_agents() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/writer", "")
    turn.add("lead/writer", sub_agent_partial=event_pb2.SubAgentPartial(text="Owls "))
    turn.add("lead/writer", sub_agent_partial=event_pb2.SubAgentPartial(text="fly."))
    turn.child_end("lead/writer", "Owls fly.")
    assert shown(turn.events)[1:] == ["│ ● writer", "│ │ Owls fly.", "│ ✓ writer  2.0 s, 1,204 tokens"]


def test_failures_say_why() -> None:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "search", call="c1")
    turn.tool_end("lead", "search", call="c1", error="No\nnetwork.")
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT, message="It was silent for 60 s.")
    turn.add("lead", llm_failed=event_pb2.LlmFailed(error=error))
    turn.add("lead", run_failed=event_pb2.RunFailed(error=error, end_reason=execution_pb2.END_REASON_FAILED))
    assert shown(turn.events) == [
        "● lead",
        "│ → search",
        "│ ✗ search  TOOL_FAILED: No network.  0.4 s",
        "│ ✗ model: MODEL_TIMEOUT: It was silent for 60 s.",
        "✗ lead  MODEL_TIMEOUT",
    ]


LONG = " ".join(f"Cause {number} of it." for number in range(1, 20))


def failing(message: str) -> list[AgentEvent]:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "search", call="c1")
    turn.tool_end("lead", "search", call="c1", error=f"The search failed. {message}")
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT, message=message)
    retrying = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TIMEOUT, error=error)
    turn.add("lead", attempt=2, llm_retrying=retrying)
    turn.add("lead", attempt=2, llm_failed=event_pb2.LlmFailed(error=error))
    turn.add("lead", run_failed=event_pb2.RunFailed(error=error, end_reason=execution_pb2.END_REASON_FAILED))
    return turn.events


def test_errors_are_whole_on_one_line_in_a_pipe_and_on_several_in_a_terminal() -> None:
    pipe = LiveView(80, is_pipe=True)
    lines = [line.plain for event in failing(LONG) for line in pipe.feed(event)]
    assert lines[2:4] == [
        f"│ ✗ search  TOOL_FAILED: The search failed. {LONG}  0.4 s",
        f"│ ↻ retry 1: timeout: {LONG}",
    ]
    terminal = shown(failing(LONG))
    assert max(map(cell_len, terminal)) <= 80
    said = " ".join(line.removeprefix("│ ") for line in terminal)
    assert f"TOOL_FAILED: The search failed. {LONG}  0.4 s" in said


def test_an_error_that_ends_an_agent_and_its_callers_is_said_once() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/writer", "Write.")
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT, message="It was silent.")
    turn.add("lead/writer", llm_failed=event_pb2.LlmFailed(error=error))
    turn.add("lead/writer", sub_agent_failed=event_pb2.SubAgentFailed(error=error))
    above = error_pb2.AgentError(
        reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED, message="The agent 'writer' failed: It was silent."
    )
    turn.add("lead", run_failed=event_pb2.RunFailed(error=above))
    lines = shown(turn.events)
    assert [line for line in lines if "✗" in line] == [
        "│ │ ✗ model: MODEL_TIMEOUT: It was silent.",
        "│ ✗ writer  MODEL_TIMEOUT",
        "✗ lead  SUB_AGENT_FAILED: The agent 'writer' failed",
    ]


def test_the_wait_before_a_retry_is_shown_and_counted_down() -> None:
    turn = Turn()
    turn.start()
    error = error_pb2.AgentError(message="Too many requests.")
    retrying = event_pb2.LlmRetrying(
        reason=event_pb2.RETRY_REASON_RATE_LIMITED, error=error, delay=duration_pb2.Duration(seconds=120)
    )
    for attempt in (2, 3):
        turn.add("lead", attempt=attempt, llm_retrying=retrying)
    assert shown(turn.events)[1:] == [
        "│ ↻ retry 1 in 2 m 00 s: rate limited: Too many requests.",
        "│ ↻ retry 2 in 2 m 00 s: rate limited",
    ]
    assert status(turn.events, now=3.0) == ["│ … lead: retry 2 in 1 m 57 s: rate limited"]
    assert status(turn.events, now=121.0) == ["│ … lead: retry 2 1.0 s"]


def test_an_answer_that_was_cut_off_says_so() -> None:
    turn = Turn()
    turn.start()
    turn.add("lead", llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="Owls are"))
    cut = step_pb2.LlmResponse(message=words("Owls are"), finish_reason=step_pb2.FINISH_REASON_LENGTH)
    turn.add("lead", llm_completed=event_pb2.LlmCompleted(response=cut))
    assert shown(turn.events) == ["● lead", "│ Owls are", "│ ! finish reason length"]


def test_a_cancelled_run_ends_every_block() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/a", "")
    turn.add("lead", cancel_requested=event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_CALLER))
    turn.child_start("lead/b", "")
    cancelled, caller = execution_pb2.END_REASON_CANCELLED, execution_pb2.CANCEL_REASON_CALLER
    turn.add("lead/a", sub_agent_failed=event_pb2.SubAgentFailed(end_reason=cancelled, cancel_reason=caller))
    turn.add("lead/b", sub_agent_failed=event_pb2.SubAgentFailed(end_reason=cancelled))
    turn.add("lead", run_cancelled=event_pb2.RunCancelled(cancel_reason=caller))
    assert shown(turn.events) == [
        "● lead",
        "│ ● a",
        "▸ lead",
        "│ ■ stopping: caller",
        "│ ● b",
        "│ ■ a  cancelled: caller",
        "│ ■ b  cancelled",
        "■ lead  cancelled: caller",
    ]


def test_what_a_tool_says_meanwhile_stands_in_its_callers_block() -> None:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "build", call="c1")
    for piece in ("compiling\nlink", "ing"):
        turn.add("lead", tool_output=event_pb2.ToolOutput(call_id="c1", text=piece))
    turn.tool_end("lead", "build", "done", call="c1")
    assert shown(turn.events)[1:] == ["│ → build", "│ ┊ compiling", "│ ┊ linking", "│ ← build  done  0.4 s"]


def test_a_run_joined_in_the_middle_names_its_speakers() -> None:
    assert shown(desk()[8:11]) == ["│ ▸ lead/researcher", "│ │ Searching."]


def test_a_model_cannot_steer_the_terminal() -> None:
    turn = Turn()
    turn.start()
    turn.model("lead", "\x1b[2Jgone\x07 [bold]kept[/bold]\r\nnext")
    assert shown(turn.events)[1:] == ["│ [2Jgone [bold]kept[/bold]", "│ next"]


def test_waiting_for_a_model_is_said_until_it_speaks() -> None:
    turn = Turn()
    turn.start()
    assert status(turn.events, now=2.0) == ["│ … lead: starting 2.0 s"]
    turn.add("lead", llm_started=event_pb2.LlmStarted(model="default", provider="local"))
    assert status(turn.events, now=3.0) == ["│ … lead: waiting for local/default 3.0 s"]
    turn.add("lead", llm_output_text_delta=delta("Ow"))
    assert status(turn.events) == ["│ Ow"]
    turn.tool_start("lead", "search", call="c1")
    assert status(turn.events, now=4.0) == ["│ … lead: search 4.0 s"]
    turn.tool_end("lead", "search", "x", call="c1")
    turn.end("Owls.")
    assert status(turn.events) == []


def test_the_status_of_many_agents_is_cut_short() -> None:
    turn = Turn()
    turn.start()
    for number in range(12):
        turn.child_start(f"lead/a{number}", "")
    assert status(turn.events)[-1] == "… and 4 more"
    assert len(status(turn.events)) == 9


def test_what_was_lost_with_a_server_is_taken_back() -> None:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "search", call="c1")
    turn.add("lead", llm_output_text_delta=delta("Whole line.\nHalf a li"))
    turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_RECOVERY))
    assert status(turn.events) == []
    recovered = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_RECOVERED)
    turn.add("lead", attempt=2, llm_retrying=recovered)
    turn.add("lead", attempt=2, llm_output_text_delta=delta("Once more."))
    turn.end("Once more.")
    assert shown(turn.events)[2:] == [
        "│ Whole line.",
        "│ ↻ continued after its server was lost",
        "│ ↻ retry 1: recovered",
        "│   the text of this step so far is discarded",
        "│ Once more.",
        "✓ lead  9.0 s, 1,204 tokens",
    ]


def test_a_summary_takes_a_lost_attempt_back_and_keeps_steps_apart() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/writer", "")
    turn.add("lead/writer", sub_agent_partial=event_pb2.SubAgentPartial(text="One"))
    turn.add("lead/writer", step=1, sub_agent_partial=event_pb2.SubAgentPartial(text="Lost"))
    turn.add("lead/writer", step=1, attempt=2, sub_agent_partial=event_pb2.SubAgentPartial(text="Two"))
    turn.child_end("lead/writer", "Two")
    assert shown(turn.events)[2:] == ["│ │ One", "│ │ Two", "│ ✓ writer  2.0 s, 1,204 tokens"]


def test_questions_and_answers_stand_in_their_agents_blocks() -> None:
    turn = Turn()
    turn.start()
    turn.child_start("lead/refunds", "")
    turn.add("lead/refunds", input_requested=event_pb2.InputRequested(request=approval()))
    assert status(turn.events, now=3.0) == ["│ │ … refunds: waiting for an answer 3.0 s"]
    turn.add("lead", run_interrupted=event_pb2.RunInterrupted(requests=[approval()]))
    assert status(turn.events) == []
    turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_ANSWER))
    answer = input_pb2.InputAnswer(input_id=APPROVAL_ID, approval=input_pb2.ApprovalDecision(note="no money"))
    turn.add("lead/refunds", input_received=event_pb2.InputReceived(answer=answer))
    assert shown(turn.events)[2:] == [
        '│ │ ? asks for approval of refund {"amount": 180}',
        "│ │   until 2023-11-14 22:13 UTC; then refused: too late",
        "▸ lead",
        "│ ‖ waits for 1 answer",
        "│ ↻ continued with an answer",
        "│ ▸ lead/refunds",
        "│ │ ! refused: no money",
    ]


def test_a_run_that_waits_for_its_session_says_so() -> None:
    turn = Turn()
    turn.start()
    turn.add("lead", run_queued=event_pb2.RunQueued(behind_run_id="r1"))
    assert status(turn.events, now=2.0) == ["│ … lead: waiting for its session 2.0 s"]
    turn.add("lead", run_dequeued=event_pb2.RunDequeued(session_cut=4))
    assert shown(turn.events) == [
        "● lead",
        "│ … waits for its session, behind run r1",
        "│ … its session is free",
    ]


ORIGIN = fork_pb2.ForkOrigin(run_id="r1", sequence=7)


def test_a_fork_says_where_it_comes_from() -> None:
    turn = Turn()
    turn.add("lead", run_forked=event_pb2.RunForked(origin=ORIGIN))
    assert shown(turn.events) == ["▸ lead", "│ ⑂ fork of run r1 after 7"]


def test_a_fork_ends_with_the_time_that_it_took_itself() -> None:
    turn = Turn()
    turn.add("lead", run_forked=event_pb2.RunForked(origin=ORIGIN))
    turn.end("Done.")
    assert shown(turn.events)[-1] == "✓ lead  1.0 s, 1,204 tokens"


def test_payloads_that_are_not_known_are_passed_over() -> None:
    assert shown([AgentEvent(sequence=1, invocation_id="x", agent="lead")]) == []


CHAINS = st.sampled_from(["lead", "lead/a", "lead/b", "lead/b/c"])


@given(st.lists(st.tuples(CHAINS, st.text(alphabet="ab 猫\n", max_size=30)), max_size=30), st.integers(30, 100))
def test_every_word_is_shown_once_in_its_speakers_order(pieces: list[tuple[str, str]], width: int) -> None:
    turn = Turn()
    for chain, text in pieces:
        turn.add(chain, llm_output_text_delta=delta(text))
    for chain in dict.fromkeys(chain for chain, _ in pieces):
        turn.add(chain, llm_completed=event_pb2.LlmCompleted())
    said: dict[str, str] = {}
    speaker = ""
    for line in shown(turn.events, width=width):
        bare = line.lstrip("│ ")
        speaker = bare.removeprefix("▸ ") if bare.startswith("▸ ") else speaker
        said[speaker] = said.get(speaker, "") + ("" if bare.startswith("▸ ") else bare)
    expected = {chain: "".join(text for c, text in pieces if c == chain) for chain, _ in pieces}
    squeezed = {chain: "".join(text.split()) for chain, text in expected.items()}
    assert {chain: "".join(text.split()) for chain, text in said.items() if "".join(text.split())} == {
        chain: text for chain, text in squeezed.items() if text
    }


@given(st.text(max_size=200), st.integers(0, 40), st.integers(30, 100))
def test_no_line_is_wider_than_the_terminal(text: str, depth: int, width: int) -> None:
    turn = Turn()
    chain = "/".join(["lead", *(f"agent{number}" for number in range(depth))])
    turn.child_start(chain, "")
    turn.model(chain, text)
    turn.tool_start(chain, "search", text, call="c1")
    turn.tool_end(chain, "search", text, call="c1")
    turn.child_end(chain, text)
    widest = max(cell_len(line) for line in shown(turn.events, width=width))
    # Below a depth where nothing is left, a line keeps the room of a few words.
    assert widest <= max(width, 52)


def test_a_long_result_leaves_room_for_its_duration() -> None:
    turn = Turn()
    turn.start()
    result = message_pb2.ToolResult(
        call=message_pb2.ToolCall(call_id="c1", name="search"),
        parts=[message_pb2.Part(text="owl " * 100)],
        duration=duration_pb2.Duration(seconds=75),
    )
    turn.add("lead", tool_completed=event_pb2.ToolCompleted(result=result))
    line = shown(turn.events)[-1]
    assert (line.startswith("│ ← search  owl owl"), line.endswith("…  1 m 15 s"), len(line) <= 80) == (True, True, True)
