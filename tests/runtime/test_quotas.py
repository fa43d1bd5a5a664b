"""Quotas on runs: how many there may be at the same time, and how many may start in a minute, over all servers."""

from pathlib import Path
from random import Random

import pytest

from bough.v1 import execution_pb2, run_pb2
from bough_server.identity import Principal
from bough_server.quotas import QuotaExceeded, QuotaLimits, Quotas, TenantQuotas
from tests.support.databases import in_each_database
from tests.support.held_clock import HeldClock
from tests.support.run_harness import ME, RunHarness
from tests.support.session_agents import CANCEL_INTERRUPTED, Floor, answer_to, harness, queued, state_of

pytestmark = in_each_database

BERT = Principal(tenant_id=ME.tenant_id, user_id="bert")
RULES = Principal(tenant_id=ME.tenant_id, user_id="bough/rules")
STRANGER = Principal(tenant_id="other", user_id=ME.user_id)


def of_tenant(**limits: int) -> Quotas:
    """Return quotas of the tenant of ME."""
    return Quotas(tenants={ME.tenant_id: TenantQuotas(of_tenant=QuotaLimits(**limits))})


def of_user(**limits: int) -> Quotas:
    """Return quotas of each user of the tenant of ME."""
    return Quotas(tenants={ME.tenant_id: TenantQuotas(of_user=QuotaLimits(**limits))})


async def refused(it: RunHarness, text: str = "more", *, principal: Principal = ME, **fields: object) -> QuotaExceeded:
    """Start a run that a quota does not allow; return the error."""
    with pytest.raises(QuotaExceeded) as caught:
        await it.start("speaker", text, principal=principal, **fields)  # type: ignore[arg-type]
    return caught.value


async def end_of(it: RunHarness, run: run_pb2.Run) -> str:
    """Follow a run to its end, and return the kind of that."""
    return str((await it.log(run))[-1].WhichOneof("payload"))


async def test_a_run_beyond_those_that_may_run_at_once_is_refused_and_records_nothing(tmp_path: Path) -> None:
    floor = Floor()
    async with harness(tmp_path, floor, quotas=of_tenant(concurrent_runs=2)) as it:
        runs = [await it.start("speaker", text) for text in ("one", "two")]
        error = await refused(it, principal=BERT)
        assert (error.message, error.subject, error.limit, error.retry_delay, error.details) == (
            "Nothing is left of the quota of 2 runs at the same time of the tenant 'local'. Try again in 5 s.",
            f"tenant:{ME.tenant_id}",
            2,
            5.0,
            {"quota": "concurrent_runs"},
        )
        other = await it.start("speaker", "other", principal=STRANGER)
        floor.let("one", "two", "three", "other")
        await it.until_over(other)
        assert {await end_of(it, run) for run in runs} == {"run_completed"}
        assert await end_of(it, await it.start("speaker", "three", principal=BERT)) == "run_completed"
        lines = await it.store.usage.sum_lines(ME.tenant_id, from_ns=0)
        assert lines.starts == 3


async def test_a_quota_of_users_is_of_each_of_them_and_not_of_the_servers_own(tmp_path: Path) -> None:
    floor = Floor()
    quotas = {
        ME.tenant_id: TenantQuotas(of_tenant=QuotaLimits(runs_per_minute=4), of_user=QuotaLimits(concurrent_runs=1))
    }
    async with harness(tmp_path, floor, quotas=Quotas(tenants=quotas)) as it:
        runs = [await it.start("speaker", "one", principal=principal) for principal in (ME, BERT, RULES, RULES)]
        assert (await refused(it, principal=ME)).subject == f"user:{ME.user_id}"
        assert (await refused(it, principal=RULES)).subject == f"tenant:{ME.tenant_id}"
        floor.let("one")
        assert {await end_of(it, run) for run in runs} == {"run_completed"}


async def test_a_tenant_that_is_not_named_has_the_quotas_of_any(tmp_path: Path) -> None:
    floor = Floor()
    quotas = Quotas(tenants={"*": TenantQuotas(of_tenant=QuotaLimits(concurrent_runs=1)), "other": TenantQuotas()})
    async with harness(tmp_path, floor, quotas=quotas) as it:
        runs = [await it.start("speaker", "one", principal=who) for who in (ME, STRANGER, STRANGER)]
        await refused(it)
        floor.let("one")
        for run in runs:
            await it.until_over(run)
        assert (await it.start("speaker", "one")).state == execution_pb2.EXECUTION_STATE_RUNNING


async def test_a_run_that_waits_for_input_leaves_its_place_and_its_answer_is_never_refused(tmp_path: Path) -> None:
    floor = Floor()
    async with harness(tmp_path, floor, quotas=of_user(concurrent_runs=1)) as it:
        asking = await it.start("asker", "why?")
        await it.until_interrupted(asking)
        speaking = await it.start("speaker", "one")
        await refused(it)
        (question,) = (await it.runs.get(ME, asking.run_id)).run.open_requests
        await it.resume(asking, answer_to(question, "so"))
        assert await end_of(it, asking) == "run_completed"
        floor.let("one")
        assert await end_of(it, speaking) == "run_completed"


async def test_a_run_that_waits_for_its_session_counts_from_its_acceptance(tmp_path: Path) -> None:
    floor = Floor()
    async with harness(tmp_path, floor, quotas=of_user(concurrent_runs=2)) as it:
        first = await it.start("speaker", "one")
        (second,) = await queued(it, first.session_id, "two")
        await refused(it)
        floor.let("one", "two")
        assert [await end_of(it, run) for run in (first, second)] == ["run_completed"] * 2


