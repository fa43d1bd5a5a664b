"""A run collected from its stream: the events that were streamed, without the deltas of lost attempts."""

from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough import (
    CollectedRun,
    RunCancelledError,
    RunFailedError,
    RunInterruptedError,
    RunNotAnswered,
    StepText,
    answer_of,
    collect,
    collect_sync,
)
from bough.v1 import error_pb2, event_pb2, execution_pb2, step_pb2
from tests.clients.question_events import ask, asking, forked, hear, question, wait_for
from tests.clients.run_events import RUN_ID, SESSION_ID, USED, Turn, desk, words


async def streamed(events: Iterable[event_pb2.AgentEvent]) -> AsyncIterator[event_pb2.AgentEvent]:
    for event in events:
        yield event


async def test_a_collected_run_equals_its_stream() -> None:
    events = tuple(desk())
    assert await collect(streamed(events)) == CollectedRun(
        run_id=RUN_ID,
        session_id=SESSION_ID,
        events=events,
        state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
        message=words("Owls hunt at night."),
        error=None,
        steps=tuple(e.step_completed.step for e in events if e.HasField("step_completed")),
        texts=tuple(
            StepText(
                invocation_id=f"id-of-{chain}",
                agent=chain.rpartition("/")[2],
                step_id=f"step-{index}-of-{chain}",
                step_index=index,
                attempt=1,
                text=text,
            )
            for chain, index, text in (
                ("lead", 0, "Let me ask."),
                ("lead/researcher", 0, "Searching."),
                ("lead/researcher", 1, "Owls are birds."),
                ("lead", 1, "Owls hunt at night."),
            )
        ),
        usage=USED,
        last_sequence=len(events),
    )


def test_the_answer_is_the_text_of_the_final_message() -> None:
    run = collect_sync(desk())
    assert (run.answer, answer_of(run)) == ("Owls hunt at night.", "Owls hunt at night.")


def test_turns_are_the_roots_steps() -> None:
    assert [step.step_id for step in collect_sync(desk()).root_steps] == ["step-0-of-lead", "step-1-of-lead"]


@pytest.mark.parametrize(
    ("reason", "is_cut"),
    [
        (step_pb2.FINISH_REASON_STOP, False),
        (step_pb2.FINISH_REASON_LENGTH, True),
        (step_pb2.FINISH_REASON_CONTENT_FILTER, True),
        (step_pb2.FINISH_REASON_REFUSAL, False),
    ],
)
def test_an_answer_that_was_cut_off_is_known_by_its_last_step(
    reason: step_pb2.FinishReason.ValueType, is_cut: bool
) -> None:
    steps = [
        event_pb2.AgentEvent(
            sequence=number,
            step_completed=event_pb2.StepCompleted(
                step=step_pb2.AgentStep(llm_response=step_pb2.LlmResponse(finish_reason=each))
            ),
        )
        for number, each in enumerate((step_pb2.FINISH_REASON_TOOL_CALLS, reason), start=1)
    ]
    run = collect_sync(steps)
    assert (run.finish_reason, run.is_cut) == (reason, is_cut)


def test_a_run_without_steps_does_not_say_why_its_model_stopped() -> None:
    run = collect_sync([])
    assert (run.finish_reason, run.is_cut) == (step_pb2.FINISH_REASON_UNSPECIFIED, False)


def test_a_run_that_goes_on_has_no_answer_yet() -> None:
    run = collect_sync(desk()[:5])
    assert (run.state, run.message, run.answer, run.last_sequence) == (
        execution_pb2.EXECUTION_STATE_RUNNING,
        None,
        "",
        5,
    )


def test_nothing_collected_is_no_run() -> None:
    run = collect_sync([])
    assert (run.run_id, run.state, run.last_sequence) == ("", execution_pb2.EXECUTION_STATE_UNSPECIFIED, 0)


