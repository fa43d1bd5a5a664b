"""The life cycle of a server: its addresses, its ready file, draining and signals."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import execution_pb2
from bough_server.app import App, open_server
from bough_server.errors import ConfigurationError
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import outcome, status_details
from tests.rpc.run_server import begin, served, settings, watch


async def test_a_server_is_healthy_as_soon_as_it_has_an_address(tmp_path: Path) -> None:
    async with open_server(settings(tmp_path)) as address, aio.insecure_channel(address) as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(service="bough.v1.EvalService"))
    assert address.startswith("127.0.0.1:")
    assert answer.status == HealthCheckResponse.SERVING


async def test_a_port_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with open_server(settings(tmp_path)) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=rf"^Port {port} of 127\.0\.0\.1 .* in use"):
            async with open_server(settings(tmp_path / "other", server={"port": port})):
                pass


async def test_a_server_listens_beyond_loopback_only_when_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a loopback address"):
        async with open_server(settings(tmp_path, server={"host": "0.0.0.0"})):
            pass
    async with open_server(settings(tmp_path, server={"host": "0.0.0.0", "allow_insecure": True})) as address:
        assert address.startswith("0.0.0.0:")


async def test_a_draining_server_lets_live_runs_end_and_refuses_new_ones(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "draining").until("run_started")
        stopping = asyncio.create_task(server.app.stop(grace=60))
        health = aiter(HealthStub(server.channel).Watch(HealthCheckRequest(service="")))
        while (await anext(health)).status == HealthCheckResponse.SERVING:
            pass
        received, error = await outcome(begin(server, "echo", "hi").call)
        GATES["draining"].set()
        await turn.to_the_end()
        await stopping
    assert received == []
    assert error is not None
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert status_details(error) == (
        ErrorInfo(reason="SERVER_STOPPED", domain="bough.dev"),
        RetryInfo(retry_delay=Duration(seconds=1)),
    )
    assert turn.kinds[-1] == "run_completed"
    assert await turn.call.code() == grpc.StatusCode.OK


async def test_a_run_that_outlives_the_grace_is_gone_on_with_by_the_next_server(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "opened later").until("run_started")
        await server.app.stop(grace=0)
        with pytest.raises(aio.AioRpcError) as ended:
            await turn.to_the_end()
    run_id = await turn.run_id()
    async with served(settings(tmp_path)) as server:
        before = (await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))).run
        GATES["opened later"].set()
        watched = await watch(server, run_id).to_the_end()
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert before.state == execution_pb2.EXECUTION_STATE_RUNNING
    assert watched.events[: len(turn.events)] == turn.events
    assert watched.kinds[-1] == "run_completed"


async def test_a_served_app_writes_its_ready_file_and_stops_on_a_signal(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with App.open(settings(tmp_path)) as app:
        async with aio.insecure_channel(app.address) as channel:
            health = aiter(HealthStub(channel).Watch(HealthCheckRequest(service="")))
            assert (await anext(health)).status == HealthCheckResponse.SERVING
            serving_now = asyncio.create_task(app.serve(ready_file=ready))
            await asyncio.sleep(0)
            assert ready.read_text() == f"{app.address}\n"
            signal.raise_signal(signal.SIGTERM)
            assert (await anext(health)).status == HealthCheckResponse.NOT_SERVING
        await serving_now


async def test_a_second_signal_ends_the_grace_of_the_first(tmp_path: Path) -> None:
    async with served(settings(tmp_path, server={"drain_grace": 3600})) as server:
        turn = await begin(server, "waiter", "hurried").until("run_started")
        ready = tmp_path / "ready"
        serving_now = asyncio.create_task(server.app.serve(ready_file=ready))
        await asyncio.sleep(0)
        assert ready.exists()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(aio.AioRpcError) as ended:
            await turn.to_the_end()
        await serving_now
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert turn.kinds == ["run_started"]
