"""Fold the log of an evaluation: what is planned, what is done, and what was found so far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server import evaluation_events
from bough_server.evals.verdicts import case_result, totals
from bough_server.store.ports import EvaluationFact
from bough_server.usage import Sums


def as_fact(event: evaluation_pb2.EvaluationEvent, *, sequence: int, now_ns: int) -> EvaluationFact:
    """Return an event as it is appended; its sequence and its time are set."""
    event.sequence = sequence
    event.record_time.FromNanoseconds(now_ns)
    kind = evaluation_events.kind_of(event)
    return EvaluationFact(sequence=sequence, kind=kind, data=event.SerializeToString(), event=event)


CaseRun: TypeAlias = tuple[str, int]
"""A run of a case: the case's id, and the number of the run, from 0."""


MAX_SHOWN_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of results that a fold keeps whole, of several cases together; a page shows a quarter of it."""

MAX_CASE_BYTES: Final = 1024 * 1024
"""The most bytes of the results of one case's runs, but for the first: the others are without trees."""


@dataclass(slots=True)
class EvaluationState:
    """What the events of an evaluation say, in the order of their sequences.

    Results are kept whole only for the cases of a page: those of a thousand cases are large. Of the others the turns
    are dropped, and without `keeps_differences` also the details of their scores.
    """

    shown: range = range(0)
    """The numbers of the cases whose results are kept whole; it ends earlier if they are too large together."""
    keeps_differences: bool = False
    last_sequence: int = 0
    planned: evaluation_pb2.EvaluationPlanned = field(default_factory=evaluation_pb2.EvaluationPlanned)
    create_time_ns: int = 0
    cases: dict[str, evaluation_pb2.CasePlanned] = field(default_factory=dict)
    started: dict[CaseRun, str] = field(default_factory=dict)
    """The runs of cases that began, and the session of each."""
    ended: set[CaseRun] = field(default_factory=set)
    """The runs of cases whose turns have ended."""
    scored: dict[CaseRun, eval_result_pb2.CaseRunResult] = field(default_factory=dict)
    cancel: evaluation_pb2.EvaluationCancelRequested | None = None
    totaled: evaluation_pb2.EvaluationTotaled | None = None
    end: evaluation_pb2.EvaluationEvent | None = None
    spent: Sums = field(default_factory=Sums)
    """What the runs and judges of all scored runs of cases used together."""

    _places: dict[str, int] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)
    """The bytes that are kept of each shown case, by its number."""

    def apply(self, event: evaluation_pb2.EvaluationEvent) -> None:
        """Add the next event of the log."""
        self.last_sequence = event.sequence
        match event.WhichOneof("payload"):
            case "evaluation_planned":
                self.planned = event.evaluation_planned
                self.create_time_ns = event.record_time.ToNanoseconds()
            case "case_planned":
                self._places[event.case_planned.case.id] = len(self.cases)
                self.cases[event.case_planned.case.id] = event.case_planned
            case "case_run_started":
                one = event.case_run_started
                self.started[one.case_id, one.index] = one.session_id
            case "case_run_ended":
                self.ended.add((event.case_run_ended.case_id, event.case_run_ended.index))
            case "case_run_scored":
                self._score(event.case_run_scored.result)
            case "evaluation_totaled":
                self.totaled = event.evaluation_totaled
            case "evaluation_cancel_requested":
                self.cancel = event.evaluation_cancel_requested
            case "evaluation_completed" | "evaluation_failed" | "evaluation_cancelled":
                self.end = event
            case _:
                pass

    def _score(self, result: eval_result_pb2.CaseRunResult) -> None:
        self.spent.add(Sums.of(result.usage))
        self.spent.add(Sums.of(result.judge_usage))
        place = self._places[result.case_id]
        if place in self.shown:
            self._show(place, result)
        else:
            _strip(result, keeps_differences=self.keeps_differences)
        self.scored[result.case_id, result.index] = result

    def _show(self, place: int, result: eval_result_pb2.CaseRunResult) -> None:
        """Count a result that is kept whole, and give up others, or parts of it, that would be too much."""
        held = self._held.setdefault(place, 0)
        if held and held + result.ByteSize() > MAX_CASE_BYTES:
            _cut(result)
        self._held[place] += result.ByteSize()
        while len(self._held) > 1 and sum(self._held.values()) > MAX_SHOWN_BYTES:
            last = max(self._held)
            del self._held[last]
            self.shown = range(self.shown.start, last)
            for (case_id, _), other in self.scored.items():
                if self._places[case_id] == last:
                    _strip(other, keeps_differences=self.keeps_differences)
            if place == last:
                _strip(result, keeps_differences=self.keeps_differences)

    def remaining(self) -> Iterator[tuple[evaluation_pb2.CasePlanned, int]]:
        """Yield the runs of cases that are not judged yet, in the order of the set."""
        for planned in self.cases.values():
            for index in range(planned.runs):
                if (planned.case.id, index) not in self.scored:
                    yield planned, index

    def results_of(self, case_id: str) -> list[eval_result_pb2.CaseRunResult]:
        """Return the results of a case's runs so far, by index."""
        count = self.cases[case_id].runs
        return [self.scored[case_id, index] for index in range(count) if (case_id, index) in self.scored]

    def case_results(self, case_ids: Sequence[str] | None = None) -> list[eval_result_pb2.CaseResult]:
        """Return what is known about these cases, by default about all, in the order of the set."""
        chosen = self.cases if case_ids is None else case_ids
        return [case_result(self.cases[case_id], self.results_of(case_id)) for case_id in chosen]

    def totals_of(self, cases: Sequence[eval_result_pb2.CaseResult]) -> eval_result_pb2.EvalTotals:
        """Return the numbers over all cases."""
        return totals(cases, planned_runs=self.planned.run_count, digest=self.planned.pins.set_digest)

    def result(
        self, evaluation_id: str, cases: Sequence[eval_result_pb2.CaseResult], summary: eval_result_pb2.EvalTotals
    ) -> eval_result_pb2.EvalResult:
        """Return the result so far with these cases and totals."""
        result = eval_result_pb2.EvalResult(
            evaluation_id=evaluation_id,
            set_name=self.planned.set.name,
            pins=self.planned.pins,
            totals=summary,
            cases=cases,
            labels=dict(self.planned.labels),
            cancelled=self.end is not None and self.end.HasField("evaluation_cancelled"),
        )
        result.start_time.FromNanoseconds(self.create_time_ns)
        if self.end is not None:
            result.end_time.CopyFrom(self.end.record_time)
        if self.totaled is not None:
            result.status = self.totaled.status
            result.gates.extend(self.totaled.gates)
        return result


def _strip(result: eval_result_pb2.CaseRunResult, *, keeps_differences: bool) -> None:
    """Drop what no number depends on."""
    del result.turns[:]
    for score in result.scores:
        del score.judgements[:]
        if not keeps_differences:
            del score.agents[:]


def _cut(result: eval_result_pb2.CaseRunResult) -> None:
    """Drop the trees and the answer of each turn, and say so."""
    for turn in result.turns:
        del turn.agents[:]
        turn.answer, turn.truncated = "", True
    for score in result.scores:
        del score.agents[:]
        del score.judgements[:]
