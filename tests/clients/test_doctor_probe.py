"""`bough doctor --probe`: each model that can be called is called once, and its answer or its failure is reported."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.cli_process import bough
from tests.support import anthropic_rules, gemini_rules
from tests.support.model_scenarios import Scenario
from tests.support.model_server import serving_model
from tests.support.projects import llm, openai_model, write_project


def write(folder: Path, models: Mapping[str, object]) -> Path:
    return write_project(folder, llm("alone"), script={"alone": ["Hm."]}, models=models)


async def findings(config: Path, *options: str) -> tuple[int | None, dict[str, tuple[bool, str]]]:
    """Return the exit code and the findings about models: whether they are right, and their words."""
    seen = await bough("--config", str(config), "doctor", "--json", *options)
    read = [json.loads(line) for line in seen.out.splitlines()]
    return seen.code, {each["name"]: (each["isRight"], each["words"]) for each in read if "model" in each["name"]}


async def test_models_are_called_only_if_that_is_asked_for_and_aliases_never(tmp_path: Path) -> None:
    async with serving_model("plain") as server:
        scripted = {"provider": "scripted", "script": "script.yaml"}
        models = {"default": {"alias": "real"}, "real": openai_model(server.base_url), "scripted": scripted}
        config = write(tmp_path, models)
        without = await findings(config)
        calls_before = server.count
        code, found = await findings(config, "--probe")
        calls = server.count - calls_before
    assert (without[0], without[1]["model real"], calls_before) == (0, (True, "openai"), 0)
    assert (code, found["model default"], found["model scripted"]) == (0, (True, "alias of real"), (True, "scripted"))
    assert (found["model real"][0], found["model real"][1].startswith("openai; answered in "), calls) == (True, True, 1)


async def test_a_model_that_does_not_answer_fails_the_doctor_if_it_is_the_default(tmp_path: Path) -> None:
    async with serving_model("unauthorized") as server:
        default = {"default": {"alias": "real"}, "real": openai_model(server.base_url)}
        code, found = await findings(write(tmp_path, default), "--probe")
        other = {"default": {"provider": "scripted", "script": "script.yaml"}, "real": openai_model(server.base_url)}
        code_of_other, _ = await findings(write(tmp_path, other), "--probe")
    assert (code, code_of_other) == (1, 0)
    assert found["model default"] == (False, "alias of real; real does not answer")
    assert (found["model real"][0], found["model real"][1].startswith("openai; does not answer: ")) == (False, True)


@pytest.mark.parametrize(
    ("provider", "scenario"), [("anthropic", anthropic_rules.rules), ("gemini", gemini_rules.rules)]
)
async def test_models_of_native_providers_are_called_too(tmp_path: Path, provider: str, scenario: Scenario) -> None:
    async with serving_model(scenario) as server:
        native = {"provider": provider, "model": "m-1", "base_url": server.root, "api_key_env": ""}
        code, found = await findings(write(tmp_path, {"default": native}), "--probe")
        calls = server.count
    is_right, words = found["model default"]
    assert (code, is_right, words.startswith(f"{provider}; answered in "), calls) == (0, True, True, 1)
