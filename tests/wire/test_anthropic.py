"""The real client against a fake of Anthropic's Messages API that keeps its rules: turns, requests, answers, faults."""

import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import error_pb2, event_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.anthropic.request import messages_body
from bough_server.models.model import (
    AttemptMeter,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
    encode_body,
)
from tests.support import anthropic_rules as fake
from tests.support.anthropic_rules import ANSWER
from tests.support.log_readings import answer_of, check_replay, failures, having
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, failure, text_of, tool_result, user
from tests.support.model_scenarios import Ending, Reply
from tests.support.native_models import KEY, NativeProvider

THINKING = '{"thinking": {"type": "enabled", "budget_tokens": 2048}}'
USAGE = usage_pb2.Usage(
    input_tokens=100,
    cached_input_tokens=60,
    cache_write_tokens=30,
    output_tokens=25,
    reasoning_tokens=7,
    total_tokens=125,
)


PROVIDER = NativeProvider("anthropic", "claude-1", fake.rules)


@pytest.mark.parametrize("extra", ["", THINKING, '{"thinking": {"type": "adaptive"}}'])
async def test_two_turns_of_calls_are_answered_by_the_rules_of_the_api(tmp_path: Path, extra: str) -> None:
    async with PROVIDER.harness(tmp_path, extra_json=extra) as (harness, server):
        first = await harness.turn("p", "What is an oak?")
        logs = [first, await harness.turn("p", "What is an oak?", session_id=first[0].session_id)]
        for log in logs:
            await check_replay(harness, log)
    assert [(answer_of(log), failures(log)) for log in logs] == [(ANSWER, [])] * 2
    assert (server.count, {len(having(log, "tool_completed")) for log in logs}) == (6, {2})


async def test_thinking_comes_back_with_its_signature_before_the_calls_it_led_to(tmp_path: Path) -> None:
    async with PROVIDER.harness(tmp_path, extra_json=THINKING) as (harness, server):
        await harness.turn("p", "What is an oak?")
    _, first, _, second, _ = server.requests[2]["messages"]
    thought = "I think of oak."
    assert first["content"][0] == {"type": "thinking", "thinking": thought, "signature": fake.signed(thought)}
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert second["content"][0] == {"type": "redacted_thinking", "data": "redacted/bough"}


async def test_an_answer_streams_and_ends_with_the_whole_message(tmp_path: Path) -> None:
    settings = model_pb2.ModelSettings(extra_json=THINKING)
    async with PROVIDER.talking(tmp_path) as (model, _):
        deltas, response = await answer(model, asking(tools=[LOOKUP], settings=settings))
    (_, _, made) = response.message.parts
    call_id = made.tool_call.provider_call_id
    assert deltas == [
        ReasoningDelta("I think"),
        ReasoningDelta(" of oak."),
        TextDelta("Let me look."),
        ToolCallDelta(0, "", call_id, "lookup"),
        ToolCallDelta(0, '{"que'),
        ToolCallDelta(0, 'ry": "oak"}'),
    ]
    thought = message_pb2.Reasoning(text="I think of oak.", signature=fake.signed("I think of oak."), model="large")
    assert list(response.message.parts) == [
        message_pb2.Part(reasoning=thought),
        message_pb2.Part(text="Let me look."),
        message_pb2.Part(
            tool_call=message_pb2.ToolCall(name="lookup", arguments_json='{"query": "oak"}', provider_call_id=call_id)
        ),
    ]
    assert (response.response_id, response.provider, response.model) == ("msg_1", "anthropic", "claude-1")
    assert (response.finish_reason, response.provider_finish_reason) == (step_pb2.FINISH_REASON_TOOL_CALLS, "tool_use")
    assert response.usage == USAGE
    raw = json.loads(response.raw_json)
    assert [block["type"] for block in raw["content"]] == ["thinking", "text", "tool_use"]
    assert (raw["stop_reason"], raw["usage"]["cache_read_input_tokens"]) == ("tool_use", 60)


