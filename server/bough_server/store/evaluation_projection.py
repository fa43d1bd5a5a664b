"""Project events of an evaluation to its row: the numbers so far, and how it ended."""

from collections.abc import Iterable
from typing import Final

from bough.v1 import error_pb2, eval_result_pb2, evaluation_pb2, execution_pb2
from bough_server.log import evaluation_events
from bough_server.log.usage import Sums
from bough_server.store.ports.log import EvaluationLogEvent
from bough_server.store.projected import NOTHING, EvaluationChange, Projected, RunEnd, RunStart


class EvaluationFold:
    """The fold of one evaluation's log. Apply every event once and in order.

    It can begin in the middle of a log, with the totals that the row holds for the events before. They do not tell if
    a cost is unknown because it was in several currencies: later costs then have a sum, until evaluation_totaled.
    """

    def __init__(self, totals: bytes = b"") -> None:
        self._totals = eval_result_pb2.EvalTotals.FromString(totals)
        self._usage, self._judge_usage = Sums.of(self._totals.usage), Sums.of(self._totals.judge_usage)
        self._user_usage = Sums.of(self._totals.user_usage)
        self._verdict = 0
        self._start: RunStart | None = None
        self._end: RunEnd | None = None

    def project(self, log_events: Iterable[EvaluationLogEvent]) -> Projected:
        """Return the changes that these events cause; NOTHING if they only say what was begun."""
        is_quiet = True
        for record in log_events:
            fold = _FOLDS.get(record.kind)
            if fold is not None:
                fold(self, record.event)
                is_quiet = False
        if is_quiet:
            return NOTHING
        change = EvaluationChange(totals=self._totals.SerializeToString(deterministic=True), verdict=self._verdict)
        projected = Projected(start=self._start, messages=(), usage=(), end=self._end, evaluation=change)
        self._start = self._end = None
        return projected

    def _on_evaluation_planned(self, event: evaluation_pb2.EvaluationEvent) -> None:
        planned = event.evaluation_planned
        self._totals.cases, self._totals.trials = planned.case_count, planned.trial_count
        self._start = RunStart(
            agent=planned.agent,
            labels=dict(planned.labels),
            input_excerpt="",
            start_time_ns=event.record_time.ToNanoseconds(),
            deadline_time_ns=None,
            request_id=planned.request_id,
            request_digest=planned.request_digest,
            revisions=(),
            eval_set_name=planned.eval_set.name,
        )

    def _on_case_trial_scored(self, event: evaluation_pb2.EvaluationEvent) -> None:
        result, totals = event.case_trial_scored.result, self._totals
        if result.purpose:
            totals.reruns_ended += 1
        else:
            totals.trials_ended += 1
            totals.trials_passed += result.verdict == eval_result_pb2.VERDICT_PASSED
        self._usage.add(Sums.of(result.usage))
        self._judge_usage.add(Sums.of(result.judge_usage))
        totals.usage.CopyFrom(self._usage.usage())
        totals.judge_usage.CopyFrom(self._judge_usage.usage())
        if result.HasField("user_usage"):
            self._user_usage.add(Sums.of(result.user_usage))
            totals.user_usage.CopyFrom(self._user_usage.usage())

    def _on_suspects_planned(self, event: evaluation_pb2.EvaluationEvent) -> None:
        suspects = event.suspects_planned.suspects
        both = 2 if suspects.HasField("baseline_pins") else 1
        self._totals.reruns = len(suspects.case_ids) * suspects.trials * both

    def _on_evaluation_totaled(self, event: evaluation_pb2.EvaluationEvent) -> None:
        self._totals.CopyFrom(event.evaluation_totaled.totals)

    def _on_evaluation_completed(self, event: evaluation_pb2.EvaluationEvent) -> None:
        self._verdict = event.evaluation_completed.verdict
        self._set_end(event, execution_pb2.EXECUTION_STATE_SUCCEEDED)

    def _on_evaluation_failed(self, event: evaluation_pb2.EvaluationEvent) -> None:
        self._set_end(event, execution_pb2.EXECUTION_STATE_FAILED, event.evaluation_failed.error)

    def _on_evaluation_cancelled(self, event: evaluation_pb2.EvaluationEvent) -> None:
        cancelled = event.evaluation_cancelled
        if cancelled.HasField("totals"):
            self._totals.CopyFrom(cancelled.totals)
        self._set_end(event, execution_pb2.EXECUTION_STATE_CANCELLED, cancelled.error)

    def _set_end(
        self,
        event: evaluation_pb2.EvaluationEvent,
        state: execution_pb2.ExecutionState.ValueType,
        error: error_pb2.AgentError | None = None,
    ) -> None:
        self._end = RunEnd(
            state=state,
            end_time_ns=event.record_time.ToNanoseconds(),
            error=None if error is None else error.SerializeToString(deterministic=True),
            tree_usage=self._totals.usage.SerializeToString(deterministic=True),
        )


_FOLDS: Final = {
    evaluation_events.EVALUATION_PLANNED: EvaluationFold._on_evaluation_planned,
    evaluation_events.CASE_TRIAL_SCORED: EvaluationFold._on_case_trial_scored,
    evaluation_events.SUSPECTS_PLANNED: EvaluationFold._on_suspects_planned,
    evaluation_events.EVALUATION_TOTALED: EvaluationFold._on_evaluation_totaled,
    evaluation_events.EVALUATION_COMPLETED: EvaluationFold._on_evaluation_completed,
    evaluation_events.EVALUATION_FAILED: EvaluationFold._on_evaluation_failed,
    evaluation_events.EVALUATION_CANCELLED: EvaluationFold._on_evaluation_cancelled,
}
