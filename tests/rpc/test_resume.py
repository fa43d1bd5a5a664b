"""ResumeRun over gRPC: the first and last events of a stream, and the errors with their details."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bough import reply
from bough.v1 import agent_service_pb2 as pb
from bough.v1 import execution_pb2, follow_pb2, input_pb2, policy_pb2, run_pb2
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, begin, sequences, served, settings, watch
from tests.support.databases import in_each_database

pytestmark = in_each_database


CHIEF = "chief"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the teams that ask and wait."""
    async with served(settings(tmp_path, python=["tests.rpc.question_agents", "tests.rpc.gated_agents"])) as serving:
        yield serving


def answer(server: Served, run_id: str, *answers: input_pb2.InputAnswer, **fields: Any) -> Turn:
    """Answer a run."""
    timeout = fields.pop("timeout", None)
    request = pb.ResumeRunRequest(run_id=run_id, answers=answers, **fields)
    return Turn(call=server.agents.ResumeRun(request, timeout=timeout))


def asked(turn: Turn) -> dict[str, input_pb2.InputRequest]:
    """Return the requests of the last interruption of a stream, by prompt."""
    return {request.prompt: request for request in turn.events[-1].run_interrupted.requests}


async def refusal(turn: Turn) -> aio.AioRpcError:
    """Return the error of a refused call."""
    with pytest.raises(aio.AioRpcError) as raised:
        await turn.to_the_end()
    return raised.value


async def get(server: Served, run_id: str) -> run_pb2.Run:
    response: pb.GetRunResponse = await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))
    return response.run


async def test_each_stream_ends_where_the_run_waits_and_the_next_begins_there(server: Served) -> None:
    turn = await begin(server, CHIEF, "go").to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    streams = [turn]
    for prompts in (["first?"], ["second?"], ["third?"]):
        streams.append(
            await answer(server, run_id, *(reply(requests[one], one) for one in prompts)).to_the_end(),
        )
        requests = asked(streams[-1])
    assert [stream.kinds[0] for stream in streams[1:]] == ["run_resumed"] * 3
    assert [stream.kinds[-1] for stream in streams] == ["run_interrupted"] * 3 + ["run_completed"]
    seen = [event for stream in streams for event in stream.events]
    assert sequences(seen) == list(range(1, len(seen) + 1))
    assert seen == (await watch(server, run_id).to_the_end()).events
    for stream in streams[1:]:
        assert await stream.run_id() == run_id
        trailing = dict(await stream.call.trailing_metadata())
        assert trailing["bough-last-sequence"] == str(stream.through)


async def test_a_stream_begins_after_the_sequence_that_its_caller_has(server: Served) -> None:
    turn = await begin(server, CHIEF, "go").to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    answers = [reply(requests[one], one) for one in ("first?", "second?")]
    again = await answer(server, run_id, *answers, after_sequence=0).to_the_end()
    assert again.events[: len(turn.events)] == turn.events
    assert asked(again).keys() == {"third?"}
    late = await answer(server, run_id, *answers, after_sequence=again.through - 1).to_the_end()
    assert late.kinds == ["run_interrupted"]
    error = await refusal(answer(server, run_id, *answers, after_sequence=again.through + 1))
    assert error.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_a_stream_that_cannot_begin_leaves_the_run_unanswered(server: Served) -> None:
    turn = await begin(server, CHIEF, "go").to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    last = turn.through
    late = answer(server, run_id, reply(requests["first?"], "one"), after_sequence=last + 1)
    error = await refusal(late)
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    info, *_ = status_details(error)
    assert (info.reason, dict(info.metadata)) == ("SEQUENCE_OUT_OF_RANGE", {"last_sequence": str(last)})
    run = await get(server, run_id)
    assert (run.state, run.last_sequence) == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, last)
    assert [request.prompt for request in run.open_requests] == list(requests)


async def test_runs_that_ask_are_listed_with_what_they_ask(server: Served) -> None:
    turn = await begin(server, CHIEF, "go").to_the_end()
    run_id = await turn.run_id()
    await begin(server, "asker", "other?").to_the_end()
    request = pb.ListRunsRequest(
        filter=run_pb2.RunFilter(states=[execution_pb2.EXECUTION_STATE_INPUT_REQUIRED], agent=CHIEF)
    )
    (listed,) = (await server.agents.ListRuns(request)).runs
    assert listed == await get(server, run_id)
    assert list(listed.open_requests) == list(turn.events[-1].run_interrupted.requests)
    assert listed.last_sequence == turn.through