async def test_a_request_carries_instruction_history_tools_settings_and_marks_for_the_cache(tmp_path: Path) -> None:
    made = call("0.1", "lookup", '{"query":"oak"}')
    settings = model_pb2.ModelSettings(temperature=0.5, top_p=0.25, max_output_tokens=64, extra_json='{"top_k": 7}')
    request = asking(
        user("What is"),
        user("an oak?"),
        assistant("I look.", made),
        tool_result(made, "a tree"),
        user("Go on."),
        instruction="Be brief.",
        tools=[LOOKUP],
        settings=settings,
    )
    cached = {"cache_control": {"type": "ephemeral"}}
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, request)
    assert server.requests[0] == {
        "model": "claude-1",
        "max_tokens": 64,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief.", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "an oak?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "0_1", "name": "lookup", "input": {"query": "oak"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "0_1", "content": "a tree"},
                    {"type": "text", "text": "Go on.", **cached},
                ],
            },
        ],
        "tools": [
            {
                "name": "lookup",
                "description": "Looks a word up.",
                "input_schema": json.loads(LOOKUP.input_schema_json),
            }
        ],
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
    }
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "anthropic-version" in {name.lower() for name in server.headers[0]}


def odd(*messages: message_pb2.Message, **fields: Any) -> ModelRequest:
    return replace(asking(*messages), **fields)


FAILED = call("c1", "lookup", "not json")
IMAGE = message_pb2.Part(blob=message_pb2.Blob(data=b"png", media_type="image/png"))


@pytest.mark.parametrize(
    "request_",
    [
        odd(user(" ")),
        odd(assistant("I said so.")),
        odd(assistant("I said so."), user("What?")),
        odd(user("a"), assistant(" "), user("b")),
        odd(user("a"), assistant("", FAILED), tool_result(FAILED, "")),
        odd(
            user("a"),
            assistant("", FAILED, call("c2", "lookup", "{}")),
            tool_result(FAILED, "x"),
            tool_result(call("c2", "lookup", "{}"), "y"),
        ),
        odd(user("a"), tools=[ToolSpec(name="t", description="", input_schema_json="")]),
        odd(user("a"), tools=[LOOKUP], tool_choice="required"),
        odd(user("a"), tools=[LOOKUP], tool_choice="required", settings=model_pb2.ModelSettings(extra_json=THINKING)),
        odd(
            user("a"),
            assistant("", FAILED),
            tool_result(FAILED, "x"),
            tools=[LOOKUP],
            settings=model_pb2.ModelSettings(extra_json=THINKING),
        ),
        odd(user("a"), output_schema_json='{"type": "object", "minProperties": 1}'),
        odd(message_pb2.Message(role=message_pb2.ROLE_USER, parts=[IMAGE])),
        odd(message_pb2.Message(role=message_pb2.ROLE_SYSTEM, parts=[message_pb2.Part(text="Note.")])),
    ],
)
async def test_whatever_a_history_is_like_the_rules_are_kept(tmp_path: Path, request_: ModelRequest) -> None:
    async with PROVIDER.talking(tmp_path) as (model, server):
        _, response = await answer(model, request_)
        assert server.count == 1
    assert response.message.parts


async def test_thinking_of_another_model_is_not_sent(tmp_path: Path) -> None:
    said = assistant("Yes.")
    thought = message_pb2.Reasoning(text="Hm.", signature="not Anthropic's", model="another")
    said.parts.insert(0, message_pb2.Part(reasoning=thought))
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, asking(user("a"), said, user("b")))
    assert server.requests[0]["messages"][1]["content"] == [{"type": "text", "text": "Yes."}]


async def test_a_failed_result_is_marked_and_its_image_sent(tmp_path: Path) -> None:
    made = call("c1", "lookup", "{}")
    failed = message_pb2.ToolResult(call=made, parts=[IMAGE], error=error_pb2.AgentError(message="No such word."))
    results = message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=failed)])
    async with PROVIDER.talking(tmp_path, prompt_cache=False) as (model, server):
        await answer(model, asking(user("a"), assistant("", made), results, tools=[LOOKUP]))
    (sent,) = server.requests[0]["messages"][2]["content"]
    assert sent == {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [
            {"type": "text", "text": "Error: No such word."},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "cG5n"}},
        ],
        "is_error": True,
    }


