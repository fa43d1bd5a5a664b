"""Two servers on one PostgreSQL database: a run of one is watched, answered and cancelled through the other."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bough import reply
from bough.v1 import agent_service_pb2 as pb
from bough.v1 import execution_pb2, follow_pb2
from tests.rpc.agents import GATES
from tests.rpc.run_server import Served, Turn, begin, sequences, served, settings, watch
from tests.support import postgres


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@pytest.fixture
async def servers(url: str, tmp_path: Path) -> AsyncIterator[tuple[Served, Served]]:
    """Two servers with the teams that ask and wait."""
    python = ["tests.rpc.question_agents", "tests.rpc.gated_agents", "tests.rpc.agents"]
    made = settings(tmp_path, python=python, storage={"url": url, "durability": "process"})
    async with served(made) as one, served(made) as other:
        yield one, other


async def test_a_run_is_watched_through_another_server_from_its_first_event_to_its_last(
    servers: tuple[Served, Served],
) -> None:
    one, other = servers
    turn = await begin(one, "waiter", "watched elsewhere").until("run_started")
    run_id = await turn.run_id()
    watching = await watch(other, run_id).until("run_started")
    GATES["watched elsewhere"].set()
    await turn.to_the_end()
    assert (await watching.to_the_end()).events == turn.events
    current = watch(other, run_id, until=follow_pb2.WATCH_UNTIL_CURRENT)
    assert (await current.to_the_end()).events == turn.events


async def test_a_run_that_waits_is_answered_through_another_server(servers: tuple[Served, Served]) -> None:
    one, other = servers
    turn = await begin(one, "asker", "well?").to_the_end()
    run_id = await turn.run_id()
    (request,) = turn.events[-1].run_interrupted.requests
    resume = pb.ResumeRunRequest(run_id=run_id, answers=[reply(request, "so")])
    answered = await Turn(call=other.agents.ResumeRun(resume)).to_the_end()
    assert answered.kinds[-1] == "run_completed"
    log = await watch(one, run_id).to_the_end()
    assert log.events == [*turn.events, *answered.events]
    assert sequences(log.events) == list(range(1, len(log.events) + 1))


async def test_a_run_that_works_meanwhile_is_answered_by_its_owner_for_the_other_server(
    servers: tuple[Served, Served],
) -> None:
    one, other = servers
    turn = await begin(one, "worker", "works elsewhere").until("input_requested")
    run_id = await turn.run_id()
    watching = await watch(other, run_id).until("input_requested")
    (request,) = [event.input_requested.request for event in turn.events if event.HasField("input_requested")]
    resume = pb.ResumeRunRequest(run_id=run_id, answers=[reply(request, "so")])
    answered = await Turn(call=other.agents.ResumeRun(resume)).until("input_received")
    GATES["works elsewhere"].set()
    for stream in (turn, watching, answered):
        await stream.to_the_end()
    assert watching.events == turn.events
    assert answered.events == turn.events[-len(answered.events) :]
    assert turn.events[-1].run_completed.final_answer.parts[0].text == "so"
    assert "run_resumed" not in turn.kinds


async def test_a_run_is_cancelled_through_another_server(servers: tuple[Served, Served]) -> None:
    one, other = servers
    turn = await begin(one, "waiter", "never opened").until("run_started")
    run_id = await turn.run_id()
    cancelled = await other.agents.CancelRun(pb.CancelRunRequest(run_id=run_id))
    assert cancelled.run.run_id == run_id
    assert (await turn.to_the_end()).kinds[-1] == "run_cancelled"
    assert (await watch(other, run_id).to_the_end()).events == turn.events
    run = (await other.agents.GetRun(pb.GetRunRequest(run_id=run_id))).run
    assert run.state == execution_pb2.EXECUTION_STATE_CANCELLED