async def test_a_run_that_is_refused_does_not_replace_one_that_waits_for_input(tmp_path: Path) -> None:
    floor = Floor()
    async with harness(tmp_path, floor, quotas=of_user(concurrent_runs=1)) as it:
        asking = await it.start("asker", "why?")
        await it.until_interrupted(asking)
        speaking = await it.start("speaker", "one")
        await refused(it, session_id=asking.session_id, policy=CANCEL_INTERRUPTED)
        assert await state_of(it, asking) == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        floor.let("one")
        assert await end_of(it, speaking) == "run_completed"


async def test_a_repeated_request_returns_its_run_although_its_quota_is_used_up(tmp_path: Path) -> None:
    floor = Floor()
    async with harness(tmp_path, floor, quotas=of_user(concurrent_runs=1, runs_per_minute=1)) as it:
        run = await it.start("speaker", "one", request_id="r")
        assert (await it.start("speaker", "one", request_id="r")).run_id == run.run_id
        await refused(it, request_id="s")
        floor.let("one")
        assert await end_of(it, run) == "run_completed"


async def test_a_fork_counts_as_a_start_and_as_a_run_of_its_own_user(tmp_path: Path) -> None:
    floor = Floor()
    async with harness(tmp_path, floor, quotas=of_user(concurrent_runs=1, runs_per_minute=2)) as it:
        floor.let("one")
        origin = await it.start("speaker", "one")
        await it.log(origin)
        await it.log(await it.fork(origin, 1))
        with pytest.raises(QuotaExceeded, match="2 runs a minute"):
            await it.fork(origin, 1)
        assert await end_of(it, await it.fork(origin, 1, principal=BERT)) == "run_completed"
        floor.may_speak["one"].clear()
        held = await it.fork(origin, 1, principal=BERT)
        with pytest.raises(QuotaExceeded, match="1 runs at the same time"):
            await it.fork(origin, 1, principal=BERT)
        floor.let("one")
        assert await end_of(it, held) == "run_completed"


async def test_a_deleted_session_resets_no_quota_and_the_minute_does(tmp_path: Path) -> None:
    floor, clock = Floor(), HeldClock()
    floor.let("one")
    async with harness(tmp_path, floor, quotas=of_user(runs_per_minute=2), clock=clock) as it:
        for _ in range(2):
            run = await it.start("speaker", "one")
            await it.log(run)
            await it.until_over(run)
            await it.store.sessions.delete(ME, run.session_id)
            clock.turn(20)
        error = await refused(it)
        assert (error.message, error.retry_delay) == (
            f"Nothing is left of the quota of 2 runs a minute of the user {ME.user_id!r}. Try again in 20 s.",
            20.0,
        )
        clock.turn(20)
        assert await end_of(it, await it.start("speaker", "one")) == "run_completed"
        assert (await refused(it)).retry_delay == 20.0


async def test_a_clock_that_jumps_an_hour_refuses_nobody_for_longer_than_two_minutes(tmp_path: Path) -> None:
    floor, clock = Floor(), HeldClock()
    floor.let("one")
    async with harness(tmp_path, floor, quotas=of_user(runs_per_minute=1), clock=clock) as it:
        await it.log(await it.start("speaker", "one"))
        for jump, delay in ((-59, 119.0), (119, None), (-3600, None), (3600 + 30, 30.0)):
            clock.turn(jump)
            if delay is None:
                assert await end_of(it, await it.start("speaker", "one")) == "run_completed"
            else:
                assert (await refused(it)).retry_delay == delay


async def test_at_no_time_did_more_runs_start_within_a_minute_than_may(tmp_path: Path) -> None:
    floor, clock, random = Floor(), HeldClock(), Random(27)
    floor.let("one")
    starts: list[int] = []
    async with harness(tmp_path, floor, quotas=of_user(runs_per_minute=3), clock=clock) as it:
        for _ in range(40):
            clock.turn(random.choice((0, 1, 7, 19, 31, -31)))
            try:
                await it.log(await it.start("speaker", "one"))
            except QuotaExceeded as error:
                clock.turn(error.retry_delay or 0)
                continue
            starts.append(clock.now_ns())
    starts.sort()
    minute = 60 * 10**9
    assert len(starts) > 10
    assert all(later - earlier >= minute for earlier, later in zip(starts, starts[3:], strict=False))


async def test_a_cancelled_run_and_one_that_another_server_has_ended_give_their_places_back(tmp_path: Path) -> None:
    floor, quotas = Floor(), of_user(concurrent_runs=2)
    async with harness(tmp_path, floor, quotas=quotas) as it:
        cancelled, lost = [await it.start("speaker", text) for text in ("one", "two")]
        await refused(it)
        await it.runs.cancel(ME, cancelled.run_id)
        await it.until_over(cancelled)
        assert (await it.start("speaker", "three")).state == execution_pb2.EXECUTION_STATE_RUNNING
        await refused(it)
        await it.crash()
    async with harness(tmp_path, floor, quotas=quotas) as it:
        await refused(it)  # the runs of the server that is gone have not ended
        await it.runs.recover()  # which no quota keeps from being continued
        floor.let("two", "three", "four")
        assert await end_of(it, lost) == "run_completed"
        assert await end_of(it, await it.start("speaker", "four")) == "run_completed"
