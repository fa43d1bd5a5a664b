"""The real client against a fake of Anthropic's Messages API that keeps its rules: requests, answers, thinking."""

import json
from dataclasses import replace
from pathlib import Path

from bough.v1 import error_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.anthropic.request import messages_body
from bough_server.models.model import (
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    encode_body,
)
from tests.support import anthropic_rules as fake
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, tool_result, user
from tests.support.model_scenarios import Reply
from tests.support.providers import ANTHROPIC as PROVIDER
from tests.support.providers import KEY

THINKING = '{"thinking": {"type": "enabled", "budget_tokens": 2048}}'
USAGE = usage_pb2.Usage(
    input_tokens=100,
    cached_input_tokens=60,
    cache_write_tokens=30,
    output_tokens=25,
    reasoning_tokens=7,
    total_tokens=125,
)


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


IMAGE = message_pb2.Part(blob=message_pb2.Blob(data=b"png", media_type="image/png"))


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


def test_arguments_are_sent_however_deep_they_are_nested() -> None:
    for depth in (1, 60, *range(800, 1010)):
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        body = encode_body(
            messages_body(asking(user("?"), assistant("", call("c1", "lookup", text))), model="m", name="m")
        )
        (made,) = json.loads(body)["messages"][1]["content"]
        assert made["input"] == (json.loads(text) if depth < 100 else {"invalid_json": text})
