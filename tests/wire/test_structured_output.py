"""How providers are asked for JSON of a schema, on the wire: in their own way, or in words."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bough.v1 import model_pb2
from bough_server.models.config import ModelSection
from bough_server.models.model import Model
from bough_server.models.registry import build_models
from tests.support.model_calls import LOOKUP, answer, asking
from tests.support.model_scenarios import Reply, Request, chunk, ending
from tests.support.model_server import ModelServer, serving_model
from tests.support.run_harness import open_harness
from tests.support.teams import llm

STRICT = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
    "additionalProperties": False,
}
OPEN = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 9}}}


@asynccontextmanager
async def configured(folder: Path, **facts: object) -> AsyncIterator[tuple[Model, ModelServer]]:
    """A configured model at a server."""
    async with serving_model("plain") as server:
        section = {"provider": "openai", "model": "scenario-1", "base_url": server.base_url, **facts}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=folder)
        try:
            yield models.get("m"), server
        finally:
            await models.close()


@pytest.mark.parametrize(("schema", "strict"), [(STRICT, True), (OPEN, False)])
async def test_chat_completions_are_asked_by_their_response_format_beside_tools(
    tmp_path: Path, schema: dict[str, object], strict: bool
) -> None:
    request = replace(asking(instruction="Be brief.", tools=[LOOKUP]), output_schema_json=json.dumps(schema))
    async with configured(tmp_path) as (model, server):
        await answer(model, request)
    form = {"name": "answer", "schema": schema, "strict": strict}
    assert server.requests[0]["response_format"] == {"type": "json_schema", "json_schema": form}
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert len(server.requests[0]["tools"]) == 1


async def test_responses_are_asked_by_their_text_format_which_settings_do_not_displace(tmp_path: Path) -> None:
    settings = model_pb2.ModelSettings(extra_json='{"text": {"verbosity": "low", "format": {"type": "text"}}}')
    request = replace(asking(settings=settings), output_schema_json=json.dumps(STRICT))
    async with configured(tmp_path, api="responses") as (model, server):
        await answer(model, request)
    form = {"type": "json_schema", "name": "answer", "schema": STRICT, "strict": True}
    assert server.requests[0]["text"] == {"verbosity": "low", "format": form}


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_provider_that_has_no_way_of_its_own_is_asked_in_words(tmp_path: Path, api: str) -> None:
    request = replace(asking(instruction="Be brief."), output_schema_json=json.dumps(STRICT))
    async with configured(tmp_path, api=api, structured_output=False) as (model, server):
        await answer(model, request)
    body = server.requests[0]
    told = body["instructions"] if api == "responses" else body["messages"][0]["content"]
    assert told == (
        "Be brief.\n\nYour final answer, when you call no tool, must be one JSON object and nothing around it. "
        f"It must fit this JSON Schema:\n{json.dumps(STRICT)}"
    )
    assert ("response_format" in body, "text" in body) == (False, False)


async def test_without_a_schema_no_form_is_asked_for(tmp_path: Path) -> None:
    for api in ("chat", "responses"):
        async with configured(tmp_path, api=api) as (model, server):
            await answer(model, asking())
        assert ("response_format" in server.requests[0], "text" in server.requests[0]) == (False, False)


async def test_a_turn_is_repaired_over_the_wire(tmp_path: Path) -> None:
    def reply(request: Request) -> Reply:
        is_first = len(request["messages"]) == 2
        return Reply(pieces=(chunk({"content": "Oaks." if is_first else '{"title": "Oaks"}'}), *ending("stop")))

    async with serving_model(reply) as server:
        section = ModelSection(provider="openai", model="m", base_url=server.base_url)
        models = build_models({"m": section}, secrets={}, folder=tmp_path)
        definition = llm("p", model="m")
        definition.output_schema_json = json.dumps(STRICT)
        async with open_harness(tmp_path, models=models, definitions=[definition]) as harness:
            log = await harness.turn("p")
        await models.close()
    assert log[-1].run_completed.final_answer.parts[0].data_json == '{"title": "Oaks"}'
    roles = [(message["role"], message["content"]) for message in server.requests[1]["messages"]][2:]
    assert roles[0] == ("assistant", "Oaks.")
    assert roles[1][1].startswith("Your answer does not fit: it is not JSON (")
