"""Starting and following a run over gRPC."""

import asyncio

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import error_pb2, event_pb2, execution_pb2, follow_pb2, policy_pb2, run_pb2
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import outcome, status_details
from tests.rpc.run_server import Served, begin, said, sequences, watch

_NO_GRACE = policy_pb2.RunPolicy()
_NO_GRACE.disconnect_grace.FromNanoseconds(0)


async def _failed(call: object) -> tuple[grpc.StatusCode, tuple[object, ...]]:
    _, error = await outcome(call)  # type: ignore[arg-type]
    assert error is not None
    return error.code(), status_details(error)


async def test_a_turn_streams_every_event_of_every_agent_in_order_and_ends_well(server: Served) -> None:
    turn = await begin(server, "lead", "hi").to_the_end()
    run_id = await turn.run_id()
    assert turn.kinds[0] == "run_started"
    assert turn.kinds[-1] == "run_completed"
    assert turn.events[-1].run_completed.final_answer.parts[0].text == "hi 1, hi 2, hi 3"
    assert turn.kinds.count("sub_agent_started") == turn.kinds.count("sub_agent_completed") == 4
    assert sequences(turn.events) == list(range(1, len(turn.events) + 1))
    assert {event.run_id for event in turn.events} == {run_id}
    assert len({event.session_id for event in turn.events}) == 1
    assert turn.through == len(turn.events)
    assert dict(await turn.call.trailing_metadata())["bough-last-sequence"] == str(len(turn.events))
    assert await turn.call.code() == grpc.StatusCode.OK


async def test_a_finished_run_is_watched_from_any_sequence(server: Served) -> None:
    turn = await begin(server, "lead", "hi").to_the_end()
    run_id = await turn.run_id()
    last = len(turn.events)
    for after in (0, 1, last - 1, last):
        watched = await watch(server, run_id, after_sequence=after).to_the_end()
        assert watched.events == turn.events[after:]
        assert await watched.run_id() == run_id
        assert dict(await watched.call.trailing_metadata())["bough-last-sequence"] == str(last)


async def test_watching_beyond_the_log_is_out_of_range_and_says_what_there_is(server: Served) -> None:
    turn = await begin(server, "echo", "hi").to_the_end()
    last = str(len(turn.events))
    code, details = await _failed(watch(server, await turn.run_id(), after_sequence=99).call)
    assert code == grpc.StatusCode.OUT_OF_RANGE
    assert details == (ErrorInfo(reason="SEQUENCE_OUT_OF_RANGE", domain="bough.dev", metadata={"last_sequence": last}),)


async def test_a_live_run_is_watched_by_many_and_to_what_is_there(server: Served) -> None:
    turn = await begin(server, "waiter", "many").until("run_started")
    run_id = await turn.run_id()
    current = await watch(server, run_id, until=follow_pb2.WATCH_UNTIL_CURRENT).to_the_end()
    others = [asyncio.create_task(watch(server, run_id).to_the_end()) for _ in range(5)]
    GATES["many"].set()
    await turn.to_the_end()
    assert current.kinds == ["run_started"]
    assert [other.events for other in await asyncio.gather(*others)] == [turn.events] * 5
    assert turn.kinds == ["run_started", "value_recorded", "run_completed"]


async def test_a_masked_stream_shows_what_was_asked_and_says_how_far_it_is(server: Served) -> None:
    follow = follow_pb2.FollowOptions(event_names=["agent.sub_agent.started"])
    masked = await begin(server, "lead", "hi", follow=follow).to_the_end()
    whole = await watch(server, await masked.run_id()).to_the_end()
    wanted = ("run_started", "sub_agent_started", "run_completed")
    assert masked.events == [event for event in whole.events if event.WhichOneof("payload") in wanted]
    assert masked.through == len(whole.events)


async def test_a_quiet_stream_has_heartbeats(server: Served) -> None:
    follow = follow_pb2.FollowOptions()
    follow.heartbeat_interval.FromMilliseconds(100)
    turn = begin(server, "waiter", "quiet", follow=follow)
    first, beat = await turn.call.read(), await turn.call.read()
    GATES["quiet"].set()
    assert [event.sequence for event in first.batch.events] == [1]
    assert beat == pb.RunResponse(batch=follow_pb2.EventBatch(through_sequence=1))
    assert (await turn.to_the_end()).kinds[-1] == "run_completed"


