"""ForkRun over gRPC: its stream, its errors with their fields, both views, and its tree."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio

from bough.v1 import (
    agent_service_pb2 as pb,
)
from bough.v1 import (
    error_pb2,
    eval_service_pb2,
    execution_pb2,
    follow_pb2,
    fork_pb2,
    message_pb2,
    run_pb2,
    session_service_pb2,
)
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, begin, said, sequences, served, settings, watch
from tests.support.databases import in_each_database
from tests.support.log_laws import check_laws

pytestmark = in_each_database


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the teams in code, including the one that asks."""
    async with served(settings(tmp_path, python=["tests.rpc.agents", "tests.rpc.question_agents"])) as serving:
        yield serving


def fork(server: Served, run_id: str, after: int, *, timeout: float | None = None, **fields: Any) -> Turn:
    request = pb.ForkRunRequest(run_id=run_id, after_sequence=after, **fields)
    return Turn(call=server.agents.ForkRun(request, timeout=timeout))


async def refused(turn: Turn) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await turn.to_the_end()
    return caught.value


async def run_of(server: Served, run_id: str) -> run_pb2.Run:
    response: pb.GetRunResponse = await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))
    return response.run


async def test_a_forks_stream_begins_with_its_run_forked_and_its_log_with_its_origins(server: Served) -> None:
    origin = await begin(server, "lead", "hi").to_the_end()
    cut = origin.kinds.index("sub_agent_completed") + 1
    turn = await fork(server, await origin.run_id(), cut, labels={"why": "test"}).to_the_end()
    run_id = await turn.run_id()
    whole = await watch(server, run_id).to_the_end()
    tree = (await server.trees.GetInvocation(eval_service_pb2.GetInvocationRequest(run_id=run_id))).invocation
    run = await run_of(server, run_id)
    assert sequences(turn.events) == list(range(cut + 1, len(whole.events) + 1))
    assert turn.kinds[0] == "run_forked"
    assert whole.events[cut:] == turn.events
    assert {(event.run_id, event.session_id) for event in whole.events} == {(run_id, run.session_id)}
    assert run.session_id != origin.events[0].session_id
    check_laws(whole.events)
    assert turn.events[-1].run_completed.final_answer.parts == origin.events[-1].run_completed.final_answer.parts
    assert run.forked_from == fork_pb2.ForkOrigin(run_id=await origin.run_id(), sequence=cut)
    assert tree.forked_from == run.forked_from
    assert dict(run.labels) == dict(tree.labels) == {"why": "test"}
    assert dict(await turn.call.trailing_metadata())["bough-last-sequence"] == str(len(whole.events))


async def test_the_summary_of_a_fork_shows_what_is_shared_as_that_of_its_origin(server: Served) -> None:
    origin = await begin(server, "lead", "hi").to_the_end()
    cut = len(origin.events) - 1
    turn = await fork(server, await origin.run_id(), cut).to_the_end()
    summary = follow_pb2.FollowOptions(view=follow_pb2.EVENT_VIEW_SUMMARY)
    shown = [await watch(server, await one.run_id(), follow=summary).to_the_end() for one in (origin, turn)]
    shared = [[event for event in one.events if event.sequence <= cut] for one in shown]
    assert [event.WhichOneof("payload") for event in shared[0]] == [event.WhichOneof("payload") for event in shared[1]]
    assert sequences(shared[0]) == sequences(shared[1])
    assert [kind for kind in shown[1].kinds if kind == "run_forked"] == ["run_forked"]


async def test_a_fork_of_a_run_that_waits_ends_its_stream_where_it_waits_itself(server: Served) -> None:
    origin = await begin(server, "asker", "well?").to_the_end()
    assert origin.kinds[-1] == "run_interrupted"
    turn = await fork(server, await origin.run_id(), len(origin.events)).to_the_end()
    assert turn.kinds == ["run_forked", "run_interrupted"]
    run = await run_of(server, await turn.run_id())
    assert (run.state, run.open_requests) == (
        execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
        (await run_of(server, await origin.run_id())).open_requests,
    )


