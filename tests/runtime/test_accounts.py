"""Accounts: what is left is checked before a run and before each of its model calls, and every attempt is charged."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, model_pb2
from bough_server.errors import InsufficientBalance, RequestIdReused
from bough_server.identity import Principal
from bough_server.store.opening import rebuild_projections
from bough_server.store.ports.accounts import AccountKey, StoredAdjustment
from bough_server.store.sqlite.database_path import is_postgres
from tests.store.sql import execute
from tests.support.composite_agents import parallel
from tests.support.databases import database_in, in_each_database
from tests.support.held_clock import HeldClock
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import call, calls, llm, open_team, script

pytestmark = in_each_database

REFUSED: Final = error_pb2.ERROR_REASON_INSUFFICIENT_BALANCE
TURN: Final = {"text": "Done.", "usage": {"input_tokens": 1_000, "output_tokens": 0}}
"""A turn that costs a million billionths: the scripted model costs 1,000 a token of input and 2,000 of output."""
COST: Final = 1_000_000
DAY_NS: Final = 86_400 * 10**9
KEY: Final = AccountKey(tenant_id=ME.tenant_id, user_id=ME.user_id, currency_code="USD")


async def add(harness: RunHarness, amount: int, *, request_id: str = "first", key: AccountKey = KEY) -> None:
    """Add to an account, as AdjustBalance does."""
    adjustment = StoredAdjustment(
        request_id=request_id,
        amount_nanos=amount,
        currency_code="USD",
        note="",
        time_ns=harness.clock.now_ns(),
        made_by="bill",
    )
    await harness.store.accounts.adjust(key, adjustment)
    assert harness.dependencies.accounts is not None
    await harness.dependencies.accounts.refresh(key)


async def balance(harness: RunHarness, key: AccountKey = KEY) -> int:
    """Return a balance; no model call may have reserved anything of it."""
    assert harness.dependencies.accounts is not None
    sums = await harness.dependencies.accounts.read(key)
    assert sums.reserved_nanos == 0
    return sums.balance_nanos


async def charged(harness: RunHarness, *logs: Sequence[event_pb2.AgentEvent]) -> int:
    """Return what the ledger has charged for runs."""
    lines = [line for log in logs for line in await harness.store.usage.list_for_run(log[0].run_id)]
    return sum(line.charge.nanos for line in lines)


def spender(name: str = "p", **fields: object) -> agent_pb2.AgentDefinition:
    """Return an agent whose calls reserve a little more than two thousand tokens' price each."""
    return llm(name, settings=model_pb2.ModelSettings(max_output_tokens=1_000), **fields)


async def test_without_a_balance_nothing_begins_and_nothing_is_written(tmp_path: Path) -> None:
    heard: list[object] = []
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user", heard=heard) as harness:  # type: ignore[arg-type]
        with pytest.raises(InsufficientBalance, match="Nothing is left of the account of the user 'local'") as refused:
            await harness.start("p")
        assert refused.value.retry_delay is None
        tables = ("runs", "sessions", "events", "messages", "usage_entries", "account_snapshots")
        url = database_in(tmp_path)
        assert [execute(url, f"SELECT count(*) FROM {table}") for table in tables] == [[(0,)]] * len(tables)
        await add(harness, 10 * COST)
        log = await harness.turn("p")
        await check_replay(harness, log)
        assert answer_of(log) == "Done."
        assert await balance(harness) == 10 * COST - await charged(harness, log) == 9 * COST
    assert len(heard) == 1


async def test_a_balance_of_nothing_refuses_forks_and_answers_too_and_a_repeated_request_id_does_not_start(
    tmp_path: Path,
) -> None:
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user") as harness:
        await add(harness, 3 * COST)
        run = await harness.start("p", request_id="once")
        log = await harness.log(run)
        await add(harness, -await balance(harness), request_id="out")
        assert (await harness.start("p", request_id="once")).run_id == run.run_id
        with pytest.raises(InsufficientBalance):
            await harness.fork(run, 1)
        await add(harness, 3 * COST, request_id="second")
        fork = await harness.log(await harness.fork(run, 1))
        assert await charged(harness, fork) == await charged(harness, log) == COST


