"""Evaluations that a server leaves open: the next one continues them, and runs nothing twice."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from bough.v1 import eval_result_pb2, eval_service_pb2, execution_pb2
from bough.v1.policy_pb2 import Limits
from bough_server.errors import NotFound, StorageFailed
from bough_server.evals.job import evaluator
from bough_server.evals.job.judging import score_all_metrics
from bough_server.identity import Principal
from bough_server.observability.tracing import Parent
from bough_server.store.ports.evaluations import EvaluationRow
from bough_server.store.ports.workers import RunStore
from bough_server.store.sql.evaluations import SqlEvaluations
from tests.evals.evaluation_workers import ME, Worker, until_owned
from tests.evals.job_server import (
    ARRIVED,
    CALLED,
    GATES,
    begin,
    case,
    check_log,
    eval_set,
    evaluated,
    evaluating,
    evaluation,
    many,
    runs_of,
    watch,
)
from tests.rpc.run_server import Served

PASSED = eval_result_pb2.VERDICT_PASSED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED
OTHER = Principal(tenant_id="other", user_id="local")


async def test_a_stopped_evaluation_goes_on_at_the_next_server_and_runs_nothing_twice(tmp_path: Path) -> None:
    made = eval_set(
        *(case(f"c{number}", "restart-go", f"restart{number}", answers=["restart-go"]) for number in range(6)),
        agent="gated",
    )
    GATES["restart-go"].set()
    for number in range(0, 6, 2):
        GATES[f"restart{number}"].set()
    async with evaluating(tmp_path) as server:
        log = await begin(server, made, max_concurrency=3, request_id="r").until("case_trial_started")
        await asyncio.wait_for(asyncio.gather(*(ARRIVED[f"restart{number}"].wait() for number in range(4))), 30)
        evaluation_id = log.evaluation_id
        before = asyncio.all_tasks()
    assert before, "the server closes with runs in flight"
    for number in range(6):
        GATES[f"restart{number}"].set()
    async with evaluating(tmp_path) as server:
        followed = await watch(server, evaluation_id).to_the_end()
        again = await evaluated(server, made, max_concurrency=3, request_id="r")
        runs = await runs_of(server, evaluation_id)
    check_log(followed.events)
    assert followed.events[: len(log.events)] == log.events
    assert again.events == followed.events
    assert followed.having("evaluation_completed")[0].verdict == PASSED
    assert sorted(run.evaluation.case_id for run in runs) == sorted(
        f"c{number}" for number in range(6) for _ in range(2)
    )


async def test_the_runs_are_part_of_the_callers_trace_also_after_a_restart(tmp_path: Path) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    made = eval_set(case("first", "hello"), case("then", "trace gate"), case("last", "hello"), agent="gated")
    GATES["hello"].set()
    async with evaluating(tmp_path) as server:
        log = begin(server, made, max_concurrency=1, metadata=(("traceparent", f"00-{trace_id}-{span_id}-01"),))
        await log.until("case_trial_scored")
        await asyncio.wait_for(ARRIVED["trace gate"].wait(), 30)
    GATES["trace gate"].set()
    async with evaluating(tmp_path) as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
        without = await evaluated(server, eval_set(case("a", "hello"), case("b", "hello"), agent="gated"))
    assert {result.turns[0].trace_id for result in followed.results().values()} == {trace_id}
    assert len({result.turns[0].trace_id for result in without.results().values()} - {trace_id, ""}) == 2


async def test_a_stream_of_a_server_that_stops_says_so_and_where_it_was(server: Served) -> None:
    log = await begin(server, eval_set(case("a", "stopping"), agent="gated")).until("case_trial_started")
    await asyncio.wait_for(ARRIVED["stopping"].wait(), 30)
    stopping = asyncio.create_task(server.app.stop())
    with pytest.raises(aio.AioRpcError) as ended:
        await log.to_the_end()
    await stopping
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "SERVER_STOPPED" in str(ended.value.trailing_metadata())
    assert ("bough-last-sequence", str(len(log.events))) in list(ended.value.trailing_metadata())


async def test_close_leaves_no_task_behind(server: Served) -> None:
    before = asyncio.all_tasks()
    await begin(server, eval_set(*(case(f"c{n}", f"leak{n}") for n in range(5)), agent="gated")).until(
        "case_trial_started"
    )
    await asyncio.wait_for(ARRIVED["leak0"].wait(), 30)
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if "bough_server" in repr(task.get_coro())]
    assert not left, left


async def test_an_unanswered_case_is_not_scored_either_if_the_server_stops_before_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = asyncio.Event()
    made = eval_set(case("one", "Which colour?"), agent="asker")
    async with evaluating(tmp_path) as server:
        cancel = server.app.runs.cancel

        async def cancel_and_stop(*arguments: Any, **options: Any) -> Any:
            found = await cancel(*arguments, **options)
            cancelled.set()
            await asyncio.Event().wait()  # until the server stops
            return found

        monkeypatch.setattr(server.app.runs, "cancel", cancel_and_stop)
        log = await begin(server, made).until("case_trial_started")
        await asyncio.wait_for(cancelled.wait(), 30)
    async with evaluating(tmp_path) as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
    result = followed.result("one")
    assert result.verdict == NOT_EVALUATED
    assert "Which colour?" in result.reason
    assert result.unanswered.prompt == "Which colour?"


async def test_a_request_that_was_not_answered_yet_is_answered_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = asyncio.Event()

    async def resume(*_: Any, **__: Any) -> Any:
        answering.set()
        await asyncio.Event().wait()  # until the server stops

    one = case("one", "Which colour?", answers=["red"])
    one["answers"] = [{"value_json": '"red"'}]
    async with evaluating(tmp_path) as server:
        monkeypatch.setattr(server.app.runs, "resume", resume)
        log = await begin(server, eval_set(one, agent="asker")).until("case_trial_started")
        await asyncio.wait_for(answering.wait(), 30)
    async with evaluating(tmp_path) as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
    check_log(followed.events)
    assert followed.result("one").verdict == PASSED


async def test_a_run_that_cannot_go_on_at_the_next_server_makes_its_case_not_scored(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        cases = [case("begun", "parked"), case("later", "parked too")]
        log = await begin(server, eval_set(*cases, agent="gated"), max_concurrency=1).until("case_trial_started")
        await asyncio.wait_for(ARRIVED["parked"].wait(), 30)
    async with evaluating(tmp_path, python=[]) as server:
        followed = await asyncio.wait_for(watch(server, log.evaluation_id).to_the_end(), 30)
        (run,) = await runs_of(server, log.evaluation_id)
    check_log(followed.events)
    assert [followed.result(name).verdict for name in ("begun", "later")] == [NOT_EVALUATED] * 2
    assert "gated" in followed.result("begun").reason
    assert run.state == execution_pb2.EXECUTION_STATE_CANCELLED


async def test_an_evaluation_goes_on_without_its_client(server: Served) -> None:
    log = begin(server, eval_set(case("one", "alone", answers=["alone"]), agent="gated"), timeout=0.5)
    with pytest.raises(aio.AioRpcError) as ended:
        await log.to_the_end()
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await evaluation(server, log.evaluation_id)).evaluation.state == execution_pb2.EXECUTION_STATE_RUNNING
    GATES["alone"].set()
    followed = await watch(server, log.evaluation_id).to_the_end()
    check_log(followed.events)
    assert followed.result("one").verdict == PASSED


async def test_another_tenants_evaluation_does_not_exist(server: Served) -> None:
    log = await evaluated(server, eval_set(*many(1)), request_id="mine")
    evaluations, source = server.app.evaluations, eval_result_pb2.EvalSource(evaluation_id=log.evaluation_id)
    for call in (
        evaluations.get(OTHER, log.evaluation_id),
        evaluations.cancel(OTHER, log.evaluation_id),
        evaluations.source(OTHER, source, field="baseline"),
        anext(evaluations.follow(OTHER, log.evaluation_id)),
    ):
        with pytest.raises(NotFound):
            await call
    request = eval_service_pb2.EvaluateRequest(eval_set=eval_set(*many(1)), request_id="mine")
    started = await evaluations.start(OTHER, request, trace=Parent.of_call(()))
    assert started.evaluation.evaluation_id != log.evaluation_id


async def test_a_budget_counts_what_was_used_before_the_restart(tmp_path: Path) -> None:
    GATES["spent0"].set()
    made = eval_set(*(case(f"c{number}", f"spent{number}") for number in range(4)), agent="careful")
    async with evaluating(tmp_path) as server:
        log = await begin(server, made, budget=Limits(tool_calls=2), max_concurrency=1).until("case_trial_started")
        await asyncio.wait_for(ARRIVED["spent1"].wait(), 30)
    for number in range(4):
        GATES[f"spent{number}"].set()
    async with evaluating(tmp_path) as server:
        followed = await watch(server, log.evaluation_id).to_the_end()
    check_log(followed.events)
    assert [followed.result(f"c{number}").verdict for number in range(4)] == [PASSED] * 2 + [NOT_EVALUATED] * 2
    assert [CALLED[f"spent{number}"] for number in range(4)] == [1, 1, 0, 0]


async def test_an_error_in_one_case_is_its_own_and_is_logged_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def judging(*arguments: Any, **options: Any) -> Any:
        if arguments[1].id == "c1":
            raise ZeroDivisionError("a secret of the server")
        return await score_all_metrics(*arguments, **options)

    monkeypatch.setattr(evaluator, "score_all_metrics", judging)
    async with evaluating(tmp_path) as server:
        with capture_logs() as logged:
            log = await evaluated(server, eval_set(*many(3)))
    check_log(log.events)
    assert [log.result(f"c{number}").verdict for number in range(3)] == [PASSED, NOT_EVALUATED, PASSED]
    assert "secret" not in log.result("c1").reason
    (entry,) = (one for one in logged if one["log_level"] == "error")
    assert isinstance(entry["exc_info"], ZeroDivisionError)
    assert (entry["case_id"], entry["trial"]) == ("c1", 0)


async def test_an_evaluation_that_cannot_go_on_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(*_: Any) -> Any:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(evaluator, "compute_verdict", judged)
    async with evaluating(tmp_path) as server:
        log = await evaluated(server, eval_set(*many(3)))
        found = await evaluation(server, log.evaluation_id)
    assert log.kinds[-1] == "evaluation_failed"
    assert found.evaluation.state == execution_pb2.EXECUTION_STATE_FAILED
    assert "secret" not in str(found)
    assert found.evaluation.error.message
    assert (found.result.state, found.result.error) == (found.evaluation.state, found.evaluation.error)


async def test_another_worker_leaves_an_evaluation_to_its_owner_and_sends_it_cancellations(server: Served) -> None:
    log = await begin(server, eval_set(case("a", "owned"), agent="gated")).until("case_trial_started")
    await asyncio.wait_for(ARRIVED["owned"].wait(), 30)
    async with Worker(server, "other") as other:
        assert await other.evaluations.recover() == 0
        for _ in range(3):
            await asyncio.sleep(0.01)
        record = await other.store.evaluations.find(log.evaluation_id)
        assert record is not None
        assert record.owner == server.app.evaluations.dependencies.worker.name
        await asyncio.wait_for(other.evaluations.cancel(ME, log.evaluation_id, note="from afar"), 30)
        await log.to_the_end()
        assert not await other.store.mailbox.take(log.evaluation_id)
    assert log.kinds[-1] == "evaluation_cancelled"
    assert log.having("evaluation_cancel_requested")[0].note == "from afar"


async def test_an_owner_that_was_overtaken_writes_nothing_more(server: Served) -> None:
    log = await begin(server, eval_set(*many(1), case("a", "overtaken"), agent="gated"), max_concurrency=1).until(
        "case_planned"
    )
    GATES["hello"].set()
    await asyncio.wait_for(ARRIVED["overtaken"].wait(), 30)
    first = server.app.evaluations.dependencies
    await first.store.leases.release(first.worker.name)
    async with Worker(server, "successor") as successor:
        with capture_logs() as logged:
            await successor.evaluations.recover()
            await until_owned(successor, log.evaluation_id)
            GATES["overtaken"].set()
            await log.to_the_end()
    check_log(log.events)
    assert not [one for one in logged if one["log_level"] == "error"], logged


async def test_an_owner_that_was_overtaken_sends_a_cancellation_to_its_successor(server: Served) -> None:
    log = await begin(server, eval_set(case("a", "handed over"), agent="gated")).until("case_trial_started")
    await asyncio.wait_for(ARRIVED["handed over"].wait(), 30)
    first = server.app.evaluations.dependencies
    await first.store.leases.release(first.worker.name)
    async with Worker(server, "successor") as successor:
        await successor.evaluations.recover()
        await until_owned(successor, log.evaluation_id)
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=log.evaluation_id, note="late")
        await asyncio.wait_for(server.trees.CancelEvaluation(request), 30)
        await asyncio.wait_for(log.to_the_end(), 30)
    assert log.kinds[-1] == "evaluation_cancelled"
    assert log.having("evaluation_cancel_requested")[0].note == "late"


async def test_a_worker_that_was_taken_for_lost_leaves_its_evaluations_to_others(server: Served) -> None:
    log = await begin(server, eval_set(case("a", "left"), agent="gated")).until("case_trial_started")
    await asyncio.wait_for(ARRIVED["left"].wait(), 30)
    first = server.app.evaluations.dependencies
    await server.app.runs.worker.replace_lease()
    await asyncio.wait_for(until_taken_over(first.store, log.evaluation_id), 30)
    GATES["left"].set()
    await log.to_the_end()
    check_log(log.events)
    assert log.kinds[-1] == "evaluation_completed"


async def test_an_evaluation_without_an_owner_is_found_although_nothing_was_heard_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with evaluating(tmp_path) as server:
        first = server.app.evaluations.dependencies
        async with Worker(server, "successor") as successor:
            monkeypatch.setattr(type(first.store.leases), "is_shared", True)
            await successor.evaluations.recover()
            log = await begin(server, eval_set(case("a", "unheard"), agent="gated")).until("case_trial_started")
            await asyncio.wait_for(ARRIVED["unheard"].wait(), 30)
            monkeypatch.setattr(first.store.notifier, "publish", lambda topic, log_id="": None)
            await first.store.leases.release(first.worker.name)
            await until_owned(successor, log.evaluation_id)
            GATES["unheard"].set()
            await log.to_the_end()
    check_log(log.events)


async def until_taken_over(store: RunStore, evaluation_id: str) -> None:
    """Wait until a worker has taken an evaluation over, be it the same again."""
    while True:
        record = await store.evaluations.find(evaluation_id)
        if record is not None and record.epoch > 1:
            return
        await asyncio.sleep(0.01)


async def test_to_cancel_an_evaluation_that_is_being_created_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, released = asyncio.Event(), asyncio.Event()
    read = SqlEvaluations.get

    async def held(index: SqlEvaluations, principal: Principal, evaluation_id: str) -> EvaluationRow:
        found = await read(index, principal, evaluation_id)
        if not created.is_set():
            created.set()
            await released.wait()
        return found

    monkeypatch.setattr(SqlEvaluations, "get", held)
    async with evaluating(tmp_path) as server:
        log = begin(server, eval_set(case("a", "being created"), agent="gated"))
        await asyncio.wait_for(created.wait(), 30)
        listed = await server.trees.ListEvaluations(eval_service_pb2.ListEvaluationsRequest())
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=listed.evaluations[0].evaluation_id)
        cancelling = asyncio.ensure_future(server.trees.CancelEvaluation(request))
        await asyncio.wait({cancelling}, timeout=0.3)  # it may not take over what is being created
        epoch = epoch_of_the_evaluation(tmp_path)
        released.set()
        await asyncio.wait_for(cancelling, 30)
        await asyncio.wait_for(log.to_the_end(), 30)
    assert epoch == 1
    assert [event.sequence for event in log.events] == list(range(1, len(log.events) + 1))
    assert log.kinds.count("evaluation_cancel_requested") == 1
    assert log.kinds[-1] == "evaluation_cancelled"


async def test_an_evaluation_that_was_created_and_not_launched_is_launched_by_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SqlEvaluations.get
    failed: list[str] = []

    async def failing(index: SqlEvaluations, principal: Principal, evaluation_id: str) -> EvaluationRow:
        if not failed:
            failed.append(evaluation_id)
            raise StorageFailed("The disk is on holiday.")
        return await read(index, principal, evaluation_id)

    monkeypatch.setattr(SqlEvaluations, "get", failing)
    async with evaluating(tmp_path) as server:
        with pytest.raises(aio.AioRpcError) as lost:
            await evaluated(server, eval_set(*many(2)), request_id="again")
        assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
        log = await asyncio.wait_for(evaluated(server, eval_set(*many(2)), request_id="again"), 30)
    check_log(log.events)
    assert [log.evaluation_id] == failed


def epoch_of_the_evaluation(folder: Path) -> int:
    """How often the only evaluation was taken over, and once for its creation."""
    with closing(sqlite3.connect(folder / "bough.db")) as connection:
        ((epoch,),) = connection.execute("SELECT epoch FROM runs WHERE kind = 1")
    return int(epoch)


async def test_calls_that_continue_an_evaluation_at_once_do_not_fence_each_other(tmp_path: Path) -> None:
    async with evaluating(tmp_path) as server:
        log = await begin(server, eval_set(case("a", "at once"), agent="gated")).until("case_trial_started")
        await asyncio.wait_for(ARRIVED["at once"].wait(), 30)
    GATES["at once"].set()
    async with evaluating(tmp_path) as server:
        request = eval_service_pb2.CancelEvaluationRequest(evaluation_id=log.evaluation_id)
        await asyncio.gather(*(server.trees.CancelEvaluation(request) for _ in range(8)))
        followed = await asyncio.wait_for(watch(server, log.evaluation_id).to_the_end(), 30)
    assert followed.kinds.count("evaluation_cancel_requested") <= 1
    assert followed.kinds[-1] in ("evaluation_cancelled", "evaluation_completed")
