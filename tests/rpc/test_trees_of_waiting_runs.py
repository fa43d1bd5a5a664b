"""Trees over gRPC of runs that wait for answers, wait for their session, and are forked."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough.v1 import (
    agent_service_pb2,
    execution_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    policy_pb2,
    run_pb2,
)
from bough.v1 import eval_service_pb2 as pb
from tests.rpc.run_server import Served, Turn, begin, served, settings, watch

Rows = list[tuple[str, str]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the team that asks."""
    async with served(settings(tmp_path, python=["tests.rpc.question_agents"])) as serving:
        yield serving


async def tree(server: Served, run_id: str, as_of: int = 0) -> invocation_pb2.Invocation:
    request = pb.GetInvocationRequest(run_id=run_id, as_of_sequence=as_of)
    response: pb.GetInvocationResponse = await server.trees.GetInvocation(request)
    return response.invocation


async def listed(server: Served, run_id: str) -> run_pb2.Run:
    response: agent_service_pb2.ListRunsResponse = await server.agents.ListRuns(agent_service_pb2.ListRunsRequest())
    (found,) = [run for run in response.runs if run.run_id == run_id]
    return found


def rows(record: invocation_pb2.Invocation) -> Rows:
    """Return the state of the run, and of each agent."""
    named = [("run", record.state), *((agent.name, agent.state) for agent in record.agents)]
    return [(name, execution_pb2.ExecutionState.Name(state).removeprefix("EXECUTION_STATE_")) for name, state in named]


def asked(turn: Turn) -> dict[str, input_pb2.InputRequest]:
    """Return the requests of the last interruption of a stream, by prompt."""
    return {request.prompt: request for request in turn.events[-1].run_interrupted.requests}


def answer(server: Served, run_id: str, **answers: input_pb2.InputRequest) -> Turn:
    """Answer some requests, each with the name of its keyword."""
    made = [
        input_pb2.InputAnswer(input_id=request.input_id, value_json=f'"{word}"') for word, request in answers.items()
    ]
    request = agent_service_pb2.ResumeRunRequest(run_id=run_id, answers=made)
    return Turn(call=server.agents.ResumeRun(request))


async def test_the_tree_says_who_waits_until_everybody_is_answered(server: Served) -> None:
    turn = await begin(server, "chief", "go").to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    waiting = "INPUT_REQUIRED"
    record = await tree(server, run_id)
    assert rows(record) == [("run", waiting), ("chief", "RUNNING"), ("asker", waiting), ("asker", waiting)]
    assert (record.complete, record.HasField("end_time")) == (False, False)
    turn = await answer(server, run_id, one=requests["first?"]).to_the_end()
    assert rows(await tree(server, run_id)) == [
        ("run", waiting),
        ("chief", "RUNNING"),
        ("asker", "SUCCEEDED"),
        ("asker", waiting),
    ]
    turn = await answer(server, run_id, two=requests["second?"]).to_the_end()
    assert rows(await tree(server, run_id))[:2] == [("run", waiting), ("chief", waiting)]
    await answer(server, run_id, three=asked(turn)["third?"]).to_the_end()
    record = await tree(server, run_id)
    assert set(dict(rows(record)).values()) == {"SUCCEEDED"}
    assert record.final_response.parts[0].text == "one, two, three"
    assert list(record.anomalies) == [text for agent in record.agents for text in agent.anomalies] == []


async def test_the_tree_of_what_was_streamed_is_the_tree_of_the_run_wherever_it_stands(server: Served) -> None:
    turn = await begin(server, "chief", "go").to_the_end()
    run_id = await turn.run_id()
    log = [*turn.events]
    while log[-1].HasField("run_interrupted"):
        turn = await answer(server, run_id, **{f"a{n}": one for n, one in enumerate(asked(turn).values())}).to_the_end()
        log += turn.events
    for length in range(1, len(log) + 1):
        streamed = pb.AggregateEventsRequest(events=log[:length])
        aggregated = (await server.trees.AggregateEvents(iter([streamed]))).invocation
        assert aggregated == await tree(server, run_id, as_of=length)


async def test_a_run_that_waits_for_its_session_is_pending_and_agrees_with_its_row(server: Served) -> None:
    first = await begin(server, "asker", "what?").to_the_end()
    policy = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
    session_id = first.events[0].session_id
    second = await begin(server, "asker", "and then?", session_id=session_id, policy=policy).until("run_queued")
    run_id = await second.run_id()
    record = await tree(server, run_id)
    assert rows(record) == [("run", "PENDING"), ("asker", "PENDING")]
    assert not record.HasField("start_time")
    await answer(server, await first.run_id(), so=asked(first)["what?"]).to_the_end()
    await second.to_the_end()
    record, row = await tree(server, run_id), await listed(server, run_id)
    assert rows(record) == [("run", "INPUT_REQUIRED"), ("asker", "INPUT_REQUIRED")]
    dequeued = next(event for event in second.events if event.HasField("run_dequeued"))
    assert record.start_time == row.start_time == dequeued.record_time
    assert (row.state, row.last_sequence, record.complete) == (record.state, record.as_of_sequence, False)


async def test_a_fork_has_its_origin_s_tree_up_to_where_it_goes_its_own_way(server: Served) -> None:
    origin = await begin(server, "chief", "go", labels={"of": "origin"}).to_the_end()
    origin_id, through = await origin.run_id(), origin.through
    request = agent_service_pb2.ForkRunRequest(run_id=origin_id, after_sequence=through, labels={"of": "fork"})
    fork = await Turn(call=server.agents.ForkRun(request)).to_the_end()
    run_id = await fork.run_id()
    await answer(server, run_id, two=asked(fork)["second?"]).to_the_end()
    record, row = await tree(server, run_id), await listed(server, run_id)
    assert record.forked_from == row.forked_from == fork_pb2.ForkOrigin(run_id=origin_id, sequence=through)
    assert dict(record.labels) == dict(row.labels) == {"of": "fork"}
    assert (record.run_id, record.invocation_id, record.session_id) == (run_id, origin_id, fork.events[0].session_id)
    assert (record.state, record.start_time) == (row.state, row.start_time)
    assert [state for _, state in rows(record)] == ["INPUT_REQUIRED", "RUNNING", "INPUT_REQUIRED", "SUCCEEDED"]
    assert [state for _, state in rows(await tree(server, origin_id))][2:] == ["INPUT_REQUIRED", "INPUT_REQUIRED"]


async def test_the_summary_of_a_run_that_asks_is_enough_to_answer_it(server: Served) -> None:
    turn = await begin(server, "chief", "go").to_the_end()
    follow = follow_pb2.FollowOptions(view=follow_pb2.EVENT_VIEW_SUMMARY)
    until = follow_pb2.WATCH_UNTIL_INTERRUPTED
    summary = await watch(server, await turn.run_id(), follow=follow, until=until).to_the_end()
    assert summary.kinds == [
        "run_started",
        *["sub_agent_started", "sub_agent_started", "input_requested", "input_requested"],
        "run_interrupted",
    ]
    requested = {event.input_requested.request.prompt: event.input_requested.request for event in summary.events[3:5]}
    assert requested == asked(turn)
