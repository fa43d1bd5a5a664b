"""Two tenants on one server: neither learns of the other's runs and sessions, in any call."""

from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import (
    agent_service_pb2 as pb,
)
from bough.v1 import (
    eval_service_pb2,
    execution_pb2,
    run_pb2,
    session_pb2,
    session_service_pb2,
)
from bough_server.identity import Principal
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import begin, served, settings, watch

ANNE = Principal(tenant_id="anne's", user_id="anne")
BERT = Principal(tenant_id="bert's", user_id="bert")


@dataclass(slots=True)
class Caller:
    """Whose token the calls bring."""

    principal: Principal = ANNE

    def __call__(self) -> Principal:
        return self.principal


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    """The caller of every call; it stands where a token will say who that is."""
    made = Caller()
    monkeypatch.setattr("bough_server.app.current_principal", made)
    return made


async def _is_hidden(call: Awaitable[object], kind: str, name: str) -> None:
    """Asserts that something is refused as if it did not exist."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(caught.value) == (
        ErrorInfo(reason="NOT_FOUND", domain="bough.dev"),
        ResourceInfo(resource_type=kind, resource_name=name),
    )


async def test_another_tenants_runs_and_sessions_do_not_exist(tmp_path: Path, caller: Caller) -> None:
    session = session_service_pb2
    async with served(settings(tmp_path)) as server:
        turn = await begin(server, "waiter", "anne's gate", request_id="ask").until("run_started")
        run_id, session_id = await turn.run_id(), turn.events[0].session_id
        caller.principal = BERT
        for call in (
            server.agents.GetRun(pb.GetRunRequest(run_id=run_id)),
            server.agents.CancelRun(pb.CancelRunRequest(run_id=run_id)),
            server.agents.WatchRun(pb.WatchRunRequest(run_id=run_id)).read(),
            server.trees.GetInvocation(eval_service_pb2.GetInvocationRequest(run_id=run_id)),
        ):
            await _is_hidden(call, "run", run_id)
        for call in (
            server.sessions.GetSession(session.GetSessionRequest(session_id=session_id)),
            server.sessions.ListMessages(session.ListMessagesRequest(session_id=session_id)),
            server.sessions.DeleteSession(session.DeleteSessionRequest(session_id=session_id)),
            server.sessions.GetSessionState(session.GetSessionStateRequest(session_id=session_id)),
            server.sessions.UpdateSessionState(
                session.UpdateSessionStateRequest(
                    session_id=session_id, state_changes=[session_pb2.SessionStateChange(key="a")]
                )
            ),
            server.sessions.UpdateSession(session.UpdateSessionRequest(session_id=session_id, labels={"a": "b"})),
            begin(server, "echo", "hi", session_id=session_id).call.read(),
        ):
            await _is_hidden(call, "session", session_id)
        assert not (await server.agents.ListRuns(pb.ListRunsRequest())).runs
        annes = run_pb2.RunFilter(session_id=session_id)
        assert not (await server.agents.ListRuns(pb.ListRunsRequest(filter=annes))).runs
        assert not (await server.sessions.ListSessions(session.ListSessionsRequest())).sessions
        caller.principal = ANNE
        assert (
            await server.agents.GetRun(pb.GetRunRequest(run_id=run_id))
        ).run.state == execution_pb2.EXECUTION_STATE_RUNNING
        GATES["anne's gate"].set()
        await turn.to_the_end()
    assert turn.kinds == ["run_started", "value_recorded", "run_completed"]


async def test_a_request_id_belongs_to_its_tenant(tmp_path: Path, caller: Caller) -> None:
    async with served(settings(tmp_path)) as server:
        annes = await begin(server, "echo", "hi", request_id="ask").to_the_end()
        caller.principal = BERT
        berts = await begin(server, "echo", "ho", request_id="ask").to_the_end()
        again = await begin(server, "echo", "ho", request_id="ask").to_the_end()
        listed = (await server.agents.ListRuns(pb.ListRunsRequest())).runs
        (own,) = (await server.sessions.ListSessions(session_service_pb2.ListSessionsRequest())).sessions
        caller.principal = ANNE
        watched = await watch(server, await annes.run_id()).to_the_end()
    assert await annes.run_id() != await berts.run_id()
    assert again.events == berts.events
    assert [run.run_id for run in listed] == [await berts.run_id()]
    assert (own.session_id, own.user_id) == (berts.events[0].session_id, "bert")
    assert watched.events == annes.events
