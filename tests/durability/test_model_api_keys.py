"""Keys of models: a missing one is named, and a key that is there is nowhere to be found."""

from pathlib import Path

import pytest

from bough.v1 import error_pb2
from tests.support.model_scenarios import refusing
from tests.support.model_server import serving_model
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import connected

KEY = "sk-wrong-key-123456"
"""What the model server's refusal repeats, as OpenAI's does with a part of it."""


@pytest.mark.parametrize(
    ("provider", "header", "value"),
    [
        ("openai", "Authorization", f"Bearer {KEY}"),
        ("anthropic", "Authorization", f"Bearer {KEY}"),
        ("gemini", "x-goog-api-key", KEY),
    ],
)
async def test_a_missing_key_is_named_and_a_given_one_is_in_no_file_log_or_event(
    tmp_path: Path, provider: str, header: str, value: str
) -> None:
    async with serving_model(lambda _: refusing(401, f"Incorrect API key provided: {KEY}.")) as model:
        base_url = model.base_url if provider == "openai" else model.root
        base = {"provider": provider, "model": "m", "base_url": base_url, "retries": 0}
        models = {
            "default": {"alias": "keyed"},
            "keyed": {**base, "api_key_env": "TEAM_KEY"},
            "keyless": {**base, "api_key_env": "MISSING_KEY"},
        }
        agents = (llm("keyed", model="keyed"), llm("keyless", model="keyless"))
        config = write_project(tmp_path, *agents, models=models, log_level="debug")
        environment = {"TEAM_KEY": KEY}
        async with serving(config, environment=environment) as server, connected(server.address) as remote:
            keyed = await remote.begin("keyed").to_the_end()
            keyless = await remote.begin("keyless").to_the_end()
        assert [headers[header] for headers in model.headers] == [value]
    failed = keyless.events[-1].run_failed.error
    assert failed.reason == error_pb2.ERROR_REASON_MODEL_UNAVAILABLE
    assert "the environment variable MISSING_KEY is not set" in failed.message
    assert keyed.events[-1].run_failed.error.reason == error_pb2.ERROR_REASON_MODEL_AUTHENTICATION
    assert KEY not in f"{keyed.events} {keyless.events}"
    written = _written(tmp_path)
    assert {"bough.db", "serve.stderr"} <= written.keys()
    assert [name for name, content in written.items() if KEY.encode() in content] == []


def _written(folder: Path) -> dict[str, bytes]:
    """Every file there is, by its name."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