async def test_the_same_request_follows_the_same_fork(server: Served) -> None:
    origin = await begin(server, "echo", "hi").to_the_end()
    first = await fork(server, await origin.run_id(), 1, request_id="f").to_the_end()
    second = await fork(server, await origin.run_id(), 1, request_id="f").to_the_end()
    assert second.events == first.events
    error = await refused(fork(server, await origin.run_id(), 1, request_id="f", labels={"a": "b"}))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize(
    ("after", "code", "reason"),
    [
        (2, grpc.StatusCode.FAILED_PRECONDITION, "FORK_REFUSED"),
        (3, grpc.StatusCode.OUT_OF_RANGE, "SEQUENCE_OUT_OF_RANGE"),
        (2**60, grpc.StatusCode.OUT_OF_RANGE, "SEQUENCE_OUT_OF_RANGE"),
    ],
)
async def test_a_place_where_a_run_cannot_be_forked_is_refused_with_its_reason(
    server: Served, after: int, code: grpc.StatusCode, reason: str
) -> None:
    origin = await begin(server, "echo", "hi").to_the_end()
    assert len(origin.events) == 2
    error = await refused(fork(server, await origin.run_id(), after))
    info = next(detail for detail in status_details(error) if isinstance(detail, ErrorInfo))
    assert (error.code(), info.reason, info.domain) == (code, reason, "bough.dev")


async def test_a_fork_of_no_run_is_not_found(server: Served) -> None:
    assert (await refused(fork(server, "nothing", 1))).code() == grpc.StatusCode.NOT_FOUND


async def test_changes_that_fit_nothing_name_all_their_fields(server: Served) -> None:
    origin = await begin(server, "lead", "hi").to_the_end()
    changes = fork_pb2.ForkChanges()
    changes.agents["absent"].model = "nothing"
    changes.agents["echo"].instruction = "{{input}}"
    error = await refused(fork(server, await origin.run_id(), 1, changes=changes))
    _, bad = status_details(error)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [(violation.field, violation.reason) for violation in bad.field_violations] == [
        ('changes.agents["absent"].model', "INVALID_REQUEST"),
        ('changes.agents["absent"]', "UNKNOWN_AGENT"),
        ('changes.agents["echo"].instruction', "INVALID_REQUEST"),
        ('changes.agents["echo"]', "INVALID_REQUEST"),
    ]


@pytest.mark.parametrize(
    "message",
    [
        message_pb2.Message(),
        message_pb2.Message(parts=[message_pb2.Part(text=" ")]),
        message_pb2.Message(parts=[message_pb2.Part(text="hi")], role=message_pb2.ROLE_TOOL),
    ],
)
async def test_what_a_fork_is_told_must_be_an_input(server: Served, message: message_pb2.Message) -> None:
    origin = await begin(server, "echo", "hi").to_the_end()
    error = await refused(fork(server, await origin.run_id(), 1, changes=fork_pb2.ForkChanges(input=message)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_fork_that_is_told_something_else_answers_that_and_outlives_its_origin(server: Served) -> None:
    origin = await begin(server, "echo", "hi").to_the_end()
    changes = fork_pb2.ForkChanges(input=said("good evening"))
    turn = await fork(server, await origin.run_id(), 1, changes=changes).to_the_end()
    await server.sessions.DeleteSession(
        session_service_pb2.DeleteSessionRequest(session_id=origin.events[0].session_id)
    )
    whole = await watch(server, await turn.run_id()).to_the_end()
    tree = (
        await server.trees.GetInvocation(eval_service_pb2.GetInvocationRequest(run_id=await turn.run_id()))
    ).invocation
    again = await begin(server, "echo", "and now", session_id=whole.events[0].session_id).to_the_end()
    assert whole.events[-1].run_completed.final_answer.parts[0].text == "good evening"
    assert tree.user_content.parts[0].text == "good evening"
    assert again.events[0].run_started.session_cut == 2


async def test_the_deadline_of_the_call_that_forks_is_the_forks(server: Served) -> None:
    began = begin(server, "waiter", "the gate of a fork")
    origin_id = await (await began.until("run_started")).run_id()
    turn = await fork(server, origin_id, 1, timeout=1.5).until("run_forked")
    whole = await watch(server, await turn.run_id()).to_the_end()
    GATES["the gate of a fork"].set()
    origin = await began.to_the_end()
    assert whole.events[1].run_forked.HasField("deadline_time")
    assert whole.events[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert origin.kinds[-1] == "run_completed"
