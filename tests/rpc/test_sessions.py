"""Sessions over gRPC."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import agent_service_pb2, message_pb2, policy_pb2
from bough.v1 import session_service_pb2 as pb
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, begin
from tests.support.databases import in_each_database

pytestmark = in_each_database


async def test_a_session_is_made_listed_and_deleted(server: Served) -> None:
    made = (await server.sessions.CreateSession(pb.CreateSessionRequest(labels={"k": "v"}))).session
    await server.sessions.CreateSession(pb.CreateSessionRequest())
    assert (made.user_id, dict(made.labels), made.current_run_id) == ("local", {"k": "v"}, "")
    assert (await server.sessions.GetSession(pb.GetSessionRequest(session_id=made.session_id))).session == made
    labelled = await server.sessions.ListSessions(pb.ListSessionsRequest(filter={"labels": {"k": "v"}}))
    assert list(labelled.sessions) == [made]
    await server.sessions.DeleteSession(pb.DeleteSessionRequest(session_id=made.session_id))
    with pytest.raises(aio.AioRpcError) as caught:
        await server.sessions.GetSession(pb.GetSessionRequest(session_id=made.session_id))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(caught.value) == (
        ErrorInfo(reason="NOT_FOUND", domain="bough.dev"),
        ResourceInfo(resource_type="session", resource_name=made.session_id),
    )


async def _refused(call: Any) -> tuple[grpc.StatusCode, ErrorInfo]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    info = status_details(caught.value)[0]
    assert isinstance(info, ErrorInfo)
    return caught.value.code(), info


async def test_a_session_may_have_an_id_of_the_callers_which_no_other_has(server: Served) -> None:
    request = pb.CreateSessionRequest(session_id="chat/7", labels={"k": "v"})
    made = (await server.sessions.CreateSession(request)).session
    turn = await begin(server, "echo", "hi", session_id="chat/7").to_the_end()
    refused = await _refused(server.sessions.CreateSession(request))
    assert (made.session_id, dict(made.labels)) == ("chat/7", {"k": "v"})
    assert {event.session_id for event in turn.events} == {"chat/7"}
    expected = ErrorInfo(reason="SESSION_EXISTS", domain="bough.dev", metadata={"session_id": "chat/7"})
    assert refused == (grpc.StatusCode.ALREADY_EXISTS, expected)


async def test_a_session_is_made_once_for_a_request_id(server: Served) -> None:
    request = pb.CreateSessionRequest(labels={"k": "v"}, request_id="mine")
    first, again = [(await server.sessions.CreateSession(request)).session for _ in range(2)]
    request.labels["k"] = "w"
    refused = await _refused(server.sessions.CreateSession(request))
    assert first == again
    assert len((await server.sessions.ListSessions(pb.ListSessionsRequest())).sessions) == 1
    metadata = {"session_id": first.session_id}
    expected = ErrorInfo(reason="REQUEST_ID_REUSED", domain="bough.dev", metadata=metadata)
    assert refused == (grpc.StatusCode.ALREADY_EXISTS, expected)


async def test_a_request_with_an_id_of_a_session_and_a_request_id_may_be_repeated(server: Served) -> None:
    request = pb.CreateSessionRequest(session_id="chat", request_id="mine")
    first, again = [(await server.sessions.CreateSession(request)).session for _ in range(2)]
    assert first == again


async def test_the_labels_of_a_session_are_replaced(server: Served) -> None:
    made = (await server.sessions.CreateSession(pb.CreateSessionRequest(labels={"a": "1", "b": "2"}))).session
    request = pb.UpdateSessionRequest(session_id=made.session_id, labels={"b": "3"})
    updated = (await server.sessions.UpdateSession(request)).session
    assert dict(updated.labels) == {"b": "3"}
    assert (await server.sessions.GetSession(pb.GetSessionRequest(session_id=made.session_id))).session == updated
    made.ClearField("labels")
    made.labels["b"] = "3"
    assert updated == made
    missing = await _refused(server.sessions.UpdateSession(pb.UpdateSessionRequest(session_id="none")))
    assert missing == (grpc.StatusCode.NOT_FOUND, ErrorInfo(reason="NOT_FOUND", domain="bough.dev"))


async def test_a_session_says_when_a_run_last_began_or_ended_in_it(server: Served) -> None:
    made = (await server.sessions.CreateSession(pb.CreateSessionRequest())).session
    turn = await begin(server, "echo", "hi", session_id=made.session_id).to_the_end()
    request = pb.GetSessionRequest(session_id=made.session_id)
    after = (await server.sessions.GetSession(request)).session
    update = pb.UpdateSessionStateRequest(session_id=made.session_id)
    update.state_changes.add(key="a", value_json="1")
    await server.sessions.UpdateSessionState(update)
    assert not made.HasField("last_run_time")
    assert after.last_run_time == turn.events[-1].record_time
    assert (await server.sessions.GetSession(request)).session == after


async def test_a_run_makes_a_session_that_is_missing_if_it_is_asked_to(server: Served) -> None:
    create = agent_service_pb2.MISSING_SESSION_POLICY_CREATE
    missing = await _refused(begin(server, "echo", "hi", session_id="chat").call.read())
    first = await begin(server, "echo", "one", session_id="chat", on_missing_session=create).to_the_end()
    second = await begin(server, "echo", "two", session_id="chat", on_missing_session=create).to_the_end()
    listed = await server.sessions.ListMessages(pb.ListMessagesRequest(session_id="chat"))
    assert missing == (grpc.StatusCode.NOT_FOUND, ErrorInfo(reason="NOT_FOUND", domain="bough.dev"))
    assert {event.session_id for turn in (first, second) for event in turn.events} == {"chat"}
    assert second.events[0].run_started.session_cut == 2
    assert [message.parts[0].text for message in listed.messages] == ["two", "two", "one", "one"]


async def test_one_of_several_runs_at_once_makes_the_session(server: Served) -> None:
    queue = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
    create = agent_service_pb2.MISSING_SESSION_POLICY_CREATE
    turns = [
        begin(server, "echo", text, session_id="chat", on_missing_session=create, policy=queue) for text in "abcdefgh"
    ]
    await asyncio.gather(*(turn.to_the_end() for turn in turns))
    listed = await server.sessions.ListMessages(pb.ListMessagesRequest(session_id="chat"))
    assert [turn.kinds[-1] for turn in turns] == ["run_completed"] * 8
    assert len(listed.messages) == 16


async def test_pages_of_sessions_with_large_labels_stay_within_what_a_client_receives(server: Served) -> None:
    labels = {f"k{number:02}" + "x" * 60: "🌳" * 256 for number in range(64)}
    made = [(await server.sessions.CreateSession(pb.CreateSessionRequest(labels=labels))).session for _ in range(60)]
    listed: list[str] = []
    sizes: list[int] = []
    token = ""
    while not sizes or token:
        request = pb.ListSessionsRequest(page_size=1_000, page_token=token)
        page = await server.sessions.ListSessions(request)
        listed += [session.session_id for session in page.sessions]
        sizes.append(len(page.sessions))
        token = page.next_page_token
    assert listed == [session.session_id for session in reversed(made)]
    assert sizes == [14, 14, 14, 14, 4]


async def test_the_messages_of_a_session_are_listed_the_newest_first_over_its_turns(server: Served) -> None:
    first = await begin(server, "echo", "one").to_the_end()
    session_id = first.events[0].session_id
    second = await begin(server, "nester", "two", session_id=session_id).to_the_end()
    listed = await server.sessions.ListMessages(pb.ListMessagesRequest(session_id=session_id))
    user, assistant = message_pb2.MESSAGE_KIND_USER, message_pb2.MESSAGE_KIND_ASSISTANT
    told, answered = message_pb2.MESSAGE_KIND_SUB_AGENT_USER, message_pb2.MESSAGE_KIND_SUB_AGENT_ASSISTANT
    runs = [await second.run_id()] * 4 + [await first.run_id()] * 2
    assert [message.run_id for message in listed.messages] == runs
    assert [(message.position, message.kind, message.parts[0].text) for message in listed.messages] == [
        (6, assistant, "two"),
        (5, answered, "two"),
        (4, told, "two"),
        (3, user, "two"),
        (2, assistant, "one"),
        (1, user, "one"),
    ]


async def test_a_session_with_a_live_run_is_not_deleted(server: Served) -> None:
    turn = await begin(server, "waiter", "a held session").until("run_started")
    session_id = turn.events[0].session_id
    held = (await server.sessions.GetSession(pb.GetSessionRequest(session_id=session_id))).session
    with pytest.raises(aio.AioRpcError) as caught:
        await server.sessions.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
    GATES["a held session"].set()
    await turn.to_the_end()
    assert held.current_run_id == await turn.run_id()
    assert caught.value.code() == grpc.StatusCode.ABORTED
