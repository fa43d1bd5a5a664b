"""The real client against a fake of the Gemini API that keeps its rules: requests, answers, signatures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bough.v1 import error_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.gemini.request import FOREIGN_SIGNATURE, GeminiApi
from bough_server.models.model import (
    ReasoningDelta,
    ToolCallDelta,
    ToolSpec,
)
from tests.support import gemini_rules as fake
from tests.support.gemini_rules import ANSWER, USAGE
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, tool_result, user
from tests.support.model_scenarios import Reply, event
from tests.support.providers import GEMINI as PROVIDER
from tests.support.providers import KEY

USED = usage_pb2.Usage(input_tokens=100, cached_input_tokens=60, output_tokens=25, reasoning_tokens=7, total_tokens=125)
IMAGE = message_pb2.Part(blob=message_pb2.Blob(data=b"png", media_type="image/png"))


async def test_calls_of_all_turns_have_the_signatures_that_they_came_with_and_no_other(tmp_path: Path) -> None:
    async with PROVIDER.harness(tmp_path) as (harness, server):
        first = await harness.turn("p", "What is an oak?")
        await harness.turn("p", "What is an oak?", session_id=first[0].session_id)
    parts = [part for content in server.requests[5]["contents"] for part in content["parts"]]
    calls = [part.get("thoughtSignature", "") for part in parts if "functionCall" in part]
    assert calls == [fake.signed("oak"), "", fake.signed("root")] * 2


async def test_an_answer_streams_and_ends_with_the_whole_content(tmp_path: Path) -> None:
    async with PROVIDER.talking(tmp_path) as (model, server):
        deltas, response = await answer(model, asking(tools=[LOOKUP]))
        _, last = await answer(model, asking())
    made = [part.tool_call for part in response.message.parts[1:]]
    assert deltas == [
        ReasoningDelta("I think"),
        ReasoningDelta(" of trees."),
        ToolCallDelta(0, '{"query":"oak"}', made[0].provider_call_id, "lookup"),
        ToolCallDelta(1, '{"query":"bough"}', made[1].provider_call_id, "lookup"),
    ]
    assert response.message.parts[0].reasoning == message_pb2.Reasoning(text="I think of trees.")
    assert [(one.provider_json, one.model) for one in made] == [
        (json.dumps({"thoughtSignature": fake.signed("oak")}, separators=(",", ":")), "large"),
        ("{}", "large"),
    ]
    assert (response.response_id, response.provider, response.model) == ("resp-1", "gemini", "gemini-3")
    assert (response.finish_reason, response.provider_finish_reason) == (step_pb2.FINISH_REASON_TOOL_CALLS, "STOP")
    assert response.usage == USED
    assert json.loads(response.raw_json)["usageMetadata"] == USAGE
    assert [part.text for part in last.message.parts] == ["", ANSWER, ""]
    assert last.message.parts[2].reasoning == message_pb2.Reasoning(signature=fake.signed("text"), model="large")
    assert server.headers[0]["x-goog-api-key"] == KEY


async def test_a_request_carries_instruction_history_tools_and_settings(tmp_path: Path) -> None:
    made = call("c1", "lookup", '{"query":"oak"}')
    made.provider_json, made.model = json.dumps({"thoughtSignature": fake.signed("oak")}), "large"
    extra = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}, "safetySettings": []}
    settings = model_pb2.ModelSettings(temperature=0.5, top_p=0.25, max_output_tokens=64, extra_json=json.dumps(extra))
    schema = {"type": "object", "properties": {"safety_level": {"type": "string"}}}
    request = asking(
        user("What is an oak?"),
        assistant("I look.", made),
        tool_result(made, "a tree"),
        instruction="Be brief.",
        tools=[ToolSpec(name="lookup", description="Looks.", input_schema_json=json.dumps(schema))],
        settings=settings,
    )
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, replace(request, tool_choice="required"))
    assert server.requests[0] == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "What is an oak?"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "I look."},
                    {
                        "thoughtSignature": fake.signed("oak"),
                        "functionCall": {"id": "c1", "name": "lookup", "args": {"query": "oak"}},
                    },
                ],
            },
            {
                "role": "user",
                "parts": [{"functionResponse": {"id": "c1", "name": "lookup", "response": {"output": "a tree"}}}],
            },
        ],
        "tools": [
            {"functionDeclarations": [{"name": "lookup", "description": "Looks.", "parametersJsonSchema": schema}]}
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        "safetySettings": [],
        "generationConfig": {
            "temperature": 0.5,
            "topP": 0.25,
            "maxOutputTokens": 64,
            "thinkingConfig": {"includeThoughts": True},
        },
    }


FOREIGN = call("0.1", "lookup", "not json")
OTHER = call("c2", "lookup", "{}")


async def test_a_call_of_another_model_says_that_its_signature_is_not_to_be_checked(tmp_path: Path) -> None:
    request = asking(user("a"), assistant("", FOREIGN, OTHER), tool_result(FOREIGN, "x"), tool_result(OTHER, "y"))
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, request)
    first, second = server.requests[0]["contents"][1]["parts"]
    assert (first["thoughtSignature"], "thoughtSignature" in second) == (FOREIGN_SIGNATURE, False)


async def test_a_failed_result_and_its_image_are_sent_apart(tmp_path: Path) -> None:
    made = call("c1", "lookup", "{}")
    failed = message_pb2.ToolResult(call=made, parts=[IMAGE], error=error_pb2.AgentError(message="No such word."))
    results = message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=failed)])
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, asking(user("a"), assistant("", made), results, tools=[LOOKUP]))
    result, files = server.requests[0]["contents"][2:]
    said = "Error: No such word.\n[image/png, shown below]"
    assert result["parts"] == [{"functionResponse": {"id": "c1", "name": "lookup", "response": {"error": said}}}]
    assert files["parts"] == [
        {"text": "[files of lookup]"},
        {"inlineData": {"mimeType": "image/png", "data": "cG5n"}},
    ]


async def test_a_schema_is_sent_as_a_format_where_no_tools_are(tmp_path: Path) -> None:
    schema = '{"type": "object"}'
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, replace(asking(), output_schema_json=schema))
        await answer(model, replace(asking(tools=[LOOKUP]), output_schema_json=schema))
    form = {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}}
    assert server.requests[0]["generationConfig"] == form
    assert not server.requests[1].get("generationConfig")
    assert schema in server.requests[1]["systemInstruction"]["parts"][0]["text"]


async def test_a_blocked_prompt_is_an_empty_answer_that_was_filtered(tmp_path: Path) -> None:
    rating = {"category": "HARM_CATEGORY_HARASSMENT", "probability": "HIGH", "blocked": True}
    feedback = {"blockReason": "SAFETY", "safetyRatings": [rating]}
    reply = Reply(pieces=(event({"promptFeedback": feedback, "usageMetadata": {"promptTokenCount": 4}}),))
    async with PROVIDER.talking(tmp_path, lambda _: reply) as (model, _):
        deltas, response = await answer(model, asking())
    assert (deltas, list(response.message.parts)) == ([], [])
    assert response.finish_reason == step_pb2.FINISH_REASON_CONTENT_FILTER
    blocked, prompt = step_pb2.SAFETY_VERDICT_BLOCK, step_pb2.SAFETY_SUBJECT_PROMPT
    assert [(note.category, note.verdict, note.subject) for note in response.annotations.safety] == [
        ("HARM_CATEGORY_HARASSMENT", blocked, prompt),
        ("safety", blocked, prompt),
    ]


async def test_sources_are_citations(tmp_path: Path) -> None:
    grounding = {"groundingChunks": [{"web": {"uri": "https://a.example", "title": "Oaks"}}]}
    candidate = {"content": {"parts": [{"text": "An oak"}]}, "finishReason": "STOP", "groundingMetadata": grounding}
    async with PROVIDER.talking(tmp_path, lambda _: Reply(pieces=(event({"candidates": [candidate]}),))) as (model, _):
        _, response = await answer(model, asking())
    assert list(response.annotations.citations) == [
        step_pb2.CitationRef(label="Oaks", url="https://a.example", part_index=0)
    ]
    assert json.loads(response.annotations.extra_json) == {"groundingMetadata": grounding}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("gemini-3", "models/gemini-3"),
        ("models/gemini-3", "models/gemini-3"),
        ("tunedModels/mine", "tunedModels/mine"),
        ("mine?key=1#a", "models/mine%3Fkey%3D1%23a"),
    ],
)
def test_a_models_full_or_short_name_is_in_the_path(model: str, path: str) -> None:
    assert GeminiApi(model=model).path == f"/v1beta/{path}:streamGenerateContent?alt=sse"


async def test_the_files_of_parallel_calls_come_after_all_their_results(tmp_path: Path) -> None:
    """The API refuses results of one answer's calls that are not all in one message."""
    made = [call("c1", "lookup", "{}"), call("c2", "lookup", "{}")]
    parts = [[message_pb2.Part(text="One."), IMAGE], [IMAGE]]
    results = [
        message_pb2.Message(
            role=message_pb2.ROLE_TOOL,
            parts=[message_pb2.Part(tool_result=message_pb2.ToolResult(call=one, parts=own))],
        )
        for one, own in zip(made, parts, strict=True)
    ]
    async with PROVIDER.talking(tmp_path) as (model, server):
        await answer(model, asking(user("a"), assistant("", *made), *results, user("b"), tools=[LOOKUP]))
    answered, files = server.requests[0]["contents"][2:]
    assert [part["functionResponse"]["response"]["output"] for part in answered["parts"]] == [
        "One.\n[image/png, shown below]",
        "[image/png, shown below]",
    ]
    image = {"inlineData": {"mimeType": "image/png", "data": "cG5n"}}
    assert files["parts"] == [{"text": "[files of lookup]"}, image, {"text": "[files of lookup]"}, image, {"text": "b"}]
