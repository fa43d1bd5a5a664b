"""How evaluations end: cancelled, out of budget, judged by gates and against a baseline, over a real socket."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from bough.v1 import error_pb2, eval_result_pb2, eval_service_pb2, execution_pb2, policy_pb2
from bough_server.evals.job import evaluator
from tests.evals.job_server import (
    ARRIVED,
    AT_ONCE,
    GATES,
    begin,
    case,
    case_results,
    check_log,
    eval_set,
    evaluated,
    evaluating,
    evaluation,
    many,
    runs_of,
    watch,
)
from tests.evals.test_judges import broken
from tests.rpc.run_server import Served

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED
CANCELLED = execution_pb2.EXECUTION_STATE_CANCELLED


async def cancel(server: Served, evaluation_id: str, note: str = "") -> Any:
    """Cancel an evaluation."""
    request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=evaluation_id, note=note)
    return (await server.trees.CancelEvaluation(request)).evaluation


def waiting(name: str, count: int) -> list[dict[str, Any]]:
    """Cases of `gated` that wait."""
    return [case(f"{name}{number}", f"{name}{number}") for number in range(count)]


async def test_a_cancelled_evaluation_cancels_its_runs_and_begins_no_others(server: Served) -> None:
    log = await begin(server, eval_set(*waiting("cancel", 6), agent="gated"), max_concurrency=2).until(
        "case_trial_started"
    )
    await asyncio.wait_for(asyncio.gather(ARRIVED["cancel0"].wait(), ARRIVED["cancel1"].wait()), 30)
    await asyncio.gather(*(cancel(server, log.evaluation_id, note="enough") for _ in range(5)))
    await log.to_the_end()
    again = await cancel(server, log.evaluation_id)
    runs = await runs_of(server, log.evaluation_id)
    found = await evaluation(server, log.evaluation_id)
    followed = await watch(server, log.evaluation_id).to_the_end()
    assert [event.sequence for event in log.events] == list(range(1, len(log.events) + 1))
    assert log.kinds.count("evaluation_cancel_requested") == 1
    assert log.having("evaluation_cancel_requested")[0].note == "enough"
    assert log.kinds[-1] == "evaluation_cancelled"
    assert log.kinds.count("case_trial_started") == 2
    assert [run.state for run in runs] == [CANCELLED] * 2
    assert found.evaluation.state == again.state == CANCELLED
    assert (found.result.state, found.result.error.reason) == (CANCELLED, error_pb2.ERROR_REASON_CANCELLED)
    assert found.evaluation.last_sequence == len(log.events)
    assert followed.events == log.events


async def test_to_cancel_what_has_ended_changes_nothing(server: Served) -> None:
    log = await evaluated(server, eval_set(*many(2)))
    ended = await cancel(server, log.evaluation_id)
    assert ended.state == execution_pb2.EXECUTION_STATE_SUCCEEDED
    assert (await watch(server, log.evaluation_id).to_the_end()).events == log.events
    with pytest.raises(aio.AioRpcError) as refused:
        await cancel(server, "nothing")
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_an_evaluation_is_deleted_once_it_has_ended_and_its_runs_are_kept(server: Served) -> None:
    log = await begin(server, eval_set(case("a", "delete gate"), agent="gated"), request_id="d").until(
        "case_trial_started"
    )
    request = eval_service_pb2.DeleteEvaluationRequest(evaluation_id=log.evaluation_id)
    with pytest.raises(aio.AioRpcError) as early:
        await server.trees.DeleteEvaluation(request)
    assert early.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "has not ended: cancel it first." in str(early.value.details())
    GATES["delete gate"].set()
    await log.to_the_end()
    await evaluation(server, log.evaluation_id)
    await server.trees.DeleteEvaluation(request)
    for call in (
        server.trees.DeleteEvaluation(request),
        evaluation(server, log.evaluation_id),
        case_results(server, log.evaluation_id),
        watch(server, log.evaluation_id).to_the_end(),
    ):
        with pytest.raises(aio.AioRpcError) as gone:
            await call
        assert gone.value.code() == grpc.StatusCode.NOT_FOUND
    assert [run.evaluation.case_id for run in await runs_of(server, log.evaluation_id)] == ["a"]
    again = await evaluated(server, eval_set(case("a", "delete gate"), agent="gated"), request_id="d")
    assert again.evaluation_id != log.evaluation_id


async def test_a_trial_that_begins_while_the_evaluation_is_cancelled_is_cancelled_too(server: Served) -> None:
    """Whenever the cancellation comes, nothing waits for the gates, which stay closed."""
    for delay in range(12):
        log = await begin(server, eval_set(*waiting(f"at{delay}-", 4), agent="gated"), max_concurrency=4).until(
            "case_planned"
        )
        await asyncio.sleep(delay * 0.002)
        await cancel(server, log.evaluation_id)
        await asyncio.wait_for(log.to_the_end(), 20)
        assert log.kinds[-1] == "evaluation_cancelled"
        assert {run.state for run in await runs_of(server, log.evaluation_id)} <= {CANCELLED}


async def test_no_trial_begins_after_the_event_of_a_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = asyncio.Event()
    async with evaluating(tmp_path) as server:
        append = server.app.store.log.append

        async def appending(*arguments: Any, log_events: Any, **options: Any) -> None:
            await append(*arguments, log_events=log_events, **options)
            if any("evaluation_cancel_requested" in str(record.event) for record in log_events):
                await may_go_on.wait()

        monkeypatch.setattr(server.app.store.log, "append", appending)
        log = await begin(server, eval_set(*waiting("after", 3), agent="gated"), max_concurrency=1).until(
            "case_trial_started"
        )
        cancelling = asyncio.create_task(cancel(server, log.evaluation_id))
        await log.until("evaluation_cancel_requested")
        for number in range(3):
            GATES[f"after{number}"].set()
        await log.until("case_trial_scored")
        may_go_on.set()
        await cancelling
        await asyncio.wait_for(log.to_the_end(), 20)
    assert log.kinds[-1] == "evaluation_cancelled"
    assert log.kinds.count("case_trial_started") == 1


async def test_a_run_that_was_being_created_when_the_evaluation_was_cancelled_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = asyncio.Event()
    async with evaluating(tmp_path) as server:
        start = server.app.runs.start

        async def starting(*arguments: Any, **options: Any) -> Any:
            await may_go_on.wait()
            return await start(*arguments, **options)

        monkeypatch.setattr(server.app.runs, "start", starting)
        log = await begin(server, eval_set(*waiting("created", 1), agent="gated")).until("case_trial_started")
        await cancel(server, log.evaluation_id)
        await log.until("evaluation_cancel_requested")
        may_go_on.set()
        await asyncio.wait_for(log.to_the_end(), 20)
        runs = await runs_of(server, log.evaluation_id)
    assert [run.state for run in runs] == [CANCELLED]


async def test_between_two_turns_a_cancelled_evaluation_begins_no_further_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with evaluating(tmp_path) as server:
        log = await begin(server, eval_set(case("one", "turn one", "turn two"), agent="gated")).until(
            "case_trial_started"
        )
        get, has_ended = server.app.runs.get, asyncio.Event()

        async def getting(*arguments: Any) -> Any:
            record = await get(*arguments)
            if record.run.HasField("end_time") and not has_ended.is_set():
                has_ended.set()
                await cancel(server, log.evaluation_id)
            return record

        monkeypatch.setattr(server.app.runs, "get", getting)
        GATES["turn one"].set()
        await log.to_the_end()
        (run,) = await runs_of(server, log.evaluation_id)
    assert log.kinds[-1] == "evaluation_cancelled"
    assert run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


async def test_a_cancelled_evaluation_waits_for_no_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def judging(*_: Any, **__: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(evaluator, "score_all_metrics", judging)
    async with evaluating(tmp_path) as server:
        log = await begin(server, eval_set(*many(3))).until("case_trial_started")
        await asyncio.wait_for(asked.wait(), 30)
        await cancel(server, log.evaluation_id)
        await asyncio.wait_for(log.to_the_end(), 20)
    assert log.kinds[-1] == "evaluation_cancelled"


async def test_a_cancellation_is_durable_across_a_restart(tmp_path: Path) -> None:
    made = eval_set(*waiting("durable", 3), agent="gated")
    async with evaluating(tmp_path) as server:
        log = await begin(server, made, max_concurrency=1).until("case_trial_started")
        await asyncio.wait_for(ARRIVED["durable0"].wait(), 30)
    async with evaluating(tmp_path) as server:
        # Recovery continues it at the same time.
        await cancel(server, log.evaluation_id)
        followed = await watch(server, log.evaluation_id).to_the_end()
        runs = await runs_of(server, log.evaluation_id)
    assert followed.kinds[-1] == "evaluation_cancelled"
    assert followed.events[: len(log.events)] == log.events
    assert {run.state for run in runs} == {CANCELLED}


@pytest.mark.parametrize("name", ["tool_calls", "wall_duration"])
async def test_when_the_budget_is_used_up_the_rest_is_not_scored(server: Served, name: str) -> None:
    limits = (
        policy_pb2.Limits(tool_calls=3) if name == "tool_calls" else policy_pb2.Limits(wall_duration=Duration(nanos=1))
    )
    cases = [case(f"c{number}", "budget-a budget-b") for number in range(5)]
    log = await evaluated(server, eval_set(*cases, agent="clerk"), budget=limits, max_concurrency=1)
    runs = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    count = 2 if name == "tool_calls" else 0
    assert len(runs) == log.kinds.count("case_trial_started") == count
    assert [log.result(f"c{number}").verdict for number in range(5)] == [PASSED] * count + [NOT_EVALUATED] * (5 - count)
    assert name in log.result("c4").reason
    assert log.verdict == NOT_EVALUATED


@pytest.mark.parametrize("max_concurrency", [1, 3])
async def test_no_more_trials_are_in_progress_than_the_request_allows(server: Served, max_concurrency: int) -> None:
    AT_ONCE[:] = [0, 0]
    cases = [case(f"c{number}", "x") for number in range(12)]
    log = await evaluated(server, eval_set(*cases, agent="slow"), max_concurrency=max_concurrency)
    check_log(log.events)
    assert [0, max_concurrency] == AT_ONCE


@pytest.mark.parametrize(
    ("gates", "verdict"),
    [
        (["pass_rate >= 0.5"], PASSED),
        (["pass_rate >= 0.9"], FAILED),
        (["final_response.mean > 0.4", "pass_rate > 0"], PASSED),
    ],
)
async def test_gates_alone_decide(server: Served, gates: list[str], verdict: int) -> None:
    cases = [case("good", "x", answers=["x"]), case("bad", "x", answers=["y"])]
    log = await evaluated(server, eval_set(*cases), gates=gates)
    assert log.verdict == verdict
    assert [gate.gate for gate in log.having("evaluation_totaled")[0].gates] == gates


@pytest.mark.parametrize(
    ("gates", "verdict", "reason"),
    [
        (
            ["cost.total <= 2"],
            FAILED,
            "1 trial crashed, of 'bad', and no gate counts crashed trials: a gate on a pass rate, such as "
            "pass_rate >= 0.9, does.",
        ),
        (["cost.total <= 2", "pass_rate >= 0.5"], PASSED, ""),
        ([], FAILED, ""),
    ],
)
async def test_a_crashed_trial_that_no_gate_counts_fails_the_evaluation(
    server: Served, gates: list[str], verdict: int, reason: str
) -> None:
    cases = [case("good", "x"), case("bad", "fail")]
    log = await evaluated(server, eval_set(*cases, agent="touchy"), gates=gates)
    found = await evaluation(server, log.evaluation_id)
    assert log.verdict == verdict
    assert (found.result.verdict, found.result.reason) == (verdict, reason)


async def test_gates_that_hold_beside_a_trial_that_was_not_scored_leave_a_reason(server: Served) -> None:
    cases = [case("good", "x"), case("waiting", "x")]
    log = await evaluated(server, eval_set(*cases, agent="asker"), gates=["cost.total <= 2"])
    found = await evaluation(server, log.evaluation_id)
    assert found.result.verdict == NOT_EVALUATED
    assert found.result.reason == "Not every trial of 2 cases could be scored, such as 'good'."


async def test_what_a_cancelled_evaluation_found_is_a_baseline_only_if_the_request_allows_it(server: Served) -> None:
    cases = eval_set(case("c0", "kept", answers=["kept"]), case("c1", "not kept"), agent="gated")
    GATES["kept"].set()
    log = await begin(server, cases, max_concurrency=1).until("case_trial_scored")
    await cancel(server, log.evaluation_id)
    await log.to_the_end()
    found = (await evaluation(server, log.evaluation_id)).result
    by_id = eval_result_pb2.EvalSource(evaluation_id=log.evaluation_id)
    by_result = eval_result_pb2.EvalSource(result=found)
    compared = partial(eval_service_pb2.CompareEvaluationsRequest, candidate=by_id)
    for baseline, field in ((by_id, "baseline.evaluation_id"), (by_result, "baseline.result.state")):
        for call in (
            evaluated(server, eval_set(*many(2)), baseline=baseline),
            server.trees.CompareEvaluations(compared(baseline=baseline)),
        ):
            with pytest.raises(aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            ((named, sentence),) = broken(refused.value)
            assert named == field
            assert "CANCELLED, not SUCCEEDED: set allow_incomplete_baseline" in sentence
        allowed = await server.trees.CompareEvaluations(compared(baseline=baseline, allow_incomplete_baseline=True))
        assert (allowed.comparison.state_baseline, allowed.comparison.state_candidate) == (CANCELLED, CANCELLED)
        again = await evaluated(
            *(server, eval_set(*many(2))),
            baseline=baseline,
            allow_incomplete_baseline=True,
            gates=["removed == 0"],
        )
        assert again.having("evaluation_planned")[0].baseline.state == CANCELLED
        assert again.verdict == PASSED


async def test_a_baseline_is_compared_by_id_and_by_result(server: Served) -> None:
    before = await evaluated(server, eval_set(*many(7)))
    found = await evaluation(server, before.evaluation_id)
    by_id = eval_result_pb2.EvalSource(evaluation_id=before.evaluation_id)
    by_result = eval_result_pb2.EvalSource(result=found.result)
    for baseline in (by_id, by_result):
        same = await evaluated(server, eval_set(*many(7)), baseline=baseline, gates=["regressions == 0"])
        assert same.verdict == PASSED
        fewer = await evaluated(server, eval_set(*many(1)), baseline=baseline)
        assert fewer.verdict == FAILED, "six of seven cases were removed"
        assert fewer.having("evaluation_totaled")[0].reason == (
            "6 cases of the baseline may not be removed from the set: 'c1', 'c2', 'c3', 'c4', 'c5' and others."
        )
        allowed = await evaluated(server, eval_set(*many(1)), baseline=baseline, allow_removed=True)
        assert allowed.verdict == PASSED
        worse = eval_set(*many(2), *(case(f"c{number}", "hello", answers=["good bye"]) for number in range(2, 7)))
        log = await evaluated(server, worse, baseline=baseline, gates=["regressions == 0"])
        assert log.verdict == FAILED
        kept = log.having("evaluation_planned")[0].baseline
        assert [one.case_id for one in kept.cases] == [f"c{number}" for number in range(7)]
        assert not any(one.trials for one in kept.cases)
