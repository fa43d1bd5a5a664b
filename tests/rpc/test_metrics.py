"""Metrics of a whole server: scraped as Prometheus does, sent by OTLP, or nowhere; and limits that a request sets."""

import asyncio
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bough.v1 import error_pb2, execution_pb2, policy_pb2
from bough_server.app import App
from bough_server.errors import ConfigurationError
from tests.rpc.run_server import begin, served, settings
from tests.support.otlp_sink import serving_sink
from tests.support.teams import call, calls, script

DESK = """\
name: desk
description: Answers.
llm: {model: default, instruction: Answer., tools: [{name: look_up}]}
"""
USED = {"usage": {"input_tokens": 1_000, "output_tokens": 500}}
TURNS = script(desk=[calls(call("look_up", what="leaf"), **USED), {"text": "It is red.", **USED}])
TOOLS = '''\
from bough_server import tool


@tool
def look_up(what: str) -> str:
    """Looks something up."""
    return f"{what} is red"
'''


def desk(folder: Path, **changes: Any) -> Any:
    """Settings of a server with an agent that calls a tool and then answers; its model has a price."""
    for name, text in (("desk.yaml", DESK), ("turns.yaml", TURNS), ("metrics_tools.py", TOOLS)):
        (folder / name).write_text(text)
    return settings(
        folder,
        base=folder,
        python=["metrics_tools"],
        agents=["desk.yaml"],
        models={
            "default": {
                "provider": "scripted",
                "script": str(folder / "turns.yaml"),
                "price": {"input_per_million": 1, "output_per_million": 2},
            }
        },
        **changes,
    )


