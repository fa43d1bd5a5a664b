"""A server whose event loop is blocked by an agent, and servers that are killed by one again and again."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import error_pb2, event_pb2
from tests.support.log_laws import check_laws
from tests.support.log_readings import having
from tests.support.processes import EndedBeforeServing, Serving, serving, starting
from tests.support.projects import llm, write_project
from tests.support.wire_client import connected

CODE = ["tests.durability.hostile_code"]


def _project(folder: Path, **sections: object) -> Path:
    return write_project(folder, llm("talker"), script={"talker": ["Hello."]}, python=CODE, **sections)


@pytest.mark.parametrize("how", ["sleep", "python"])
async def test_a_blocked_loop_is_named_in_the_log_and_a_second_signal_stops_the_server(
    tmp_path: Path, how: str
) -> None:
    config = _project(tmp_path)
    async with serving(config) as server, connected(server.address) as remote:
        turn = remote.begin("blocker", how)  # a blocked server cannot tell its client anything
        await server.until_said("the event loop is blocked")
        assert "in blocker" in server.said
        server.send(signal.SIGTERM)
        await server.until_said("send the signal again")
        began = time.monotonic()
        server.send(signal.SIGTERM)
        code = await server.end()
        turn.call.cancel()
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10
    async with serving(config, environment={"HOSTILE_PEACE": "1"}) as server, connected(server.address) as remote:
        (run,) = (await remote.agents.ListRuns(pb.ListRunsRequest())).runs
        log = await remote.log(run.run_id)
    check_laws(log)
    assert log[-1].HasField("run_completed")
    # It was lost, and so is counted, although it had been asked to stop.
    assert [event.run_resumed.cause for event in having(log, "run_resumed")] == [event_pb2.RESUME_CAUSE_RECOVERY]


async def test_a_server_stops_although_code_ignores_its_end(tmp_path: Path) -> None:
    config = _project(tmp_path, server={"drain_grace": "0s"})
    async with serving(config) as server, connected(server.address) as remote:
        await remote.begin("immortal").until("run_started")
        server.send(signal.SIGTERM)
        assert await server.end() == 0
    assert "task ignores its cancellation" in server.said


@pytest.mark.parametrize(("agent", "code"), [("killer", 9), ("canceller", 1)])
async def test_one_run_that_ends_its_servers_ends_and_takes_no_other_with_it(
    tmp_path: Path, agent: str, code: int
) -> None:
    config = _project(tmp_path)
    runs: list[str] = []
    async with serving(config) as server, connected(server.address) as remote:
        runs = [await (await remote.begin("innocent").until("run_started")).run_id() for _ in range(3)]
        killing = remote.begin(agent)
        assert await server.end() == code
        killing.call.cancel()
    assert ("cancelled the server's own task" in server.said) == (agent == "canceller")
    for _ in range(12):
        async with starting(config) as server:
            logs = await _ended(server, runs, code)
            if logs is not None:
                break
    else:
        pytest.fail("the run that ends its servers never ended")
    for log in logs:
        check_laws(log)
    assert [log[-1].WhichOneof("payload") for log in logs] == [*["run_completed"] * 3, "run_failed"]
    assert logs[-1][-1].run_failed.error.reason == error_pb2.ERROR_REASON_RECOVERY_LIMIT


async def _ended(server: Serving, first: Sequence[str], code: int) -> list[list[event_pb2.AgentEvent]] | None:
    """Return the logs of all runs, some of them first, once all have ended; None if the server has, with `code`."""
    try:
        await server.serves()
        async with connected(server.address) as remote:
            listed = (await remote.agents.ListRuns(pb.ListRunsRequest())).runs
            others = [run.run_id for run in listed if run.run_id not in first]
            return [await remote.log(run_id) for run_id in (*first, *others)]
    except (EndedBeforeServing, aio.AioRpcError):
        assert await server.end() == code
        return None
