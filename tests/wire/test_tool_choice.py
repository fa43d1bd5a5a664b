"""A call that has to be made, on the wire: how both APIs are asked for it, and how the embedded model is made to."""

from dataclasses import replace
from pathlib import Path

import pytest

from bough_server.models.configured import build_models
from bough_server.settings_models import ModelSection
from tests.support.model_calls import LOOKUP, answer, asking
from tests.support.model_server import serving_model


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_required", [False, True])
async def test_providers_are_told_that_a_tool_must_be_called(tmp_path: Path, api: str, is_required: bool) -> None:
    request = replace(asking(tools=[LOOKUP]), tool_choice="required" if is_required else "auto")
    async with serving_model("plain") as server:
        section = {"provider": "openai", "model": "scenario-1", "base_url": server.base_url, "api": api}
        models = build_models({"m": ModelSection.model_validate(section)}, secrets={}, folder=tmp_path)
        try:
            await answer(models.get("m"), request)
        finally:
            await models.close()
    (sent,) = server.requests
    assert sent.get("tool_choice") == ("required" if is_required else None)
    assert len(sent["tools"]) == 1