def scraped(address: str) -> dict[str, float]:
    """The samples of a page of metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_prometheus_finds_what_a_turn_took(tmp_path: Path) -> None:
    made = desk(tmp_path, telemetry={"prometheus_port": 0})
    async with served(made) as server:
        assert server.app.metrics_address.startswith("127.0.0.1:")
        turn = await begin(server, "desk", "hi").to_the_end()
        await server.app.runs.drain(10)
        found = await asyncio.to_thread(scraped, server.app.metrics_address)
    assert turn.kinds[-1] == "run_completed"
    agent = 'agent="desk",kind="llm",state="succeeded"'
    model = (
        'gen_ai_agent_name="desk",gen_ai_operation_name="chat",gen_ai_provider_name="scripted",'
        'gen_ai_request_model="default",gen_ai_response_model="turns"'
    )
    assert found['bough_agent_invocations_total{agent="desk",end_reason="answered",kind="llm",state="succeeded"}'] == 1
    assert found[f"bough_agent_duration_seconds_count{{{agent}}}"] == 1
    assert found['bough_agent_cost_total{agent="desk",currency="USD"}'] == 4_000_000
    assert found['bough_charges_total{currency="USD"}'] == 4_000_000
    usage, counted = "gen_ai_client_inference_usage", f'{model},gen_ai_token_modality="unknown"'
    assert found[f"{usage}_input_tokens_total{{{counted}}}"] == 2_000
    assert found[f"{usage}_output_tokens_total{{{counted}}}"] == 1_000
    assert found[f"gen_ai_client_inference_duration_seconds_count{{{model}}}"] == 2
    assert found['bough_tool_duration_seconds_count{outcome="succeeded",tool="look_up"}'] == 1
    assert found['bough_run_duration_seconds_count{agent="desk",state="succeeded"}'] == 1
    assert found["bough_runs_active"] == 0
    commits = found["bough_store_commit_duration_seconds_count"]
    assert 0 < commits == found["bough_store_batch_size_count"] <= found["bough_store_batch_size_sum"]
    assert any(name.startswith("target_info{") and 'service_name="bough"' in name for name in found)


async def test_the_port_of_metrics_is_free_again_after_the_server(tmp_path: Path) -> None:
    async with served(desk(tmp_path, telemetry={"prometheus_port": 0})) as server:
        port = int(server.app.metrics_address.rpartition(":")[2])
    async with served(desk(tmp_path, telemetry={"prometheus_port": port})) as server:
        assert server.app.metrics_address == f"127.0.0.1:{port}"


async def test_a_port_that_is_taken_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = desk(tmp_path, telemetry={"prometheus_port": taken.getsockname()[1]})
        with pytest.raises(ConfigurationError, match="cannot be bound for metrics"):
            async with App.open(made):
                pass


async def test_metrics_go_out_by_otlp_where_that_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    with serving_sink(lambda _: None, count=lambda name, _: sent.append(name)) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{endpoint}")
        async with served(desk(tmp_path, exports_metrics=True)) as server:
            assert server.app.metrics_address == ""
            await begin(server, "desk", "hi").to_the_end()
    assert {"bough.agent.invocations", "gen_ai.client.inference.duration", "bough.runs.active"} <= set(sent)


async def test_nothing_is_counted_while_metrics_are_off(tmp_path: Path) -> None:
    async with served(desk(tmp_path)) as server:
        turn = await begin(server, "desk", "hi").to_the_end()
        assert server.app.metrics_address == ""
        assert server.app.metrics is None
    assert turn.kinds[-1] == "run_completed"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (policy_pb2.Limits(tokens=2_000), ""),
        (policy_pb2.Limits(tokens=1_500), "The limit of 1500 tokens for the run is reached: 0 are left"),
        (
            policy_pb2.Limits(cost_nanos=2_000_001),
            "The limit of 2000001 billionths of cost for the run is reached: 1 are left",
        ),
        (policy_pb2.Limits(concurrency=1), ""),
    ],
)
async def test_a_request_bounds_tokens_cost_and_parallelism(
    tmp_path: Path, limits: policy_pb2.Limits, words: str
) -> None:
    async with served(desk(tmp_path)) as server:
        policy = policy_pb2.RunPolicy(limits=limits)
        turn = await begin(server, "desk", "hi", policy=policy).to_the_end()
    if not words:
        assert turn.kinds[-1] == "run_completed"
        return
    failed = turn.events[-1].run_failed
    assert failed.error.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert failed.end_reason == execution_pb2.END_REASON_LIMIT
    assert failed.error.message.startswith(words)


async def test_the_servers_maximum_of_tokens_wins_and_its_default_is_given(tmp_path: Path) -> None:
    bounds = {"default": {"concurrency": 2, "cost_nanos": 9_000_000}, "maximum": {"tokens": 1_500}}
    async with served(desk(tmp_path, limits=bounds)) as server:
        policy = policy_pb2.RunPolicy(limits=policy_pb2.Limits(tokens=10**12))
        turn = await begin(server, "desk", "hi", policy=policy).to_the_end()
    limits = turn.events[0].run_started.policy.limits
    assert (limits.tokens, limits.concurrency, limits.cost_nanos) == (1_500, 2, 9_000_000)
    assert turn.kinds[-1] == "run_failed"


@pytest.mark.parametrize(
    "limits", [policy_pb2.Limits(tokens=-1), policy_pb2.Limits(cost_nanos=-1), policy_pb2.Limits(concurrency=0)]
)
async def test_bounds_that_mean_nothing_are_refused(tmp_path: Path, limits: policy_pb2.Limits) -> None:
    async with served(desk(tmp_path)) as server:
        policy = policy_pb2.RunPolicy(limits=limits)
        with pytest.raises(aio.AioRpcError) as refused:
            await begin(server, "desk", "hi", policy=policy).to_the_end()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_block_of_the_event_loop_is_counted_once(tmp_path: Path) -> None:
    async with served(settings(tmp_path, telemetry={"prometheus_port": 0})) as server:
        time.sleep(2.0)  # noqa: ASYNC251 # that is the point
        page = await asyncio.to_thread(scraped, server.app.metrics_address)
    assert page["bough_event_loop_blocks_total"] == 1
