"""Redirects of providers are not followed: a key and what users wrote go to the configured address alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from bough_server.models.config import ModelSection
from bough_server.models.registry import build_models
from tests.support import anthropic_rules, gemini_rules
from tests.support.model_calls import asking, failure
from tests.support.model_scenarios import Reply, Scenario
from tests.support.model_server import serving_model
from tests.support.native_models import KEY

PATHS = {
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/m:streamGenerateContent?alt=sse",
}
RULES: Mapping[str, Scenario] = {
    "anthropic": anthropic_rules.rules,
    "gemini": gemini_rules.rules,
}


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("provider", PATHS)
async def test_a_redirect_is_a_failure_and_nothing_is_sent_to_where_it_leads(
    tmp_path: Path, provider: str, status: int
) -> None:
    async with serving_model(RULES[provider]) as other:
        elsewhere = other.root.replace("127.0.0.1", "localhost")
        moved = Reply(status=status, headers={"Location": elsewhere + PATHS[provider]})
        async with serving_model(lambda _: moved) as server:
            facts = {"provider": provider, "model": "m", "base_url": server.root, "api_key_env": "KEY"}
            models = build_models({"m": ModelSection.model_validate(facts)}, secrets={"KEY": KEY}, folder=tmp_path)
            _, error = await failure(models.get("m"), asking())
            await models.close()
    assert (server.count, other.count, list(other.headers)) == (1, 0, [])
    assert (error.retry, error.provider_status) == (None, status)
    to = elsewhere + PATHS[provider].partition("?")[0]
    assert error.message == (
        f"The model 'm' at {server.root} redirects to {to}, and redirects are not followed: "
        "correct its base_url in the server's configuration."
    )
