"""Turns that begin with one native provider and end with another, each by its own rules, at its own price."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from bough.v1 import error_pb2, event_pb2
from bough_server.models.config import ModelSection
from bough_server.models.registry import build_models
from tests.support import anthropic_rules, chat_rules, gemini_rules
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.model_scenarios import Reply, Request, Scenario
from tests.support.model_server import ModelServer, serving_model
from tests.support.providers import lookup
from tests.support.run_harness import open_harness
from tests.support.teams import llm

RULES: Mapping[str, Scenario] = {
    "anthropic": anthropic_rules.rules,
    "gemini": gemini_rules.rules,
    "deepseek": chat_rules.deepseek,
}


def overloaded_after_one(rules: Scenario) -> Scenario:
    """The rules for one request; then the provider is overloaded."""
    made = 0

    def answer(request: Request) -> Reply:
        nonlocal made
        made += 1
        return rules(request) if made == 1 else anthropic_rules.refusal(529, "overloaded_error", "Overloaded")

    return answer


def section(provider: str, server: ModelServer, **fields: object) -> ModelSection:
    price = {"input_per_million": 1, "output_per_million": 2, "cached_input_per_million": 0}
    facts: dict[str, object] = {"model": "m", "api_key_env": "", "retries": 0, "price": price, **fields}
    if provider == "deepseek":
        return ModelSection.model_validate({"preset": provider, "base_url": server.base_url, **facts})
    return ModelSection.model_validate({"provider": provider, "base_url": server.root, **facts})


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(RULES, 2)])
async def test_a_turn_that_one_provider_began_is_ended_by_another(tmp_path: Path, first: str, second: str) -> None:
    async with (
        serving_model(overloaded_after_one(RULES[first])) as here,
        serving_model(RULES[second]) as there,
    ):
        configs = {"one": section(first, here, fallbacks=["two"]), "two": section(second, there)}
        models = build_models(configs, secrets={}, folder=tmp_path)
        team = [llm("p", model="one", tools=["lookup"])]
        async with open_harness(tmp_path, models=models, definitions=team, tools=[lookup]) as harness:
            log = await harness.turn("p", "What is an oak?")
            await check_replay(harness, log)
        await models.close()
    assert answer_of(log) == "An oak is a tree."
    retry = having(log, "llm_retrying")[0].llm_retrying
    assert (retry.reason, retry.next_model) == (event_pb2.RETRY_REASON_PROVIDER_ERROR, "two")
    assert (retry.error.reason, retry.error.provider_status) == (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, 529)
    assert log[-1].run_completed.usage.cost_nanos > 0
