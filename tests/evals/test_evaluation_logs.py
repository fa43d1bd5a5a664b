"""The log of an evaluation, and what its trials share, over a real socket."""

import asyncio

import grpc
import pytest
from grpc import aio

from bough.v1 import agent_service_pb2, eval_result_pb2, eval_service_pb2, evaluation_ref_pb2, execution_pb2, run_pb2
from tests.evals.job_server import (
    ARRIVED,
    GATES,
    begin,
    case,
    check_log,
    eval_set,
    evaluated,
    evaluation,
    many,
    run_started,
    runs_of,
    watch,
)
from tests.rpc.run_server import Served

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED
SUCCEEDED = execution_pb2.EXECUTION_STATE_SUCCEEDED


async def test_the_log_of_an_evaluation_is_what_happened_in_it(server: Served) -> None:
    log = await evaluated(server, eval_set(case("one", "hello", answers=["hello"])), labels={"pr": "7"})
    found = await evaluation(server, log.evaluation_id)
    again = await watch(server, log.evaluation_id).to_the_end()
    (run,) = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    assert log.kinds == [
        "evaluation_planned",
        "case_planned",
        "case_trial_started",
        "case_trial_ended",
        "case_trial_scored",
        "evaluation_totaled",
        "evaluation_completed",
    ]
    assert again.events == log.events
    (ended,), (totaled,) = log.having("case_trial_ended"), log.having("evaluation_totaled")
    assert ended.run_ids == [run.run_id]
    assert (found.result.totals, found.result.verdict) == (totaled.totals, PASSED)
    assert (found.evaluation.state, found.evaluation.verdict) == (SUCCEEDED, PASSED)
    assert found.evaluation.totals == totaled.totals
    assert found.evaluation.last_sequence == len(log.events)
    assert dict(found.evaluation.labels) == {"pr": "7"}
    assert found.result.cases[0].trials[0] == log.result("one")
    assert dict(await log.call.initial_metadata())["bough-evaluation-id"] == log.evaluation_id
    assert dict(await log.call.trailing_metadata())["bough-last-sequence"] == str(len(log.events))


async def test_every_planned_trial_has_a_result_and_the_worst_of_them_is_the_verdict(server: Served) -> None:
    cases = [
        case("good", "hello", answers=["hello"], trials=3),
        case("bad", "hello", answers=["good bye"], trials=2),
        case("crashed", "fail"),
        case("unmocked", "x", mocks={"run_id": "nowhere"}),
    ]
    log = await evaluated(server, eval_set(*cases, agent="touchy"))
    found = await evaluation(server, log.evaluation_id)
    check_log(log.events)
    results = log.results()
    assert {key: result.verdict for key, result in results.items()} == {
        **{("good", index): PASSED for index in range(3)},
        **{("bad", index): FAILED for index in range(2)},
        ("crashed", 0): FAILED,
        ("unmocked", 0): NOT_EVALUATED,
    }
    assert results["crashed", 0].crashed
    assert "nowhere" in results["unmocked", 0].reason
    (totaled,) = log.having("evaluation_totaled")
    totals = totaled.totals
    assert (totals.cases, totals.cases_passed, totals.cases_failed, totals.cases_not_evaluated) == (4, 1, 2, 1)
    assert (totals.trials, totals.trials_ended, totals.trials_passed) == (7, 7, 3)
    assert totaled.verdict == found.evaluation.verdict == found.result.verdict == FAILED
    assert found.result.totals == totals
    assert [one.case_id for one in found.result.cases] == ["good", "bad", "crashed", "unmocked"]


async def test_what_cannot_be_scored_never_passes(server: Served) -> None:
    cases = [case("good", "hello", answers=["hello"]), case("unmocked", "x", mocks={"run_id": "nowhere"})]
    log = await evaluated(server, eval_set(*cases))
    assert log.having("evaluation_completed")[0].verdict == NOT_EVALUATED


