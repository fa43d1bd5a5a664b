"""Conversations over gRPC."""

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import message_pb2
from bough.v1 import session_service_pb2 as pb
from tests.rpc.servers import status_details
from tests.rpc.team import GATES
from tests.rpc.turns import Served, begin


async def test_a_session_is_made_listed_and_deleted(server: Served) -> None:
    made = (await server.sessions.CreateSession(pb.CreateSessionRequest(labels={"k": "v"}))).session
    await server.sessions.CreateSession(pb.CreateSessionRequest())
    assert (made.user_id, dict(made.labels), made.current_run_id) == ("local", {"k": "v"}, "")
    assert (await server.sessions.GetSession(pb.GetSessionRequest(session_id=made.session_id))).session == made
    labelled = await server.sessions.ListSessions(pb.ListSessionsRequest(labels={"k": "v"}))
    assert list(labelled.sessions) == [made]
    await server.sessions.DeleteSession(pb.DeleteSessionRequest(session_id=made.session_id))
    with pytest.raises(aio.AioRpcError) as caught:
        await server.sessions.GetSession(pb.GetSessionRequest(session_id=made.session_id))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(caught.value) == (
        ErrorInfo(reason="NOT_FOUND", domain="bough"),
        ResourceInfo(resource_type="session", resource_name=made.session_id),
    )


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
    await begin(server, "nester", "two", session_id=session_id).to_the_end()
    listed = await server.sessions.ListMessages(pb.ListMessagesRequest(session_id=session_id))
    user, assistant = message_pb2.MESSAGE_KIND_USER, message_pb2.MESSAGE_KIND_ASSISTANT
    told, answered = message_pb2.MESSAGE_KIND_SUB_AGENT_USER, message_pb2.MESSAGE_KIND_SUB_AGENT_ASSISTANT
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
