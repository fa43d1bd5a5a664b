"""Session state over gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import agent_service_pb2, policy_pb2
from bough.v1 import session_service_pb2 as pb
from bough.v1.session_pb2 import SessionStateChange
from bough_server.identity import Principal
from bough_server.log.session_state import MAX_STATE_BYTES
from bough_server.store.ports.sessions import SessionPosition
from tests.rpc.interceptor_server import outcome, status_details
from tests.rpc.run_server import Served, Turn, begin, served, settings
from tests.rpc.state_agents import DOORS
from tests.support.databases import in_each_database

pytestmark = in_each_database


QUEUE = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose agents read and write session state."""
    async with served(settings(tmp_path, python=["tests.rpc.state_agents"])) as serving:
        yield serving


async def _new_session(server: Served) -> str:
    return str((await server.sessions.CreateSession(pb.CreateSessionRequest())).session.session_id)


async def _state(server: Served, session_id: str) -> str:
    return str((await server.sessions.GetSessionState(pb.GetSessionStateRequest(session_id=session_id))).state_json)


async def _update(server: Served, session_id: str, *changes: SessionStateChange) -> str:
    request = pb.UpdateSessionStateRequest(session_id=session_id, state_changes=changes)
    return str((await server.sessions.UpdateSessionState(request)).state_json)


async def _refused(server: Served, session_id: str, *changes: SessionStateChange) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await _update(server, session_id, *changes)
    return caught.value


def _keep(server: Served, session_id: str, door: str = "", **values: object) -> Turn:
    told = {"keep": values, **({"door": door} if door else {})}
    return begin(server, "keeper", json.dumps(told), session_id=session_id, policy=QUEUE)


def _answer(turn: Turn) -> object:
    return json.loads(turn.events[-1].run_completed.final_answer.parts[0].text)


async def test_a_new_session_has_no_values(server: Served) -> None:
    assert await _state(server, await _new_session(server)) == "{}"


async def test_what_a_call_changes_is_kept_as_it_was_written(server: Served) -> None:
    session_id = await _new_session(server)
    changes = [
        SessionStateChange(key="price", value_json="1.50"),
        SessionStateChange(key="a.b", value_json='{"z":1,  "a":2}'),
    ]
    changed = await _update(server, session_id, *changes)
    assert changed == await _state(server, session_id) == '{"a.b":{"z":1,  "a":2},"price":1.50}'
    delete, absent = SessionStateChange(key="a.b"), SessionStateChange(key="absent")
    assert await _update(server, session_id, delete, absent, changes[0]) == '{"price":1.50}'


async def test_a_run_begins_with_what_is_kept_and_the_next_with_what_it_keeps(server: Served) -> None:
    session_id = await _new_session(server)
    await _update(server, session_id, SessionStateChange(key="a", value_json="1"))
    first = await _keep(server, session_id, b=[2]).to_the_end()
    assert first.events[0].run_started.state_json == '{"a":1}'
    assert _answer(first) == {"a": 1, "b": [2]}
    assert await _state(server, session_id) == '{"a":1,"b":[2]}'
    second = await _keep(server, session_id, a=3).to_the_end()
    assert _answer(second) == {"a": 3, "b": [2]}


async def test_the_state_of_a_session_is_live_and_its_runs_alone_may_change_it(server: Served) -> None:
    session_id = await _new_session(server)
    turn = await _keep(server, session_id, door="live", a=1).until("value_recorded")
    assert await _state(server, session_id) == '{"a":1}'
    error = await _refused(server, session_id, SessionStateChange(key="a", value_json="2"))
    assert error.code() == grpc.StatusCode.ABORTED
    (info,) = [one for one in status_details(error) if isinstance(one, ErrorInfo)]
    assert (info.reason, info.metadata["run_id"]) == ("SESSION_BUSY", await turn.run_id())
    DOORS["live"].set()
    await turn.to_the_end()
    assert await _update(server, session_id, SessionStateChange(key="a", value_json="2")) == '{"a":2}'


async def test_a_session_that_another_server_changes_at_every_try_is_told_apart_from_a_busy_one(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await _new_session(server)
    sessions, read_position = server.app.store.sessions, server.app.store.sessions.read_position
    numbers = count(1)

    async def read_then_change(principal: Principal, session_id: str) -> SessionPosition:
        position = await read_position(principal, session_id)
        change = SessionStateChange(key="n", value_json=str(next(numbers)))
        await sessions.update_state(principal, session_id, [change])
        return position

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "read_position", read_then_change)
        _, error = await outcome(_keep(server, session_id, a=1).call)
    assert error is not None
    assert (error.code(), next(numbers) > 2) == (grpc.StatusCode.ABORTED, True)
    (info,) = [one for one in status_details(error) if isinstance(one, ErrorInfo)]
    assert (info.reason, info.metadata) == ("CONCURRENT_CHANGE", {"session_id": session_id})
    assert (await _keep(server, session_id, a=1).to_the_end()).kinds[-1] == "run_completed"


