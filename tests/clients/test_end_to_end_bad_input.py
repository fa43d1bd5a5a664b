"""Invalid calls: a clear status for each, on a server and a connection that keep working."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import (
    agent_pb2,
    catalog_service_pb2,
    eval_service_pb2,
    follow_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
    session_service_pb2,
)
from bough.v1 import agent_service_pb2 as pb
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, begin, said, served, settings

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the team of code."""
    async with served(settings(tmp_path)) as serving:
        yield serving


async def _refusal(call: Awaitable[object], server: Served) -> aio.AioRpcError:
    """Return the error of a call, and check that the connection and the server serve the next one."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    after = await begin(server, "echo", "still there").to_the_end()
    assert after.kinds == ["run_started", "run_completed"]
    return caught.value


TOO_SHALLOW = policy_pb2.RunPolicy(limits=policy_pb2.Limits(depth=-1))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.RunRequest(input=said("hi")), ["agent"]),
        (pb.RunRequest(agent="x" * 60, input=said("hi")), ["agent"]),
        (pb.RunRequest(agent="echo"), ["input"]),
        (pb.RunRequest(agent="echo", input=message_pb2.Message()), ["input"]),
        (pb.RunRequest(agent="echo", input=said("")), ["input"]),
        (pb.RunRequest(agent="echo", input=said("x" * 5_000_000)), ["input.parts"]),
        (pb.RunRequest(agent="echo", input=said("hi"), request_id="x" * 129), ["request_id"]),
        (pb.RunRequest(agent="echo", input=said("hi"), policy=TOO_SHALLOW), ["policy.limits.depth"]),
        (pb.RunRequest(agent="echo", input=said("hi"), follow=follow_pb2.FollowOptions(view=77)), ["follow.view"]),  # type: ignore[arg-type]
        (pb.RunRequest(input=said("")), ["agent", "input"]),
    ],
    ids=["no agent", "long agent", "no input", "no parts", "no text", "5 MB", "long id", "depth", "view", "two"],
)
async def test_a_run_that_breaks_rules_is_refused_with_every_field(
    server: Served, request_: pb.RunRequest, fields: list[str]
) -> None:
    error = await _refusal(server.agents.Run(request_).read(), server)
    info, bad_request = status_details(error)
    assert (error.code(), info) == (INVALID, ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev"))
    assert sorted(violation.field for violation in bad_request.field_violations) == fields
    assert len(error.details() or "") < 1_000
    assert [run.agent for run in (await server.agents.ListRuns(pb.ListRunsRequest())).runs] == ["echo"]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda s: s.agents.GetRun(pb.GetRunRequest(run_id="none")), "run"),
        (lambda s: s.agents.CancelRun(pb.CancelRunRequest(run_id="none")), "run"),
        (lambda s: s.agents.WatchRun(pb.WatchRunRequest(run_id="none")).read(), "run"),
        (lambda s: s.trees.GetInvocation(eval_service_pb2.GetInvocationRequest(run_id="none")), "run"),
        (lambda s: s.catalog.GetAgent(catalog_service_pb2.GetAgentRequest(name="none")), "agent"),
        (lambda s: s.sessions.GetSession(session_service_pb2.GetSessionRequest(session_id="none")), "session"),
        (lambda s: s.sessions.DeleteSession(session_service_pb2.DeleteSessionRequest(session_id="none")), "session"),
        (lambda s: s.sessions.ListMessages(session_service_pb2.ListMessagesRequest(session_id="none")), "session"),
    ],
)
async def test_what_is_not_there_is_named(
    server: Served, call: Callable[[Served], Awaitable[object]], kind: str
) -> None:
    error = await _refusal(call(server), server)
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(error)[-1] == ResourceInfo(resource_type=kind, resource_name="none")


async def test_tokens_of_other_lists_are_refused(server: Served) -> None:
    for _ in range(2):
        await begin(server, "echo", "hi").to_the_end()
    session = session_service_pb2
    runs = (await server.agents.ListRuns(pb.ListRunsRequest(page_size=1))).next_page_token
    sessions = (await server.sessions.ListSessions(session.ListSessionsRequest(page_size=1))).next_page_token
    assert runs
    assert sessions
    for call in (
        server.agents.ListRuns(pb.ListRunsRequest(page_token=sessions)),
        server.agents.ListRuns(pb.ListRunsRequest(page_token=runs, filter=run_pb2.RunFilter(agent="echo"))),
        server.agents.ListRuns(pb.ListRunsRequest(page_token="AAAA")),
        server.sessions.ListSessions(session.ListSessionsRequest(page_token=runs)),
    ):
        error = await _refusal(call, server)
        assert (error.code(), status_details(error)[0].reason) == (INVALID, "INVALID_PAGE_TOKEN")


@pytest.mark.parametrize("sequence", [3, 2**63 - 1])
async def test_a_sequence_beyond_the_log_is_out_of_range_and_one_below_it_invalid(
    server: Served, sequence: int
) -> None:
    turn = await begin(server, "echo", "hi").to_the_end()
    run_id = await turn.run_id()
    info = ErrorInfo(reason="SEQUENCE_OUT_OF_RANGE", domain="bough.dev", metadata={"last_sequence": "2"})
    tree = eval_service_pb2.GetInvocationRequest
    for call in (
        server.agents.WatchRun(pb.WatchRunRequest(run_id=run_id, after_sequence=sequence)).read(),
        server.trees.GetInvocation(tree(run_id=run_id, as_of_sequence=sequence)),
    ):
        error = await _refusal(call, server)
        assert (error.code(), status_details(error)) == (grpc.StatusCode.OUT_OF_RANGE, (info,))
    for call in (
        server.agents.WatchRun(pb.WatchRunRequest(run_id=run_id, after_sequence=-sequence)).read(),
        server.trees.GetInvocation(tree(run_id=run_id, as_of_sequence=-sequence)),
    ):
        assert (await _refusal(call, server)).code() == INVALID


async def test_definitions_with_mistakes_are_judged_all_at_once_and_nothing_is_stored(server: Served) -> None:
    link = agent_pb2.AgentLink
    definitions = [
        agent_pb2.AgentDefinition(
            name="narcissus",
            description="Looks at itself.",
            llm=agent_pb2.LlmAgent(),
            sub_agents=[link(agent="absent")],
        ),
        agent_pb2.AgentDefinition(name="9lives", llm=agent_pb2.LlmAgent(model="none", tools=[])),
    ]
    request = catalog_service_pb2.ValidateAgentsRequest(definitions=definitions)
    violations = (await server.catalog.ValidateAgents(request)).violations
    assert {(violation.agent, violation.field) for violation in violations} >= {
        ("narcissus", "sub_agents[0].agent"),
        ("9lives", "name"),
        ("9lives", "description"),
        ("9lives", "llm.model"),
    }
    with pytest.raises(aio.AioRpcError) as caught:
        await server.catalog.GetAgent(catalog_service_pb2.GetAgentRequest(name="narcissus"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
