"""The real client against a fake of the Gemini API that keeps its rules: turns, requests, answers, faults."""

import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import error_pb2, event_pb2, message_pb2, model_pb2, step_pb2, usage_pb2
from bough_server.models.gemini.request import FOREIGN_SIGNATURE, GeminiApi
from bough_server.models.model import (
    AttemptMeter,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
)
from tests.support import gemini_rules as fake
from tests.support.gemini_rules import ANSWER, USAGE
from tests.support.log_readings import answer_of, check_replay, failures, having
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, failure, text_of, tool_result, user
from tests.support.model_scenarios import Ending, Reply, event
from tests.support.native_models import KEY, NativeProvider

USED = usage_pb2.Usage(input_tokens=100, cached_input_tokens=60, output_tokens=25, reasoning_tokens=7, total_tokens=125)
IMAGE = message_pb2.Part(blob=message_pb2.Blob(data=b"png", media_type="image/png"))


PROVIDER = NativeProvider("gemini", "gemini-3", fake.rules)


async def test_two_turns_of_calls_are_answered_by_the_rules_of_the_api(tmp_path: Path) -> None:
    async with PROVIDER.harness(tmp_path) as (harness, server):
        first = await harness.turn("p", "What is an oak?")
        logs = [first, await harness.turn("p", "What is an oak?", session_id=first[0].session_id)]
        for log in logs:
            await check_replay(harness, log)
    assert [(answer_of(log), failures(log)) for log in logs] == [(ANSWER, [])] * 2
    assert (server.count, {len(having(log, "tool_completed")) for log in logs}) == (6, {3})
    # Also calls of earlier turns have the signatures that they came with, and no other.
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


def odd(*messages: message_pb2.Message, **fields: Any) -> ModelRequest:
    return replace(asking(*messages), **fields)


FOREIGN = call("0.1", "lookup", "not json")
OTHER = call("c2", "lookup", "{}")


@pytest.mark.parametrize(
    "request_",
    [
        odd(user("")),
        odd(assistant("I said so.")),
        odd(assistant("I said so."), user("What?")),
        odd(user("a"), assistant("So."), assistant("", FOREIGN), tool_result(FOREIGN, "")),
        odd(user("a"), assistant("", FOREIGN, OTHER), tool_result(FOREIGN, "x"), tool_result(OTHER, "y"), user("b")),
        odd(user("a"), tools=[ToolSpec(name="t", description="", input_schema_json="")]),
        odd(user("a"), tools=[LOOKUP], output_schema_json='{"type": "object"}'),
        odd(user("a"), output_schema_json='{"type": "object"}'),
        odd(message_pb2.Message(role=message_pb2.ROLE_USER, parts=[IMAGE])),
        odd(message_pb2.Message(role=message_pb2.ROLE_SYSTEM, parts=[message_pb2.Part(text="Note.")])),
    ],
)
async def test_whatever_a_history_is_like_the_rules_are_kept(tmp_path: Path, request_: ModelRequest) -> None:
    async with PROVIDER.talking(tmp_path) as (model, server):
        _, response = await answer(model, request_)
        assert server.count == 1
    assert response.message.parts


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
        await answer(model, odd(user("a"), output_schema_json=schema))
        await answer(model, odd(user("a"), output_schema_json=schema, tools=[LOOKUP]))
    form = {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}}
    assert server.requests[0]["generationConfig"] == form
    assert not server.requests[1].get("generationConfig")
    assert schema in server.requests[1]["systemInstruction"]["parts"][0]["text"]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("STOP", step_pb2.FINISH_REASON_STOP),
        ("MAX_TOKENS", step_pb2.FINISH_REASON_LENGTH),
        ("SAFETY", step_pb2.FINISH_REASON_CONTENT_FILTER),
        ("RECITATION", step_pb2.FINISH_REASON_CONTENT_FILTER),
        ("OTHER", step_pb2.FINISH_REASON_OTHER),
    ],
)
async def test_why_it_stopped_is_told_in_one_vocabulary(
    tmp_path: Path, reason: str, finish: step_pb2.FinishReason.ValueType
) -> None:
    reply = Reply(pieces=(fake.chunk({"text": "Well"}, finish=reason),))
    async with PROVIDER.talking(tmp_path, lambda _: reply) as (model, _):
        _, response = await answer(model, asking())
    assert (response.finish_reason, response.provider_finish_reason) == (finish, reason)
    assert bool(response.annotations.safety) == (finish == step_pb2.FINISH_REASON_CONTENT_FILTER)


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


