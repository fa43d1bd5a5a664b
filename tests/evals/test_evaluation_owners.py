"""Who owns an evaluation: commands that its owner cannot carry out, lost leases, and how many one server adopts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from bough_server.evals.job import evaluations, evaluator
from bough_server.evals.job.evaluation_log import EvaluationState
from bough_server.evals.job.evaluator import LiveEvaluation
from bough_server.evals.job.judging import score_all_metrics
from bough_server.store.ports.log import EventLog
from bough_server.store.ports.workers import RunCommand
from tests.evals.evaluation_workers import ME, Worker
from tests.evals.job_server import GATES, begin, case, check_log, eval_set, evaluating, many, watch


async def test_a_cancellation_that_raises_in_its_owner_does_not_stay_pending_and_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel, failed = LiveEvaluation.cancel, list[RunCommand]()

    async def raising_once(live: LiveEvaluation, *, requested_by: str, note: str) -> None:
        if not failed:
            failed.extend(await server.app.store.mailbox.take(live.evaluation_id))
            raise KeyError("a mistake of the server")
        await cancel(live, requested_by=requested_by, note=note)

    monkeypatch.setattr(LiveEvaluation, "cancel", raising_once)
    async with evaluating(tmp_path) as server:
        log = await begin(server, eval_set(case("a", "cancelled twice"), agent="gated")).until("case_trial_started")
        async with Worker(server, "other") as other:
            with capture_logs() as logged:
                await asyncio.wait_for(other.evaluations.cancel(ME, log.evaluation_id, note="enough"), 20)
            assert failed[0] not in await other.store.mailbox.take(log.evaluation_id)
        await log.to_the_end()
    errors = [(line["evaluation_id"], repr(line["exc_info"])) for line in logged if "exc_info" in line]
    assert (len(failed), errors) == (1, [(log.evaluation_id, "KeyError('a mistake of the server')")])
    assert log.kinds[-1] == "evaluation_cancelled"
    assert [event.note for event in log.having("evaluation_cancel_requested")] == ["enough"]


async def test_an_evaluation_stops_at_once_when_its_server_has_lost_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_judging, judged = asyncio.Event(), list[str]()

    async def judging(*arguments: Any, **options: Any) -> Any:
        if is_judging.is_set():
            return await score_all_metrics(*arguments, **options)
        is_judging.set()
        try:
            await asyncio.Event().wait()
        finally:
            judged.append("stopped")

    monkeypatch.setattr(evaluator, "score_all_metrics", judging)
    async with evaluating(tmp_path) as server:
        leases = server.app.store.leases
        lease = leases.begin

        async def begin_lease(worker: str) -> None:
            judged.append("leased")
            await lease(worker)

        log = begin(server, eval_set(*many(1)))
        await asyncio.wait_for(is_judging.wait(), 30)
        monkeypatch.setattr(leases, "begin", begin_lease)
        await asyncio.wait_for(server.app.runs.worker.replace_lease(), 30)
        await log.to_the_end()
    assert judged == ["stopped", "leased"]
    check_log(log.events)


async def test_cancellations_under_way_when_the_lease_is_lost_end_the_evaluation_once_it_has_a_lease_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_appending, take_over = asyncio.Event(), list[str]()
    async with evaluating(tmp_path) as server:
        log, store = server.app.store.log, server.app.store
        append, begin_lease, continued = log.append, store.leases.begin, log.take_over

        async def appending(*arguments: Any, log_events: Any, **options: Any) -> None:
            if not is_appending.is_set() and any("cancel_requested" in str(each.event) for each in log_events):
                is_appending.set()
                await asyncio.Event().wait()
            await append(*arguments, log_events=log_events, **options)

        async def begin_late(worker: str) -> None:
            for _ in range(50):  # both cancellations ask for the evaluation while there is no lease
                await asyncio.sleep(0)
            await begin_lease(worker)

        async def take_over_noted(evaluation_id: str, **options: Any) -> None:
            take_over.append(evaluation_id)
            await continued(evaluation_id, **options)

        monkeypatch.setattr(log, "append", appending)
        monkeypatch.setattr(log, "take_over", take_over_noted)
        monkeypatch.setattr(store.leases, "begin", begin_late)
        followed = await begin(server, eval_set(case("a", "lost"), agent="gated")).until("case_trial_started")
        cancelling = [asyncio.ensure_future(server.app.evaluations.cancel(ME, followed.evaluation_id))]
        await asyncio.wait_for(is_appending.wait(), 30)
        cancelling.append(asyncio.ensure_future(server.app.evaluations.cancel(ME, followed.evaluation_id)))
        await asyncio.sleep(0)
        await asyncio.wait_for(server.app.runs.worker.replace_lease(), 30)
        await asyncio.wait_for(asyncio.gather(*cancelling), 30)
        await followed.to_the_end()
    assert followed.kinds[-1] == "evaluation_cancelled"
    assert take_over.count(followed.evaluation_id) == 1, "two attempts would fence each other"


async def test_a_server_continues_no_more_evaluations_at_once_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"adopted{number}" for number in range(4)]
    is_judging, may_judge = ({name: asyncio.Event() for name in names} for _ in range(2))

    async def judging(*arguments: Any, **options: Any) -> Any:
        name = arguments[1].id
        is_judging[name].set()
        await may_judge[name].wait()
        return await score_all_metrics(*arguments, **options)

    monkeypatch.setattr(evaluator, "score_all_metrics", judging)
    monkeypatch.setattr(evaluations, "MOST_ADOPTED", 2)
    async with evaluating(tmp_path) as server:
        for name in names:
            await begin(server, eval_set(case(name, "hello"))).until("case_planned")
            await asyncio.wait_for(is_judging[name].wait(), 30)
            is_judging[name].clear()
    async with evaluating(tmp_path) as server:
        index = server.app.store.evaluations
        for left in (4, 3, 2):
            first, second = names[-left], names[-left + 1]
            await asyncio.wait_for(asyncio.gather(is_judging[first].wait(), is_judging[second].wait()), 30)
            rows = await index.open_evaluations()
            assert [row.epoch for row in rows] == [2, 2, 1, 1][:left], "the oldest are continued first"
            may_judge[first].set()
            await watch(server, rows[0].evaluation.evaluation_id).to_the_end()
        may_judge[names[-1]].set()
        await watch(server, rows[1].evaluation.evaluation_id).to_the_end()


async def test_an_evaluation_that_cannot_be_continued_takes_no_room_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, broken = evaluations.read_state, list[str]()

    async def read_unless_broken(log: EventLog, evaluation_id: str) -> EvaluationState:
        if evaluation_id in broken:
            raise ValueError("unreadable")
        return await read(log, evaluation_id)

    monkeypatch.setattr(evaluations, "read_state", read_unless_broken)
    monkeypatch.setattr(evaluations, "MOST_ADOPTED", 1)
    async with evaluating(tmp_path) as server:
        logs = [
            await begin(server, eval_set(case("a", name), agent="gated")).until("case_trial_started")
            for name in ("unreadable", "readable")
        ]
    broken.append(logs[0].evaluation_id)
    GATES["readable"].set()
    with capture_logs() as logged:
        async with evaluating(tmp_path) as server:
            followed = await asyncio.wait_for(watch(server, logs[1].evaluation_id).to_the_end(), 30)
    check_log(followed.events)
    errors = [(line["event"], line["evaluation_id"]) for line in logged if "exc_info" in line]
    assert errors == [("evaluation not continued", broken[0])]
