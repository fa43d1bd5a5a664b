"""Fold the log of an evaluation: what is planned, what is done, and what was found so far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from bough.v1 import error_pb2, eval_result_pb2, evaluation_pb2, execution_pb2
from bough_server.evals.results.verdicts import FAILED, case_result, list_usages, totals
from bough_server.evals.sets.eval_set import is_recorded
from bough_server.log import evaluation_events
from bough_server.log.usage import Sums
from bough_server.store.ports.log import EvaluationLogEvent, EventLog, StoredEvent
from bough_server.threads import run_in_thread


def as_fact(event: evaluation_pb2.EvaluationEvent, *, sequence: int, now_ns: int) -> EvaluationLogEvent:
    """Return an event as it is appended; its sequence and its time are set."""
    event.sequence = sequence
    event.record_time.FromNanoseconds(now_ns)
    kind = evaluation_events.kind_of(event)
    return EvaluationLogEvent(sequence=sequence, kind=kind, data=event.SerializeToString(), event=event)


MAX_RERUNS: Final = 100_000
"""The most fresh trials of an evaluation."""

TrialKey: TypeAlias = tuple[str, int]
"""A trial: the case's id, and the number of the trial, from 0."""


@dataclass(slots=True)
class EvaluationState:
    """What the events of an evaluation say, in the order of their sequences.

    The turns of results are dropped, and without `keeps_differences` also the details of their scores: only a result
    that is shown needs them, and those of a thousand cases are large. See ResultPages.
    """

    keeps_differences: bool = False
    last_sequence: int = 0
    planned: evaluation_pb2.EvaluationPlanned = field(default_factory=evaluation_pb2.EvaluationPlanned)
    create_time_ns: int = 0
    cases: dict[str, evaluation_pb2.CasePlanned] = field(default_factory=dict)
    started: dict[TrialKey, str] = field(default_factory=dict)
    """The trials that began, and the session of each."""
    crashed_attempts: dict[TrialKey, list[eval_result_pb2.CrashedAttempt]] = field(default_factory=dict)
    """The attempts at trials that crashed, and after which the trial began anew."""
    ended: set[TrialKey] = field(default_factory=set)
    """The trials whose turns have ended."""
    scored: dict[TrialKey, eval_result_pb2.CaseTrialResult] = field(default_factory=dict)
    scored_at: dict[TrialKey, int] = field(default_factory=dict)
    """The sequence of each result in `scored`."""
    suspects: eval_result_pb2.EvalSuspects | None = None
    """Which cases run again; None until that is decided."""
    suspect_ids: frozenset[str] = frozenset()
    cancel: evaluation_pb2.EvaluationCancelRequested | None = None
    totaled: evaluation_pb2.EvaluationTotaled | None = None
    end: evaluation_pb2.EvaluationEvent | None = None
    spent: Sums = field(default_factory=Sums)
    """What the runs, judges and simulated users of all scored trials used together."""
    judge_runs: set[str] = field(default_factory=set)
    """The runs of the judgments in the results: their usage is counted."""

    def apply(self, event: evaluation_pb2.EvaluationEvent) -> None:
        """Add the next event of the log."""
        self.last_sequence = event.sequence
        match event.WhichOneof("payload"):
            case "evaluation_planned":
                self.planned = event.evaluation_planned
                self.create_time_ns = event.record_time.ToNanoseconds()
            case "case_planned":
                self.cases[event.case_planned.eval_case.id] = event.case_planned
            case "case_trial_started":
                one = event.case_trial_started
                self.started[one.case_id, one.trial] = one.session_id
            case "case_trial_ended":
                self.ended.add((event.case_trial_ended.case_id, event.case_trial_ended.trial))
            case "case_trial_retried":
                again = event.case_trial_retried
                self.crashed_attempts.setdefault((again.case_id, again.trial), []).append(again.crashed_attempt)
            case "case_trial_scored":
                self._score(event.case_trial_scored.result, event.sequence)
            case "suspects_planned":
                self.suspects = event.suspects_planned.suspects
                self.suspect_ids = frozenset(self.suspects.case_ids)
            case "evaluation_totaled":
                self.totaled = event.evaluation_totaled
            case "evaluation_cancel_requested":
                self.cancel = event.evaluation_cancel_requested
            case "evaluation_completed" | "evaluation_failed" | "evaluation_cancelled":
                self.end = event
            case _:
                pass

    def add(self, page: Sequence[StoredEvent]) -> None:
        """Add the next events of the log, as they are stored."""
        for stored in page:
            self.apply(evaluation_events.parse(stored.data))

    def _score(self, result: eval_result_pb2.CaseTrialResult, sequence: int) -> None:
        self.scored_at[result.case_id, result.trial] = sequence
        for used in list_usages(result):
            self.spent.add(Sums.of(used))
        del result.turns[:]
        for score in result.scores:
            runs = dict.fromkeys(judgment.run_id for judgment in score.judgments)
            self.judge_runs.update(runs)
            del score.judgments[:]
            # Which judgments trials share is part of their statistics.
            score.judgments.extend(eval_result_pb2.Judgment(run_id=run_id) for run_id in runs)
            if not self.keeps_differences:
                del score.tree_comparisons[:]
        self.scored[result.case_id, result.trial] = result

    @property
    def state(self) -> execution_pb2.ExecutionState.ValueType:
        """The state of the evaluation, as its row has it."""
        match self.end.WhichOneof("payload") if self.end is not None else None:
            case "evaluation_completed":
                return execution_pb2.EXECUTION_STATE_SUCCEEDED
            case "evaluation_failed":
                return execution_pb2.EXECUTION_STATE_FAILED
            case "evaluation_cancelled":
                return execution_pb2.EXECUTION_STATE_CANCELLED
        return execution_pb2.EXECUTION_STATE_RUNNING

    @property
    def error(self) -> error_pb2.AgentError | None:
        """Why the evaluation failed or was cancelled."""
        if self.end is None or self.end.HasField("evaluation_completed"):
            return None
        failed = self.end.HasField("evaluation_failed")
        return self.end.evaluation_failed.error if failed else self.end.evaluation_cancelled.error

    def remaining(self) -> Iterator[tuple[evaluation_pb2.CasePlanned, int]]:
        """Yield the trials that are not scored yet, in the order of the set; then the suspects' fresh ones."""
        for numbers_of in (_number_planned_trials, self.number_reruns):
            for planned in self.cases.values():
                for trial in numbers_of(planned):
                    # One that has ended is executed again too: its runs are found, and only its scores are computed.
                    if (planned.eval_case.id, trial) not in self.scored:
                        yield planned, trial

    def number_reruns(self, planned: evaluation_pb2.CasePlanned) -> range:
        """Return the numbers of a case's fresh trials: the evaluation's own, then the baseline's."""
        if self.suspects is None or planned.eval_case.id not in self.suspect_ids:
            return range(0)
        return range(planned.trials, planned.trials + self.suspects.trials * count_sides(self.suspects))

    def find_purpose(self, planned: evaluation_pb2.CasePlanned, trial: int) -> eval_result_pb2.TrialPurpose.ValueType:
        """Return what a trial is for, by its number."""
        if trial < planned.trials or self.suspects is None:
            return eval_result_pb2.TRIAL_PURPOSE_UNSPECIFIED
        is_own = trial < planned.trials + self.suspects.trials
        return eval_result_pb2.TRIAL_PURPOSE_RERUN if is_own else eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN

    def plan_suspects(self) -> eval_result_pb2.EvalSuspects:
        """Return the cases that run again: those of the baseline of which a trial failed, unless they are recorded.

        Recorded ones are listed apart, whatever their trials are: chosen by these, they could not be compared by them.
        """
        planned = self.planned
        comparable = {case.case_id for case in planned.baseline.cases}
        suspects = eval_result_pb2.EvalSuspects(baseline_not_rerun_reason=planned.baseline_not_rerun_reason)
        if not planned.baseline_not_rerun_reason:
            suspects.baseline_pins.CopyFrom(planned.baseline.pins)
        suspects.case_ids.extend(
            case_id
            for case_id, one in self.cases.items()
            if case_id in comparable
            and not is_recorded(one.eval_case)
            and any(trial.verdict == FAILED for trial in self.results_of(case_id))
        )
        suspects.recorded_case_ids.extend(key for key, one in self.cases.items() if is_recorded(one.eval_case))
        most = MAX_RERUNS // (count_sides(suspects) * max(1, len(suspects.case_ids)))
        suspects.trials = min(planned.rerun_suspects, most)
        return suspects

    def results_of(self, case_id: str) -> list[eval_result_pb2.CaseTrialResult]:
        """Return the results of a case's planned trials so far, by number."""
        return self._list_results(case_id, _number_planned_trials(self.cases[case_id]))

    def reruns_of(self, case_id: str) -> list[eval_result_pb2.CaseTrialResult]:
        """Return the results of a case's fresh trials so far, by number."""
        return self._list_results(case_id, self.number_reruns(self.cases[case_id]))

    def _list_results(self, case_id: str, numbers: range) -> list[eval_result_pb2.CaseTrialResult]:
        return [self.scored[case_id, trial] for trial in numbers if (case_id, trial) in self.scored]

    def case_results(self, case_ids: Sequence[str] | None = None) -> list[eval_result_pb2.CaseResult]:
        """Return what is known about these cases, by default about all, in the order of the set."""
        chosen = self.cases if case_ids is None else case_ids
        return [
            case_result(self.cases[case_id], self.results_of(case_id), self.reruns_of(case_id)) for case_id in chosen
        ]

    def totals_of(self, cases: Sequence[eval_result_pb2.CaseResult]) -> eval_result_pb2.EvalTotals:
        """Return the numbers over all cases."""
        reruns = sum(len(self.number_reruns(planned)) for planned in self.cases.values())
        digest = self.planned.pins.eval_set_digest
        return totals(cases, planned_trials=self.planned.trial_count, planned_reruns=reruns, digest=digest)

    def result(
        self, evaluation_id: str, cases: Sequence[eval_result_pb2.CaseResult], summary: eval_result_pb2.EvalTotals
    ) -> eval_result_pb2.EvalResult:
        """Return the result so far with these cases and totals."""
        result = eval_result_pb2.EvalResult(
            evaluation_id=evaluation_id,
            eval_set_name=self.planned.eval_set.name,
            pins=self.planned.pins,
            totals=summary,
            cases=cases,
            labels=dict(self.planned.labels),
            state=self.state,
        )
        result.create_time.FromNanoseconds(self.create_time_ns)
        if self.end is not None:
            result.end_time.CopyFrom(self.end.record_time)
        if (error := self.error) is not None:
            result.error.CopyFrom(error)
        if self.suspects is not None:
            result.suspects.CopyFrom(self.suspects)
        if self.totaled is not None:
            result.verdict, result.reason = self.totaled.verdict, self.totaled.reason
            result.gates.extend(self.totaled.gates)
            result.cells.extend(self.totaled.cells)
        return result


def _number_planned_trials(planned: evaluation_pb2.CasePlanned) -> range:
    return range(planned.trials)


def count_sides(suspects: eval_result_pb2.EvalSuspects) -> int:
    """Return on how many sides suspects run again: on the evaluation's own, and on that of the baseline if it does."""
    return 2 if suspects.HasField("baseline_pins") else 1


async def read_state(log: EventLog, evaluation_id: str, *, keeps_differences: bool = False) -> EvaluationState:
    """Return what the committed events of an evaluation say."""
    state = EvaluationState(keeps_differences=keeps_differences)
    while page := await log.read(evaluation_id, after=state.last_sequence):
        # In a thread: the results of a page take a while to parse.
        await run_in_thread(state.add, page)
    return state
