"""Runs whose model answers badly, from the model's socket to the caller's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bough import AsyncClient, CollectedRun, collect
from bough.v1 import error_pb2, execution_pb2
from bough_server.app import open_server
from bough_server.settings import Settings
from tests.support.log_laws import check_laws
from tests.support.model_scenarios import TEXT
from tests.support.model_server import ModelServer, serving_model
from tests.support.projects import llm, openai_model, write_project

TEAM = (llm("talker"), llm("lead", calls=["talker"]), llm("clerk", tools=["look_up"]))


@asynccontextmanager
async def _asked_of(folder: Path, scenario: str, **model: object) -> AsyncIterator[tuple[AsyncClient, ModelServer]]:
    """A client of a server whose model answers by a scenario."""
    async with serving_model(scenario) as fake:
        config = write_project(folder, *TEAM, model=openai_model(fake.base_url, **model))
        async with open_server(Settings.load(config, port=0)) as address, AsyncClient(address, timeout=30) as client:
            yield client, fake


async def _turn(client: AsyncClient, agent: str) -> CollectedRun:
    run = await collect(client.run(agent, "What is it?"))
    check_laws(run.events)
    log = await collect(client.watch(run.run_id))
    assert run == log
    return run


def _failed(run: CollectedRun) -> str:
    assert run.state == execution_pb2.EXECUTION_STATE_FAILED
    assert run.error is not None
    return error_pb2.ErrorReason.Name(run.error.reason).removeprefix("ERROR_REASON_")


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("garbage", "MODEL_BAD_RESPONSE"),
        ("page", "MODEL_BAD_RESPONSE"),
        ("cut", "MODEL_BAD_RESPONSE"),
        ("cut-after-usage", "MODEL_BAD_RESPONSE"),
        ("drop", "MODEL_UNAVAILABLE"),
        ("drop-before-answer", "MODEL_UNAVAILABLE"),
        ("error-event", "MODEL_UNAVAILABLE"),
        ("server-error", "MODEL_UNAVAILABLE"),
        ("out-of-quota", "MODEL_QUOTA_EXCEEDED"),
        ("empty", "INVALID_OUTPUT"),
    ],
)
async def test_a_model_that_answers_badly_fails_the_run_with_its_reason(
    tmp_path: Path, scenario: str, reason: str
) -> None:
    async with _asked_of(tmp_path, scenario) as (client, fake):
        run = await _turn(client, "talker")
        tree = await client.get_invocation(run.run_id)
    assert _failed(run) == reason
    assert run.error is not None
    assert "Traceback" not in run.error.message
    assert [(node.name, node.state) for node in tree.agents] == [("talker", execution_pb2.EXECUTION_STATE_FAILED)]
    # An empty answer is retried once; the other errors are not retryable.
    assert fake.count == (2 if scenario == "empty" else 1)


@pytest.mark.parametrize("scenario", ["cut-once", "drop-once", "empty-once"])
async def test_a_model_that_answers_badly_once_is_asked_again(tmp_path: Path, scenario: str) -> None:
    async with _asked_of(tmp_path, scenario, retries=1) as (client, fake):
        run = await _turn(client, "talker")
    assert (run.state, run.answer) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, TEXT)
    assert fake.count == 2


async def test_a_broken_tool_call_is_a_result_that_the_model_sees(tmp_path: Path) -> None:
    async with _asked_of(tmp_path, "broken-arguments") as (client, fake):
        run = await _turn(client, "clerk")
    assert (run.state, run.answer) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, TEXT)
    (failed,) = [event.tool_failed.result for event in run.events if event.HasField("tool_failed")]
    assert failed.error.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    assert not any(event.HasField("tool_started") for event in run.events)
    told = fake.requests[-1]["messages"][-1]
    assert (told["role"], "JSON" in told["content"]) == ("tool", True)


async def test_a_stalling_model_is_given_up_after_its_idle_timeout(tmp_path: Path) -> None:
    async with _asked_of(tmp_path, "stall", timeouts={"start": 20, "idle": 0.1}) as (client, fake):
        run = await _turn(client, "talker")
        await fake.left.wait()
    assert _failed(run) == "MODEL_TIMEOUT"
    assert "".join(event.llm_output_text_delta.text for event in run.events) != ""