async def test_answers_that_do_not_fit_are_named_by_their_fields(server: Served) -> None:
    turn = await begin(server, CHIEF, "go").to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    wrong = input_pb2.InputAnswer(input_id=requests["second?"].input_id, value_json="{")
    error = await refusal(answer(server, run_id, reply(requests["first?"], 1), wrong, reply("absent", 1)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    (bad,) = [one for one in status_details(error) if hasattr(one, "field_violations")]
    assert [violation.field for violation in bad.field_violations] == ["answers[1].value_json", "answers[2].input_id"]
    assert (await get(server, run_id)).last_sequence == turn.through


async def test_another_answer_an_ended_run_and_a_foreign_one_are_refused_with_reasons(server: Served) -> None:
    turn = await begin(server, "asker", "what?").to_the_end()
    run_id, request = await turn.run_id(), asked(turn)["what?"]
    ended = await answer(server, run_id, reply(request, "this"), request_id="mine").to_the_end()
    again = await answer(server, run_id, reply(request, "this"), request_id="mine").to_the_end()
    assert again.events == ended.events
    other, late = reply(request, "that"), reply("absent", 1)
    wrong = grpc.StatusCode.FAILED_PRECONDITION
    refused = [
        (answer(server, run_id, other), wrong, "ALREADY_ANSWERED", {"input_id": request.input_id}),
        (answer(server, run_id, late), wrong, "RUN_ENDED", {"run_id": run_id}),
        (answer(server, "absent's", reply(request, "this")), grpc.StatusCode.NOT_FOUND, "NOT_FOUND", {}),
        (
            answer(server, run_id, other, request_id="mine"),
            grpc.StatusCode.ALREADY_EXISTS,
            "REQUEST_ID_REUSED",
            {"run_id": run_id},
        ),
    ]
    for call, code, reason, metadata in refused:
        error = await refusal(call)
        (info,) = [one for one in status_details(error) if hasattr(one, "reason")]
        assert (error.code(), info.reason, dict(info.metadata)) == (code, reason, metadata)


async def test_an_answer_to_a_run_that_goes_on_is_followed_from_its_own_event(server: Served) -> None:
    turn = await begin(server, "worker", "live").until("input_requested")
    run_id = await turn.run_id()
    (request,) = (await get(server, run_id)).open_requests
    answering = await answer(server, run_id, reply(request, "A")).until("input_received")
    GATES["live"].set()
    await asyncio.gather(answering.to_the_end(), turn.to_the_end())
    assert answering.kinds[0] == "input_received"
    assert "run_interrupted" not in turn.kinds
    assert answering.events == turn.events[-len(answering.events) :]
    assert turn.kinds[-1] == "run_completed"


async def test_a_run_that_was_answered_is_cancelled_when_its_last_follower_leaves(server: Served) -> None:
    policy = policy_pb2.RunPolicy()
    policy.disconnect_grace.nanos = 1
    turn = await begin(server, "then_worker", "left", policy=policy).to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    answering = await answer(server, run_id, reply(requests["before?"], "A")).until("input_received")
    answering.call.cancel()
    while (await get(server, run_id)).state != execution_pb2.EXECUTION_STATE_CANCELLED:
        pass  # a stream of our own would follow it, and keep it running
    ended = await watch(server, run_id, after_sequence=turn.through).to_the_end()
    (request,) = [event.cancel_requested for event in ended.events if event.HasField("cancel_requested")]
    assert (request.reason, ended.kinds[-1]) == (execution_pb2.CANCEL_REASON_DISCONNECTED, "run_cancelled")


async def test_the_deadline_of_who_answers_ends_the_run(server: Served) -> None:
    turn = await begin(server, "then_worker", "slow", timeout=60).to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    call = answer(server, run_id, reply(requests["before?"], "A"), timeout=1.5)
    assert (await refusal(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    ended = await watch(server, run_id, after_sequence=turn.through).to_the_end()
    assert ended.kinds[-1] == "run_failed"


async def test_a_view_and_a_mask_of_what_follows(server: Served) -> None:
    turn = await begin(server, CHIEF, "go").to_the_end()
    run_id, requests = await turn.run_id(), asked(turn)
    follow = follow_pb2.FollowOptions(view=follow_pb2.EVENT_VIEW_SUMMARY, event_names=["agent.control.*"])
    answers = [reply(requests[one], one) for one in ("first?", "second?")]
    resumed = await answer(server, run_id, *answers, follow=follow).to_the_end()
    assert resumed.kinds == ["run_resumed", "input_received", "input_received", "input_requested", "run_interrupted"]
