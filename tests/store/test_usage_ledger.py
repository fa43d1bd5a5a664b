"""The ledger: a line for each attempt that was sent and each start of a run, in columns that SQL sums."""

import base64
import json

import pytest
from sqlalchemy import create_engine, insert
from sqlalchemy.event import listen

from bough import v1
from bough.v1 import event_pb2, usage_pb2
from bough_server.errors import InvalidRequest
from bough_server.identity import Principal
from bough_server.store.opening import Store, open_store, upgrade_database
from bough_server.store.ports.runs import Page
from bough_server.store.ports.usage import UsageFilter, UsageTotals
from bough_server.store.sql.tables import usage_entries
from bough_server.store.sql.usage import sum_lines
from tests.store.logs import ALL, ANNE, BERT, SECOND, START_NS, Made, completed, session_id
from tests.store.sql import execute
from tests.support.older_schema import undo_charges

CARL = Principal(tenant_id="acme", user_id="carl")

_SUMS = """
    SELECT user_id, currency_code, count(*), sum(input_tokens), sum(cached_input_tokens), sum(output_tokens),
        sum(reasoning_tokens), sum(total_tokens), sum(model_calls), sum(model_calls_without_usage), sum(cost_nanos)
    FROM usage_entries WHERE kind = 0 GROUP BY tenant_id, user_id, currency_code ORDER BY user_id, currency_code
"""


def _answered(usage: usage_pb2.Usage) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(llm_completed=event_pb2.LlmCompleted())
    event.llm_completed.response.usage.CopyFrom(usage)
    return event


async def test_sql_sums_the_ledger(url: str) -> None:
    priced = usage_pb2.Usage(
        input_tokens=2**40, cached_input_tokens=2, output_tokens=5, total_tokens=9, cost_nanos=3, currency_code="EUR"
    )
    unpriced = usage_pb2.Usage(input_tokens=7, output_tokens=0, reasoning_tokens=1)
    lost = event_pb2.AgentEvent(llm_retrying=event_pb2.LlmRetrying(lost_usage=priced))
    silent = _answered(usage_pb2.Usage())
    async with open_store(url, durability="process") as store:
        annes, berts = Made(number=1), Made(number=2, principal=BERT)
        for run, spent in (
            (annes, [lost, _answered(priced), _answered(unpriced), silent]),
            (berts, [_answered(unpriced)]),
        ):
            await store.log.create(run.new())
            await store.log.append(run.run_id, epoch=1, log_events=run.next(*spent, completed()))
        kept = [entry.usage for entry in await store.usage.list_for_run(annes.run_id)]
        await store.sessions.delete(ANNE, annes.session_id)
    for usage in (priced, unpriced):
        usage.model_calls = 1
    assert kept == [priced, priced, unpriced, usage_pb2.Usage(model_calls=1, model_calls_without_usage=1)]
    assert execute(url, _SUMS) == [
        ("anne", "", 2, 7, None, 0, 1, None, 2, 1, None),
        ("anne", "EUR", 2, 2**41, 4, 10, None, 18, 2, 0, 6),
        ("bert", "", 1, 7, None, 0, 1, None, 1, 0, None),
    ]


_PRICED = usage_pb2.Usage(input_tokens=3, output_tokens=2, cost_nanos=2**62, currency_code="EUR")


async def test_sums_hold_starts_tokens_and_the_charges_in_each_currency(url: str) -> None:
    dollars = usage_pb2.Usage(total_tokens=8, cost_nanos=1, currency_code="USD")
    async with open_store(url, durability="process") as store:
        annes, carls = Made(number=1), Made(number=2, principal=CARL)
        for run, spent in ((annes, [_PRICED, _PRICED, _PRICED, dollars]), (carls, [usage_pb2.Usage(), dollars])):
            await store.log.create(run.new())
            await store.log.append(run.run_id, epoch=1, log_events=run.next(*map(_answered, spent), completed()))
        await store.sessions.delete(ANNE, session_id(1))
        largest = 2**63 - 1
        assert await store.usage.sum_lines("acme", from_ns=0) == UsageTotals(
            starts=2, tokens=31, charges={"EUR": largest, "USD": 2}
        )
        assert await store.usage.sum_lines("acme", user_id="carl", from_ns=0) == UsageTotals(
            starts=1, tokens=8, charges={"USD": 1}
        )
        fifth = START_NS + 5 * SECOND
        assert await store.usage.sum_lines("acme", user_id="anne", from_ns=fifth) == UsageTotals(
            tokens=8, charges={"USD": 1}
        )
        assert await store.usage.sum_lines("acme", user_id="anne", from_ns=0, before_ns=START_NS + 3 * SECOND) == (
            UsageTotals(starts=1, tokens=5, charges={"EUR": 2**62})
        )
        assert await store.usage.sum_lines("other", from_ns=0) == UsageTotals()


