"""What an evaluation's row says of its log."""

import pytest

from bough.v1 import error_pb2, eval_result_pb2, evaluation_pb2, execution_pb2, usage_pb2
from bough_server.log.evaluation_events import EvaluationEvent
from bough_server.store.evaluation_projection import EvaluationFold
from bough_server.store.projected import NOTHING
from bough_server.store.sql.store import Store
from tests.store.evaluation_logs import (
    CANCELLED,
    FAILED,
    PASSED,
    MadeEvaluation,
    began,
    cancelled,
    passed,
    scored,
    totaled,
)
from tests.store.logs import ANNE, SECOND, START_NS

TOTALS = eval_result_pb2.EvalTotals(cases=2, cases_passed=2, trials=4, trials_ended=4, trials_passed=4, pass_rate=1)


def _usage(tokens: int, *, cost: int | None = None, currency: str = "USD") -> usage_pb2.Usage:
    paid = {} if cost is None else {"cost_nanos": cost, "currency_code": currency}
    return usage_pb2.Usage(input_tokens=tokens, model_calls=1, **paid)


async def _after(store: Store, *batch: EvaluationEvent) -> evaluation_pb2.Evaluation:
    made = MadeEvaluation(labels={"branch": "main"}, owner="worker")
    await store.log.create_evaluation(made.new())
    for event in batch:
        await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(event))
    return (await store.evaluations.get(ANNE, made.evaluation_id)).evaluation


async def test_a_planned_evaluation_runs(store: Store) -> None:
    made = MadeEvaluation()
    expected = evaluation_pb2.Evaluation(
        evaluation_id=made.evaluation_id,
        eval_set_name="desk",
        agent="lead",
        user_id="anne",
        state=execution_pb2.EXECUTION_STATE_RUNNING,
        totals=eval_result_pb2.EvalTotals(cases=2, trials=4),
        labels={"branch": "main"},
        last_sequence=3,
    )
    expected.create_time.FromNanoseconds(START_NS + 60 * SECOND)
    assert await _after(store) == expected


async def test_verdicts_are_counted_as_they_come_and_what_was_used_is_summed(store: Store) -> None:
    evaluation = await _after(
        store,
        began(),
        scored(usage=_usage(3, cost=5), judge_usage=_usage(1), user_usage=_usage(2)),
        scored(FAILED, usage=_usage(4, cost=6)),
        scored(eval_result_pb2.VERDICT_NOT_EVALUATED),
        EvaluationEvent(evaluation_cancel_requested=evaluation_pb2.EvaluationCancelRequested(requested_by="anne")),
    )
    used = usage_pb2.Usage(input_tokens=7, model_calls=2, cost_nanos=11, currency_code="USD")
    assert evaluation.totals == eval_result_pb2.EvalTotals(
        cases=2, trials=4, trials_ended=3, trials_passed=1, usage=used, judge_usage=_usage(1), user_usage=_usage(2)
    )
    assert (evaluation.state, evaluation.verdict) == (execution_pb2.EXECUTION_STATE_RUNNING, 0)
    assert evaluation.last_sequence == 8


async def test_the_numbers_of_evaluation_totaled_are_final_and_the_verdict_comes_with_the_end(store: Store) -> None:
    evaluation = await _after(store, scored(), totaled(TOTALS))
    assert (evaluation.totals, evaluation.verdict) == (TOTALS, 0)


async def test_an_evaluation_ends_with_its_verdict(store: Store) -> None:
    evaluation = await _after(store, scored(), totaled(TOTALS), passed())
    assert (evaluation.state, evaluation.verdict) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, PASSED)
    assert (evaluation.totals, evaluation.HasField("error")) == (TOTALS, False)
    assert evaluation.end_time.ToNanoseconds() == START_NS + 6 * SECOND
    assert evaluation.last_sequence == 6


async def test_a_failed_evaluation_says_why_and_keeps_its_numbers(store: Store) -> None:
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_INTERNAL, message="No.")
    failed = EvaluationEvent(evaluation_failed=evaluation_pb2.EvaluationFailed(error=error))
    evaluation = await _after(store, scored(), failed)
    assert (evaluation.state, evaluation.verdict) == (execution_pb2.EXECUTION_STATE_FAILED, 0)
    assert (evaluation.error, evaluation.totals.trials_ended) == (error, 1)


@pytest.mark.parametrize("totals", [None, TOTALS])
async def test_a_cancelled_evaluation_has_the_numbers_of_its_end_if_it_holds_any(
    store: Store, totals: eval_result_pb2.EvalTotals | None
) -> None:
    evaluation = await _after(store, scored(), cancelled(totals))
    assert (evaluation.state, evaluation.verdict) == (execution_pb2.EXECUTION_STATE_CANCELLED, 0)
    assert (evaluation.error, evaluation.totals.trials_ended) == (CANCELLED, 1 if totals is None else 4)


def test_costs_in_several_currencies_have_no_sum() -> None:
    fold, made = EvaluationFold(), MadeEvaluation()
    fold.project(made.first())
    batch = (_usage(1, cost=5), _usage(1, cost=5, currency="EUR"), _usage(1, cost=5))
    projected = fold.project(made.next(*(scored(usage=usage) for usage in batch)))
    assert projected.evaluation is not None
    totals = eval_result_pb2.EvalTotals.FromString(projected.evaluation.totals)
    assert totals.usage == usage_pb2.Usage(input_tokens=3, model_calls=3)


def test_a_fold_begins_with_the_numbers_of_a_row() -> None:
    whole, made = EvaluationFold(), MadeEvaluation()
    whole.project(made.first())
    before = whole.project(made.next(scored(usage=_usage(3, cost=5))))
    assert before.evaluation is not None
    later = made.next(scored(FAILED, usage=_usage(4, cost=6)), cancelled())
    assert EvaluationFold(before.evaluation.totals).project(later) == whole.project(later)


def test_what_was_only_begun_changes_no_row() -> None:
    fold, made = EvaluationFold(), MadeEvaluation()
    fold.project(made.first())
    assert fold.project(made.next(began())) is NOTHING