@pytest.mark.parametrize(
    ("request_", "reason", "kind", "name"),
    [
        (pb.RunRequest(agent="absent", input=said("hi")), "UNKNOWN_AGENT", "agent", "absent"),
        (pb.RunRequest(agent="echo", session_id="none", input=said("hi")), "NOT_FOUND", "session", "none"),
    ],
)
async def test_a_turn_of_what_is_not_there_is_not_found(
    server: Served, request_: pb.RunRequest, reason: str, kind: str, name: str
) -> None:
    code, details = await _failed(server.agents.Run(request_))
    assert code == grpc.StatusCode.NOT_FOUND
    assert details == (
        ErrorInfo(reason=reason, domain="bough.dev", metadata={"name": name} if kind == "agent" else {}),
        ResourceInfo(resource_type=kind, resource_name=name),
    )


async def test_an_input_of_5_mb_is_refused_by_name_and_one_of_20_by_the_transport(server: Served) -> None:
    code, details = await _failed(begin(server, "echo", "x" * 5_000_000).call)
    _, bad_request = details
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in bad_request.field_violations] == ["input.parts"]  # type: ignore[attr-defined]
    _, error = await outcome(begin(server, "echo", "x" * 20_000_000).call)
    assert error is not None
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_same_request_follows_the_run_it_started_and_another_content_is_refused(server: Served) -> None:
    first = await begin(server, "echo", "hi", request_id="once").to_the_end()
    again = await begin(
        server, "echo", "hi", request_id="once", follow=follow_pb2.FollowOptions(view=follow_pb2.EVENT_VIEW_FULL)
    ).to_the_end()
    assert again.events == first.events
    code, details = await _failed(begin(server, "echo", "ho", request_id="once").call)
    assert code == grpc.StatusCode.ALREADY_EXISTS
    metadata = {"run_id": await first.run_id()}
    assert details == (ErrorInfo(reason="REQUEST_ID_REUSED", domain="bough.dev", metadata=metadata),)


async def test_a_session_runs_one_turn_at_a_time(server: Served) -> None:
    turn = await begin(server, "waiter", "busy").until("run_started")
    code, details = await _failed(begin(server, "echo", "hi", session_id=turn.events[0].session_id).call)
    GATES["busy"].set()
    await turn.to_the_end()
    assert code == grpc.StatusCode.ABORTED
    session_id = turn.events[0].session_id
    metadata = {"run_id": await turn.run_id(), "session_id": session_id}
    assert details == (ErrorInfo(reason="SESSION_BUSY", domain="bough.dev", metadata=metadata),)
    after = await begin(server, "echo", "hi", session_id=session_id).to_the_end()
    assert after.events[0].run_started.session_cut == 2


async def test_what_goes_wrong_in_a_run_is_an_event_and_the_stream_ends_well(server: Served) -> None:
    turn = await begin(server, "failing", "of its own").to_the_end()
    assert turn.kinds == ["run_started", "run_failed"]
    assert await turn.call.code() == grpc.StatusCode.OK


async def test_a_cancelled_run_ends_its_stream_well(server: Served) -> None:
    turn = await begin(server, "waiter", "cancelled").until("run_started")
    run_id = await turn.run_id()
    await server.agents.CancelRun(pb.CancelRunRequest(run_id=run_id))
    current = await watch(server, run_id, until=follow_pb2.WATCH_UNTIL_CURRENT).to_the_end()
    await turn.to_the_end()
    assert current.kinds[:2] == ["run_started", "cancel_requested"]
    assert turn.kinds == ["run_started", "cancel_requested", "run_cancelled"]
    run = (await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))).run
    assert (run.state, run.error.reason) == (execution_pb2.EXECUTION_STATE_CANCELLED, error_pb2.ERROR_REASON_CANCELLED)
    again = await server.agents.CancelRun(pb.CancelRunRequest(run_id=run_id))
    assert again.run == run


async def test_a_run_whose_deadline_passes_fails_by_it(server: Served) -> None:
    turn = begin(server, "waiter", "overdue", timeout=1.5)
    run_id = await turn.run_id()
    code = grpc.StatusCode.OK
    try:
        await turn.to_the_end()
    except aio.AioRpcError as error:
        code = error.code()
    # Whichever of the two ends comes first.
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED or turn.kinds[-1] == "run_failed"
    watched = await watch(server, run_id).to_the_end()
    assert watched.events[0].run_started.HasField("deadline_time")
    assert watched.kinds[-1] == "run_failed"
    assert watched.events[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED


async def test_a_background_run_outlives_its_call(server: Served) -> None:
    policy = policy_pb2.RunPolicy(background=True)
    turn = await begin(server, "waiter", "background", policy=policy, timeout=20).until("run_started")
    turn.call.cancel()
    watched = watch(server, await turn.run_id())
    GATES["background"].set()
    assert (await watched.to_the_end()).kinds == ["run_started", "value_recorded", "run_completed"]
    assert not watched.events[0].run_started.HasField("deadline_time")


async def test_a_run_without_followers_is_cancelled_after_its_grace(server: Served) -> None:
    turn = await begin(server, "waiter", "alone", policy=_NO_GRACE).until("run_started")
    watched = watch(server, await turn.run_id())
    await watched.until("run_started")
    turn.call.cancel()
    watched.call.cancel()
    run_id = await turn.run_id()
    state = execution_pb2.EXECUTION_STATE_RUNNING
    while state == execution_pb2.EXECUTION_STATE_RUNNING:  # a stream of our own would follow it again
        state = (await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))).run.state
    seen = await watch(server, run_id).to_the_end()
    assert seen.kinds == ["run_started", "cancel_requested", "run_cancelled"]
    assert seen.events[1].cancel_requested.reason == execution_pb2.CANCEL_REASON_DISCONNECTED


