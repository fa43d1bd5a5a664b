"""Evaluations on a disk that fails for a while, and what a running evaluation keeps in memory."""

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from bough.v1 import eval_result_pb2, eval_service_pb2, eval_set_pb2, evaluation_pb2, execution_pb2
from bough_server import app
from bough_server.evals.job import result_pages
from bough_server.evals.job.evaluation_log import EvaluationState
from bough_server.ownership import background
from bough_server.store.opening import open_store
from bough_server.store.ports.log import StoredEvent
from bough_server.store.sql.event_log import SqlEventLog
from bough_server.store.sql.writer import CommitHooks
from tests.evals.job_server import (
    ARRIVED,
    GATES,
    Followed,
    begin,
    case,
    case_results,
    check_log,
    eval_set,
    evaluated,
    evaluating,
    evaluation,
    runs_of,
    watch,
)
from tests.rpc.run_server import Served

PASSED = eval_result_pb2.VERDICT_PASSED


class Disk:
    """A disk that fails some commits in a row once it is told to."""

    def __init__(self) -> None:
        self.failing = range(0)
        self.commits = 0
        self.has_failed = threading.Event()

    def __call__(self) -> None:
        """What becomes of a commit."""
        self.commits += 1
        if self.commits in self.failing:
            if self.commits >= self.failing.start + 5:
                self.has_failed.set()
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    def fail(self, *, after: int, count: int) -> None:
        """Fail so many commits after so many more."""
        self.failing = range(self.commits + after, self.commits + after + count)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk of every server of a test, which retries soon."""
    made = Disk()
    opened = partial(open_store, hooks=CommitHooks(before=made), retry_delays=(0.0,))
    monkeypatch.setattr(app, "open_store", opened)
    monkeypatch.setattr(background, "INITIAL_BACKOFF", 0.02)
    monkeypatch.setattr(background, "MAX_BACKOFF", 0.05)
    return made


async def followed_to_the_end(server: Served, evaluation_id: str) -> Followed:
    """The whole log of an evaluation, followed by as many calls as it takes."""
    while True:
        log = watch(server, evaluation_id)
        try:
            return await log.to_the_end()
        except aio.AioRpcError as dropped:
            if dropped.code() != grpc.StatusCode.UNAVAILABLE:
                raise
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("after", range(1, 20, 3))
async def test_an_evaluation_goes_on_once_the_disk_is_well(tmp_path: Path, disk: Disk, after: int) -> None:
    answers = ["nobody: ", "nobody: one"]
    made = eval_set(*(case(f"c{number}", "one", "two", answers=answers) for number in range(5)), agent="memory")
    async with evaluating(tmp_path) as server:
        log = begin(server, made, max_concurrency=2)
        await log.until("evaluation_planned")
        disk.fail(after=after, count=6)
        followed = await asyncio.wait_for(followed_to_the_end(server, log.evaluation_id), 60)
        runs = await runs_of(server, log.evaluation_id)
        assert disk.commits >= disk.failing.stop, "the disk failed in the middle"
    check_log(followed.events)
    assert followed.having("evaluation_completed")[0].verdict == PASSED, followed.results()
    assert len(runs) == 10
    assert followed.events[: len(log.events)] == log.events


async def test_a_disk_that_never_recovers_keeps_the_evaluation_for_the_next_server(tmp_path: Path, disk: Disk) -> None:
    made = eval_set(*(case(f"c{number}", "one", answers=["nobody: "]) for number in range(5)), agent="memory")
    async with evaluating(tmp_path) as server:
        disk.fail(after=8, count=1_000_000)
        log = await begin(server, made, max_concurrency=2).until("evaluation_planned")
        assert await asyncio.to_thread(disk.has_failed.wait, 30)
    disk.failing = range(0)
    async with evaluating(tmp_path) as server:
        followed = await asyncio.wait_for(followed_to_the_end(server, log.evaluation_id), 60)
        assert len(await runs_of(server, log.evaluation_id)) == 5
    check_log(followed.events)


async def test_a_cancellation_that_could_not_be_written_is_refused_and_can_be_sent_again(
    tmp_path: Path, disk: Disk
) -> None:
    request = eval_service_pb2.CancelEvaluationRequest()
    async with evaluating(tmp_path) as server:
        made = eval_set(case("one", "unwritten"), agent="gated")
        log = await begin(server, made).until("case_trial_started")
        await asyncio.wait_for(ARRIVED["unwritten"].wait(), 30)
        request.evaluation_id = log.evaluation_id
        disk.fail(after=1, count=2)
        with pytest.raises(aio.AioRpcError) as refused:
            await server.trees.CancelEvaluation(request)
        assert "STORAGE_FAILED" in str(refused.value.trailing_metadata())
        await server.trees.CancelEvaluation(request)
        followed = await asyncio.wait_for(followed_to_the_end(server, log.evaluation_id), 30)
        (run,) = await runs_of(server, log.evaluation_id)
    assert followed.kinds[-1] == "evaluation_cancelled"
    assert followed.kinds.count("evaluation_cancel_requested") == 1
    assert run.state == execution_pb2.EXECUTION_STATE_CANCELLED


async def test_a_disk_that_fails_leaves_no_unhandled_error(tmp_path: Path, disk: Disk) -> None:
    made = eval_set(*(case(f"c{number}", "one") for number in range(5)), agent="memory")
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with capture_logs() as logged:
        async with evaluating(tmp_path) as server:
            disk.fail(after=9, count=5)
            log = await begin(server, made, max_concurrency=3).until("evaluation_planned")
            await asyncio.wait_for(followed_to_the_end(server, log.evaluation_id), 60)
        gc.collect()
    assert not unhandled
    assert not [one for one in logged if one["event"] in ("evaluation failed", "evaluation not continued")]


def planned(count: int) -> list[evaluation_pb2.EvaluationEvent]:
    """The first events of an evaluation of so many cases."""
    started = evaluation_pb2.EvaluationPlanned(case_count=count)
    events = [evaluation_pb2.EvaluationEvent(sequence=1, evaluation_planned=started)]
    for number in range(count):
        one = eval_set_pb2.EvalCase(id=f"c{number}", turns=[eval_set_pb2.EvalTurn(user="x")])
        made = evaluation_pb2.CasePlanned(eval_case=one, trials=1)
        events.append(evaluation_pb2.EvaluationEvent(sequence=number + 2, case_planned=made))
    return events


def scored(number: int, *, size: int) -> evaluation_pb2.EvaluationEvent:
    """A result with a tree of so many bytes."""
    event = evaluation_pb2.EvaluationEvent(sequence=1_000_000)
    result = event.case_trial_scored.result
    result.case_id, result.trial, result.verdict = f"c{number}", 0, PASSED
    turn = result.turns.add(answer="yes")
    turn.agents.add(name="a" * size)
    result.scores.add(name="agent_trajectory", score=1.0).tree_comparisons.add().differences.add(agent="b" * 100)
    return event


def test_a_running_evaluation_keeps_no_trees() -> None:
    fold = EvaluationState()
    for event in planned(1_000):
        fold.apply(event)
    for number in range(1_000):
        fold.apply(scored(number, size=10_000))
    kept = sum(result.ByteSize() for result in fold.scored.values())
    assert kept < 1_000 * 100, kept


async def test_a_case_of_many_large_trials_is_shown_with_the_trees_of_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_pages, "MAX_CASE_BYTES", 4_000)
    async with evaluating(tmp_path) as server:
        log = await evaluated(server, eval_set(case("one", "x" * 1_000, trials=12)))
        found = await evaluation(server, log.evaluation_id)
    (shown,) = found.result.cases
    assert shown.ByteSize() < 10_000
    turns = [run.turns[0] for run in shown.trials]
    assert [bool(turn.agents) for turn in turns] == [not turn.truncated for turn in turns]
    assert not turns[0].truncated
    assert turns[11].truncated


async def test_to_poll_a_running_evaluation_reads_what_is_new_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, cost = SqlEventLog.read, 0

    async def counted(log: SqlEventLog, run_id: str, **options: Any) -> Sequence[StoredEvent]:
        nonlocal cost
        page = await read(log, run_id, **options)
        cost += len(page) if run_id == evaluation_id else 0
        return page

    quick = [case(f"c{number}", "x", answers=["x"]) for number in range(20)]
    async with evaluating(tmp_path) as server:
        GATES["x"].set()
        log = await begin(server, eval_set(*quick, case("last", "polled"), agent="gated"), max_concurrency=1).until(
            "case_trial_scored"
        )
        evaluation_id = log.evaluation_id
        await asyncio.wait_for(ARRIVED["polled"].wait(), 30)
        monkeypatch.setattr(SqlEventLog, "read", counted)
        costs: list[int] = []
        for wanted in (20, 20, 21):
            if wanted == 21:
                GATES["polled"].set()
                await log.to_the_end()
            cost = 0
            request = eval_service_pb2.GetEvaluationRequest(evaluation_id=evaluation_id)
            found = await server.trees.GetEvaluation(request)
            await case_results(server, evaluation_id, page_size=1)
            costs.append(cost)
            assert (found.result.totals.trials_ended, found.result.totals.cases_passed) == (wanted, wanted)
    # The page has one case with one trial, whose result is read for it.
    assert costs[0] > 60
    assert costs[1:] == [1, 5]


async def test_a_poll_that_is_cancelled_while_it_reads_spoils_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with evaluating(tmp_path) as server:
        log = await evaluated(server, eval_set(*(case(f"c{number}", "x", answers=["x"]) for number in range(20))))
        add, is_reading, go_on = EvaluationState.add, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def held_up(state: EvaluationState, page: Sequence[StoredEvent]) -> None:
            loop.call_soon_threadsafe(is_reading.set)
            go_on.wait(30)
            add(state, page)

        monkeypatch.setattr(EvaluationState, "add", held_up)
        request = eval_service_pb2.GetEvaluationRequest(evaluation_id=log.evaluation_id)
        first = server.trees.GetEvaluation(request)
        reading = asyncio.ensure_future(first)
        await asyncio.wait_for(is_reading.wait(), 30)
        others = [asyncio.ensure_future(evaluation(server, log.evaluation_id)) for _ in range(3)]
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()
        for found in await asyncio.gather(*others):
            assert len(found.result.cases) == 20
            assert found.result.verdict == PASSED
