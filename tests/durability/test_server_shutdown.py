"""A server that is told to stop: it takes nothing new, lets effects in flight end, and leaves its runs to the next."""

import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough.v1 import event_pb2
from bough.v1.follow_pb2 import FollowOptions
from tests.rpc.interceptor_server import outcome, status_details
from tests.support.log_laws import check_laws
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import Gate, standing_gate
from tests.support.wire_client import NARROW, Remote, connected

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


def _is_left(error: aio.AioRpcError) -> None:
    """Asserts that a stream ended because its server stops, and says when to come back."""
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert status_details(error) == (
        ErrorInfo(reason="SERVER_STOPPED", domain="bough.dev"),
        RetryInfo(retry_delay=Duration(seconds=1)),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_that_is_told_to_stop_refuses_new_runs_and_lets_what_is_in_flight_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with standing_gate() as gate:
        config = _project(tmp_path, gate, grace="1h")
        async with serving(config) as server, connected(server.address) as remote:
            turn = remote.begin("waiter")
            await gate.arrived.wait()
            await _told(server, remote, number)
            received, refused = await outcome(remote.begin("waiter").call)
            gate.open()
            with pytest.raises(aio.AioRpcError) as left:
                await turn.to_the_end()
            code = await server.end()
        async with serving(config) as successor, connected(successor.address) as remote:
            log = await remote.log(await turn.run_id())
    assert (received, code) == ([], 0)
    assert refused is not None
    _is_left(refused)
    _is_left(left.value)
    assert turn.kinds[-2:] == ["tool_completed", "step_completed"]
    assert log[: len(turn.events)] == turn.events
    assert log[len(turn.events)].HasField("run_resumed")
    check_laws(log)
    assert _attempts(log) == [1]
    assert log[-1].HasField("run_completed")
    assert (tmp_path / "serve.ready").read_text() == f"{successor.address}\n"
    assert "Traceback" not in server.said


async def test_a_run_that_outlives_the_grace_stays_as_it_is_and_the_next_server_goes_on_with_it(tmp_path: Path) -> None:
    async with standing_gate() as gate:
        config = _project(tmp_path, gate, grace="0s")
        async with serving(config) as server, connected(server.address) as remote:
            turn = remote.begin("waiter")
            await gate.arrived.wait()
            server.send(signal.SIGTERM)
            with pytest.raises(aio.AioRpcError) as left:
                await turn.to_the_end()
            code = await server.end()
        gate.open()
        async with serving(config) as successor, connected(successor.address) as remote:
            log = await remote.log(await turn.run_id())
    _is_left(left.value)
    assert turn.kinds[-1] == "tool_started"
    assert log[: len(turn.events)] == turn.events
    check_laws(log)
    assert _attempts(log) == [1, 2]
    assert log[-1].HasField("run_completed")
    assert code == 0
    assert "Traceback" not in server.said


async def test_a_server_that_survived_a_stray_task_stops_in_order(tmp_path: Path) -> None:
    calls = {"calls": [{"name": "stray", "arguments": {"kind": "KeyboardInterrupt"}}]}
    config = write_project(
        tmp_path,
        llm("lead", tools=["stray"]),
        script={"lead": [calls, "Left."]},
        python=["tests.durability.hostile_code"],
    )
    async with serving(config) as server, connected(server.address) as remote:
        await remote.begin("lead").to_the_end()
        await _told(server, remote, signal.SIGTERM)
        code = await server.end()
    assert code == 0
    assert server.said.count("tried to end the server") == 2
    assert "Bad file descriptor" not in server.said


def _attempts(log: Sequence[event_pb2.AgentEvent]) -> list[int]:
    """How often the run's only tool was begun."""
    return [event.attempt for event in log if event.HasField("tool_started")]


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
