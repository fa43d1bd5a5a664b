"""UsageService on a whole server: whose usage a caller sees, and what is refused."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from bough import v1
from tests.rpc.run_server import Served, Turn, said, served
from tests.rpc.test_metrics import desk
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with callers of two tenants."""
    ring = KeyRing(tmp_path / "keys.yaml")
    for user, roles in (("anne", ["RUN"]), ("bert", ["RUN"]), ("rita", ["READ"]), ("bill", ["BILLING"])):
        ring.add(user, roles=roles)
    ring.add("carl", tenant="beta", roles=["RUN", "READ"])
    async with served(desk(tmp_path, auth=ring.auth)) as serving:
        yield serving


def as_(server: Served, user: str) -> CallerStubs:
    return stubs(server.channel, bearer(KeyRing(Path("unused")).key(user)))


async def turn(server: Served, user: str) -> v1.AgentEvent:
    request = v1.RunRequest(agent="desk", input=said("hi"))
    return (await Turn(call=as_(server, user).agents.Run(request)).to_the_end()).events[-1]


async def users_of(server: Served, user: str, **fields: str) -> dict[str, tuple[int, int, int]]:
    """Return runs, model calls and charge of each user that a caller sees."""
    request = v1.GetUsageRequest(filter=v1.UsageFilter(**fields), group_by=[v1.USAGE_DIMENSION_USER])
    response = await as_(server, user).usage.GetUsage(request)
    return {one.user_id: (one.runs, one.usage.model_calls, one.charge_nanos) for one in response.groups}


ONE_TURN = (1, 2, 4_000_000)


async def test_a_caller_sees_its_own_usage_and_with_read_or_billing_that_of_its_tenant(server: Served) -> None:
    ends = {user: await turn(server, user) for user in ("anne", "bert", "carl")}
    assert {event.WhichOneof("payload") for event in ends.values()} == {"run_completed"}
    both = {"anne": ONE_TURN, "bert": ONE_TURN}
    seen = {user: await users_of(server, user) for user in ("anne", "rita", "bill", "carl")}
    assert seen == {"anne": {"anne": ONE_TURN}, "rita": both, "bill": both, "carl": {"carl": ONE_TURN}}
    assert await users_of(server, "rita", user_id="bert") == {"bert": ONE_TURN}
    assert await users_of(server, "anne", user_id="bert") == {}
    assert await users_of(server, "anne", run_id=ends["bert"].run_id) == {}
    assert await users_of(server, "carl", run_id=ends["bert"].run_id) == {}


async def test_a_line_is_an_attempt_and_names_the_event_with_which_it_ended(server: Served) -> None:
    end = await turn(server, "anne")
    request = v1.ListUsageEntriesRequest(filter=v1.UsageFilter(run_id=end.run_id))
    newest, oldest = (await as_(server, "anne").usage.ListUsageEntries(request)).entries
    events = (
        await Turn(call=as_(server, "anne").agents.WatchRun(v1.WatchRunRequest(run_id=end.run_id))).to_the_end()
    ).events
    completed = [event for event in events if event.HasField("llm_completed")]
    for event, entry in zip(completed, (oldest, newest), strict=True):
        used = v1.Usage()
        used.CopyFrom(event.llm_completed.response.usage)
        used.model_calls = 1
        assert entry == v1.UsageEntry(
            run_id=end.run_id,
            sequence=event.sequence,
            user_id="anne",
            session_id=end.session_id,
            agent="desk",
            invocation_id=end.run_id,
            model="default",
            time=event.record_time,
            usage=used,
            charge_nanos=used.cost_nanos,
            currency_code="USD",
        )


async def test_what_stays_after_a_session_was_deleted_is_its_usage(server: Served) -> None:
    end = await turn(server, "anne")
    await as_(server, "anne").sessions.DeleteSession(v1.DeleteSessionRequest(session_id=end.session_id))
    assert await users_of(server, "anne", session_id=end.session_id) == {"anne": ONE_TURN}
    request = v1.GetUsageRequest(group_by=[v1.USAGE_DIMENSION_DAY])
    (group,) = (await as_(server, "anne").usage.GetUsage(request)).groups
    assert group.day == end.record_time.ToDatetime(UTC).strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (v1.GetUsageRequest(group_by=[v1.USAGE_DIMENSION_INVOCATION]), "group_by"),
        (v1.GetUsageRequest(group_by=[v1.USAGE_DIMENSION_USER] * 2), "group_by"),
        (v1.GetUsageRequest(group_by=[v1.USAGE_DIMENSION_UNSPECIFIED]), "group_by[0]"),
        (v1.GetUsageRequest(filter=v1.UsageFilter(user_id="a\0")), "filter.user_id"),
        (v1.GetUsageRequest(page_token="bm9uZQ=="), "page_token"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_with_its_field(
    server: Served, request_: v1.GetUsageRequest, field: str
) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await as_(server, "anne").usage.GetUsage(request_)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(refused.value.details())


async def test_a_range_of_time_that_is_turned_around_is_refused(server: Served) -> None:
    moments = [Timestamp(), Timestamp()]
    for moment, day in zip(moments, (2, 1), strict=True):
        moment.FromDatetime(datetime(2026, 11, day, tzinfo=UTC))
    asked = v1.UsageFilter(time_from=moments[0], time_before=moments[1])
    for call, request in (
        (as_(server, "anne").usage.GetUsage, v1.GetUsageRequest(filter=asked)),
        (as_(server, "anne").usage.ListUsageEntries, v1.ListUsageEntriesRequest(filter=asked)),
    ):
        with pytest.raises(aio.AioRpcError, match="time_before must be after time_from") as refused:
            await call(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