async def test_a_call_for_which_too_little_is_left_is_not_sent_and_fails_for_its_caller(tmp_path: Path) -> None:
    turns = script(p=[calls(call("call_c", message="go"), usage=TURN["usage"]), TURN], c=[TURN])
    child = llm("c", settings=model_pb2.ModelSettings(max_output_tokens=100_000))
    async with open_team(tmp_path, turns, spender(links=["c"]), child, accounts_per="user") as harness:
        await add(harness, 10 * COST)
        log = await harness.turn("p")
        await check_replay(harness, log)
        assert await balance(harness) == 10 * COST - await charged(harness, log) == 8 * COST
    (failed,) = [event.sub_agent_failed for event in having(log, "sub_agent_failed")]
    assert (failed.error.reason, failed.end_reason) == (REFUSED, execution_pb2.END_REASON_LIMIT)
    (refused,) = [event.llm_failed for event in having(log, "llm_failed")]
    assert (refused.error.reason, refused.not_sent) == (REFUSED, True)
    assert "Too little is left of the account of the user 'local': 9000000 billionths of USD" in refused.error.message
    assert answer_of(log) == "Done."


async def test_of_twenty_children_at_once_as_many_are_asked_as_there_is_left_for(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(20)]
    turns = script(**{name: [{"text": "Hm.", "usage": {"input_tokens": 10, "output_tokens": 0}}] for name in names})
    children = [llm(name, settings=model_pb2.ModelSettings(max_output_tokens=1_000)) for name in names]
    asked = 0
    all_decided = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        nonlocal asked
        asked += 1
        await all_decided.wait()

    team = parallel("root", *names)
    async with open_team(tmp_path, turns, team, *children, accounts_per="user", gate=gate) as harness:
        await add(harness, 7 * COST)  # three reservations of a little more than two million
        run = await harness.start("root")
        refused = 0
        log = []
        async for event in harness.follow(run):
            log.append(event)
            refused += event.HasField("llm_failed")
            if refused == 17:
                all_decided.set()
        await check_replay(harness, log)
        left = await balance(harness)
        assert left == 7 * COST - await charged(harness, log)
    assert (asked, len(having(log, "llm_started")), len(having(log, "llm_completed"))) == (3, 3, 3)
    assert {event.llm_failed.error.reason for event in having(log, "llm_failed")} == {REFUSED}
    assert left >= 0
    assert log[-1].HasField("run_completed") or log[-1].HasField("run_failed")


async def test_what_is_not_reported_is_charged_as_reserved_and_marked(tmp_path: Path) -> None:
    lost = {"reason": "TRANSPORT", "after_chunks": 1, "times": 1}
    at_once = {"reason": "TRANSPORT", "after_chunks": 0, "times": 1}
    turns = script(p=[{"text": "One of two.", "error": lost}], q=[{**TURN, "error": at_once}])
    async with open_team(tmp_path, turns, spender("p"), spender("q"), accounts_per="user") as harness:
        await add(harness, 100 * COST)
        logs = [await harness.turn(name) for name in ("p", "q")]
        lines = [
            [(line.charge.nanos, line.is_estimated) for line in await harness.store.usage.list_for_run(log[0].run_id)]
            for log in logs
        ]
        assert await balance(harness) == 100 * COST - await charged(harness, *logs)
    (started,) = [event.llm_started for event in having(logs[0], "llm_started")]
    assert lines[0] == [(started.reserved_cost_nanos, True)] * 2
    assert lines[1] == [(0, False), (COST, False)], "an attempt that was not answered charges nothing"
    assert [event.llm_retrying.unanswered for log in logs for event in having(log, "llm_retrying")] == [False, True]


async def test_a_call_in_flight_keeps_its_reservation_at_the_next_server(tmp_path: Path) -> None:
    is_asked = asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if agent == "p":
            is_asked.set()
            await asyncio.Event().wait()

    turns = script(p=[TURN], q=[TURN])
    team = spender("p"), spender("q")
    async with open_team(tmp_path, turns, *team, accounts_per="user", gate=gate) as harness:
        await add(harness, 6 * COST)
        run = await harness.start("p")
        await is_asked.wait()
        assert harness.dependencies.accounts is not None
        reserved = (await harness.dependencies.accounts.read(KEY)).reserved_nanos
        assert reserved > 2 * COST
        await harness.crash()
    async with open_team(tmp_path, turns, *team, accounts_per="user", gate=gate) as harness:
        is_asked.clear()
        await harness.runs.recover()
        await is_asked.wait()
        other = await harness.turn("q")
        assert {event.llm_failed.error.reason for event in having(other, "llm_failed")} == {REFUSED}
        await harness.runs.cancel(ME, run.run_id)
        log = await harness.log(run)
        lines = await harness.store.usage.list_for_run(run.run_id)
        assert [(line.charge.nanos, line.is_estimated) for line in lines] == [(reserved, True)] * 2
        assert await balance(harness) == 6 * COST - 2 * reserved
    assert [event.llm_retrying.reason for event in having(log, "llm_retrying")] == [event_pb2.RETRY_REASON_RECOVERED]


