"""Calls that go on with another model at another address, on the wire: what each is asked, and who answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bough.v1 import error_pb2, event_pb2
from bough_server.models.config import ModelSection
from bough_server.models.registry import build_models
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.model_scenarios import TEXT, Scenario, refusing, scenario
from tests.support.model_server import ModelServer, serving_model
from tests.support.run_harness import RunHarness, open_harness
from tests.support.teams import llm


@asynccontextmanager
async def two_addresses(
    folder: Path, first: Scenario, second: Scenario, *, retries: int = 0
) -> AsyncIterator[tuple[RunHarness, ModelServer, ModelServer]]:
    """A harness whose model `one` falls back to `two`, each at a separate server."""
    async with serving_model(first) as here, serving_model(second) as there:
        facts = {"provider": "openai", "model": "scenario-1", "retries": retries}
        configs = {
            "one": ModelSection.model_validate({**facts, "base_url": here.base_url, "fallbacks": ["two"]}),
            "two": ModelSection.model_validate({**facts, "base_url": there.base_url}),
        }
        models = build_models(configs, secrets={}, folder=folder)
        async with open_harness(folder, models=models, definitions=[llm("p", model="one")]) as harness:
            yield harness, here, there
        await models.close()


@pytest.mark.parametrize("fault", ["cut", "drop", "error-event"])
async def test_an_answer_that_breaks_off_comes_whole_from_another_address(tmp_path: Path, fault: str) -> None:
    async with two_addresses(tmp_path, scenario(fault), scenario("plain")) as (harness, here, there):
        log = await harness.turn("p")
        await check_replay(harness, log)
    assert here.requests[0]["messages"] == there.requests[0]["messages"]
    assert (here.count, there.count, answer_of(log)) == (1, 1, TEXT)
    spoken = having(log, "llm_output_text_delta")
    first = "".join(event.llm_output_text_delta.text for event in spoken if event.attempt == 1)
    second = "".join(event.llm_output_text_delta.text for event in spoken if event.attempt == 2)
    assert (first, second) == ("word0 word1 word2 ", TEXT)
    assert having(log, "llm_completed")[0].llm_completed.response.response_id == "chatcmpl-1"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, ""),
        (403, ""),
        (404, "model_not_found"),
        (429, "insufficient_quota"),
        (400, "context_length_exceeded"),
        (402, ""),
    ],
)
async def test_a_refusal_that_another_provider_does_not_share_is_not_tried_again(
    tmp_path: Path, status: int, code: str
) -> None:
    def refuse(_: object) -> object:
        return refusing(status, "Not here.", code=code)

    async with two_addresses(tmp_path, refuse, scenario("plain"), retries=2) as (harness, here, there):  # type: ignore[arg-type]
        log = await harness.turn("p")
    (retry,) = having(log, "llm_retrying")
    assert (retry.llm_retrying.reason, retry.llm_retrying.next_model) == (event_pb2.RETRY_REASON_REFUSED, "two")
    assert f"refused with status {status}" in retry.llm_retrying.error.message
    assert (here.count, there.count, answer_of(log)) == (1, 1, TEXT)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_request_that_is_wrong_is_asked_of_nobody_else(tmp_path: Path, status: int) -> None:
    async with two_addresses(tmp_path, lambda _: refusing(status, "Bad."), scenario("plain")) as (harness, here, there):
        log = await harness.turn("p")
    assert (here.count, there.count) == (1, 0)
    error = log[-1].run_failed.error
    assert error.message == f"The model 'one' at {here.base_url} refused with status {status}: Bad."
    assert (error.reason, error.provider_status) == (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, status)


async def test_a_model_without_its_key_is_passed_over_and_counts_as_no_call(tmp_path: Path) -> None:
    async with serving_model("plain") as there:
        configs = {
            "one": ModelSection(provider="openai", model="m", api_key_env="DESK_KEY", fallbacks=("two",)),
            "two": ModelSection(provider="openai", model="m", base_url=there.base_url),
        }
        models = build_models(configs, secrets={}, folder=tmp_path)
        async with open_harness(tmp_path, models=models, definitions=[llm("p", model="one")]) as harness:
            log = await harness.turn("p")
            tree = await harness.tree(log)
        await models.close()
    (retry,) = having(log, "llm_retrying")
    assert (retry.llm_retrying.not_sent, answer_of(log)) == (True, TEXT)
    assert log[-1].run_completed.usage.model_calls == tree.agents[0].usage.model_calls == 1
