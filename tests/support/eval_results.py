"""Builders of results of evaluations, as scored runs of cases, and random ones."""

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, usage_pb2
from bough_server.evals import statistics, verdicts
from bough_server.evals.verdicts import FAILED, NOT_EVALUATED, PASSED

Run = eval_result_pb2.CaseRunResult


def planned_case(case_id: str, runs: int = 1, **fields: object) -> evaluation_pb2.CasePlanned:
    """A case that is to be run so often; `fields` are those of the case."""
    case = eval_set_pb2.EvalCase(id=case_id, turns=[eval_set_pb2.EvalTurn(user="Hello")])
    case.MergeFrom(eval_set_pb2.EvalCase(**fields))  # type: ignore[arg-type]
    return evaluation_pb2.CasePlanned(case=case, runs=runs)


def scored(index: int = 0, *, threshold: float = 1, **scores: float | None) -> eval_result_pb2.CaseRunResult:
    """A run with these scores, None for a metric that could not be judged."""
    entries = [
        eval_result_pb2.MetricScore(
            name=name,
            status=NOT_EVALUATED if score is None else PASSED if statistics.reaches(score, threshold) else FAILED,
            score=score,
            threshold=threshold,
        )
        for name, score in scores.items()
    ]
    status = verdicts.worst([entry.status for entry in entries] or [PASSED])
    return Run(index=index, status=status, scores=entries)


def crashed(index: int = 0, reason: str = "The model failed.") -> eval_result_pb2.CaseRunResult:
    """A run whose turn ended without an answer."""
    return Run(index=index, status=FAILED, crashed=True, reason=reason)


def unjudged(index: int = 0, reason: str = "Nothing answers the question.") -> eval_result_pb2.CaseRunResult:
    """A run that could not be judged at all."""
    return Run(index=index, status=NOT_EVALUATED, reason=reason)


def case_of(case_id: str, *runs: eval_result_pb2.CaseRunResult) -> eval_result_pb2.CaseResult:
    """A case with the results of all of its runs, numbered in order."""
    for index, run in enumerate(runs):
        run.index = index
    return verdicts.case_result(planned_case(case_id, len(runs)), runs)


def passing(case_id: str, passed: int = 1, runs: int = 1) -> eval_result_pb2.CaseResult:
    """A case of which some of the runs passed and the others failed, by a metric `answer` of 1 or 0."""
    return case_of(case_id, *(scored(answer=1 if index < passed else 0) for index in range(runs)))


def totals_of(
    cases: Sequence[eval_result_pb2.CaseResult], *, usage: usage_pb2.Usage | None = None
) -> eval_result_pb2.EvalTotals:
    """The numbers over all cases, and what they used."""
    totals = verdicts.totals(cases, planned_runs=sum(len(case.runs) for case in cases), digest="sha256:set")
    if usage is not None:
        totals.usage.CopyFrom(usage)
    return totals


def result_of(
    *cases: eval_result_pb2.CaseResult, pins: eval_result_pb2.EvalPins | None = None
) -> eval_result_pb2.EvalResult:
    """A result with these cases."""
    return eval_result_pb2.EvalResult(set_name="desk", pins=pins, cases=cases, totals=totals_of(cases))


def named(cases: Mapping[str, Sequence[eval_result_pb2.CaseRunResult]]) -> list[eval_result_pb2.CaseResult]:
    """Cases by their ids."""
    return [case_of(case_id, *runs) for case_id, runs in cases.items()]


def _of_metric(score: float | None) -> eval_result_pb2.CaseRunResult:
    return scored(answer=score)


RUNS = st.one_of(st.sampled_from([1.0, 1.0, 0.0, 0.5, None]).map(_of_metric), st.builds(crashed), st.builds(unjudged))
"""Runs of cases with a metric `answer`, of every outcome."""

CASES = st.dictionaries(st.sampled_from("abcdef"), st.lists(RUNS, min_size=1, max_size=4), min_size=1).map(named)
"""Cases with random results."""
