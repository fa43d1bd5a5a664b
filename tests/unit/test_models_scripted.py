"""The scripted model: which turn answers, how it streams, how it fails; and what is wrong with a script."""

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2, event_pb2, message_pb2, step_pb2, usage_pb2
from bough_server.errors import ConfigurationError
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import AttemptMeter, ModelRequest, ReasoningDelta, TextDelta, ToolCallDelta
from bough_server.models.scripted.model import Gate, ScriptedModel
from bough_server.models.scripted.script import parse_script, split_words
from tests.support.model_calls import answer, asking, assistant, call, failure, text_of, tool_result, user


def scripted(text: str, *, gate: Gate | None = None, max_concurrency: int = 0) -> ScriptedModel:
    return ScriptedModel(
        name="scripted",
        model="desk",
        script=parse_script(text),
        gate=gate,
        limiter=ModelLimiter(max_concurrency=max_concurrency),
    )


TWO_STEPS = """
agents:
  lead:
    - calls: [{name: lookup, arguments: {query: oak, b: 1}}]
    - The answer.
"""
CALL = call("call_0_0", "lookup", '{"query": "oak", "b": 1}')


async def test_the_first_turn_calls_a_tool_and_the_second_answers() -> None:
    model = scripted(TWO_STEPS)
    deltas, response = await answer(model, asking(user("What is an oak?"), agent="lead"))
    assert deltas == [ToolCallDelta(0, "", "call_0_0", "lookup"), ToolCallDelta(0, '{"query": "oak", "b": 1}')]
    assert (response.provider, response.model, response.provider_finish_reason) == ("scripted", "desk", "tool_calls")
    assert list(response.message.parts) == [
        message_pb2.Part(
            tool_call=message_pb2.ToolCall(
                name="lookup", arguments_json='{"query": "oak", "b": 1}', provider_call_id="call_0_0"
            )
        )
    ]
    history = [user("What is an oak?"), assistant("", CALL), tool_result(CALL, "a tree")]
    deltas, response = await answer(model, asking(*history, agent="lead"))
    assert deltas == [TextDelta("The "), TextDelta("answer.")]
    assert (response.finish_reason, response.provider_finish_reason) == (step_pb2.FINISH_REASON_STOP, "stop")


async def test_the_same_request_always_gets_the_same_answer() -> None:
    model = scripted(TWO_STEPS)
    first, second = [await answer(model, asking(agent="lead")) for _ in range(2)]
    assert first == second


async def test_a_new_message_of_the_user_begins_at_the_first_turn_again() -> None:
    history = [user("one"), assistant("", CALL), tool_result(CALL, "a tree"), assistant("The answer."), user("two")]
    _, response = await answer(scripted(TWO_STEPS), asking(*history, agent="lead"))
    assert response.finish_reason == step_pb2.FINISH_REASON_TOOL_CALLS


async def test_what_other_agents_said_is_not_a_new_message() -> None:
    history = [
        user("one"),
        assistant("", CALL),
        tool_result(CALL, "a tree"),
        user("For context: [writer] said: Hello."),
    ]
    _, response = await answer(scripted(TWO_STEPS), asking(*history, agent="lead"))
    assert response.message.parts[0].text == "The answer."


async def test_a_question_that_the_runtime_repeats_is_the_next_step() -> None:
    stored = message_pb2.Message()
    stored.CopyFrom(user("one"))
    stored.kind = message_pb2.MESSAGE_KIND_USER
    model = scripted("agents: {lead: ['', Second.]}")
    _, empty = await answer(model, asking(stored, agent="lead"))
    assert list(empty.message.parts) == []
    _, response = await answer(model, asking(stored, user("Your last answer was empty."), agent="lead"))
    assert response.message.parts[0].text == "Second."


async def test_a_turn_may_depend_on_what_the_user_says() -> None:
    model = scripted("agents: {lead: [{when: poem, text: Roses.}, Prose.]}")
    assert (await answer(model, asking(user("a poem"), agent="lead")))[1].message.parts[0].text == "Roses."
    assert (await answer(model, asking(user("a text"), agent="lead")))[1].message.parts[0].text == "Prose."


