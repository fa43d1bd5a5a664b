"""The real client against a model server on loopback: what arrives, what is sent, and what connections do."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from bough.v1 import message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import AttemptMeter, ReasoningDelta, TextDelta, ToolCallDelta
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, failure, reasoning_of, tool_result, user
from tests.support.model_scenarios import TEXT
from tests.support.model_server import ModelServer, serving_model
from tests.support.openai_models import OpenAIModel

USAGE = usage_pb2.Usage(input_tokens=20, cached_input_tokens=5, output_tokens=50, reasoning_tokens=3, total_tokens=70)


@asynccontextmanager
async def talking(
    scenario: str, *, key: str = "", max_concurrency: int = 0, delta_interval: float = 0.0
) -> AsyncIterator[tuple[OpenAIModel, ModelServer]]:
    """A model server and a model that talks to it."""
    async with serving_model(scenario, delta_interval=delta_interval) as server:
        model = OpenAIModel(
            name="large",
            model="scenario-1",
            base_url=server.base_url,
            key=key,
            limiter=ModelLimiter(max_concurrency=max_concurrency),
        )
        try:
            yield model, server
        finally:
            await model.close()


async def test_an_answer_streams_word_by_word_and_ends_with_the_whole_response() -> None:
    async with talking("plain") as (model, _):
        deltas, response = await answer(model, asking())
    assert deltas == [TextDelta(f"word{number} ") for number in range(50)]
    assert response.message == message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text=TEXT)])
    assert (response.response_id, response.provider, response.model) == ("chatcmpl-1", "openai", "scenario-1")
    assert (response.finish_reason, response.provider_finish_reason) == (step_pb2.FINISH_REASON_STOP, "stop")
    assert response.usage == USAGE


async def test_the_raw_answer_is_an_assembled_chat_completion() -> None:
    async with talking("plain") as (model, _):
        _, response = await answer(model, asking())
    raw = json.loads(response.raw_json)
    assert raw == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "scenario-1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"},
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 50,
            "total_tokens": 70,
            "prompt_tokens_details": {"cached_tokens": 5},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }


async def test_tool_calls_stream_in_pieces_that_name_their_place() -> None:
    agents = [LOOKUP.__class__(name=f"call_{name}", description="", input_schema_json="{}") for name in ("a", "b")]
    async with talking("desk") as (model, _):
        deltas, response = await answer(model, asking(tools=agents))
    assert [(delta.index, delta.name) for delta in deltas if isinstance(delta, ToolCallDelta)] == [
        (0, "call_a"),
        (0, ""),
        (1, "call_b"),
        (1, ""),
    ]
    calls = [part.tool_call for part in response.message.parts]
    assert [(made.name, made.arguments_json, made.call_id) for made in calls] == [
        ("call_a", '{"message":"What do you know?"}', ""),
        ("call_b", '{"message":"What do you know?"}', ""),
    ]
    assert len({made.provider_call_id for made in calls}) == 2
    assert all(made.provider_call_id for made in calls)
    assert response.finish_reason == step_pb2.FINISH_REASON_TOOL_CALLS


async def test_reasoning_is_kept_apart_from_the_text() -> None:
    async with talking("reasoning") as (model, _):
        deltas, response = await answer(model, asking())
    assert deltas[:2] == [ReasoningDelta("Let me "), ReasoningDelta("think.")]
    assert reasoning_of(deltas) == response.message.parts[0].reasoning.text
    assert response.message.parts[1].text == "word0 word1 "


async def test_a_refusal_is_text() -> None:
    async with talking("refusal") as (model, _):
        _, response = await answer(model, asking())
    assert [part.text for part in response.message.parts] == ["I will not."]


async def test_an_empty_answer_is_an_answer_without_parts() -> None:
    async with talking("empty") as (model, _):
        deltas, response = await answer(model, asking())
    assert (deltas, list(response.message.parts)) == ([], [])


async def test_usage_that_is_not_reported_is_absent_and_not_zero() -> None:
    async with talking("no-usage") as (model, _):
        _, response = await answer(model, asking())
    assert not response.HasField("usage")


async def test_broken_tool_arguments_arrive_as_the_model_wrote_them() -> None:
    async with talking("broken-arguments") as (model, _):
        _, response = await answer(model, asking(tools=[LOOKUP]))
    assert response.message.parts[0].tool_call.arguments_json == '{"query": "unfin'


async def test_a_request_carries_instruction_history_tools_and_settings() -> None:
    made = call("c1", "lookup", '{"query":"oak"}')
    settings = model_pb2.ModelSettings(
        temperature=0.5, top_p=0.25, max_output_tokens=64, extra_json='{"seed": 7, "temperature": 0.0}'
    )
    request = asking(
        user("What is an oak?"),
        assistant("I look.", made),
        tool_result(made, "a tree"),
        instruction="Be brief.",
        tools=[LOOKUP],
        settings=settings,
    )
    async with talking("plain") as (model, server):
        await answer(model, request)
    assert server.requests[0] == {
        "model": "scenario-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is an oak?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "lookup", "arguments": '{"query":"oak"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "lookup",
                    "description": "Looks a word up.",
                    "parameters": {
                        "type": "object",
                        "properties": {"query": {"type": "string"}},
                        "required": ["query"],
                    },
                },
            }
        ],
        "temperature": 0.0,
        "top_p": 0.25,
        "max_completion_tokens": 64,
        "seed": 7,
    }


async def test_concurrency_is_limited_and_a_place_is_given_back_after_a_failure() -> None:
    async with talking("cut-once", max_concurrency=2, delta_interval=0.0001) as (model, server):
        await failure(model, asking())
        await asyncio.gather(*(answer(model, asking()) for _ in range(6)))
        assert (server.count, server.most_open) == (7, 2)


async def test_cancelling_the_task_closes_the_connection() -> None:
    async with talking("slow-start") as (model, server):
        task = asyncio.create_task(answer(model, asking()))
        await server.arrived.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await server.left.wait()


async def test_what_a_cancelled_call_had_used_so_far_is_known_by_its_meter() -> None:
    async with talking("stall-after-usage") as (model, server):
        meter, heard = AttemptMeter(), asyncio.Event()

        async def listen() -> None:
            async for item in model.stream(asking(), meter=meter):
                if not isinstance(item, step_pb2.LlmResponse) and TextDelta("x") in item:
                    heard.set()

        task = asyncio.create_task(listen())
        await heard.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await server.left.wait()
    assert meter == AttemptMeter(usage=USAGE, is_sent=True)


async def test_a_meter_says_what_a_whole_answer_and_a_closed_one_used() -> None:
    whole, left = AttemptMeter(), AttemptMeter()
    async with talking("plain") as (model, _):
        assert len([item async for item in model.stream(asking(), meter=whole)]) > 1
    async with talking("stall") as (model, _), aclosing(model.stream(asking(), meter=left)) as begun:
        assert (await anext(begun))[0] == TextDelta("word0 ")
    assert (whole, left) == (AttemptMeter(usage=USAGE, is_sent=True), AttemptMeter(is_sent=True))


async def test_one_model_serves_many_calls_at_once() -> None:
    async with talking("plain") as (model, server):
        answers = await asyncio.gather(*(answer(model, asking()) for _ in range(32)))
        assert {response.message.parts[0].text for _, response in answers} == {TEXT}
        assert server.count == 32
