"""Runs that are queued for their session: their order, over commands, crashes and restarts, their bounds in time."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import error_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server.errors import SessionQueueFull
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, text_of
from tests.support.run_harness import ME, RunHarness, names
from tests.support.session_agents import QUEUE, Floor, Run, answer_to, harness, queued, state_of


@pytest.fixture
def floor() -> Floor:
    return Floor()


ORDER = ["saw a", "saw a . b", "saw a . b . c"]


async def test_queued_runs_begin_first_in_first_out_and_each_sees_those_before_it(tmp_path: Path, floor: Floor) -> None:
    floor.let("a", "b", "c")
    floor.may_speak["a"].clear()
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, "b", "c")
        assert [await state_of(it, run) for run in waiting] == [execution_pb2.EXECUTION_STATE_PENDING] * 2
        floor.let("a")
        logs = [await it.log(run) for run in (holder, *waiting)]
        messages = await it.messages(holder.session_id)
        for log in logs:
            await check_replay(it, log)
    assert [answer_of(log) for log in logs] == ORDER
    assert names(logs[1])[:3] == ["speaker: run.started", "speaker: run.queued", "speaker: run.dequeued"]
    assert [log[1].run_queued.behind_run_id for log in logs[1:]] == [holder.run_id, holder.run_id]
    assert [log[2].run_dequeued.session_cut for log in logs[1:]] == [2, 4]
    assert [one.message.position for one in messages] == [1, 2, 3, 4, 5, 6]
    assert [text_of(one.message) for one in messages][::2] == ["a", "b", "c"]


@pytest.mark.parametrize("is_killed", [True, False])
async def test_queued_runs_keep_their_order_over_a_restart(tmp_path: Path, floor: Floor, is_killed: bool) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, "b", "c", "d")
        await floor.began["a"].wait()
        if is_killed:
            await it.crash()
        else:
            await it.runs.drain(0)
    floor.let("a", "b", "c", "d")
    async with harness(tmp_path, floor) as it:
        assert await it.runs.recover() == 4
        logs = [await it.log(run) for run in (holder, *waiting)]
        for log in logs:
            await check_replay(it, log)
    assert [answer_of(log) for log in logs][:3] == ORDER
    assert [having(log, "run_dequeued")[0].run_dequeued.session_cut for log in logs[1:]] == [2, 4, 6]
    ends = [log[-1].record_time.ToNanoseconds() for log in logs]
    assert ends == sorted(ends)


@pytest.mark.parametrize("events_before", [2, 3, 4, 5])
async def test_a_queued_run_that_is_killed_after_any_of_its_events_ends_as_it_would_have(
    tmp_path: Path, floor: Floor, events_before: int
) -> None:
    floor.let("a", "c")
    floor.may_speak["a"].clear()
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        second, third = await queued(it, holder.session_id, "b", "c")
        if events_before > 2:
            floor.let("a")
        if events_before > 3:
            floor.let("b")
        seen = 0
        async for event in it.follow(second):
            seen = event.sequence
            if seen == events_before:
                break
        await it.crash()
    floor.let("a", "b")
    async with harness(tmp_path, floor) as it:
        await it.runs.recover()
        logs = [await it.log(run) for run in (holder, second, third)]
        for log in logs:
            await check_replay(it, log)
    assert [answer_of(log) for log in logs] == ORDER
    assert [len(having(log, "run_dequeued")) for log in logs] == [0, 1, 1]


@pytest.mark.parametrize("is_recovered", [False, True])
async def test_a_queued_run_that_is_cancelled_never_begins_and_lets_the_next_through(
    tmp_path: Path, floor: Floor, is_recovered: bool
) -> None:
    floor.let("b", "c")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, "b", "c")
        if is_recovered:
            await it.crash()
        else:
            logs = await cancel_the_first(it, floor, holder, waiting)
    if is_recovered:
        async with harness(tmp_path, floor) as it:
            await it.runs.recover()
            for run in waiting:
                await until_resumed(it, run, 1)
            logs = await cancel_the_first(it, floor, holder, waiting)
    expected = ["run_started", "run_queued", "run_resumed", "cancel_requested", "run_cancelled"]
    assert [event.WhichOneof("payload") for event in logs[1]] == [
        kind for kind in expected if is_recovered or kind != "run_resumed"
    ]
    assert answer_of(logs[2]) == "saw a . c"


async def cancel_the_first(
    it: RunHarness, floor: Floor, holder: Run, waiting: Sequence[Run]
) -> list[list[event_pb2.AgentEvent]]:
    record = await it.runs.cancel(ME, waiting[0].run_id)
    assert record.run.run_id == waiting[0].run_id
    cancelled = await it.log(waiting[0])
    check_laws(cancelled)
    await it.until_over(waiting[0])
    assert await state_of(it, waiting[0]) == execution_pb2.EXECUTION_STATE_CANCELLED
    assert await state_of(it, waiting[1]) == execution_pb2.EXECUTION_STATE_PENDING
    floor.let("a")
    return [await it.log(holder), cancelled, await it.log(waiting[1])]


async def test_a_queued_runs_deadline_passes_while_it_waits(tmp_path: Path, floor: Floor) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        soon = time.time_ns() + 20_000_000
        late = await it.start("speaker", "b", session_id=holder.session_id, policy=QUEUE, deadline_time_ns=soon)
        log = await it.log(late)
        check_laws(log)
        floor.let("a")
        await it.log(holder)
        again = await it.start("speaker", "a", session_id=holder.session_id)
        await it.log(again)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert not having(log, "run_dequeued")


async def test_a_deadline_that_passes_while_no_server_is_there_ends_a_queued_run_without_its_turn(
    tmp_path: Path, floor: Floor
) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        soon = time.time_ns() + 50_000_000
        late = await it.start("speaker", "b", session_id=holder.session_id, policy=QUEUE, deadline_time_ns=soon)
        await it.crash()
    floor.let("a")
    async with harness(tmp_path, floor) as it:
        await pass_the_time(it, soon)
        await it.runs.recover()
        log = await it.log(late)
        check_laws(log)
        assert answer_of(await it.log(holder)) == "saw a"
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert not having(log, "run_dequeued")


async def test_a_queued_run_that_is_not_followed_any_more_is_cancelled(tmp_path: Path, floor: Floor) -> None:
    policy = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE, disconnect_grace=Duration())
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        left = await it.start("speaker", "b", session_id=holder.session_id, policy=policy)
        (kept,) = await queued(it, holder.session_id, "c")
        follower = it.follow(left)
        await anext(follower)
        await follower.aclose()
        await it.until_over(left)
        floor.let("a", "c")
        assert answer_of(await it.log(kept)) == "saw a . c"
        log = await it.log(left)
    assert [event.WhichOneof("payload") for event in log][2:] == ["cancel_requested", "run_cancelled"]
    assert log[2].cancel_requested.reason == execution_pb2.CANCEL_REASON_DISCONNECTED


@pytest.mark.parametrize("is_recovered", [False, True])
async def test_the_time_that_a_run_waits_for_its_session_is_none_of_its_wall_duration(
    tmp_path: Path, floor: Floor, is_recovered: bool
) -> None:
    policy = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
    policy.limits.wall_duration.FromMilliseconds(300)
    floor.let("b")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await it.start("speaker", "b", session_id=holder.session_id, policy=policy)
        until = time.time_ns() + 320_000_000
        if is_recovered:
            await it.crash()
        else:
            await pass_the_time(it, until)
            floor.let("a")
            log = await it.log(waiting)
    if is_recovered:
        async with harness(tmp_path, floor) as it:
            await it.runs.recover()
            await pass_the_time(it, until)
            floor.let("a")
            log = await it.log(waiting)
    assert answer_of(log) == "saw a . b"


async def pass_the_time(it: RunHarness, until_ns: int) -> None:
    await it.clock.sleep(max(0.0, (until_ns - time.time_ns()) / 1e9))


async def test_restarts_while_a_run_waits_for_its_session_are_none_of_its_recoveries(
    tmp_path: Path, floor: Floor
) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        asked = await it.until_interrupted(holder)
        (waiting,) = await queued(it, holder.session_id, "b")
    floor.let("b")
    for times in range(1, 7):
        async with harness(tmp_path, floor) as it:
            await it.runs.recover()
            await until_resumed(it, waiting, times)
    async with harness(tmp_path, floor) as it:
        await it.runs.recover()
        await it.resume(holder, answer_to(having(asked, "input_requested")[0].input_requested.request, "yes"))
        log = await it.log(waiting)
        await check_replay(it, log)
    assert answer_of(log) == "saw a For context: [asker] said: yes. b"
    assert len(having(log, "run_resumed")) == 7


async def until_resumed(it: RunHarness, run: Run, times: int) -> None:
    """Waits until a run has been taken over so many times."""
    follower = it.follow(run)
    async for event in follower:
        times -= event.HasField("run_resumed")
        if not times:
            break
    await follower.aclose()


async def test_runs_wait_behind_one_that_asks_until_it_is_answered(tmp_path: Path, floor: Floor) -> None:
    floor.let("b")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        asked = await it.until_interrupted(holder)
        await it.until_over(holder)
        (waiting,) = await queued(it, holder.session_id, "b")
        assert not floor.began["b"].is_set()
        await it.resume(holder, answer_to(having(asked, "input_requested")[0].input_requested.request, "yes"))
        assert answer_of(await it.log(waiting)) == "saw a For context: [asker] said: yes. b"


async def test_sixty_four_runs_may_wait_and_the_next_is_refused_until_one_has_left(
    tmp_path: Path, floor: Floor
) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        waiting = await queued(it, holder.session_id, *(str(number) for number in range(64)))
        with pytest.raises(SessionQueueFull) as refused:
            await queued(it, holder.session_id, "too many")
        assert refused.value.details["run_id"] == holder.run_id
        await it.runs.cancel(ME, waiting[10].run_id)
        await it.log(waiting[10])
        (last,) = await queued(it, holder.session_id, "last")
        floor.let("a", "last", *(str(number) for number in range(64)))
        log = await it.log(last)
    said = [str(number) for number in range(64) if number != 10]
    assert having(log, "run_dequeued")[0].run_dequeued.session_cut == 2 * (1 + len(said))
    assert answer_of(log).split()[-1] == "last"