async def test_agents_that_are_not_named_share_the_star() -> None:
    model = scripted("agents: {lead: [one], '*': [two]}")
    assert (await answer(model, asking(agent="lead")))[1].message.parts[0].text == "one"
    assert (await answer(model, asking(agent="other")))[1].message.parts[0].text == "two"


async def test_reasoning_streams_before_the_text_and_chunks_stream_as_written() -> None:
    model = scripted("agents: {lead: [{reasoning: Let me see., chunks: ['a b', '', 'c'], finish_reason: length}]}")
    deltas, response = await answer(model, asking(agent="lead"))
    assert deltas == [
        ReasoningDelta("Let "),
        ReasoningDelta("me "),
        ReasoningDelta("see."),
        TextDelta("a b"),
        TextDelta(""),
        TextDelta("c"),
    ]
    assert response.message.parts[0].reasoning.text == "Let me see."


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", step_pb2.FINISH_REASON_STOP),
        ("tool_calls", step_pb2.FINISH_REASON_TOOL_CALLS),
        ("length", step_pb2.FINISH_REASON_LENGTH),
        ("content_filter", step_pb2.FINISH_REASON_CONTENT_FILTER),
        ("refusal", step_pb2.FINISH_REASON_REFUSAL),
        ("tired", step_pb2.FINISH_REASON_OTHER),
    ],
)
async def test_a_script_says_why_the_model_stopped_in_a_providers_word(
    word: str, reason: step_pb2.FinishReason.ValueType
) -> None:
    model = scripted(f"agents: {{lead: [{{text: a, finish_reason: {word}}}]}}")
    _, response = await answer(model, asking(agent="lead"))
    assert (response.finish_reason, response.provider_finish_reason) == (reason, word)


async def test_usage_is_reported_as_far_as_the_script_says() -> None:
    model = scripted("agents: {lead: [{text: a, usage: {input_tokens: 3, output_tokens: 0}}], writer: [b]}")
    _, response = await answer(model, asking(agent="lead"))
    assert response.usage == usage_pb2.Usage(input_tokens=3, output_tokens=0)
    _, response = await answer(model, asking(agent="writer"))
    assert not response.HasField("usage")


@pytest.mark.parametrize(
    ("reason", "error", "retry"),
    [
        ("TRANSPORT", error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_TRANSPORT),
        ("RATE_LIMITED", error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_RATE_LIMITED),
        ("PROVIDER_ERROR", error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR),
        ("TIMEOUT", error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT),
        ("BAD_RESPONSE", error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE, event_pb2.RETRY_REASON_BAD_RESPONSE),
        ("UNAVAILABLE", error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, None),
    ],
)
async def test_a_turn_fails_for_the_reason_that_its_script_gives(
    reason: str, error: error_pb2.ErrorReason.ValueType, retry: event_pb2.RetryReason.ValueType | None
) -> None:
    model = scripted(
        f"agents: {{lead: [{{text: a b c, error: {{reason: {reason}, retry_after: 0.5, after_chunks: 2, "
        "usage: {input_tokens: 7}}}]}"
    )
    deltas, failed = await failure(model, asking(agent="lead"))
    assert text_of(deltas) == "a b "
    assert (failed.reason, failed.retry, failed.retry_after) == (error, retry, 0.5)
    assert failed.lost_usage == usage_pb2.Usage(input_tokens=7)


async def test_the_first_attempts_of_each_request_fail_and_then_it_answers() -> None:
    model = scripted("agents: {lead: [{text: a b, error: {reason: TRANSPORT, times: 2}}]}")
    for request in (asking(user("one"), agent="lead"), asking(user("two"), agent="lead")):
        for _ in range(2):
            await failure(model, request)
        assert (await answer(model, request))[1].message.parts[0].text == "a b"


async def test_a_cut_stream_says_everything_and_then_fails() -> None:
    deltas, failed = await failure(scripted("agents: {lead: [{text: a b, cut: true}]}"), asking(agent="lead"))
    assert (text_of(deltas), failed.retry) == ("a b", event_pb2.RETRY_REASON_BAD_RESPONSE)