async def test_a_run_is_shown_with_its_answer_once_it_has_succeeded(server: Served) -> None:
    gate = GATES["shown"]
    gate.clear()
    turn = await begin(server, "waiter", "shown").until("run_started")
    request = pb.GetRunRequest(run_id=await turn.run_id())
    before = await server.agents.GetRun(request)
    gate.set()
    await turn.to_the_end()
    after = await server.agents.GetRun(request)
    failed = await begin(server, "failing", "x").to_the_end()
    without = await server.agents.GetRun(pb.GetRunRequest(run_id=await failed.run_id()))
    assert before.run.state == execution_pb2.EXECUTION_STATE_RUNNING
    assert after.final_answer == turn.events[-1].run_completed.final_answer
    assert [each.HasField("final_answer") for each in (before, after, without)] == [False, True, False]


async def test_a_run_says_who_started_it_with_what_until_when_and_what_it_used(server: Served) -> None:
    said_at_length = "Once upon a time. " * 20
    turn = await begin(server, "lead", said_at_length, timeout=60.0).to_the_end()
    run = (await server.agents.GetRun(pb.GetRunRequest(run_id=await turn.run_id()))).run
    started = turn.events[0].run_started
    assert (run.user_id, started.user_id) == ("local", "local")
    assert run.input_excerpt == said_at_length[:200]
    assert run.deadline_time == started.deadline_time
    assert run.HasField("deadline_time")
    assert run.tree_usage == turn.events[-1].run_completed.tree_usage


async def test_a_cancellation_carries_its_note(server: Served) -> None:
    turn = await begin(server, "waiter", "noted").until("run_started")
    await server.agents.CancelRun(pb.CancelRunRequest(run_id=await turn.run_id(), note="Not needed any more."))
    await turn.to_the_end()
    (asked,) = [event.cancel_requested for event in turn.events if event.HasField("cancel_requested")]
    assert asked == event_pb2.CancelRequested(
        reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="local", note="Not needed any more."
    )
    assert turn.events[-1].run_cancelled.cancel_reason == execution_pb2.CANCEL_REASON_CALLER


async def test_runs_are_listed_the_newest_first_in_pages_and_by_filters(server: Served) -> None:
    ids = []
    for number in range(5):
        labels = {"parity": "odd" if number % 2 else "even"}
        turn = await begin(server, "echo", str(number), labels=labels).to_the_end()
        ids.append(await turn.run_id())
    pages, token = [], ""
    while True:
        page = await server.agents.ListRuns(pb.ListRunsRequest(page_size=2, page_token=token))
        pages.append([run.run_id for run in page.runs])
        token = page.next_page_token
        if not token:
            break
    odd = await server.agents.ListRuns(pb.ListRunsRequest(filter=run_pb2.RunFilter(labels={"parity": "odd"})))
    assert pages == [[ids[4], ids[3]], [ids[2], ids[1]], [ids[0]]]
    assert [run.run_id for run in odd.runs] == [ids[3], ids[1]]
    code, details = await _failed_unary(server.agents.ListRuns(pb.ListRunsRequest(page_token="mine")))
    assert (code, details[0]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        ErrorInfo(reason="INVALID_PAGE_TOKEN", domain="bough.dev"),
    )


async def _failed_unary(call: object) -> tuple[grpc.StatusCode, tuple[object, ...]]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), status_details(caught.value)


async def test_a_caller_that_leaves_while_its_run_is_accepted_leaves_no_run_behind(server: Served) -> None:
    for patience in range(0, 600, 4):
        turn = begin(server, "echo", "hi")
        for _ in range(patience):
            await asyncio.sleep(0)
        turn.call.cancel()
    for _ in range(100):
        await begin(server, "echo", "later").to_the_end()
        running = run_pb2.RunFilter(states=[execution_pb2.EXECUTION_STATE_RUNNING])
        listed = await server.agents.ListRuns(pb.ListRunsRequest(filter=running))
        if not listed.runs:
            break
    assert list(listed.runs) == []