def test_a_failed_run_raises_its_error() -> None:
    turn = Turn()
    turn.start()
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, message="The model is away.")
    turn.add("lead", run_failed=event_pb2.RunFailed(error=error))
    run = collect_sync(turn.events)
    assert (run.state, run.error) == (execution_pb2.EXECUTION_STATE_FAILED, error)
    with pytest.raises(RunFailedError, match="The model is away") as raised:
        answer_of(run)
    assert (raised.value.run_id, raised.value.error) == (RUN_ID, error)


def test_a_cancelled_run_raises_that() -> None:
    turn = Turn()
    turn.start()
    assert collect_sync(turn.events).cancel_reason == execution_pb2.CANCEL_REASON_UNSPECIFIED
    error, caller = error_pb2.AgentError(message="It was cancelled."), execution_pb2.CANCEL_REASON_CALLER
    turn.add("lead", run_cancelled=event_pb2.RunCancelled(error=error, cancel_reason=caller))
    assert collect_sync(turn.events).cancel_reason == caller
    with pytest.raises(RunCancelledError, match="It was cancelled"):
        answer_of(collect_sync(turn.events))


def test_a_run_that_goes_on_is_neither_failed_nor_answered() -> None:
    with pytest.raises(RunNotAnswered, match="has not ended") as raised:
        answer_of(collect_sync(desk()[:5]))
    assert type(raised.value) is RunNotAnswered


def test_an_interrupted_run_says_what_it_asks() -> None:
    run = collect_sync(asking()[0])
    assert (run.state, run.open_requests) == (
        execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
        (question("a"), question("b")),
    )
    with pytest.raises(RunInterruptedError, match=r"What is a\?; What is b\?") as raised:
        answer_of(run)
    assert (raised.value.run_id, raised.value.requests) == (RUN_ID, (question("a"), question("b")))


def test_a_question_is_open_as_soon_as_it_is_asked_and_until_it_is_answered() -> None:
    turn = Turn()
    turn.start()
    ask(turn, "a", "b")
    asked = collect_sync(turn.events)
    assert (asked.state, asked.open_requests) == (execution_pb2.EXECUTION_STATE_RUNNING, (question("a"), question("b")))
    wait_for(turn, "a", "b")
    hear(turn, "a")
    heard = collect_sync(turn.events)
    assert (heard.state, heard.open_requests) == (execution_pb2.EXECUTION_STATE_RUNNING, (question("b"),))
    turn.add("lead", run_cancelled=event_pb2.RunCancelled())
    assert collect_sync(turn.events).open_requests == ()


def test_the_streams_of_a_run_and_its_answers_make_the_whole_run() -> None:
    streams = asking()
    whole = [event for stream in streams for event in stream]
    run = collect_sync(whole)
    assert (run.state, run.answer, run.events) == (
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
        "That is all.",
        tuple(whole),
    )
    assert [text.text for text in run.texts] == ["Let me ask.", "And c?", "That is all."]


async def test_what_a_later_stream_gives_again_counts_once() -> None:
    streams = asking()
    whole = collect_sync(event for stream in streams for event in stream)
    first = await collect(streamed(streams[0]))
    second = await collect(streamed([*streams[0][2:], *streams[1]]), earlier=first.events)
    assert (second.state, second.open_requests) == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, (question("b"),))
    assert await collect(streamed([*streams[2], *streams[3]]), earlier=second.events) == whole


def test_a_queued_run_is_pending_until_it_begins() -> None:
    turn = Turn()
    turn.start()
    turn.add("lead", run_queued=event_pb2.RunQueued(behind_run_id="another"))
    assert collect_sync(turn.events).state == execution_pb2.EXECUTION_STATE_PENDING
    turn.add("lead", run_dequeued=event_pb2.RunDequeued())
    assert collect_sync(turn.events).state == execution_pb2.EXECUTION_STATE_RUNNING
    turn.end("At last.")
    assert answer_of(collect_sync(turn.events)) == "At last."


