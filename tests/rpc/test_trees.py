"""Trees over gRPC: of finished and running runs, as of a sequence, and of events from any source."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import (
    agent_service_pb2,
    error_pb2,
    event_pb2,
    execution_pb2,
    invocation_pb2,
    run_pb2,
    session_service_pb2,
)
from bough.v1 import eval_service_pb2 as pb
from bough_server.store.ports.log import StoredEvent
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, begin


async def _tree(
    server: Served, run_id: str, *, as_of: int = 0, options: invocation_pb2.InvocationOptions | None = None
) -> invocation_pb2.Invocation:
    request = pb.GetInvocationRequest(run_id=run_id, as_of_sequence=as_of, options=options)
    response: pb.GetInvocationResponse = await server.trees.GetInvocation(request)
    return response.invocation


def _outline(tree: invocation_pb2.Invocation) -> list[tuple[int, str, str]]:
    return [(node.depth, node.name, execution_pb2.ExecutionState.Name(node.state)) for node in tree.agents]


async def test_the_tree_of_a_finished_run_says_who_called_whom(server: Served) -> None:
    turn = await begin(server, "lead", "hi", labels={"team": "desk"}).to_the_end()
    tree = await _tree(server, await turn.run_id())
    done = "EXECUTION_STATE_SUCCEEDED"
    assert _outline(tree) == [
        (0, "lead", done),
        (1, "echo", done),
        (1, "echo", done),
        (1, "nester", done),
        (2, "echo", done),
    ]
    assert (tree.state, tree.complete, tree.as_of_sequence) == (
        execution_pb2.EXECUTION_STATE_SUCCEEDED,
        True,
        len(turn.events),
    )
    assert (tree.user_content.parts[0].text, tree.final_response.parts[0].text) == ("hi", "hi 1, hi 2, hi 3")
    assert dict(tree.labels) == {"team": "desk"}


async def test_a_tree_is_given_as_of_any_sequence(server: Served) -> None:
    turn = await begin(server, "lead", "hi").to_the_end()
    run_id = await turn.run_id()
    for event in turn.events:
        tree = await _tree(server, run_id, as_of=event.sequence)
        started = [each for each in turn.events[: event.sequence] if each.HasField("sub_agent_started")]
        assert len(tree.agents) == 1 + len(started)
        assert (tree.as_of_sequence, tree.complete) == (event.sequence, event.sequence == len(turn.events))
    with pytest.raises(aio.AioRpcError) as caught:
        await _tree(server, run_id, as_of=len(turn.events) + 1)
    assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
    metadata = {"last_sequence": str(len(turn.events))}
    assert status_details(caught.value) == (
        ErrorInfo(reason="SEQUENCE_OUT_OF_RANGE", domain="bough.dev", metadata=metadata),
    )


async def test_a_running_and_a_failed_run_have_trees_too(server: Served) -> None:
    turn = await begin(server, "waiter", "tree").until("run_started")
    running = await _tree(server, await turn.run_id())
    GATES["tree"].set()
    await turn.to_the_end()
    failed = await _tree(server, await (await begin(server, "failing", "no").to_the_end()).run_id())
    assert (running.complete, _outline(running)) == (False, [(0, "waiter", "EXECUTION_STATE_RUNNING")])
    assert (failed.complete, _outline(failed)) == (True, [(0, "failing", "EXECUTION_STATE_FAILED")])
    assert failed.error.reason == error_pb2.ERROR_REASON_INTERNAL


async def test_the_tree_of_the_streamed_events_is_the_tree_of_the_run(server: Served) -> None:
    turn = await begin(server, "lead", "hi").to_the_end()
    options = invocation_pb2.InvocationOptions(max_agents=3)
    half = len(turn.events) // 2
    requests = [
        pb.AggregateEventsRequest(events=turn.events[:half], options=options),
        pb.AggregateEventsRequest(events=turn.events[half:]),
    ]
    aggregated = (await server.trees.AggregateEvents(iter(requests))).invocation
    assert aggregated == await _tree(server, await turn.run_id(), options=options)
    assert (len(aggregated.agents), aggregated.agents_total) == (3, 5)


async def test_the_tree_of_nothing_is_empty(server: Served) -> None:
    empty = (await server.trees.AggregateEvents(iter([]))).invocation
    assert (list(empty.agents), empty.as_of_sequence) == ([], 0)


async def test_more_events_than_one_call_may_bring_are_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough_server.api.eval_service.MAX_EVENTS", 3)
    requests = [pb.AggregateEventsRequest(events=[event_pb2.AgentEvent(invocation_id="R")] * 2)] * 2
    with pytest.raises(aio.AioRpcError) as caught:
        await server.trees.AggregateEvents(iter(requests))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_tree_of_an_unknown_run_is_not_found(server: Served) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _tree(server, "none")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(caught.value) == (
        ErrorInfo(reason="NOT_FOUND", domain="bough.dev"),
        ResourceInfo(resource_type="run", resource_name="none"),
    )


@pytest.mark.parametrize("pages", [0, 1])
async def test_the_tree_of_a_run_that_is_deleted_while_it_is_read_is_not_found(
    server: Served, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    turn = await begin(server, "lead", "hi").to_the_end()
    run_id, session_id = await turn.run_id(), turn.events[0].session_id
    log, reads = server.app.store.log, count()
    read = log.read

    async def deleted_meanwhile(*args: Any, **kwargs: Any) -> Sequence[StoredEvent]:
        if next(reads) == pages:
            await server.sessions.DeleteSession(session_service_pb2.DeleteSessionRequest(session_id=session_id))
        return await read(*args, **kwargs)

    monkeypatch.setattr(log, "read", deleted_meanwhile)
    with pytest.raises(aio.AioRpcError) as caught:
        await _tree(server, run_id)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(caught.value) == (
        ErrorInfo(reason="NOT_FOUND", domain="bough.dev"),
        ResourceInfo(resource_type="run", resource_name=run_id),
    )


async def test_the_rows_of_runs_agree_with_their_trees(server: Served) -> None:
    for agent in ("lead", "failing"):
        await begin(server, agent, "hi", labels={"of": agent}).to_the_end()
    runs = (await server.agents.ListRuns(agent_service_pb2.ListRunsRequest())).runs
    assert [run.agent for run in runs] == ["failing", "lead"]
    for run in runs:
        tree = await _tree(server, run.run_id)
        of_tree = run_pb2.Run(
            run_id=tree.run_id,
            session_id=tree.session_id,
            agent=tree.agent,
            state=tree.state,
            error=tree.error if tree.HasField("error") else None,
            labels=tree.labels,
            start_time=tree.start_time,
            end_time=tree.end_time,
            last_sequence=tree.as_of_sequence,
            tree_usage=tree.tree_usage,
        )
        for name in ("user_id", "input_excerpt", "create_time"):
            run.ClearField(name)
        assert run == of_tree