async def test_the_turns_of_a_trial_share_a_session_that_no_other_has(server: Served) -> None:
    answers = ["Ann: ", "Ann: one", "Ann: one,two"]
    talk = case("talk", "one", "two", "three", answers=answers, session_state_json='{"name": "Ann"}')
    log = await evaluated(server, eval_set(talk, case("other", "x", answers=["nobody: "]), agent="memory"), trials=2)
    runs = await runs_of(server, log.evaluation_id)
    begun = {run.run_id: await run_started(server, run.run_id) for run in runs}
    listed_runs = await server.agents.ListRuns(agent_service_pb2.ListRunsRequest())
    everything = await server.agents.ListRuns(
        agent_service_pb2.ListRunsRequest(filter=run_pb2.RunFilter(include_evaluation_runs=True))
    )
    listed = await server.trees.ListEvaluations(eval_service_pb2.ListEvaluationsRequest())
    check_log(log.events)
    assert log.having("evaluation_completed")[0].verdict == PASSED, log.results()
    sessions = {(one.case_id, one.trial): one.session_id for one in log.having("case_trial_started")}
    assert len(set(sessions.values())) == 4
    ended = {(one.case_id, one.trial): list(one.run_ids) for one in log.having("case_trial_ended")}
    by_id = {run.run_id: run for run in runs}
    for key, run_ids in ended.items():
        assert len(run_ids) == (3 if key[0] == "talk" else 1)
        for turn, run_id in enumerate(run_ids):
            run = by_id.pop(run_id)
            assert run.session_id == sessions[key]
            assert run.evaluation == evaluation_ref_pb2.EvaluationRef(
                evaluation_id=log.evaluation_id,
                case_id=key[0],
                trial=key[1],
                turn=turn,
                role=evaluation_ref_pb2.EVALUATION_ROLE_TURN,
            )
            assert begun[run_id].evaluation == run.evaluation
            assert begun[run_id].request_id.startswith("bough/turn/")
    assert not by_id
    assert all(name.startswith("bough/") for name in sessions.values())
    assert len(everything.runs) == len(runs) == 8, "the evaluation is none of the runs"
    assert not listed_runs.runs
    assert [one.evaluation_id for one in listed.evaluations] == [log.evaluation_id]


async def test_after_a_turn_that_failed_the_later_ones_are_not_run(server: Served) -> None:
    log = await evaluated(server, eval_set(case("talk", "hello", "fail", "never"), agent="touchy"))
    runs = await runs_of(server, log.evaluation_id)
    result = log.result("talk")
    assert (result.verdict, result.crashed) == (FAILED, True)
    assert [turn.state for turn in result.turns] == [SUCCEEDED, execution_pb2.EXECUTION_STATE_FAILED]
    assert len(runs) == 2


async def test_two_clients_see_one_log_wherever_they_begin(server: Served) -> None:
    made = eval_set(*many(12), case("last", "clients", answers=["clients"]), agent="gated")
    for one in made.cases[:12]:
        GATES[one.turns[0].user].set()
    first = await begin(server, made, request_id="same").until("case_trial_scored")
    second = begin(server, made, request_id="same")
    third = watch(server, first.evaluation_id, after_sequence=5)
    await asyncio.wait_for(ARRIVED["clients"].wait(), 30)
    GATES["clients"].set()
    await asyncio.gather(first.to_the_end(), second.to_the_end(), third.to_the_end())
    check_log(first.events)
    assert second.events == first.events
    assert third.events == first.events[5:]
    for after in range(len(first.events) + 1):
        seen = await watch(server, first.evaluation_id, after_sequence=after).to_the_end()
        assert seen.events == first.events[after:]
    for call, code in (
        (watch(server, first.evaluation_id, after_sequence=len(first.events) + 1), grpc.StatusCode.OUT_OF_RANGE),
        (watch(server, "nothing"), grpc.StatusCode.NOT_FOUND),
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await call.to_the_end()
        assert refused.value.code() == code
    with pytest.raises(aio.AioRpcError) as reused:
        await evaluated(server, made, request_id="same", trials=2)
    assert reused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert first.evaluation_id in str(reused.value.trailing_metadata())
    assert len(await runs_of(server, first.evaluation_id)) == 13


async def test_one_request_sent_many_times_at_once_is_one_evaluation(server: Served) -> None:
    logs = await asyncio.gather(*(evaluated(server, eval_set(*many(3)), request_id="once") for _ in range(8)))
    listed = await server.trees.ListEvaluations(eval_service_pb2.ListEvaluationsRequest())
    assert len(listed.evaluations) == 1
    assert all(log.events == logs[0].events for log in logs)


async def test_what_is_known_so_far_of_an_evaluation_that_goes_on(server: Served) -> None:
    GATES["so far"].set()
    made = eval_set(case("a", "so far", answers=["so far"]), case("b", "not yet"), agent="gated")
    log = await begin(server, made, max_concurrency=1).until("case_trial_scored")
    await asyncio.wait_for(ARRIVED["not yet"].wait(), 30)
    found = await evaluation(server, log.evaluation_id)
    GATES["not yet"].set()
    await log.to_the_end()
    totals = found.result.totals
    assert (totals.cases, totals.cases_passed, totals.trials, totals.trials_ended) == (2, 1, 2, 1)
    assert [one.verdict for one in found.result.cases] == [PASSED, eval_result_pb2.VERDICT_UNSPECIFIED]
    assert found.result.verdict == eval_result_pb2.VERDICT_UNSPECIFIED
    assert not found.result.HasField("end_time")


async def test_a_reader_that_does_not_read_holds_nothing_up(server: Served) -> None:
    text = "x" * 1_500
    cases = [case(f"c{number}", text, text, text, answers=[text] * 3) for number in range(150)]
    log = await begin(server, eval_set(*cases), max_concurrency=8).until("evaluation_planned")
    idle = watch(server, log.evaluation_id)
    await idle.until("evaluation_planned")
    await asyncio.wait_for(log.to_the_end(), 60)
    await idle.to_the_end()
    check_log(log.events)
    assert idle.events == log.events