async def test_a_step_that_the_script_lacks_is_named_with_its_agent() -> None:
    history = [user("one"), assistant("", CALL), tool_result(CALL, "a tree")]
    _, failed = await failure(scripted("agents: {lead: [one]}"), asking(*history, agent="lead"))
    assert failed.message == ("The script 'script.yaml' has no turn 1 for the agent 'lead'. Add it under agents.lead.")
    assert (failed.reason, failed.retry) == (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, None)


async def test_a_gate_holds_a_stream_before_each_piece() -> None:
    passed: list[tuple[str, int, int]] = []
    held, go = asyncio.Event(), asyncio.Event()

    async def gate(agent: str, turn: int, piece: int) -> None:
        if piece == 1:
            held.set()
            await go.wait()
        passed.append((agent, turn, piece))

    task = asyncio.create_task(answer(scripted("agents: {lead: [a b]}", gate=gate), asking(agent="lead")))
    await held.wait()
    assert passed == [("lead", 0, 0)]
    go.set()
    await task
    assert passed == [("lead", 0, 0), ("lead", 0, 1)]


async def test_what_a_left_call_used_is_known_from_its_first_piece_on() -> None:
    model = scripted("agents: {lead: [{text: a b, usage: {input_tokens: 3}}], writer: [{text: a b, cut: true}]}")
    meters = []
    for agent in ("lead", "writer"):
        meter = AttemptMeter()
        async with aclosing(model.stream(asking(agent=agent), meter=meter)) as items:
            await anext(items)
        meters.append(meter)
    assert meters == [AttemptMeter(usage=usage_pb2.Usage(input_tokens=3), is_sent=True), AttemptMeter(is_sent=True)]


async def test_concurrency_is_limited() -> None:
    open_now = 0
    most = 0
    go = asyncio.Event()

    async def gate(agent: str, turn: int, piece: int) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 2:
            go.set()
        await go.wait()
        open_now -= 1

    model = scripted("agents: {lead: [a]}", gate=gate, max_concurrency=2)
    await asyncio.gather(*(answer(model, asking(agent="lead")) for _ in range(6)))
    assert most == 2


def test_every_mistake_of_a_script_has_its_line_and_field() -> None:
    text = """agents:
  lead:
    - text: a
      chunks: [b]
    - calls: [{arguments: {a: 1}}]
    - txt: a
    - text: a
      error: {reason: SLOW, times: 0}
  writer: hello
"""
    with pytest.raises(ConfigurationError) as raised:
        parse_script(text, path="desk.yaml")
    assert raised.value.message.splitlines() == [
        "desk.yaml:3: agents.lead[0]: has both `text` and `chunks`; remove one",
        "desk.yaml:5: agents.lead[1].calls[0].name: Field required",
        "desk.yaml:6: agents.lead[2].txt: There is no such field. Did you mean 'text'?",
        "desk.yaml:8: agents.lead[3].error.reason: Input should be 'TRANSPORT', 'RATE_LIMITED', 'PROVIDER_ERROR', "
        "'TIMEOUT', 'BAD_RESPONSE' or 'UNAVAILABLE'",
        "desk.yaml:8: agents.lead[3].error.times: Input should be greater than or equal to 1",
        "desk.yaml:9: agents.writer: must be a list",
    ]


@pytest.mark.parametrize("text", ["", "agents: {}\n---\nagents: {}", "- a", "agents: {lead: ["])
def test_a_file_that_is_no_script_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^desk\.yaml"):
        parse_script(text, path="desk.yaml")


@given(st.text())
def test_the_words_of_a_text_are_the_text(text: str) -> None:
    assert "".join(split_words(text)) == text


def test_a_request_without_messages_is_the_first_step() -> None:
    place, turn = parse_script("agents: {lead: [a]}").turn(ModelRequest(messages=[], agent="lead"))
    assert (place, turn is not None) == (0, True)
