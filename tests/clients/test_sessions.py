"""Sessions by the client on a whole server: ids chosen by the caller, labels, and runs that create their session."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough import AlreadyExists, AsyncClient, NotFound, collect, text_of
from bough.v1 import agent_service_pb2, fork_pb2, policy_pb2
from tests.rpc.catalog_server import team_settings
from tests.rpc.run_server import served

CREATE = agent_service_pb2.MISSING_SESSION_POLICY_CREATE


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A client of a server with agents in a file and in code."""
    async with served(team_settings(tmp_path)) as server, AsyncClient(server.app.address) as connected:
        yield connected


async def test_a_session_may_have_an_id_of_the_callers_choice(client: AsyncClient) -> None:
    created = await client.sessions.create(session_id="chat-7", labels={"pr": "7"})
    assert (created.session_id, dict(created.labels)) == ("chat-7", {"pr": "7"})
    assert await client.sessions.get("chat-7") == created
    with pytest.raises(AlreadyExists) as taken:
        await client.sessions.create(session_id="chat-7")
    assert taken.value.reason == "SESSION_EXISTS"


async def test_a_session_that_is_created_again_under_its_request_id_is_the_same_one(client: AsyncClient) -> None:
    created = [await client.sessions.create(request_id="mine", labels={"pr": "7"}) for _ in range(2)]
    others = [await client.sessions.create() for _ in range(2)]
    assert created[0] == created[1]
    assert len({session.session_id for session in (*created, *others)}) == 3
    with pytest.raises(AlreadyExists) as reused:
        await client.sessions.create(request_id="mine")
    assert reused.value.reason == "REQUEST_ID_REUSED"


async def test_labels_of_a_session_are_replaced(client: AsyncClient) -> None:
    created = await client.sessions.create(labels={"pr": "7", "by": "ann"})
    changed = await client.sessions.update(created.session_id, labels={"pr": "8"})
    assert dict(changed.labels) == {"pr": "8"}
    assert await client.sessions.get(created.session_id) == changed
    assert [session async for session in client.sessions.list(labels={"pr": "8"})] == [changed]
    with pytest.raises(NotFound):
        await client.sessions.update("none", labels={})


async def test_a_turn_creates_its_session_only_if_that_is_asked_for(client: AsyncClient) -> None:
    with pytest.raises(NotFound):
        await collect(client.run("writer", "Go.", session_id="chat-7"))
    for _ in range(2):
        run = await collect(client.run("writer", "Go.", session_id="chat-7", on_missing_session=CREATE))
        assert (run.session_id, run.answer) == ("chat-7", "A word.")
    session = await client.sessions.get("chat-7")
    assert session.HasField("last_run_time")
    assert len([run async for run in client.list_runs(session_id="chat-7")]) == 2
    assert len([message async for message in client.sessions.list_messages("chat-7")]) == 4


async def test_a_run_in_the_background_is_asked_for_its_answer_later(client: AsyncClient) -> None:
    background = policy_pb2.RunPolicy(background=True)
    async with client.run("writer", "Go.", policy=background) as stream:
        run_id = await stream.started()
        await collect(stream)
    answer = await client.get_final_answer(run_id)
    assert answer is not None
    assert text_of(answer) == "A word."
    changes = fork_pb2.ForkChanges(agents={"writer": fork_pb2.AgentOverride(instruction="Be brief.")})
    forked = await collect(client.fork(run_id, 1, changes=changes, policy=background))
    (own,) = [event.run_forked for event in forked.events if event.HasField("run_forked")]
    assert (own.changes, own.policy.background) == (changes, True)
    assert (await client.get_run(forked.run_id)).HasField("deadline_time") is False
