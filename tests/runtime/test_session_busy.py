"""Sessions that a run holds: what becomes of the next one, and of requests that come at once."""

import asyncio
from pathlib import Path

import pytest

from bough.v1 import event_pb2, execution_pb2, policy_pb2
from bough_server.errors import RequestIdReused, SessionBusy
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.open_runs import open_runs
from tests.support.run_harness import ME
from tests.support.session_agents import CANCEL_INTERRUPTED, QUEUE, Floor, Run, answer_to, harness, queued, state_of


@pytest.fixture
def floor() -> Floor:
    return Floor()


async def test_a_run_that_is_refused_is_told_who_holds_its_session_and_leaves_nothing(
    tmp_path: Path, floor: Floor
) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        with pytest.raises(SessionBusy) as refused:
            await it.start("speaker", "b", session_id=holder.session_id)
        assert [one.run.run_id for one in await open_runs(it.store)] == [holder.run_id]
        floor.let("a")
        await it.log(holder)
    assert refused.value.details == {"session_id": holder.session_id, "run_id": holder.run_id}


async def test_a_run_that_waits_for_input_gives_way_to_one_that_may_cancel_it(tmp_path: Path, floor: Floor) -> None:
    floor.let("b")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        await it.until_interrupted(holder)
        await it.until_over(holder)
        next_run = await it.start("speaker", "b", session_id=holder.session_id, policy=CANCEL_INTERRUPTED)
        assert answer_of(await it.log(next_run)) == "saw a b"
        log = await it.log(holder)
        check_laws(log)
    assert log[-2].cancel_requested == event_pb2.CancelRequested(
        reason=execution_pb2.CANCEL_REASON_SUPERSEDED, requested_by="local", by_run_id=next_run.run_id
    )
    assert log[-1].run_cancelled.cancel_reason == execution_pb2.CANCEL_REASON_SUPERSEDED
    assert log[-1].run_cancelled.error.message == "The run was cancelled because another run took over its session."


async def test_a_run_that_is_executing_does_not_give_way(tmp_path: Path, floor: Floor) -> None:
    async with harness(tmp_path, floor) as it:
        holder = await it.start("speaker", "a")
        with pytest.raises(SessionBusy) as refused:
            await it.start("speaker", "b", session_id=holder.session_id, policy=CANCEL_INTERRUPTED)
        floor.let("a")
        assert answer_of(await it.log(holder)) == "saw a"
    assert refused.value.details["run_id"] == holder.run_id


async def test_a_run_with_others_queued_behind_it_does_not_give_way(tmp_path: Path, floor: Floor) -> None:
    floor.let("b", "c")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        asked = await it.until_interrupted(holder)
        await it.until_over(holder)
        waiting = await queued(it, holder.session_id, "b", "c")
        with pytest.raises(SessionBusy) as refused:
            await it.start("speaker", "d", session_id=holder.session_id, policy=CANCEL_INTERRUPTED)
        assert await state_of(it, holder) == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
        await it.resume(holder, answer_to(having(asked, "input_requested")[0].input_requested.request, "yes"))
        yes = "For context: [asker] said: yes."
        assert [answer_of(await it.log(run)) for run in waiting] == [f"saw a {yes} b", f"saw a {yes} b . c"]
    assert refused.value.details["run_id"] == holder.run_id


@pytest.mark.parametrize("policy", [None, QUEUE, CANCEL_INTERRUPTED])
async def test_two_runs_at_once_on_one_session_never_both_hold_it(
    tmp_path: Path, floor: Floor, policy: policy_pb2.RunPolicy | None
) -> None:
    floor.let("a")
    async with harness(tmp_path, floor) as it:
        first = await it.turn("speaker", "a")
        session_id = first[0].session_id
        starting = [it.start("speaker", text, session_id=session_id, policy=policy) for text in ("b", "c")]
        started = await asyncio.gather(*starting, return_exceptions=True)
        floor.let("b", "c")
        runs = [one for one in started if isinstance(one, Run)]
        logs = [await it.log(run) for run in runs]
        for log in logs:
            await check_replay(it, log)
    if policy is QUEUE:
        assert len(runs) == 2
        assert sorted(len(having(log, "run_dequeued")) for log in logs) == [0, 1]
    else:
        assert [type(one) for one in started if not isinstance(one, Run)] == [SessionBusy]
    one, *rest = sorted(logs, key=lambda log: len(answer_of(log)))
    assert len(rest) == (policy is QUEUE)
    assert answer_of(one) in ("saw a . b", "saw a . c")


@pytest.mark.parametrize("policy", [QUEUE, CANCEL_INTERRUPTED, None])
async def test_two_requests_at_once_with_one_id_make_one_run_in_a_held_session(
    tmp_path: Path, floor: Floor, policy: policy_pb2.RunPolicy | None
) -> None:
    floor.let("b")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        await it.until_interrupted(holder)
        await it.until_over(holder)
        starting = [
            it.start("speaker", "b", session_id=holder.session_id, policy=policy, request_id="r") for _ in range(3)
        ]
        started = await asyncio.gather(*starting, return_exceptions=True)
        if policy is None:
            assert [type(one) for one in started] == [SessionBusy] * 3
            return
        await it.runs.cancel(ME, holder.run_id)
        runs = [one for one in started if isinstance(one, Run)]
        assert len(runs) == 3
        assert len({run.run_id for run in runs}) == 1
        assert answer_of(await it.log(runs[0])) == "saw a b"


async def test_two_requests_at_once_with_one_id_and_other_content_make_one_run_and_one_refusal(
    tmp_path: Path, floor: Floor
) -> None:
    floor.let("a", "b")
    async with harness(tmp_path, floor) as it:
        starting = [it.start("speaker", text, request_id="r") for text in ("a", "b")]
        started = await asyncio.gather(*starting, return_exceptions=True)
        (run,) = [one for one in started if isinstance(one, Run)]
        (refused,) = [one for one in started if isinstance(one, RequestIdReused)]
        await it.log(run)
    assert refused.details == {"run_id": run.run_id}


async def test_a_session_with_runs_that_hold_it_or_wait_for_it_is_not_deleted(tmp_path: Path, floor: Floor) -> None:
    floor.let("b")
    async with harness(tmp_path, floor) as it:
        holder = await it.start("asker", "a")
        await it.until_interrupted(holder)
        await it.until_over(holder)
        with pytest.raises(SessionBusy) as refused:
            await it.store.sessions.delete(ME, holder.session_id)
        assert refused.value.details["run_id"] == holder.run_id
        floor.may_speak["b"].clear()
        (waiting,) = await queued(it, holder.session_id, "b")
        await it.runs.cancel(ME, holder.run_id)
        await floor.began["b"].wait()
        with pytest.raises(SessionBusy) as refused:
            await it.store.sessions.delete(ME, holder.session_id)
        assert refused.value.details["run_id"] == waiting.run_id
        floor.let("b")
        await it.log(waiting)
        await it.until_over(waiting)
        await it.store.sessions.delete(ME, holder.session_id)
        assert await it.messages(holder.session_id) == []
