"""Callers by API keys: who they are, what each may call, and what a call without a proof learns."""

import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from bough.v1 import access_service_pb2, agent_service_pb2, catalog_service_pb2, options_pb2, session_service_pb2
from bough_server.auth import access
from bough_server.interceptors import auth
from bough_server.schema_rules import schema_files
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, begin, served, settings
from tests.support.callers import KeyRing, bearer, stubs
from tests.support.wire_client import NARROW, connected

RUN, READ, ADMIN = options_pb2.ACCESS_ROLE_RUN, options_pb2.ACCESS_ROLE_READ, options_pb2.ACCESS_ROLE_ADMIN
WHO = access_service_pb2.GetCallerRequest()


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    """The keys of the server."""
    made = KeyRing(tmp_path / "keys.yaml")
    made.add("anne")
    made.add("mail", user="anne@acme.example")
    made.add("bert")
    made.add(
        "ci",
        tenant="beta",
        user="auth0|x y",
        roles=["READ", "RUN"],
        groups=["legal", "finance"],
        expires="2100-01-01T00:00:00Z",
    )
    made.add("old", expires="2020-01-01T00:00:00Z")
    made.add("gamma", tenant="gamma")
    made.add("reader", roles=["READ"])
    made.add("backend", acts_for="users", roles=["RUN", "READ"])
    made.add("broker", acts_for="tenants")
    return made