def test_a_fork_of_a_run_that_waited_goes_on() -> None:
    log = forked("fork", asking()[0], len(asking()[0]))
    assert collect_sync(log[: len(asking()[0]) + 1]).state == execution_pb2.EXECUTION_STATE_RUNNING
    assert collect_sync(log).answer == "Otherwise."


def test_what_was_said_before_a_crash_is_void_once_the_model_is_asked_again() -> None:
    turn = Turn()
    turn.start()
    turn.model("lead", "This ", "stays.")
    turn.add("lead", step=1, llm_started=event_pb2.LlmStarted())
    turn.add("lead", step=1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="This is lo"))
    turn.add("lead", run_resumed=event_pb2.RunResumed(cause=event_pb2.RESUME_CAUSE_RECOVERY, epoch=2))
    again = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_RECOVERED)
    turn.add("lead", step=1, attempt=2, llm_retrying=again)
    assert [text.text for text in collect_sync(turn.events).texts] == ["This stays."]
    turn.add("lead", step=1, attempt=2, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="This "))
    turn.add("lead", step=1, attempt=2, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="counts."))
    run = collect_sync(turn.events)
    assert (run.state, [text.text for text in run.texts]) == (
        execution_pb2.EXECUTION_STATE_RUNNING,
        ["This stays.", "This counts."],
    )


def test_a_call_that_summarizes_voids_nothing_of_its_agents_steps() -> None:
    turn = Turn()
    turn.start()
    turn.model("lead", "This stays.")
    again = turn.add("lead", attempt=2, llm_retrying=event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TIMEOUT))
    again.step_id, again.step_index = "", 0
    assert [text.text for text in collect_sync(turn.events).texts] == ["This stays."]


def test_partials_of_a_summary_are_text_as_well() -> None:
    turn = Turn()
    turn.start()
    for piece in ("Owls ", "fly."):
        turn.add("lead/writer", sub_agent_partial=event_pb2.SubAgentPartial(text=piece))
    assert [text.text for text in collect_sync(turn.events).texts] == ["Owls fly."]


PIECES = st.lists(
    st.tuples(st.sampled_from(["lead", "lead/a", "lead/b"]), st.integers(0, 2), st.integers(1, 3), st.text())
)


@given(PIECES)
def test_only_the_last_attempt_of_a_step_counts(pieces: list[tuple[str, int, int, str]]) -> None:
    turn = Turn()
    for chain, step, attempt, text in pieces:
        turn.add(chain, step=step, attempt=attempt, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=text))
    last = {(chain, step): max(a for c, s, a, _ in pieces if (c, s) == (chain, step)) for chain, step, _, _ in pieces}
    expected = {
        (f"id-of-{chain}", step): "".join(t for c, s, a, t in pieces if (c, s, a) == (chain, step, attempt))
        for (chain, step), attempt in last.items()
    }
    assert {(t.invocation_id, t.step_index): t.text for t in collect_sync(turn.events).texts} == expected


def test_agents_in_one_place_of_the_tree_are_told_apart_by_their_invocations() -> None:
    turn = Turn()
    for chain, text in (("lead/poet", "Leaves."), ("lead/poet#2", "Red leaves."), ("lead/poet", " More.")):
        turn.add(chain, sub_agent_partial=event_pb2.SubAgentPartial(text=text))
    assert [(text.invocation_id, text.agent, text.text) for text in collect_sync(turn.events).texts] == [
        ("id-of-lead/poet", "poet", "Leaves. More."),
        ("id-of-lead/poet#2", "poet", "Red leaves."),
    ]


def test_a_retry_voids_what_was_said_even_if_the_next_attempt_says_nothing() -> None:
    turn = Turn()
    turn.add("lead", attempt=1, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="Ow"))
    turn.add("lead", attempt=2, llm_retrying=event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TRANSPORT))
    assert collect_sync(turn.events).texts == ()
