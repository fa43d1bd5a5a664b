"""UsageService on a whole server: whose usage a caller sees, and what is refused."""

from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc import aio

from bough import v1
from tests.rpc.interceptor_server import status_details
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


def top_up(user_id: str = "anne", amount: int = 10_000_000, **fields: str) -> v1.AdjustBalanceRequest:
    fields = {"request_id": "payment-1", "currency_code": "USD", "note": "Thanks.", **fields}
    return v1.AdjustBalanceRequest(user_id=user_id, amount_nanos=amount, **fields)


@pytest.fixture
async def prepaid(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with these callers and accounts of users."""
    ring = KeyRing(tmp_path / "keys.yaml")
    for user, roles in (("anne", ["RUN"]), ("rita", ["READ"]), ("bill", ["BILLING"])):
        ring.add(user, roles=roles)
    ring.add("carl", tenant="beta", roles=["RUN", "BILLING"])
    async with served(desk(tmp_path, auth=ring.auth, accounts={"per": "user"})) as serving:
        yield serving


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """Return the code and the reason of a call that fails."""
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    (info,) = [each for each in status_details(refused.value) if isinstance(each, ErrorInfo)]
    assert not any(isinstance(each, RetryInfo) for each in status_details(refused.value))
    return refused.value.code(), info.reason


EXHAUSTED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_BALANCE")
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
DENIED = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_a_run_is_refused_until_its_user_has_a_balance_and_then_lowers_it(prepaid: Served) -> None:
    assert await refusal(turn(prepaid, "anne")) == EXHAUSTED
    evaluate = v1.EvaluateRequest(
        eval_set=v1.EvalSet(name="s", agent="desk", cases=[v1.EvalCase(id="c", turns=[v1.EvalTurn(user="hi")])])
    )
    with pytest.raises(aio.AioRpcError, match="Nothing is left of the account"):
        async for _ in as_(prepaid, "anne").trees.Evaluate(evaluate):
            pass
    bill, anne = as_(prepaid, "bill").usage, as_(prepaid, "anne").usage
    answered = await bill.AdjustBalance(top_up())
    assert answered.account.balance_nanos == answered.adjustment.amount_nanos == 10_000_000
    assert (await turn(prepaid, "anne")).HasField("run_completed")
    account = (await anne.GetAccount(v1.GetAccountRequest())).account
    assert account.as_of_time.ToNanoseconds() > 0
    account.ClearField("as_of_time")
    assert account == v1.Account(user_id="anne", balance_nanos=6_000_000, currency_code="USD")


async def test_an_adjustment_is_made_once_and_listed_as_it_was_made(prepaid: Served) -> None:
    bill = as_(prepaid, "bill").usage
    first = await bill.AdjustBalance(top_up())
    again = await bill.AdjustBalance(top_up())
    assert (again.account.balance_nanos, again.adjustment) == (10_000_000, first.adjustment)
    for other in (top_up(amount=1), top_up(note="No.")):
        reused = await refusal(bill.AdjustBalance(other))
        assert reused == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    await bill.AdjustBalance(top_up(amount=-4, request_id="refund"))
    request = v1.ListAdjustmentsRequest(user_id="anne", page_size=1)
    newest = await bill.ListAdjustments(request)
    request.page_token = newest.next_page_token
    oldest = await bill.ListAdjustments(request)
    found = [*newest.adjustments, *oldest.adjustments]
    assert [(one.request_id, one.amount_nanos, one.note, one.made_by) for one in found] == [
        ("refund", -4, "Thanks.", "bill"),
        ("payment-1", 10_000_000, "Thanks.", "bill"),
    ]
    assert oldest.next_page_token == ""


async def test_who_may_see_and_change_which_account(prepaid: Served) -> None:
    await as_(prepaid, "bill").usage.AdjustBalance(top_up("anne"))
    await as_(prepaid, "carl").usage.AdjustBalance(top_up("anne", amount=3))
    balances = {}
    for user in ("rita", "bill", "carl"):
        response = await as_(prepaid, user).usage.GetAccount(v1.GetAccountRequest(user_id="anne"))
        balances[user] = response.account.balance_nanos
    assert balances == {"rita": 10_000_000, "bill": 10_000_000, "carl": 3}, "a name in another tenant is another user"
    for name in ("bill", "unknown"):
        assert await refusal(as_(prepaid, "anne").usage.GetAccount(v1.GetAccountRequest(user_id=name))) == DENIED
        assert (
            await refusal(as_(prepaid, "anne").usage.ListAdjustments(v1.ListAdjustmentsRequest(user_id=name))) == DENIED
        )
    for user in ("anne", "rita"):
        assert await refusal(as_(prepaid, user).usage.AdjustBalance(top_up("anne", request_id="mine"))) == DENIED


@pytest.mark.parametrize(
    "request_",
    [
        top_up(amount=0),
        top_up(currency_code="EUR"),
        top_up(user_id=""),
        top_up(user_id="bough/rules"),
        top_up(request_id=""),
        top_up(note="a\nb"),
    ],
)
async def test_a_wrong_adjustment_is_refused(prepaid: Served, request_: v1.AdjustBalanceRequest) -> None:
    assert await refusal(as_(prepaid, "bill").usage.AdjustBalance(request_)) == INVALID


async def test_adjustments_that_no_number_holds_are_refused(prepaid: Served) -> None:
    bill = as_(prepaid, "bill").usage
    await bill.AdjustBalance(top_up(amount=2**63 - 1))
    assert await refusal(bill.AdjustBalance(top_up(amount=1, request_id="more"))) == INVALID
    await bill.AdjustBalance(top_up(amount=-(2**63) + 1, request_id="less"))
    assert (await bill.AdjustBalance(top_up(amount=1, request_id="more"))).account.balance_nanos == 1


async def test_a_server_without_accounts_says_so(server: Served) -> None:
    off = (grpc.StatusCode.FAILED_PRECONDITION, "NOT_INSTALLED")
    assert await refusal(as_(server, "bill").usage.AdjustBalance(top_up())) == off
    assert await refusal(as_(server, "anne").usage.GetAccount(v1.GetAccountRequest())) == off


async def test_an_evaluation_begins_no_trial_that_its_user_cannot_pay_and_ends(prepaid: Served) -> None:
    await as_(prepaid, "bill").usage.AdjustBalance(top_up(amount=5_000_000))
    cases = [v1.EvalCase(id=name, turns=[v1.EvalTurn(user="hi")]) for name in ("a", "b", "c")]
    request = v1.EvaluateRequest(eval_set=v1.EvalSet(name="s", agent="desk", cases=cases), max_concurrency=1)
    call = as_(prepaid, "anne").trees.Evaluate(request)
    events = [event async for response in call for event in response.batch.events]
    assert events[-1].HasField("evaluation_completed")
    begun = [event.case_trial_started.case_id for event in events if event.HasField("case_trial_started")]
    assert begun == ["a", "b"], "something is left for the second one"
    results = as_(prepaid, "anne").trees.ListCaseResults(
        v1.ListCaseResultsRequest(evaluation_id=events[0].evaluation_id)
    )
    reasons = {result.case_id: str(result) for result in (await results).cases}
    assert "Nothing is left of the account of the user" in reasons["c"]
    account = (await as_(prepaid, "anne").usage.GetAccount(v1.GetAccountRequest())).account
    assert account.balance_nanos == 5_000_000 - 4_000_000 - 2_000_000, "its second call was not sent"
