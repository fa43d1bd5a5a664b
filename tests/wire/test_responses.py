"""The real client against the Responses API on loopback: what is asked, what arrives, and what becomes of faults."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bough.v1 import error_pb2, event_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.config import ModelSection
from bough_server.models.model import ModelRequest, ReasoningDelta, TextDelta, ToolCallDelta
from bough_server.models.openai.client import ResponsesApi
from bough_server.models.registry import build_models
from bough_server.tools.tool import tool
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, failure, tool_result, user
from tests.support.model_scenarios import TEXT, Reply, Request, Scenario, refusing
from tests.support.model_server import ModelServer, serving_model
from tests.support.openai_models import OpenAIModel
from tests.support.response_scenarios import failing, plain
from tests.support.run_harness import open_harness
from tests.support.teams import llm

USAGE = usage_pb2.Usage(input_tokens=20, cached_input_tokens=5, output_tokens=50, reasoning_tokens=3, total_tokens=70)
FIRST_WORDS = "word0 word1 word2 "


@asynccontextmanager
async def talking(
    scenario: str | Scenario, *, api: ResponsesApi | None = None
) -> AsyncIterator[tuple[OpenAIModel, ModelServer]]:
    """A model server and a model that talks to it by the Responses API."""
    async with serving_model(scenario) as server:
        model = OpenAIModel(name="large", model="scenario-1", base_url=server.base_url, api=api or ResponsesApi())
        try:
            yield model, server
        finally:
            await model.close()


async def test_an_answer_streams_word_by_word_and_ends_with_the_whole_response() -> None:
    async with talking("plain") as (model, _):
        deltas, response = await answer(model, asking())
    assert deltas == [TextDelta(f"word{number} ") for number in range(50)]
    assert response.message == message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text=TEXT)])
    assert (response.response_id, response.provider, response.model) == ("resp_1", "openai", "scenario-1")
    assert (response.finish_reason, response.provider_finish_reason) == (step_pb2.FINISH_REASON_STOP, "completed")
    assert response.usage == USAGE
    raw = json.loads(response.raw_json)
    assert (raw["object"], raw["output"][0]["content"][0]["text"]) == ("response", TEXT)


async def test_a_request_is_stateless_and_carries_the_whole_history() -> None:
    made = call("c1", "lookup", '{"query":"oak"}')
    settings = model_pb2.ModelSettings(
        temperature=0.5, top_p=0.25, max_output_tokens=64, extra_json='{"reasoning": {"effort": "low"}}'
    )
    request = asking(
        user("What is an oak?"),
        assistant("I look.", made),
        tool_result(made, "a tree"),
        instruction="Be brief.",
        tools=[LOOKUP],
        settings=settings,
    )
    async with talking("plain", api=ResponsesApi(encrypted_reasoning=True)) as (model, server):
        await answer(model, request)
    assert server.requests[0] == {
        "model": "scenario-1",
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "What is an oak?"},
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": '{"query":"oak"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "lookup",
                "description": "Looks a word up.",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
                "strict": False,
            }
        ],
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 64,
        "reasoning": {"effort": "low"},
    }


async def test_calls_and_reasoning_stream_in_pieces_and_stand_in_the_order_of_the_output() -> None:
    async with talking("desk") as (model, _):
        deltas, response = await answer(model, asking(tools=[LOOKUP]))
    provider_id = response.message.parts[1].tool_call.provider_call_id
    assert deltas == [
        ReasoningDelta("I look "),
        ReasoningDelta("it up."),
        ToolCallDelta(0, "", provider_id, "lookup"),
        ToolCallDelta(0, '{"query":'),
        ToolCallDelta(0, '"boughs"}'),
    ]
    thought = message_pb2.Reasoning(text="I look it up.", encrypted="sealed", provider_id="rs_1", model="large")
    made = message_pb2.ToolCall(name="lookup", arguments_json='{"query":"boughs"}', provider_call_id=provider_id)
    assert list(response.message.parts) == [message_pb2.Part(reasoning=thought), message_pb2.Part(tool_call=made)]
    assert provider_id.startswith("call_")


async def test_encrypted_reasoning_goes_back_to_the_model_that_thought_it_and_to_no_other() -> None:
    made = call("c1", "lookup", "{}")
    thoughts = [
        message_pb2.Reasoning(text="Mine.", encrypted="sealed", provider_id="rs_1", model="large"),
        message_pb2.Reasoning(text="Another's.", encrypted="sealed", provider_id="rs_2", model="small"),
        message_pb2.Reasoning(text="Readable alone."),
    ]
    said = assistant("", made)
    said.parts.insert(0, message_pb2.Part(reasoning=thoughts[0]))
    for thought in thoughts[1:]:
        said.parts.insert(1, message_pb2.Part(reasoning=thought))
    async with talking("plain") as (model, server):
        await answer(model, asking(user("Look."), said, tool_result(made, "a tree")))
    assert server.requests[0]["input"][1:3] == [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Mine."}],
            "encrypted_content": "sealed",
        },
        {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": "{}"},
    ]


async def test_reasoning_that_led_to_nothing_is_not_sent_back() -> None:
    thought = message_pb2.Reasoning(encrypted="sealed", provider_id="rs_1", model="large")
    alone = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(reasoning=thought)])
    async with talking("plain") as (model, server):
        await answer(model, asking(user("Look."), alone, user("And?")))
    assert server.requests[0]["input"] == [
        {"role": "user", "content": "Look."},
        {"role": "user", "content": "And?"},
    ]


async def test_images_and_files_are_sent_as_such_and_the_rest_in_words() -> None:
    blobs = [
        message_pb2.Blob(media_type="image/png", data=b"png"),
        message_pb2.Blob(media_type="image/png", uri="https://example.org/a.png"),
        message_pb2.Blob(media_type="application/pdf", data=b"pdf", filename="a.pdf"),
        message_pb2.Blob(media_type="application/pdf", uri="https://example.org/a.pdf"),
        message_pb2.Blob(media_type="text/plain", data=b"words"),
        message_pb2.Blob(media_type="audio/wav", data=b"wav"),
    ]
    said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(blob=blob) for blob in blobs])
    async with talking("plain") as (model, server):
        await answer(model, ModelRequest(messages=[said]))
    assert server.requests[0]["input"][0]["content"] == [
        {"type": "input_image", "image_url": "data:image/png;base64,cG5n", "detail": "auto"},
        {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,cGRm"},
        {"type": "input_file", "file_url": "https://example.org/a.pdf"},
        {"type": "input_text", "text": "[text/plain]\nwords"},
        {"type": "input_text", "text": "[audio/wav of 3 bytes, not shown]"},
    ]


async def test_a_refusal_is_text_and_an_answer_that_was_cut_by_its_bound_says_so() -> None:
    async with talking("refusal") as (model, _):
        deltas, refused = await answer(model, asking())
    assert (deltas, [part.text for part in refused.message.parts]) == (
        [TextDelta("I will "), TextDelta("not.")],
        ["I will not."],
    )
    async with talking("incomplete") as (model, _):
        _, cut = await answer(model, asking())
    assert (cut.message.parts[0].text, cut.usage) == (FIRST_WORDS, USAGE)
    assert cut.provider_finish_reason == "max_output_tokens"
    assert (refused.finish_reason, cut.finish_reason) == (step_pb2.FINISH_REASON_REFUSAL, step_pb2.FINISH_REASON_LENGTH)


async def test_what_a_server_says_at_the_end_alone_is_an_answer_too() -> None:
    async with talking("silent") as (model, _):
        deltas, response = await answer(model, asking(tools=[LOOKUP]))
    provider_id = response.message.parts[2].tool_call.provider_call_id
    assert deltas == [
        ReasoningDelta("Quiet."),
        TextDelta("All "),
        ToolCallDelta(0, "", provider_id, "lookup"),
        ToolCallDelta(0, "{}"),
    ]


async def test_an_empty_answer_is_an_answer_without_parts() -> None:
    async with talking("empty") as (model, _):
        deltas, response = await answer(model, asking())
    assert (deltas, list(response.message.parts), response.provider_finish_reason) == ([], [], "completed")


@pytest.mark.parametrize(
    ("code", "retry", "is_of_the_request"),
    [
        ("rate_limit_exceeded", event_pb2.RETRY_REASON_RATE_LIMITED, False),
        ("invalid_prompt", None, True),
        ("insufficient_quota", None, False),
    ],
)
async def test_an_answer_that_fails_says_by_its_code_what_helps_and_what_it_used(
    code: str, retry: event_pb2.RetryReason.ValueType | None, is_of_the_request: bool
) -> None:
    async with talking(lambda _: failing(code, "No.")) as (model, _):
        _, error = await failure(model, asking())
    assert (error.retry, error.is_of_the_request, error.lost_usage) == (retry, is_of_the_request, USAGE)


async def test_settings_may_choose_no_other_model_and_no_stored_state() -> None:
    for taken in ("model", "previous_response_id", "store", "prompt"):
        async with talking("plain") as (model, server):
            settings = model_pb2.ModelSettings(extra_json=json.dumps({taken: "x"}))
            _, error = await failure(model, asking(settings=settings))
            assert (server.count, f"may not set {taken}" in error.message) == (0, True)


@tool
def lookup(query: str) -> str:
    """Looks a word up."""
    return f"{query}: a tree"


async def test_a_turn_with_a_tool_sends_its_reasoning_back_and_ends(tmp_path: Path) -> None:
    async with serving_model("desk") as server:
        section = {"provider": "openai", "api": "responses", "model": "scenario-1", "base_url": server.base_url}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=tmp_path)
        definition = llm("p", model="m", tools=["lookup"])
        async with open_harness(tmp_path, models=models, definitions=[definition], tools=[lookup]) as harness:
            log = await harness.turn("p")
            await check_replay(harness, log)
        await models.close()
    assert answer_of(log) == TEXT
    call_id = having(log, "tool_completed")[0].tool_completed.result.call.call_id
    assert server.requests[1]["input"][1:] == [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "I look it up."}],
            "encrypted_content": "sealed",
        },
        {"type": "function_call", "call_id": call_id, "name": "lookup", "arguments": '{"query":"boughs"}'},
        {"type": "function_call_output", "call_id": call_id, "output": "boughs: a tree"},
    ]
    assert log[-1].run_completed.usage.total_tokens == 140


def refusing_chat(request: Request) -> Reply:
    """Knows responses alone."""
    return plain(request) if "input" in request else refusing(404, "There is no such path.")


async def test_the_call_goes_on_from_one_api_with_the_other(tmp_path: Path) -> None:
    async with serving_model(refusing_chat) as server:
        facts = {"provider": "openai", "model": "scenario-1", "base_url": server.base_url, "retries": 0}
        configs = {
            "chat": ModelSection.model_validate({**facts, "fallbacks": ["responses"]}),
            "responses": ModelSection.model_validate({**facts, "api": "responses"}),
        }
        models = build_models(configs, secrets={}, folder=tmp_path)
        async with open_harness(tmp_path, models=models, definitions=[llm("p", model="chat")]) as harness:
            log = await harness.turn("p")
        await models.close()
    assert answer_of(log) == TEXT
    assert [event.llm_retrying.next_model for event in having(log, "llm_retrying")] == ["responses"]


async def test_the_files_of_a_result_are_in_its_output() -> None:
    made = call("c1", "lookup", "{}")
    image = message_pb2.Blob(media_type="image/png", data=b"png")
    parts = [message_pb2.Part(text="A tree."), message_pb2.Part(blob=image)]
    failed = message_pb2.ToolResult(call=made, parts=parts, error=error_pb2.AgentError(message="Too dark."))
    said = message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=failed)])
    async with talking("plain") as (model, server):
        await answer(model, asking(user("Look."), assistant("", made), said))
    assert server.requests[0]["input"][-1] == {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [
            {"type": "input_text", "text": "Error: Too dark."},
            {"type": "input_text", "text": "A tree."},
            {"type": "input_image", "image_url": "data:image/png;base64,cG5n", "detail": "auto"},
        ],
    }
