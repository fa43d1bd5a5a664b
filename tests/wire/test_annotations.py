"""What providers note beside their answers, on the wire: safety, sources, extras, and their events as they came."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bough.v1 import step_pb2
from bough_server.models.answer import MAX_RAW_BYTES
from bough_server.models.config import ModelSection
from bough_server.models.model import Model
from bough_server.models.registry import build_models
from tests.support import response_scenarios as responses
from tests.support.log_readings import check_replay, having
from tests.support.model_calls import answer, asking
from tests.support.model_scenarios import DONE, Reply, chunk, ending, event
from tests.support.model_server import serving_model
from tests.support.run_harness import open_harness
from tests.support.teams import llm

ALLOW, REVIEW, BLOCK = (
    step_pb2.SAFETY_VERDICT_ALLOW,
    step_pb2.SAFETY_VERDICT_REVIEW,
    step_pb2.SAFETY_VERDICT_BLOCK,
)
PROMPT, ANSWER = step_pb2.SAFETY_SUBJECT_PROMPT, step_pb2.SAFETY_SUBJECT_ANSWER
CITED = step_pb2.CitationRef(label="Oaks", url="https://oak.example", part_index=0, start_offset=0, end_offset=4)
URL = {"type": "url_citation", "url": "https://oak.example", "title": "Oaks", "start_index": 0, "end_index": 4}


def noted_chunk(delta: dict[str, object], finish: str | None = None, **facts: object) -> bytes:
    """A chunk with more beside its delta; `choice` is what the choice has more."""
    choice = facts.pop("choice", {})
    assert isinstance(choice, dict)
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scenario-1"}
    return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **choice}], **facts})


@asynccontextmanager
async def configured(folder: Path, *pieces: bytes, **facts: object) -> AsyncIterator[Model]:
    """A configured model whose server sends these pieces."""
    async with serving_model(lambda _: Reply(pieces=pieces)) as server:
        section = {"provider": "openai", "model": "scenario-1", "base_url": server.base_url, **facts}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=folder)
        try:
            yield models.get("m")
        finally:
            await models.close()


def notes(
    *pairs: tuple[str, step_pb2.SafetyVerdict.ValueType], subject: step_pb2.SafetySubject.ValueType = ANSWER
) -> list[step_pb2.SafetyNote]:
    return [step_pb2.SafetyNote(category=category, verdict=verdict, subject=subject) for category, verdict in pairs]


async def test_filters_sources_and_extras_of_a_completion_are_annotations(tmp_path: Path) -> None:
    safe = {"filtered": False, "severity": "safe"}
    pieces = [
        noted_chunk({}, prompt_filter_results=[{"prompt_index": 0, "content_filter_results": {"violence": safe}}]),
        noted_chunk({"content": "Oaks"}, choice={"content_filter_results": {"hate": safe}}, service_tier="default"),
        noted_chunk(
            {"content": " grow."},
            choice={"content_filter_results": {"hate": {"filtered": False, "severity": "low"}}},
            obfuscation="x" * 30,
        ),
        noted_chunk({"annotations": [{"type": "url_citation", "url_citation": URL}]}),
        *ending("stop"),
    ]
    async with configured(tmp_path, *pieces) as model:
        _, response = await answer(model, asking())
    assert response.annotations == step_pb2.Annotations(
        safety=[*notes(("violence", ALLOW), subject=PROMPT), *notes(("hate", REVIEW))],
        citations=[CITED],
        extra_json='{"service_tier":"default"}',
    )


async def test_an_answer_that_its_provider_cut_off_or_its_model_refused_says_so(tmp_path: Path) -> None:
    async with configured(tmp_path, chunk({"content": "Half"}), *ending("content_filter")) as model:
        _, filtered = await answer(model, asking())
    async with configured(tmp_path, chunk({"refusal": "No."}), *ending("stop")) as model:
        _, refused = await answer(model, asking())
    assert list(filtered.annotations.safety) == notes(("content_filter", BLOCK))
    assert list(refused.annotations.safety) == notes(("refusal", BLOCK))
    assert filtered.finish_reason == step_pb2.FINISH_REASON_CONTENT_FILTER
    assert (refused.finish_reason, refused.provider_finish_reason) == (step_pb2.FINISH_REASON_REFUSAL, "stop")


async def test_an_answer_without_notes_has_no_annotations(tmp_path: Path) -> None:
    async with configured(tmp_path, chunk({"content": "Oaks."}), *ending("stop")) as model:
        _, response = await answer(model, asking())
    assert (response.HasField("annotations"), response.raw_events_json) == (False, "")


async def test_sources_filters_and_the_providers_own_tools_of_a_response_are_annotations(tmp_path: Path) -> None:
    searched: responses.Item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    cited = [URL, {"type": "file_citation", "file_id": "file-1", "filename": "oak.pdf", "index": 2}]
    said = responses.message("Oaks.", annotations=cited)
    deltas = [
        {"type": "response.output_text.delta", "delta": "Oaks."},
        {"type": "response.output_text.annotation.added", "annotation": URL},
    ]
    filters = [{"blocked": False, "source_type": "prompt", "content_filter_results": {"jailbreak": {"detected": True}}}]
    pieces = [
        responses.beginning(),
        *responses.item_events(0, searched, []),
        *responses.item_events(1, said, deltas),
        responses.ending([searched, said], content_filters=filters, service_tier="flex"),
    ]
    async with configured(tmp_path, *pieces, api="responses") as model:
        _, response = await answer(model, asking())
    assert [part.text for part in response.message.parts] == ["Oaks."]
    assert list(response.annotations.safety) == notes(("jailbreak", REVIEW), subject=PROMPT)
    assert list(response.annotations.citations) == [
        CITED,
        step_pb2.CitationRef(label="oak.pdf", provider_ref="file-1", part_index=0),
    ]
    assert json.loads(response.annotations.extra_json) == {"service_tier": "flex", "output": [searched]}


async def test_a_response_that_was_refused_or_cut_off_says_so(tmp_path: Path) -> None:
    async with configured(tmp_path, *responses.scenario("refusal")({}).pieces, api="responses") as model:
        _, refused = await answer(model, asking())
    cut = responses.ending([], status="incomplete", incomplete_details={"reason": "content_filter"})
    async with configured(tmp_path, responses.beginning(), cut, api="responses") as model:
        _, filtered = await answer(model, asking())
    assert list(refused.annotations.safety) == notes(("refusal", BLOCK))
    assert list(filtered.annotations.safety) == notes(("content_filter", BLOCK))
    assert (refused.finish_reason, refused.provider_finish_reason) == (step_pb2.FINISH_REASON_REFUSAL, "completed")
    assert filtered.finish_reason == step_pb2.FINISH_REASON_CONTENT_FILTER
    assert filtered.provider_finish_reason == "content_filter"


async def test_annotations_stand_at_the_calls_end_and_in_the_step_of_the_tree(tmp_path: Path) -> None:
    pieces = [chunk({"content": "Oaks."}), noted_chunk({"annotations": [URL]}), *ending("stop")]
    async with serving_model(lambda _: Reply(pieces=pieces)) as server:
        section = ModelSection(provider="openai", model="m", base_url=server.base_url, keep_raw=True)
        models = build_models({"m": section}, secrets={}, folder=tmp_path)
        async with open_harness(tmp_path, models=models, definitions=[llm("p", model="m")]) as harness:
            log = await harness.turn("p")
            tree = await harness.tree(log, include_steps=True)
            await check_replay(harness, log)
        await models.close()
    completed = having(log, "llm_completed")[0].llm_completed.response
    expected = step_pb2.Annotations(citations=[CITED])
    recorded = having(log, "step_completed")[0].step_completed.step.llm_response
    assert completed.annotations == recorded.annotations == tree.steps[0].llm_response.annotations == expected
    assert having(log, "step_completed")[0].step_completed.step.annotations == tree.steps[0].annotations == expected
    assert len(json.loads(completed.raw_events_json)) == 4
    assert recorded.raw_events_json == tree.steps[0].llm_response.raw_events_json == ""


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_providers_events_are_kept_as_they_came_where_the_configuration_says_so(
    tmp_path: Path, api: str
) -> None:
    pieces = (
        [chunk({"content": "Öl."}), *ending("stop")]
        if api == "chat"
        else [responses.beginning(), *responses.text_events(0, "Öl."), responses.ending([])]
    )
    async with configured(tmp_path, *pieces, api=api, keep_raw=True) as model:
        _, response = await answer(model, asking())
    sent = [json.loads(piece.removeprefix(b"data: ")) for piece in pieces if piece != DONE]
    assert json.loads(response.raw_events_json) == sent


async def test_events_beyond_their_bound_are_counted_and_not_kept(tmp_path: Path) -> None:
    large = chunk({"content": "x" * 100_000})
    async with configured(tmp_path, large, large, large, large, *ending("stop"), keep_raw=True) as model:
        _, response = await answer(model, asking())
    kept = json.loads(response.raw_events_json)
    assert (len(kept), kept[-1]) == (3, {"left_out": 4})
    assert len(response.raw_events_json) <= MAX_RAW_BYTES + 32