async def test_an_account_of_a_tenant_pays_for_all_its_users(tmp_path: Path) -> None:
    other = Principal(tenant_id=ME.tenant_id, user_id="other")
    whole = AccountKey(tenant_id=ME.tenant_id, user_id="", currency_code="USD")
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="tenant") as harness:
        await add(harness, 10 * COST, key=whole)
        for principal in (ME, other):
            await harness.log(await harness.start("p", principal=principal))
        assert await balance(harness, whole) == 8 * COST


async def test_an_account_that_is_switched_on_over_an_old_ledger_begins_with_its_first_adjustment(
    tmp_path: Path,
) -> None:
    async with open_team(tmp_path, script(p=[TURN]), spender()) as harness:
        await harness.turn("p")
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user") as harness:
        await add(harness, 10 * COST)
        await harness.turn("p")
        assert await balance(harness) == 9 * COST
    async with open_team(tmp_path, script(p=[TURN]), spender()) as harness:
        await harness.turn("p")
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user") as harness:
        assert await balance(harness) == 8 * COST


async def test_an_adjustment_of_one_request_id_is_made_once(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user") as harness:
        await add(harness, COST)
        await add(harness, COST)
        assert await balance(harness) == COST
        with pytest.raises(RequestIdReused):
            await add(harness, COST + 1)
        await add(harness, COST + 1, key=AccountKey(tenant_id="other", user_id="local", currency_code="USD"))
        assert await balance(harness) == COST


async def test_what_one_server_has_reserved_the_other_one_does_not_spend(tmp_path: Path) -> None:
    """20 children at once on two servers, with what three of them reserve: three calls are sent."""
    if not is_postgres(database_in(tmp_path)):
        pytest.skip("one server has the file")
    names = [f"c{number}" for number in range(10)]
    turns = script(**{name: [{"text": "Hm.", "usage": {"input_tokens": 10, "output_tokens": 0}}] for name in names})
    children = [llm(name, settings=model_pb2.ModelSettings(max_output_tokens=1_000)) for name in names]
    asked, is_over = asyncio.Semaphore(0), asyncio.Event()

    async def gate(agent: str, turn: int, chunk: int) -> None:
        asked.release()
        await is_over.wait()

    team = [parallel("root", *names), *children]
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(open_team(tmp_path, turns, *team, accounts_per="user", gate=gate))
            for _ in range(2)
        ]
        await add(one, 7 * COST)
        first = await one.start("root")
        for _ in range(3):
            await asked.acquire()
        await add(one, -COST, request_id="less")
        with pytest.raises(InsufficientBalance):
            await other.start("root")
        await add(one, COST, request_id="more")
        log = await other.log(await other.start("root"))
        assert having(log, "llm_started") == []
        is_over.set()
        await one.log(first)
        assert await balance(one) == 7 * COST - 3 * 10 * 1_000


async def test_a_snapshot_changes_no_balance_and_is_made_when_a_day_has_been_over_for_a_day(tmp_path: Path) -> None:
    clock, url = HeldClock(), database_in(tmp_path)
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user", clock=clock) as harness:
        accounts = harness.dependencies.accounts
        assert accounts is not None
        await add(harness, 100 * COST)
        found = []
        for _ in range(5):
            await harness.turn("p")
            await accounts.refresh_all()
            snapshots = execute(url, "SELECT before_ns, charge_nanos FROM account_snapshots")
            found.append([(before % DAY_NS, charge // COST) for before, charge in snapshots])
            clock.turn(DAY_NS / 1e9)
        assert found == [[], [], [(0, 1)], [(0, 2)], [(0, 3)]]
        assert await balance(harness) == 95 * COST
    sums = "SELECT sum(charge_nanos), count(*) FROM usage_entries"
    before = execute(url, sums)
    rebuild_projections(url)
    assert (execute(url, sums), execute(url, "SELECT * FROM account_snapshots")) == (before, [])
    async with open_team(tmp_path, script(p=[TURN]), spender(), accounts_per="user", clock=clock) as harness:
        assert await balance(harness) == 95 * COST
