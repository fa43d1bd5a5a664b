"""Quotas of tokens a day and of cost a month: before a run, during it, and when their day or month ends."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, model_pb2
from bough_server.identity import Principal
from bough_server.quotas import QuotaExceeded, QuotaLimits, Quotas, TenantQuotas
from bough_server.runs.quotas import list_periods
from bough_server.store.sqlite.database_path import is_postgres
from tests.support.composite_agents import parallel
from tests.support.databases import database_in, in_each_database
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness
from tests.support.session_agents import Floor, answer_to, state_of
from tests.support.session_agents import harness as agents_on
from tests.support.teams import call, calls, llm, open_team, script

pytestmark = in_each_database

REFUSED: Final = error_pb2.ERROR_REASON_QUOTA_EXCEEDED
TURN: Final = {"text": "Done.", "usage": {"input_tokens": 1_000, "output_tokens": 0}}
"""A turn of a thousand tokens, which cost a million billionths."""
COST: Final = 1_000_000
BERT: Final = Principal(tenant_id=ME.tenant_id, user_id="bert")


def spender(name: str = "p", *, most: int = 1_000, **fields: Any) -> agent_pb2.AgentDefinition:
    """Return an agent whose calls reserve a little more than so many tokens."""
    return llm(name, settings=model_pb2.ModelSettings(max_output_tokens=most), **fields)


def quotas(**limits: int) -> Quotas:
    """Return quotas of the tenant of ME."""
    return Quotas(tenants={ME.tenant_id: TenantQuotas(of_tenant=QuotaLimits(**limits))})


def at(year: int, month: int, day: int, hour: int = 0, minute: int = 0) -> int:
    """Return a time in UTC in nanoseconds since the Unix epoch."""
    return int(datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp()) * 10**9


async def refused(harness: RunHarness, *, principal: Principal = ME) -> QuotaExceeded:
    """Start a run that a quota does not allow; return the error."""
    with pytest.raises(QuotaExceeded) as caught:
        await harness.start("p", principal=principal)
    return caught.value


async def test_a_day_and_a_month_are_of_utc() -> None:
    of = Quotas(tenants={"*": TenantQuotas(of_tenant=QuotaLimits(tokens_per_day=1, cost_nanos_per_month=1))}).find(ME)
    found = {
        now: [(period.name, period.begin_ns, period.end_ns) for period in list_periods(of, now)]
        for now in (at(2024, 2, 29, 23, 59), at(2024, 12, 1))
    }
    assert found == {
        at(2024, 2, 29, 23, 59): [
            ("tokens_per_day", at(2024, 2, 29), at(2024, 3, 1)),
            ("cost_nanos_per_month", at(2024, 2, 1), at(2024, 3, 1)),
        ],
        at(2024, 12, 1): [
            ("tokens_per_day", at(2024, 12, 1), at(2024, 12, 2)),
            ("cost_nanos_per_month", at(2024, 12, 1), at(2025, 1, 1)),
        ],
    }


async def test_the_tokens_of_a_day_end_at_midnight_and_neither_a_deleted_session_nor_a_restart_resets_them(
    tmp_path: Path,
) -> None:
    clock, limited = HeldClock(at(2026, 11, 27, 22)), quotas(tokens_per_day=4_000)
    team = spender(most=500)
    async with open_team(tmp_path, script(p=[TURN]), team, quotas=limited, clock=clock) as harness:
        for principal in (ME, BERT, ME, ME):
            run = await harness.start("p", principal=principal)
            assert answer_of(await harness.log(run)) == "Done."
            await harness.until_over(run)
            await harness.store.sessions.delete(principal, run.session_id)
        error = await refused(harness)
        assert (error.message, error.subject, error.is_on_starts) == (
            "Nothing is left of the quota of 4,000 tokens a day of the tenant 'local'. Try again in 7,200 s.",
            "tenant:local",
            False,
        )
    async with open_team(tmp_path, script(p=[TURN]), team, quotas=limited, clock=clock) as harness:
        clock.turn(7_199)
        assert (await refused(harness, principal=BERT)).retry_delay == 1.0
        clock.turn(1)
        assert answer_of(await harness.turn("p")) == "Done."
        before = await harness.store.usage.sum_lines(ME.tenant_id, from_ns=0, before_ns=at(2026, 11, 28))
        after = await harness.store.usage.sum_lines(ME.tenant_id, from_ns=at(2026, 11, 28))
        assert (before.tokens, after.tokens) == (4_000, 1_000)


async def test_the_cost_of_a_month_is_of_each_user_if_it_is_a_quota_of_users(tmp_path: Path) -> None:
    clock = HeldClock(at(2026, 11, 30, 23))
    of_users = Quotas(tenants={"*": TenantQuotas(of_user=QuotaLimits(cost_nanos_per_month=3 * COST))})
    async with open_team(tmp_path, script(p=[TURN]), spender(most=500), quotas=of_users, clock=clock) as harness:
        for principal in (ME, ME, BERT):
            log = await harness.log(await harness.start("p", principal=principal))
            assert answer_of(log) == "Done."
        log = await harness.turn("p")
        assert log[-1].run_failed.error.reason == REFUSED, "the call reserves more than is left of one million"
        assert answer_of(await harness.log(await harness.start("p", principal=BERT))) == "Done."
        clock.turn(3_600)
        assert answer_of(await harness.turn("p")) == "Done."


async def test_a_call_for_which_too_little_is_left_is_not_sent_and_fails_for_its_caller(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="go"), usage=TURN["usage"]), TURN], c=[TURN])
    team = spender(links=["c"]), spender("c", most=100_000)
    async with open_team(tmp_path, turns, *team, quotas=quotas(tokens_per_day=10_000)) as harness:
        log = await harness.turn("p")
        await check_replay(harness, log)
    (failed,) = [event.sub_agent_failed for event in having(log, "sub_agent_failed")]
    assert (failed.error.reason, failed.end_reason) == (REFUSED, execution_pb2.END_REASON_LIMIT)
    (refusal,) = [event.llm_failed for event in having(log, "llm_failed")]
    assert (refusal.error.reason, refusal.not_sent) == (REFUSED, True)
    assert (
        "Too little is left of the quota of 10,000 tokens a day of the tenant 'local': 9,000, and the call may take"
        in refusal.error.message
    )
    assert answer_of(log) == "Done."


async def test_of_twenty_children_at_once_as_many_are_asked_as_tokens_are_left_for(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(20)]
    turns = script(**{name: [{"text": "Hm.", "usage": {"input_tokens": 10, "output_tokens": 0}}] for name in names})
    asked, all_decided = 0, asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        nonlocal asked
        asked += 1
        await all_decided.wait()

    team = parallel("root", *names), *(spender(name) for name in names)
    # Three reservations of a little more than a thousand tokens.
    async with open_team(tmp_path, turns, *team, quotas=quotas(tokens_per_day=3_500), gate=gate) as harness:
        run, failures, log = await harness.start("root"), 0, []
        async for event in harness.follow(run):
            log.append(event)
            failures += event.HasField("llm_failed")
            if failures == 17:
                all_decided.set()
        await check_replay(harness, log)
        totals = await harness.store.usage.sum_lines(ME.tenant_id, from_ns=0)
    assert (asked, totals.tokens, len(having(log, "llm_completed"))) == (3, 30, 3)
    assert {event.llm_failed.error.reason for event in having(log, "llm_failed")} == {REFUSED}


async def test_a_run_that_goes_on_past_midnight_uses_the_tokens_of_the_next_day(tmp_path: Path) -> None:
    clock, is_asked, may_answer = HeldClock(at(2026, 11, 27, 23, 59)), asyncio.Event(), asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        is_asked.set()
        await may_answer.wait()

    limited = quotas(tokens_per_day=2_500)
    async with open_team(
        tmp_path, script(p=[TURN]), spender(most=500), quotas=limited, clock=clock, gate=gate
    ) as harness:
        run = await harness.start("p")
        await is_asked.wait()
        clock.turn(120)
        may_answer.set()
        assert answer_of(await harness.log(run)) == "Done."
        days = [
            (await harness.store.usage.sum_lines(ME.tenant_id, from_ns=begin, before_ns=end)).tokens
            for begin, end in ((0, at(2026, 11, 28)), (at(2026, 11, 28), at(2026, 11, 29)))
        ]
        assert days == [0, 1_000]
        await harness.turn("p")
        failed = await harness.turn("p")
        assert failed[-1].run_failed.error.reason == REFUSED
        clock.turn(-7_200)  # it is yesterday again, when nothing was used
        assert answer_of(await harness.turn("p")) == "Done."


async def test_what_another_server_used_counts_as_soon_as_the_sum_is_read_again(tmp_path: Path) -> None:
    if not is_postgres(database_in(tmp_path)):
        pytest.skip("one server has the file")
    limited = quotas(tokens_per_day=3_000)
    async with AsyncExitStack() as stack:
        ahead = HeldClock(at(2026, 11, 27, 12) + 30 * 10**9)
        one, other = [
            await stack.enter_async_context(
                open_team(tmp_path, script(p=[TURN]), spender(most=500), quotas=limited, clock=clock)
            )
            for clock in (HeldClock(at(2026, 11, 27, 12)), ahead)
        ]
        for harness in (one, other, one):
            assert answer_of(await harness.turn("p")) == "Done."
        for harness in (one, other):
            await harness.dependencies.quotas.amounts.refresh_all()
            assert (await refused(harness)).name == "tokens_per_day"


async def test_what_a_call_of_another_server_has_reserved_is_no_longer_left(tmp_path: Path) -> None:
    if not is_postgres(database_in(tmp_path)):
        pytest.skip("one server has the file")
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        is_asked.set()
        await may_answer.wait()

    limited = quotas(cost_nanos_per_month=3 * COST)
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(open_team(tmp_path, script(p=[TURN]), spender(), quotas=limited, gate=gate))
            for _ in range(2)
        ]
        run = await one.start("p")  # its call reserves a little more than two million
        await is_asked.wait()
        failed = await other.turn("p")
        assert failed[-1].run_failed.error.reason == REFUSED
        may_answer.set()
        assert answer_of(await one.log(run)) == "Done."


async def test_servers_whose_clocks_differ_at_midnight_count_each_line_in_one_day(tmp_path: Path) -> None:
    if not is_postgres(database_in(tmp_path)):
        pytest.skip("one server has the file")
    clocks = [HeldClock(at(2026, 11, 27, 23, 59) + second * 10**9) for second in (45, 75)]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                open_team(
                    tmp_path, script(p=[TURN]), spender(most=500), quotas=quotas(tokens_per_day=2_000), clock=clock
                )
            )
            for clock in clocks
        ]
        for harness in (*servers, *servers):
            assert answer_of(await harness.turn("p")) == "Done."
        errors = [await refused(harness) for harness in servers]
        assert [error.retry_delay for error in errors] == [15.0, 86_385.0]
        midnight = at(2026, 11, 28)
        ledger = servers[0].store.usage
        sums = [
            (await ledger.sum_lines(ME.tenant_id, from_ns=begin, before_ns=end)).tokens
            for begin, end in ((0, midnight), (midnight, None), (0, None))
        ]
        assert sums == [2_000, 2_000, 4_000]


async def test_an_answer_waits_until_there_are_tokens_for_the_run(tmp_path: Path) -> None:
    floor = Floor()
    async with agents_on(tmp_path, floor) as harness:
        run = await harness.start("asker", "why?")
        await harness.until_interrupted(run)
    async with agents_on(tmp_path, floor, quotas=quotas(tokens_per_day=0)) as harness:
        (question,) = (await harness.runs.get(ME, run.run_id)).run.open_requests
        with pytest.raises(QuotaExceeded):
            await harness.resume(run, answer_to(question, "so"))
        assert await state_of(harness, run) == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
    async with agents_on(tmp_path, floor) as harness:
        await harness.resume(run, answer_to(question, "so"))
        assert answer_of(await harness.log(run)) == "so"
