"""A server that is told to stop: it takes nothing new, lets live runs end, and exits well."""

import signal
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough.v1 import error_pb2
from bough.v1.agent_service_pb2 import FollowOptions
from tests.rpc.servers import outcome, status_details
from tests.support.gate import Gate, standing_gate
from tests.support.laws import check_laws
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project
from tests.support.remote import NARROW, Remote, connected

ENDS = FollowOptions(event_names=["agent.run.*"])
HEALTHY = HealthCheckRequest(service="bough.v1.AgentService")


def _project(folder: Path, gate: Gate, *, grace: str) -> Path:
    script = {"waiter": [{"calls": [{"name": "wait_at", "arguments": {"port": gate.port}}]}, "It is over."]}
    return write_project(folder, llm("waiter", tools=["wait_at"]), script=script, server={"drain_grace": grace})


async def _told(server: Serving, remote: Remote, number: signal.Signals) -> None:
    """Tells a server to stop, and waits until it says that it does."""
    health = aiter(HealthStub(remote.channel).Watch(HEALTHY))
    assert (await anext(health)).status == HealthCheckResponse.SERVING
    server.send(number)
    assert (await anext(health)).status == HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_that_is_told_to_stop_refuses_new_runs_and_lets_live_ones_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with standing_gate() as gate:
        config = _project(tmp_path, gate, grace="1h")
        async with serving(config) as server, connected(server.address) as remote:
            turn = remote.begin("waiter")
            await gate.arrived.wait()
            await _told(server, remote, number)
            received, error = await outcome(remote.begin("waiter").call)
            gate.open()
            await turn.to_the_end()
            code = await server.end()
    assert (received, code) == ([], 0)
    assert error is not None
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert status_details(error) == (
        ErrorInfo(reason="SERVER_STOPPED", domain="bough"),
        RetryInfo(retry_delay=Duration(seconds=1)),
    )
    check_laws(turn.events)
    assert turn.kinds[-1] == "run_completed"
    assert (tmp_path / "serve.ready").read_text() == f"{server.address}\n"
    assert "Traceback" not in server.said


async def test_a_run_that_outlives_the_grace_is_ended_before_the_server_exits(tmp_path: Path) -> None:
    async with standing_gate() as gate:
        config = _project(tmp_path, gate, grace="0s")
        async with serving(config) as server, connected(server.address) as remote:
            turn = remote.begin("waiter")
            await gate.arrived.wait()
            server.send(signal.SIGTERM)
            await turn.to_the_end()
            code = await server.end()
    check_laws(turn.events)
    assert turn.events[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SERVER_STOPPED
    assert await turn.call.code() == grpc.StatusCode.OK
    assert code == 0
    assert "Traceback" not in server.said


async def test_a_reader_that_pauses_does_not_keep_a_server_from_stopping_and_reads_on_at_the_next_one(
    tmp_path: Path,
) -> None:
    lines = {"calls": [{"name": "print_lines", "arguments": {"count": 5_000, "width": 1_000}}]}
    config = write_project(tmp_path, llm("printer", tools=["print_lines"]), script={"printer": [lines, "Printed."]})
    async with serving(config) as server, connected(server.address, options=NARROW) as reader:
        turn = await reader.begin("printer").until("tool_output")
        async with connected(server.address) as other:
            await other.watch(await turn.run_id(), follow=ENDS).to_the_end()
        server.send(signal.SIGTERM)
        assert await server.end() == 0
        with pytest.raises(aio.AioRpcError) as caught:
            await turn.to_the_end()
    async with serving(config) as server, connected(server.address) as remote:
        rest = await remote.watch(await turn.run_id(), after_sequence=turn.through).to_the_end()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    check_laws([*turn.events, *rest.events])
    assert rest.kinds[-1] == "run_completed"
