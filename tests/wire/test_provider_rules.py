"""Whole turns against providers that refuse what OpenAI takes: what they sent for themselves goes back to them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bough.v1 import message_pb2
from bough_server.models.config import ModelSection
from bough_server.models.presets import PRESETS
from bough_server.models.registry import build_models
from tests.support import chat_rules
from tests.support.chat_rules import ANSWER
from tests.support.composite_agents import plan_execute
from tests.support.log_readings import having
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, failure, reasoning_of, tool_result, user
from tests.support.model_server import serving_model
from tests.support.providers import PROVIDERS
from tests.support.run_harness import open_harness
from tests.support.teams import llm


@pytest.mark.parametrize(
    ("preset", "fields", "said"),
    [
        ("deepseek", {"reasoning": "none"}, chat_rules.DEEPSEEK_RULE),
        ("mistral", {"max_tokens_field": "max_completion_tokens"}, "max_completion_tokens"),
        ("mistral", {"stream_usage": True}, "stream_options"),
    ],
)
async def test_every_field_of_a_preset_can_be_set_and_the_rules_are_real(
    tmp_path: Path, preset: str, fields: Mapping[str, object], said: str
) -> None:
    async with PROVIDERS[preset].harness(tmp_path, fields, max_output_tokens=64) as (harness, _):
        log = await harness.turn("p", "What is an oak?")
    assert said in log[-1].run_failed.error.message


async def test_signatures_are_in_the_models_message_and_in_no_event_of_the_call(tmp_path: Path) -> None:
    async with PROVIDERS["gemini-chat"].harness(tmp_path) as (harness, server):
        log = await harness.turn("p", "What is an oak?")
    (made,) = having(log, "llm_completed")[0].llm_completed.response.message.parts
    signature = '{"extra_content":{"google":{"thought_signature":"signed/oak=="}}}'
    assert (made.tool_call.provider_json, made.tool_call.model) == (signature, "m")
    (started, _), (completed, _) = having(log, "tool_started"), having(log, "tool_completed")
    for copy in (started.tool_started.call, completed.tool_completed.result.call):
        assert (copy.provider_json, copy.model) == ("", "")
    (sent,) = server.requests[1]["messages"][2]["tool_calls"]
    assert sent == {
        "id": made.tool_call.call_id,
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"query": "oak"}'},
        "extra_content": {"google": {"thought_signature": "signed/oak=="}},
    }


async def test_what_a_model_sent_for_itself_goes_to_no_other(tmp_path: Path) -> None:
    made = call("c1", "lookup", '{"query": "oak"}')
    made.provider_json, made.model = '{"extra_content": {"google": 1}}', "another"
    thought = message_pb2.Reasoning(text="Hm.", provider_field="reasoning_content", model="another")
    said = assistant("", made)
    said.parts.insert(0, message_pb2.Part(reasoning=thought))
    request = asking(user("oak?"), said, tool_result(made, "a tree"), tools=[LOOKUP])
    async with serving_model("plain") as server:
        section = {"provider": "openai", "model": "m", "base_url": server.base_url}
        configs = {name: ModelSection.model_validate(section) for name in ("m", "another")}
        models = build_models(configs, secrets={}, folder=tmp_path)
        for name in configs:
            await answer(models.get(name), request)
        await models.close()
    others, own = (request["messages"][1] for request in server.requests)
    function = {"name": "lookup", "arguments": '{"query": "oak"}'}
    bare = {"id": "c1", "type": "function", "function": function}
    assert others == {"role": "assistant", "content": None, "tool_calls": [bare]}
    assert own == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**bare, "extra_content": {"google": 1}}],
        "reasoning_content": "Hm.",
    }


async def test_a_plan_is_made_by_a_model_that_cannot_be_forced(tmp_path: Path) -> None:
    async with serving_model(chat_rules.deepseek) as server:
        section = {"preset": "deepseek", "model": "m", "base_url": server.base_url, "api_key_env": ""}
        models = build_models({"default": ModelSection.model_validate(section)}, secrets={}, folder=tmp_path)
        team = [plan_execute("lead", rounds=1), *(llm(name) for name in ("planner", "executor", "replanner"))]
        async with open_harness(tmp_path, models=models, definitions=team) as harness:
            log = await harness.turn("lead", "Paint the house red.")
        await models.close()
    assert chat_rules.DEEPSEEK_CHOICE not in log[-1].run_failed.error.message
    assert {sent.get("tool_choice") for sent in server.requests} == {None}


@pytest.mark.parametrize("word", ["required", "any"])
async def test_a_forced_call_is_said_in_the_configured_word(tmp_path: Path, word: str) -> None:
    async with serving_model("plain") as server:
        section = {"provider": "openai", "model": "m", "base_url": server.base_url, "tool_choice": word}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=tmp_path)
        await answer(models.get("m"), replace(asking(tools=[LOOKUP]), tool_choice="required"))
        await models.close()
    assert server.requests[0]["tool_choice"] == word


async def test_reasoning_in_a_list_of_contents_is_no_text(tmp_path: Path) -> None:
    async with serving_model(chat_rules.mistral) as server:
        section = {"preset": "mistral", "model": "m", "base_url": server.base_url, "api_key_env": ""}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=tmp_path)
        deltas, response = await answer(models.get("m"), asking())
        await models.close()
    assert (reasoning_of(deltas), response.message.parts[-1].text) == ("Hm.", ANSWER)
    assert response.usage.total_tokens == 25


@pytest.mark.parametrize("preset", PRESETS)
async def test_a_preset_without_its_key_says_which_variable_holds_it(tmp_path: Path, preset: str) -> None:
    section = ModelSection.model_validate({"preset": preset, "model": "m"})
    if not section.api_key_env:
        assert section.base_url.startswith("http://127.0.0.1:")
        return
    models = build_models({"m": section}, secrets={}, folder=tmp_path)
    _, error = await failure(models.get("m"), asking())
    await models.close()
    variable = f"the environment variable {preset.upper()}_API_KEY is not set"
    assert variable in error.message