async def test_a_schema_is_sent_as_a_format_beside_other_output_settings(tmp_path: Path) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"],"additionalProperties":false}'
    settings = model_pb2.ModelSettings(extra_json='{"output_config": {"effort": "low"}}')
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, replace(asking(settings=settings), output_schema_json=schema))
    form = {"type": "json_schema", "schema": json.loads(schema)}
    assert server.requests[0]["output_config"] == {"effort": "low", "format": form}


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", step_pb2.FINISH_REASON_STOP),
        ("stop_sequence", step_pb2.FINISH_REASON_STOP),
        ("max_tokens", step_pb2.FINISH_REASON_LENGTH),
        ("model_context_window_exceeded", step_pb2.FINISH_REASON_LENGTH),
        ("refusal", step_pb2.FINISH_REASON_REFUSAL),
        ("pause_turn", step_pb2.FINISH_REASON_OTHER),
    ],
)
async def test_why_it_stopped_is_told_in_one_vocabulary(
    tmp_path: Path, reason: str, finish: step_pb2.FinishReason.ValueType
) -> None:
    reply = Reply(pieces=(fake.begin(), *fake.text_block(0, "Well"), *fake.end(reason)))
    async with PROVIDER.talking(tmp_path, lambda _: reply) as (model, _):
        _, response = await answer(model, asking())
    assert (response.finish_reason, response.provider_finish_reason) == (finish, reason)
    assert bool(response.annotations.safety) == (reason == "refusal")


OVERLOADED = fake.event("error", error={"type": "overloaded_error", "message": "Overloaded"})
STARTED = (fake.begin(), *fake.text_block(0, "Well"))