STARTED = fake.chunk({"text": "Well"})
FAILED = event({"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}})


@pytest.mark.parametrize(
    ("reply", "reason", "retry", "status", "said"),
    [
        (
            fake.refusal(400, "INVALID_ARGUMENT", f"API key {KEY} not valid.", reason="API_KEY_INVALID"),
            "AUTHENTICATION",
            None,
            400,
            "API key *** not valid.",
        ),
        (fake.refusal(403, "PERMISSION_DENIED", "Not yours."), "AUTHENTICATION", None, 403, "Not yours."),
        (fake.refusal(404, "NOT_FOUND", "No such model.", is_list=True), "NOT_FOUND", None, 404, "No such model."),
        (
            fake.refusal(400, "INVALID_ARGUMENT", "The input token count (9) exceeds the maximum number of tokens."),
            "CONTEXT_TOO_LONG",
            None,
            400,
            "token count",
        ),
        (
            fake.refusal(429, "RESOURCE_EXHAUSTED", "Slow."),
            "RATE_LIMITED",
            event_pb2.RETRY_REASON_RATE_LIMITED,
            429,
            "Slow.",
        ),
        (
            fake.refusal(503, "UNAVAILABLE", "Overloaded."),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_PROVIDER_ERROR,
            503,
            "Overloaded.",
        ),
        (
            Reply(status=502, content_type="text/html", pieces=(b"<html>Bad gateway</html>",)),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_PROVIDER_ERROR,
            502,
            "Bad gateway",
        ),
        (
            Reply(pieces=(STARTED, FAILED)),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_PROVIDER_ERROR,
            0,
            "overloaded",
        ),
        (
            Reply(pieces=(STARTED,)),
            "BAD_RESPONSE",
            event_pb2.RETRY_REASON_BAD_RESPONSE,
            0,
            "before its answer was complete",
        ),
        (
            Reply(pieces=(STARTED, fake.chunk(finish="MALFORMED_FUNCTION_CALL"))),
            "BAD_RESPONSE",
            event_pb2.RETRY_REASON_BAD_RESPONSE,
            0,
            "MALFORMED_FUNCTION_CALL",
        ),
        (
            Reply(pieces=(STARTED,), ending=Ending.DROP),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_TRANSPORT,
            0,
            "could not be reached",
        ),
        (
            Reply(ending=Ending.DROP, starts=False),
            "UNAVAILABLE",
            event_pb2.RETRY_REASON_TRANSPORT,
            0,
            "could not be reached",
        ),
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
    if reply.pieces[:1] == (STARTED,):
        assert (text_of(deltas), error.lost_usage) == ("Well", USED)


async def test_usage_is_known_while_an_answer_streams_and_leaving_closes_the_connection(tmp_path: Path) -> None:
    meter = AttemptMeter()
    reply = Reply(pieces=(STARTED,), ending=Ending.HANG)
    async with PROVIDER.talking(tmp_path, lambda _: reply) as (model, server):
        async with aclosing(model.stream(asking(), meter=meter)) as items:  # type: ignore[type-var]
            assert (await anext(items))[0] == TextDelta("Well")
        await server.left.wait()
    assert meter.usage == USED


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
    for variable in ("GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.setenv(variable, "from-the-environment")
    monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "true")
    async with PROVIDER.talking(tmp_path, api_key_env="") as (model, server):
        await answer(model, asking())
    assert not {"authorization", "x-goog-api-key"} & {name.lower() for name in server.headers[0]}


async def test_sources_are_citations(tmp_path: Path) -> None:
    grounding = {"groundingChunks": [{"web": {"uri": "https://a.example", "title": "Oaks"}}]}
    candidate = {"content": {"parts": [{"text": "An oak"}]}, "finishReason": "STOP", "groundingMetadata": grounding}
    async with PROVIDER.talking(tmp_path, lambda _: Reply(pieces=(event({"candidates": [candidate]}),))) as (model, _):
        _, response = await answer(model, asking())
    assert list(response.annotations.citations) == [
        step_pb2.CitationRef(label="Oaks", url="https://a.example", part_index=0)
    ]
    assert json.loads(response.annotations.extra_json) == {"groundingMetadata": grounding}


async def test_events_are_kept_as_they_came_if_configured(tmp_path: Path) -> None:
    async with PROVIDER.talking(tmp_path, keep_raw=True) as (model, _):
        _, response = await answer(model, asking())
    assert [each["responseId"] for each in json.loads(response.raw_events_json)] == ["resp-1"] * 5


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