@pytest.fixture
async def server(tmp_path: Path, ring: KeyRing) -> AsyncIterator[Served]:
    """A server that takes these keys."""
    tenants = {"acme": {}, "beta": {}}
    async with served(settings(tmp_path, auth=ring.auth, tenants=tenants)) as serving:
        yield serving


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """Return the code and the text that a call fails with, whose reason is the code's name."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    code = caught.value.code()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        assert status_details(caught.value) == (ErrorInfo(reason=code.name, domain="bough.dev"),)
    return code, str(caught.value.details())


INVALID = (grpc.StatusCode.UNAUTHENTICATED, "The token or certificate of the call is not valid here.")
EXPIRED = (grpc.StatusCode.UNAUTHENTICATED, "The token has expired: get a new one.")
MISSING = (
    grpc.StatusCode.UNAUTHENTICATED,
    "The call has no token: send one as the metadata `authorization: Bearer TOKEN`.",
)


async def test_a_caller_is_told_who_it_is(server: Served, ring: KeyRing) -> None:
    known = await stubs(server.channel, bearer(ring.key("ci"))).access.GetCaller(WHO)
    expected = access_service_pb2.GetCallerResponse(
        tenant_id="beta", user_id="auth0|x y", roles=[RUN, READ], groups=["finance", "legal"], via="key/ci"
    )
    expected.expire_time.FromJsonString("2100-01-01T00:00:00Z")
    assert known == expected
    by_default = await stubs(server.channel, ("authorization", f"bEARER {ring.key('anne')}")).access.GetCaller(WHO)
    assert (by_default.tenant_id, by_default.user_id, list(by_default.roles)) == ("acme", "anne", [RUN])


async def test_without_auth_every_call_is_the_local_users(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as server:
        known = await stubs(server.channel, bearer("any"), ("bough-user-id", "eve")).access.GetCaller(WHO)
    assert known == access_service_pb2.GetCallerResponse(
        tenant_id="local",
        user_id="local",
        roles=[role for role in options_pb2.AccessRole.values() if role],
        via="none",
    )


async def test_a_call_without_a_valid_proof_learns_what_is_wrong_and_the_log_says_why(
    server: Served, ring: KeyRing
) -> None:
    key = ring.key("anne")
    old = ring.key("old")
    of_gamma = ring.key("gamma")
    other = key[:-1] + ("A" if key[-1] != "A" else "B")
    cases = [
        ((), MISSING, "it has no token"),
        ([bearer(old)], EXPIRED, "it has expired"),
        ([bearer(other)], INVALID, "it is not the API key anne"),
        ([bearer(key.replace("anne", "carl"))], INVALID, "there is no API key carl"),
        ([bearer("bough_anne")], INVALID, "it begins like an API key, but is none"),
        ([bearer(of_gamma)], INVALID, "`tenants` does not have gamma"),
        ([bearer("x.y.z")], INVALID, "it is no token: a part of it is not base64 of JSON"),
        ([bearer(key), bearer(key)], INVALID, "it has two tokens"),
        ([("authorization", f"Basic {key}")], INVALID, "its authorization is no bearer token"),
        ([("authorization", key)], INVALID, "its authorization is no bearer token"),
    ]
    for metadata, expected, why in cases:
        with capture_logs() as logged:
            assert await refusal(stubs(server.channel, *metadata).access.GetCaller(WHO)) == expected
        assert [line["why"] for line in logged if line["event"] == "call refused"] == [why]
        assert key not in str(logged)
        assert other not in str(logged)


async def test_a_request_is_not_parsed_before_its_caller_is_proved(server: Served) -> None:
    garbage = server.channel.unary_unary("/bough.v1.AgentService/GetRun")
    streamed = server.channel.unary_stream("/bough.v1.AgentService/Run")
    uploaded = server.channel.stream_unary("/bough.v1.EvalService/AggregateEvents")
    assert await refusal(garbage(b"\xff\xff")) == MISSING
    assert await refusal(streamed(b"\xff\xff").read()) == MISSING
    assert await refusal(uploaded(iter([b"\xff\xff"]))) == MISSING


async def test_health_answers_anyone_and_reflection_needs_a_caller(server: Served, ring: KeyRing) -> None:
    health = health_pb2_grpc.HealthStub(server.channel)
    serving = await health.Check(health_pb2.HealthCheckRequest(service="bough.v1.AccessService"))
    assert serving.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with capture_logs() as logged:
        assert await refusal(reflection(iter(asked)).read()) == MISSING
    assert [line["why"] for line in logged if line["event"] == "call refused"] == ["it has no token"]
    answer = await reflection(iter(asked), metadata=[bearer(ring.key("anne"))]).read()
    names = {service.name for service in answer.list_services_response.service}
    assert {service.full_name for service in access.SERVICES} < names


async def test_streams_of_health_are_bounded(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_WATCHES", 2)
    health = health_pb2_grpc.HealthStub(server.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    code, _ = await refusal(health.Watch(health_pb2.HealthCheckRequest()).read())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()


def test_every_method_of_the_schema_says_who_may_call_it() -> None:
    declared = {
        f"/{file.package}.{service.name}/{method.name}"
        for file in schema_files()
        if file.package == "bough.v1"
        for service in file.service
        if service.name != "ToolService"  # which tool servers serve
        for method in service.method
    }
    assert declared == access.ROLES.keys()


async def test_a_method_that_does_not_say_who_may_call_it_is_not_served(
    server: Served, ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "/bough.v1.AccessService/GetCaller"
    monkeypatch.delitem(access.ROLES, method)  # type: ignore[arg-type]
    code, _ = await refusal(stubs(server.channel, bearer(ring.key("anne"))).access.GetCaller(WHO))
    assert code == grpc.StatusCode.UNIMPLEMENTED


async def test_a_role_that_is_missing_is_named(server: Served, ring: KeyRing) -> None:
    reader = stubs(server.channel, bearer(ring.key("reader")))
    runner = stubs(server.channel, bearer(ring.key("anne")))
    denied = grpc.StatusCode.PERMISSION_DENIED
    needs = "This call needs the role {}, which the caller does not have."
    assert await refusal(reader.agents.Run(agent_service_pb2.RunRequest(agent="echo")).read()) == (
        denied,
        needs.format("RUN"),
    )
    assert await refusal(reader.agents.CancelRun(agent_service_pb2.CancelRunRequest(run_id="r"))) == (
        denied,
        needs.format("RUN or ADMIN"),
    )
    assert await refusal(runner.catalog.DeleteAgent(catalog_service_pb2.DeleteAgentRequest(name="a"))) == (
        denied,
        needs.format("ADMIN"),
    )


async def test_a_backend_names_its_users_and_no_other_caller_does(server: Served, ring: KeyRing) -> None:
    backend = bearer(ring.key("backend"))
    broker = bearer(ring.key("broker"))
    anne = bearer(ring.key("anne"))

    async def who(*metadata: tuple[str, str]) -> tuple[str, str, list[int]]:
        known = await stubs(server.channel, *metadata).access.GetCaller(WHO)
        return known.tenant_id, known.user_id, list(known.roles)

    assert await who(backend) == ("acme", "backend", [RUN, READ])
    assert await who(backend, ("bough-user-id", "bert")) == ("acme", "bert", [RUN, READ])
    assert await who(broker, ("bough-user-id", "bert"), ("bough-tenant-id", "beta")) == ("beta", "bert", [RUN])
    user, tenant = ("bough-user-id", "bert"), ("bough-tenant-id", "beta")
    for metadata, wrong in (
        ((anne, user), "metadata bough-user-id: is for keys with acts_for"),
        ((anne, tenant), "metadata bough-tenant-id: is for keys with acts_for"),
        ((backend, user, tenant), "metadata bough-tenant-id: is for keys with acts_for: tenants"),
        ((broker, tenant), "metadata bough-user-id: must be the id of a user"),
        ((broker, user, ("bough-tenant-id", "gamma")), "metadata bough-tenant-id: must be the id of a tenant"),
        ((broker, user, ("bough-tenant-id", "Beta")), "metadata bough-tenant-id: must be the id of a tenant"),
        ((backend, user, user), "metadata bough-user-id: must be one text"),
        ((backend, ("bough-user-id", "bough/rules")), "metadata bough-user-id: must be the id of a user"),
        ((backend, ("bough-user-id", "")), "metadata bough-user-id: must be the id of a user"),
        ((backend, ("bough-user-id", "x" * 129)), "metadata bough-user-id: must be the id of a user"),
    ):
        code, text = await refusal(stubs(server.channel, *metadata).access.GetCaller(WHO))
        assert (code, text[: len(wrong)]) == (grpc.StatusCode.INVALID_ARGUMENT, wrong)


async def test_what_a_call_creates_and_logs_names_its_caller(server: Served, ring: KeyRing) -> None:
    anne = stubs(server.channel, bearer(ring.key("mail")))
    with capture_logs([merge_contextvars]) as logged:
        session = (await anne.sessions.CreateSession(session_service_pb2.CreateSessionRequest())).session
        run = await begin(anne, "echo", "hi", session_id=session.session_id).to_the_end()  # type: ignore[arg-type]
    assert session.user_id == "anne@acme.example"
    listed = await anne.agents.ListRuns(agent_service_pb2.ListRunsRequest())
    assert [(each.run_id, each.user_id) for each in listed.runs] == [(await run.run_id(), "anne@acme.example")]
    (started,) = [line for line in logged if line["event"] == "run started"]
    assert (started["tenant"], started["user"], started["via"]) == ("acme", "anne@acme.example", "key/mail")


async def test_all_streams_of_a_key_that_is_removed_end_and_their_runs_go_on(server: Served, ring: KeyRing) -> None:
    bert = ring.key("bert")
    anne = stubs(server.channel, bearer(ring.key("anne")))
    streams = [
        await begin(stubs(server.channel, bearer(bert)), "waiter", "removed").until("run_started")  # type: ignore[arg-type]
        for _ in range(200)
    ]
    kept = await begin(anne, "waiter", "removed").until("run_started")  # type: ignore[arg-type]
    begin_time = time.monotonic()
    ring.remove("bert")
    ended = (grpc.StatusCode.UNAUTHENTICATED, "The API key of the stream is not valid any more.")
    for stream in streams:
        assert await refusal(stream.to_the_end()) == ended
        assert dict(await stream.call.trailing_metadata())["bough-last-sequence"] == "1"
    assert time.monotonic() - begin_time < 5
    GATES["removed"].set()
    assert (await kept.to_the_end()).kinds[-1] == "run_completed"
    ring.add("bert")
    reader = stubs(server.channel, bearer(ring.key("reader")))
    for stream in streams[::50]:
        request = agent_service_pb2.WatchRunRequest(run_id=await stream.run_id())
        log = await Turn(call=reader.agents.WatchRun(request)).to_the_end()
        assert log.kinds == ["run_started", "value_recorded", "run_completed"]


@pytest.mark.parametrize("reads", [True, False], ids=["reads at last", "leaves"])
async def test_a_stream_whose_client_does_not_read_ends_too_and_keeps_its_place_until_then(
    tmp_path: Path, ring: KeyRing, caplog: pytest.LogCaptureFixture, reads: bool
) -> None:
    ring.add("slow", user="bert")
    bounded = settings(tmp_path, auth=ring.auth, server={"max_streams_of_caller": 2})
    ended = (grpc.StatusCode.UNAUTHENTICATED, "The API key of the stream is not valid any more.")
    async with served(bounded) as server, connected(server.app.address, options=NARROW) as narrow:
        bert, large = stubs(server.channel, bearer(ring.key("bert"))), "x" * 250_000
        blocked = begin(stubs(narrow.channel, bearer(ring.key("slow"))), "waiter", large)  # type: ignore[arg-type]
        watching = agent_service_pb2.WatchRunRequest(run_id=await blocked.run_id())
        read = Turn(call=stubs(server.channel, bearer(ring.key("slow"))).agents.WatchRun(watching))
        await read.until("run_started")
        ring.remove("slow")
        assert await refusal(read.to_the_end()) == ended
        # The other one has ended with it, but its status waits behind what its client does not read.
        followed = await Turn(call=bert.agents.WatchRun(watching)).until("run_started")
        assert (await refusal(bert.agents.WatchRun(watching).read()))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        GATES[large].set()
        assert (await followed.to_the_end()).kinds[-1] == "run_completed"
        if reads:
            assert await refusal(blocked.to_the_end()) == ended
            assert blocked.kinds == ["run_started"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_token_with_many_groups_fits_the_metadata_of_a_call(server: Served) -> None:
    large = stubs(server.channel, bearer(f"{'x' * 15_000}.y.z"))
    assert await refusal(large.access.GetCaller(WHO)) == INVALID