@pytest.mark.parametrize(
    ("reply", "reason", "retry", "status", "said"),
    [
        (fake.refusal(401, "authentication_error", f"invalid {KEY}"), "AUTHENTICATION", None, 401, "invalid ***"),
        (fake.refusal(403, "permission_error", "Not yours."), "AUTHENTICATION", None, 403, "Not yours."),
        (fake.refusal(404, "not_found_error", "model: claude-1"), "NOT_FOUND", None, 404, "model: claude-1"),
        (fake.refusal(402, "billing_error", "No credit."), "QUOTA_EXCEEDED", None, 402, "No credit."),
        (
            fake.refusal(400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
            "CONTEXT_TOO_LONG",
            None,
            400,
            "prompt is too long",
        ),
        (fake.refusal(413, "request_too_large", "Too large."), "CONTEXT_TOO_LONG", None, 413, "Too large."),
        (
            fake.refusal(429, "rate_limit_error", "Slow."),
            "RATE_LIMITED",
            event_pb2.RETRY_REASON_RATE_LIMITED,
            429,
            "Slow.",
        ),
        (
            fake.refusal(529, "overloaded_error", "Overloaded"),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_PROVIDER_ERROR,
            529,
            "Overloaded",
        ),
        (
            Reply(pieces=(*STARTED, OVERLOADED)),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_PROVIDER_ERROR,
            0,
            "Overloaded",
        ),
        (
            Reply(pieces=STARTED),
            "BAD_RESPONSE",
            event_pb2.RETRY_REASON_BAD_RESPONSE,
            0,
            "before its answer was complete",
        ),
        (
            Reply(pieces=STARTED, ending=Ending.DROP),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_TRANSPORT,
            0,
            "could not be reached",
        ),
        (Reply(pieces=(b"data: no\n\n",)), "BAD_RESPONSE", event_pb2.RETRY_REASON_BAD_RESPONSE, 0, "not JSON"),
    ],
)
async def test_a_fault_is_a_model_error_with_status_and_address_and_without_the_key(
    tmp_path: Path, reply: Reply, reason: str, retry: event_pb2.RetryReason.ValueType | None, status: int, said: str
) -> None:
    async with PROVIDER.talking(tmp_path, lambda _: reply) as (model, server):
        deltas, error = await failure(model, asking())
        assert server.count == 1
    assert error_pb2.ErrorReason.Name(error.reason) == f"ERROR_REASON_MODEL_{reason}"
    assert (error.retry, error.provider_status) == (retry, status)
    assert said in error.message
    assert f"The model 'large' at {server.root} " in error.message
    assert KEY not in error.message
    if reply.pieces[:1] == (STARTED[0],):
        assert text_of(deltas) == "Well"
        assert error.lost_usage == usage_pb2.Usage(
            input_tokens=100, cached_input_tokens=60, cache_write_tokens=30, output_tokens=1, total_tokens=101
        )


async def test_usage_is_known_while_an_answer_streams_and_leaving_closes_the_connection(tmp_path: Path) -> None:
    meter = AttemptMeter()
    reply = Reply(pieces=STARTED, ending=Ending.HANG)
    async with PROVIDER.talking(tmp_path, lambda _: reply) as (model, server):
        async with aclosing(model.stream(asking(), meter=meter)) as items:  # type: ignore[type-var]
            assert (await anext(items))[0] == TextDelta("Well")
        await server.left.wait()
    assert meter.usage is not None
    assert meter.usage.input_tokens == 100


async def test_an_answer_that_does_not_begin_is_a_timeout(tmp_path: Path) -> None:
    reply = Reply(ending=Ending.HANG, starts=False)
    async with PROVIDER.talking(tmp_path, lambda _: reply, timeouts={"start": 0.3}) as (model, server):
        _, error = await failure(model, asking())
        await server.left.wait()
    assert (error.reason, error.retry) == (error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT)


async def test_calls_one_after_the_other_share_a_connection(tmp_path: Path) -> None:
    async with PROVIDER.talking(tmp_path) as (model, server):
        for _ in range(3):
            await answer(model, asking())
        assert server.connections == 1


async def test_no_key_sends_none_to_an_address_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(variable, "from-the-environment")
    async with PROVIDER.talking(tmp_path, api_key_env="") as (model, server):
        await answer(model, asking())
    sent = {name.lower() for name in server.headers[0]}
    assert not {"authorization", "x-api-key"} & sent


async def test_citations_and_halves_of_characters_are_joined_to_their_text(tmp_path: Path) -> None:
    cited = {"type": "web_search_result_location", "url": "https://a.example", "title": "Oaks", "cited_text": "An oak"}
    deltas = [
        {"type": "text_delta", "text": "an \ud83e"},
        {"type": "citations_delta", "citation": cited},
        {"type": "text_delta", "text": "\udd89"},
    ]
    pieces = (fake.begin(), *fake.block(0, {"type": "text", "text": ""}, *deltas), *fake.end("end_turn"))
    async with PROVIDER.talking(tmp_path, lambda _: Reply(pieces=pieces)) as (model, _):
        _, response = await answer(model, asking())
    assert response.message.parts[0].text == "an \U0001f989"
    assert list(response.annotations.citations) == [
        step_pb2.CitationRef(label="Oaks", url="https://a.example", snippet="An oak", part_index=0)
    ]


async def test_events_are_kept_as_they_came_if_configured(tmp_path: Path) -> None:
    async with PROVIDER.talking(tmp_path, keep_raw=True) as (model, _):
        _, response = await answer(model, asking())
    kinds = [event["type"] for event in json.loads(response.raw_events_json)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_arguments_are_sent_however_deep_they_are_nested() -> None:
    for depth in (1, 60, *range(800, 1010)):
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        body = encode_body(
            messages_body(asking(user("?"), assistant("", call("c1", "lookup", text))), model="m", name="m")
        )
        (made,) = json.loads(body)["messages"][1]["content"]
        assert made["input"] == (json.loads(text) if depth < 100 else {"invalid_json": text})
