"""Builders of results of evaluations, as scored trials, and random ones."""

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, invocation_pb2, usage_pb2
from bough_server.evals.metrics import statistics
from bough_server.evals.results import verdicts
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED

Trial = eval_result_pb2.CaseTrialResult

RECORDED = eval_set_pb2.EvalTurn(recorded=invocation_pb2.InvocationSource())
"""A turn of a recorded case."""


def planned_case(case_id: str, trials: int = 1, **fields: object) -> evaluation_pb2.CasePlanned:
    """A case with so many trials; `fields` are those of the case."""
    case = eval_set_pb2.EvalCase(id=case_id, turns=[eval_set_pb2.EvalTurn(user="Hello")])
    case.MergeFrom(eval_set_pb2.EvalCase(**fields))  # type: ignore[arg-type]
    return evaluation_pb2.CasePlanned(eval_case=case, trials=trials)


def scored(trial: int = 0, *, threshold: float = 1, **scores: float | None) -> Trial:
    """A trial with these scores, None for a metric that could not be scored."""
    entries = [
        eval_result_pb2.MetricScore(
            name=name,
            verdict=NOT_EVALUATED if score is None else PASSED if statistics.reaches(score, threshold) else FAILED,
            score=score,
            threshold=threshold,
        )
        for name, score in scores.items()
    ]
    verdict = verdicts.worst([entry.verdict for entry in entries] or [PASSED])
    return Trial(trial=trial, verdict=verdict, scores=entries)


def crashed(trial: int = 0, reason: str = "The model failed.") -> Trial:
    """A trial whose turn ended without an answer."""
    return Trial(trial=trial, verdict=FAILED, crashed=True, reason=reason)


def unscored(trial: int = 0, reason: str = "Nothing answers the question.") -> Trial:
    """A trial that could not be scored at all."""
    return Trial(trial=trial, verdict=NOT_EVALUATED, reason=reason)


def case_of(case_id: str, *trials: Trial) -> eval_result_pb2.CaseResult:
    """A case with the results of all of its trials, numbered in order."""
    for number, trial in enumerate(trials):
        trial.trial = number
    return verdicts.case_result(planned_case(case_id, len(trials)), trials)


def passing(case_id: str, passed: int = 1, trials: int = 1) -> eval_result_pb2.CaseResult:
    """A case of which some of the trials passed and the others failed, by a metric `answer` of 1 or 0."""
    return case_of(case_id, *(scored(answer=1 if number < passed else 0) for number in range(trials)))


def rerun(case: eval_result_pb2.CaseResult, *, candidate: tuple[int, int], baseline: tuple[int, int] = (0, 0)) -> None:
    """Add fresh trials to a case, of each side so many that passed of so many."""
    sides = {
        eval_result_pb2.TRIAL_PURPOSE_RERUN: candidate,
        eval_result_pb2.TRIAL_PURPOSE_BASELINE_RERUN: baseline,
    }
    for purpose, (passed, trials) in sides.items():
        for number in range(trials):
            trial = scored(len(case.trials) + len(case.reruns), answer=1 if number < passed else 0)
            trial.purpose = purpose
            case.reruns.append(trial)


def totals_of(
    cases: Sequence[eval_result_pb2.CaseResult], *, usage: usage_pb2.Usage | None = None
) -> eval_result_pb2.EvalTotals:
    """The numbers over all cases, and what they used."""
    totals = verdicts.totals(cases, planned_trials=sum(len(case.trials) for case in cases), digest="sha256:set")
    if usage is not None:
        totals.usage.CopyFrom(usage)
    return totals


def result_of(
    *cases: eval_result_pb2.CaseResult, pins: eval_result_pb2.EvalPins | None = None
) -> eval_result_pb2.EvalResult:
    """A result with these cases."""
    return eval_result_pb2.EvalResult(eval_set_name="desk", pins=pins, cases=cases, totals=totals_of(cases))


def named(cases: Mapping[str, Sequence[Trial]]) -> list[eval_result_pb2.CaseResult]:
    """Cases by their ids."""
    return [case_of(case_id, *trials) for case_id, trials in cases.items()]


def _of_metric(score: float | None) -> Trial:
    return scored(answer=score)


TRIALS = st.one_of(st.sampled_from([1.0, 1.0, 0.0, 0.5, None]).map(_of_metric), st.builds(crashed), st.builds(unscored))
"""Trials with a metric `answer`, of every outcome."""

CASES = st.dictionaries(st.sampled_from("abcdef"), st.lists(TRIALS, min_size=1, max_size=4), min_size=1).map(named)
"""Cases with random results."""