async def test_lines_of_a_server_of_the_version_before_count_what_was_reported(url: str) -> None:
    async with open_store(url) as store:
        run = Made()
        await store.log.create(run.new())
        priced = usage_pb2.Usage(input_tokens=3, output_tokens=2, cost_nanos=4, currency_code="EUR")
        await store.log.append(run.run_id, epoch=1, log_events=run.next(_answered(priced)))
    undo_charges(url)
    async with open_store(url) as store:
        execute(url, _OLD_LINE)
        assert await store.usage.sum_lines("acme", from_ns=0) == UsageTotals(tokens=10, charges={"EUR": 8})
        entries = await store.usage.list_for_run(run.run_id)
        assert [(entry.charge.nanos, entry.is_estimated) for entry in entries] == [(4, False)] * 2


_OLD_LINE = """
    INSERT INTO usage_entries (run_id, sequence, tenant_id, user_id, session_id, agent, invocation_id, model, time_ns,
        input_tokens, output_tokens, model_calls, model_calls_without_usage, cost_nanos, currency_code)
    SELECT run_id, 9, tenant_id, user_id, session_id, agent, invocation_id, model, time_ns, input_tokens,
        output_tokens, model_calls, model_calls_without_usage, cost_nanos, currency_code FROM usage_entries
"""
"""As a server of the version before writes one."""


@pytest.mark.parametrize("user_id", [None, "anne"])
def test_sums_are_read_from_an_index_alone(file_url: str, user_id: str | None) -> None:
    upgrade_database(file_url)
    index = "usage_of_tenant" if user_id is None else "usage_of_user"
    engine = create_engine(file_url)
    seen: list[tuple[str, object]] = []
    listen(engine, "before_cursor_execute", lambda _c, _u, statement, values, *_: seen.append((statement, values)))
    with engine.connect() as connection:
        sum_lines(connection, "acme", user_id=user_id, from_ns=0)
        ((statement, values),) = seen
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
    engine.dispose()
    assert any(f"USING COVERING INDEX {index} " in step.detail for step in plan)


DAY_NS = 86_400 * SECOND


def _line(sequence: int, **fields: object) -> dict[str, object]:
    """Return values of a line of Anne's, a minute after the one of the sequence before."""
    line = {
        "run_id": "r1",
        "tenant_id": "acme",
        "user_id": "anne",
        "session_id": "s1",
        "agent": "lead",
        "model": "m",
        "invocation_id": "i1",
        "time_ns": START_NS + sequence * 60 * SECOND,
        "kind": 0,
        "currency_code": "EUR",
        "model_calls": 1,
        "model_calls_without_usage": 0,
        "input_tokens": 1,
        "charge_nanos": 10,
        "cost_nanos": 10,
        "sequence": sequence,
    }
    return line | fields


async def _write(store: Store, *lines: dict[str, object]) -> None:
    await store.write(lambda connection: connection.execute(insert(usage_entries), lines))


_USER, _AGENT, _DAY = v1.USAGE_DIMENSION_USER, v1.USAGE_DIMENSION_AGENT, v1.USAGE_DIMENSION_DAY


def _shape(group: usage_pb2.UsageGroup) -> tuple[object, ...]:
    return group.user_id, group.agent, group.day, group.runs, group.charge_nanos, group.currency_code