async def test_runs_begin_while_clients_change_the_values_without_pause(server: Served) -> None:
    session_id = await _new_session(server)
    is_over = asyncio.Event()

    async def change(name: str) -> int:
        made = 0
        while not is_over.is_set():
            with suppress(aio.AioRpcError):  # a run holds the session
                await _update(server, session_id, SessionStateChange(key=name, value_json=str(made)))
                made += 1
        return made

    changing = [asyncio.create_task(change(name)) for name in ("a", "b", "c")]
    try:
        for number in range(5):
            turn = await _keep(server, session_id, n=number).to_the_end()
            assert turn.kinds[-1] == "run_completed"
    finally:
        is_over.set()
        made = await asyncio.gather(*changing)
    assert min(made) > 0


async def test_a_queued_run_begins_with_what_its_session_has_by_then(server: Served) -> None:
    session_id = await _new_session(server)
    first = await _keep(server, session_id, door="queue", a=1).until("value_recorded")
    second = await _keep(server, session_id, b=2).until("run_queued")
    DOORS["queue"].set()
    await first.to_the_end()
    await second.to_the_end()
    (dequeued,) = [event.run_dequeued for event in second.events if event.HasField("run_dequeued")]
    assert (second.events[0].run_started.state_json, dequeued.state_json) == ("", '{"a":1}')
    assert _answer(second) == {"a": 1, "b": 2}


async def test_all_that_is_wrong_with_a_change_is_said_at_once_and_nothing_is_changed(server: Served) -> None:
    session_id = await _new_session(server)
    error = await _refused(
        server,
        session_id,
        SessionStateChange(key="good", value_json="1"),
        SessionStateChange(key="1st", value_json="2"),
        SessionStateChange(key="bad", value_json="{"),
        SessionStateChange(key="", value_json="NaN"),
    )
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    (bad,) = [one for one in status_details(error) if isinstance(one, BadRequest)]
    fields = [violation.field for violation in bad.field_violations]
    assert fields == [f"state_changes[{field}" for field in ("1].key", "2].value_json", "3].key", "3].value_json")]
    assert await _state(server, session_id) == "{}"


async def test_a_state_has_a_bound(server: Served) -> None:
    session_id = await _new_session(server)
    half = json.dumps("x" * (MAX_STATE_BYTES // 2))
    await _update(server, session_id, SessionStateChange(key="a", value_json=half))
    error = await _refused(server, session_id, SessionStateChange(key="b", value_json=half))
    (bad,) = [one for one in status_details(error) if isinstance(one, BadRequest)]
    assert [(one.field, "256 KiB" in one.description) for one in bad.field_violations] == [("changes", True)]
    moved = await _update(server, session_id, SessionStateChange(key="b", value_json=half), SessionStateChange(key="a"))
    assert list(json.loads(moved)) == ["b"]


async def test_a_change_of_nothing_is_refused(server: Served) -> None:
    assert (await _refused(server, await _new_session(server))).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_that_is_not_there_has_no_state(server: Served) -> None:
    gone = await _new_session(server)
    await _update(server, gone, SessionStateChange(key="a", value_json="1"))
    await server.sessions.DeleteSession(pb.DeleteSessionRequest(session_id=gone))
    for call in (
        server.sessions.GetSessionState(pb.GetSessionStateRequest(session_id=gone)),
        server.sessions.UpdateSessionState(
            pb.UpdateSessionStateRequest(session_id=gone, state_changes=[SessionStateChange(key="a")])
        ),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert status_details(caught.value)[1] == ResourceInfo(resource_type="session", resource_name=gone)


async def test_a_forks_session_has_what_was_kept_where_it_begins_and_goes_on_from_there(server: Served) -> None:
    session_id = await _new_session(server)
    await _update(server, session_id, SessionStateChange(key="before", value_json="0"))
    origin = await _keep(server, session_id, a=1).to_the_end()
    (written,) = [event.sequence for event in origin.events if event.HasField("session_state_changed")]
    await _update(server, session_id, SessionStateChange(key="a", value_json="9"))
    for after in (1, written):
        request = agent_service_pb2.ForkRunRequest(run_id=origin.events[0].run_id, after_sequence=after)
        fork = await Turn(call=server.agents.ForkRun(request)).to_the_end()
        own = fork.events[-1].session_id
        assert _answer(fork) == json.loads(await _state(server, own)) == {"before": 0, "a": 1}
        following = await _keep(server, own, a=2).to_the_end()
        assert json.loads(following.events[0].run_started.state_json) == {"before": 0, "a": 1}
    assert json.loads(await _state(server, session_id)) == {"before": 0, "a": 9}