async def test_groups_are_in_the_order_of_their_fields_and_currencies_are_never_added_up(store: Store) -> None:
    unpriced = {"currency_code": "", "charge_nanos": 0, "cost_nanos": None}
    start = {**unpriced, "kind": 1, "model_calls": 0, "model": "", "input_tokens": None}
    await _write(
        store,
        _line(1, **start),
        _line(2),
        _line(3, agent="clerk", currency_code="USD"),
        _line(4, **unpriced),
        _line(5, currency_code="USD", charge_nanos=7, cost_nanos=None, input_tokens=None),
        _line(6, user_id="carl", agent="clerk", **unpriced),
        _line(7, tenant_id="other"),
        _line(8, time_ns=START_NS + DAY_NS),
    )
    groups, token = await store.usage.list_groups(ALL, UsageFilter(), [_DAY, _AGENT, _USER], Page(size=9))
    assert (list(map(_shape, groups)), token) == (
        [
            ("anne", "clerk", "2023-11-14", 0, 10, "USD"),
            ("anne", "lead", "2023-11-14", 1, 10, "EUR"),
            ("anne", "lead", "2023-11-14", 0, 7, "USD"),
            ("anne", "lead", "2023-11-15", 0, 10, "EUR"),
            ("carl", "clerk", "2023-11-14", 0, 0, ""),
        ],
        "",
    )
    assert groups[1].usage == usage_pb2.Usage(
        input_tokens=2, model_calls=2, cost_nanos=10, currency_code="EUR", model_calls_without_cost=1
    )
    assert groups[2].usage == usage_pb2.Usage(model_calls=1, model_calls_without_usage=1)
    assert groups[4].usage == usage_pb2.Usage(input_tokens=1, model_calls=1)
    paged: list[usage_pb2.UsageGroup] = []
    for _ in range(5):
        page, token = await store.usage.list_groups(
            ALL, UsageFilter(), [_USER, _AGENT, _DAY], Page(size=1, token=token)
        )
        paged += page
    assert (paged, token) == (groups, "")
    anne = await store.usage.list_groups(ANNE, UsageFilter(from_ns=START_NS + DAY_NS), [], Page(size=9))
    assert [group.charge_nanos for group in anne[0]] == [10]


async def test_lines_are_listed_newest_first_and_filters_hold_all_together(store: Store) -> None:
    await _write(store, *(_line(number, run_id=f"r{number % 3}", model=f"m{number % 2}") for number in range(1, 12)))
    await _write(store, _line(12, kind=1), _line(3, run_id="r7"), _line(13, user_id="carl"))
    listed: list[tuple[str, int]] = []
    token = ""
    while token or not listed:
        lines, token = await store.usage.list_attempts(ANNE, UsageFilter(), Page(size=5, token=token))
        listed += [(line.run_id, line.sequence) for line in lines]
    times = [f"r{number % 3}" for number in range(1, 12)]
    expected = [*zip(times, range(1, 12), strict=True), ("r7", 3)]
    assert listed == sorted(expected, key=lambda key: (key[1], key[0]), reverse=True)
    chosen = UsageFilter(run_id="r1", model="m1", from_ns=START_NS + 60 * SECOND, before_ns=START_NS + 421 * SECOND)
    lines, _ = await store.usage.list_attempts(ALL, chosen, Page(size=9))
    assert [line.sequence for line in lines] == [7, 1]
    assert (await store.usage.list_attempts(ANNE, UsageFilter(user_id="carl"), Page(size=9)))[0] == []


async def test_a_page_token_that_a_caller_made_is_refused(store: Store) -> None:
    await _write(store, _line(1), _line(2, agent="clerk"))
    _, token = await store.usage.list_groups(ANNE, UsageFilter(), [_AGENT, _DAY], Page(size=1))
    _, line = await store.usage.list_attempts(ANNE, UsageFilter(), Page(size=1))
    number, _, digest = json.loads(base64.urlsafe_b64decode(token))
    forged = [[1, 2, 3], ["a\0", 1, ""], ["a", 2**70, ""], ["a", True, ""], "{", "[" * 100_000]
    for made in (*(value if isinstance(value, str) else json.dumps(value) for value in forged), line, token[:-5]):
        page = Page(size=1, token=base64.urlsafe_b64encode(json.dumps([number, made, digest]).encode()).decode())
        with pytest.raises(InvalidRequest):
            await store.usage.list_groups(ANNE, UsageFilter(), [_AGENT, _DAY], page)
    number, _, digest = json.loads(base64.urlsafe_b64decode(line))
    for made in ("", "x r1", "-1 r1", "9" * 30 + " r1"):
        page = Page(size=1, token=base64.urlsafe_b64encode(json.dumps([number, made, digest]).encode()).decode())
        with pytest.raises(InvalidRequest):
            await store.usage.list_attempts(ANNE, UsageFilter(), page)
