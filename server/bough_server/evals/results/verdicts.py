"""Verdicts: of a case from its trials, of an evaluation from its cases or its gates; and the numbers over all cases.

A crashed trial is a failure. Other trials are not scored one by one but together: a case passes if the mean of each
metric over them reaches the metric's threshold, so a good trial can make up for a bad one. A case that could not be
scored never passes. FAILED takes precedence over NOT_EVALUATED, and NOT_EVALUATED over PASSED.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, usage_pb2
from bough_server.evals.metrics import statistics
from bough_server.log.usage import Sums, has_whole_cost

CaseResult = eval_result_pb2.CaseResult
CaseTrialResult = eval_result_pb2.CaseTrialResult
Status: TypeAlias = eval_result_pb2.Verdict.ValueType

PASSED: Final = eval_result_pb2.VERDICT_PASSED
FAILED: Final = eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED: Final = eval_result_pb2.VERDICT_NOT_EVALUATED
UNKNOWN: Final = eval_result_pb2.VERDICT_UNSPECIFIED

MAX_UNUSED_MOCKS: Final = 100
"""The most unused mocks that a case's result names."""

MAX_FLAKY: Final = 1_000
"""The most flaky cases that totals name: they are part of an event and of every page of a result."""


def worst(statuses: Iterable[Status]) -> Status:
    """Return FAILED if a status is, else NOT_EVALUATED if one is not PASSED or there is none, else PASSED."""
    found = set(statuses)
    if FAILED in found:
        return FAILED
    return PASSED if found == {PASSED} else NOT_EVALUATED


def is_scored(trial: eval_result_pb2.CaseTrialResult) -> bool:
    """Return whether a trial passed or failed; one that crashed failed."""
    return trial.verdict in (PASSED, FAILED)


def has_passed(trial: eval_result_pb2.CaseTrialResult) -> bool:
    """Return whether a trial passed by itself."""
    return trial.verdict == PASSED


def case_result(
    planned: evaluation_pb2.CasePlanned,
    trials: Sequence[eval_result_pb2.CaseTrialResult],
    reruns: Sequence[eval_result_pb2.CaseTrialResult] = (),
) -> eval_result_pb2.CaseResult:
    """Return the result of a case so far, from the results of its trials, in any order, and of its fresh ones.

    The verdict is FAILED if a trial crashed, or if the mean of a metric over its scored trials misses the metric's
    threshold; otherwise NOT_EVALUATED if a trial could not be scored, in whole or by one of the metrics; otherwise
    PASSED. So a case with a crashed and a passed trial fails, and so does one with a failed trial and a trial that
    could not be scored.

    The statistics count the scored trials, crashed ones among them. Fresh trials are only listed.
    """
    ordered = sorted(trials, key=lambda trial: trial.trial)
    judged = [trial for trial in ordered if is_scored(trial)]
    metrics = list(_metrics(ordered))
    status, reason = _case_verdict(planned, ordered, metrics)
    return CaseResult(
        case_id=planned.eval_case.id,
        labels=planned.eval_case.labels,
        turns=map(_drop_recorded_invocation, planned.eval_case.turns),
        user=planned.eval_case.user if planned.eval_case.HasField("user") else None,
        verdict=status,
        reason=reason,
        trials=ordered,
        metrics=(metric.summary() for metric in metrics),
        statistics=statistics.pass_statistics(
            sum(map(has_passed, judged)), len(judged), distinct_trials=_count_distinct(judged)
        ),
        unused_mocks=_find_unused_mocks(planned, trials),
        faults=_summarize_faults(planned, trials),
        reruns=reruns,
        trial_means=_measure_trials(ordered),
        cell=planned.cell,
    )


def _measure_trials(trials: Sequence[eval_result_pb2.CaseTrialResult]) -> eval_result_pb2.TrialMeans | None:
    """Return what a trial takes in the mean; None without trials."""
    if not trials:
        return None
    used = [list_usages(trial) for trial in trials]
    tokens = [sum(usage.total_tokens or usage.input_tokens + usage.output_tokens for usage in each) for each in used]
    means = eval_result_pb2.TrialMeans(tokens=statistics.mean(tokens))
    parts = [usage for each in used for usage in each]
    currencies = {usage.currency_code for usage in parts if usage.currency_code}
    if all(map(has_whole_cost, parts)) and len(currencies) <= 1:
        means.cost_nanos = statistics.mean([sum(usage.cost_nanos for usage in each) for each in used])
        means.cost_currency_code = next(iter(currencies), "")
    if all(trial.HasField("duration") for trial in trials):
        means.duration_seconds = statistics.mean([trial.duration.ToNanoseconds() / 1e9 for trial in trials])
    return means


def _count_distinct(trials: Iterable[eval_result_pb2.CaseTrialResult]) -> int:
    """Return for how many trials some scored ones count in an interval, whatever their verdicts are.

    Those that share all of their judgments are one. A crashed trial, which has none, is none beside judged ones: it
    would make the others count for more than they do without it.
    """
    judged: set[Sequence[str]] = set()
    crashed = others = 0
    for trial in trials:
        runs = tuple(dict.fromkeys(one.run_id for score in trial.scores for one in score.judgments if one.run_id))
        if runs:
            judged.add(runs)
        elif trial.crashed:
            crashed += 1
        else:
            others += 1
    return len(judged) + others if judged else others + crashed


def _find_unused_mocks(
    planned: evaluation_pb2.CasePlanned, trials: Sequence[eval_result_pb2.CaseTrialResult]
) -> Sequence[eval_result_pb2.UnusedMock]:
    """Return the mocks that answered no call in any trial; none while trials are missing."""
    if len(trials) < planned.trials:
        return []
    mocks = planned.eval_case.mocks
    tools = {index for trial in trials for index in trial.used_mocks}
    agents = {index for trial in trials for index in trial.used_agent_mocks}
    unused = [
        eval_result_pb2.UnusedMock(index=index, name=mock.name)
        for index, mock in enumerate(mocks.tools)
        if index not in tools
    ]
    unused += [
        eval_result_pb2.UnusedMock(index=index, name=mock.agent, is_agent=True)
        for index, mock in enumerate(mocks.agents)
        if index not in agents
    ]
    return unused[:MAX_UNUSED_MOCKS]


def _summarize_faults(
    planned: evaluation_pb2.CasePlanned, trials: Sequence[eval_result_pb2.CaseTrialResult]
) -> Sequence[eval_result_pb2.FaultSummary]:
    """Return how often each fault was injected, and how many of its trials passed; nothing while trials are missing."""
    if len(trials) < planned.trials:
        return []
    summaries = [
        eval_result_pb2.FaultSummary(index=index, name=fault.tool or fault.model, is_model=bool(fault.model))
        for index, fault in enumerate(planned.eval_case.faults)
    ]
    for trial in trials:
        for fault in trial.injected_faults:
            if not 0 <= fault.index < len(summaries):
                continue  # of a record that was made with other faults
            summaries[fault.index].injected += fault.count
            summaries[fault.index].trials += is_scored(trial)
            summaries[fault.index].passed += has_passed(trial)
    return summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricOfTrials:
    """A metric over the trials of a case."""

    name: str
    threshold: float
    scores: Sequence[float]
    """Those of the trials that have one."""
    missing: int
    """How many trials have none."""
    miss: str
    """The reason of the first score that misses the threshold; empty for none."""
    distinct_judgments: int

    @property
    def status(self) -> Status:
        if self.scores and not statistics.reaches(statistics.mean(self.scores), self.threshold):
            return FAILED
        return NOT_EVALUATED if self.missing or not self.scores else PASSED

    def summary(self) -> eval_result_pb2.MetricSummary:
        # Without some of the trials it would be compared with means over all of them.
        mean = None if self.missing or not self.scores else statistics.mean(self.scores)
        return eval_result_pb2.MetricSummary(
            name=self.name,
            verdict=self.status,
            mean=mean,
            threshold=self.threshold,
            distinct_judgments=self.distinct_judgments,
        )

    def failure(self) -> str:
        runs = "1 trial" if len(self.scores) == 1 else f"{len(self.scores)} trials"
        mean = statistics.mean(self.scores)
        sentence = f"{self.name}: the mean over {runs} is {mean:.6g}, and has to be at least {self.threshold:.6g}."
        return f"{sentence} {self.miss}".rstrip()


def _metrics(trials: Sequence[eval_result_pb2.CaseTrialResult]) -> Iterator[_MetricOfTrials]:
    """Return the metrics that some trial has an entry of, in the order in which they first come."""
    for name in dict.fromkeys(score.name for trial in trials for score in trial.scores):
        entries = [score for trial in trials for score in trial.scores if score.name == name]
        known = [entry for entry in entries if entry.HasField("score")]
        runs_of_scores = [tuple(dict.fromkeys(one.run_id for one in entry.judgments if one.run_id)) for entry in known]
        judgments = {runs for runs in runs_of_scores if runs}
        misses = (entry.reason for entry in known if not statistics.reaches(entry.score, entry.threshold))
        yield _MetricOfTrials(
            name=name,
            threshold=entries[0].threshold,
            scores=[entry.score for entry in known],
            missing=len(trials) - len(known),
            miss=next(misses, ""),
            distinct_judgments=len(judgments),
        )


def _case_verdict(
    planned: evaluation_pb2.CasePlanned,
    trials: Sequence[eval_result_pb2.CaseTrialResult],
    metrics: Sequence[_MetricOfTrials],
) -> tuple[Status, str]:
    """Return the verdict of a case and the sentence that says why."""
    total = max(planned.trials, len(trials))
    # In this order: a failure is final, and a trial that was not scored decides before those that have not ended.
    if crashed := [trial for trial in trials if trial.crashed]:
        return FAILED, _describe_trials(crashed, total, "crashed")
    if failed := next((metric for metric in metrics if metric.status == FAILED), None):
        return FAILED, failed.failure()
    if unjudged := [trial for trial in trials if not is_scored(trial)]:
        return NOT_EVALUATED, _describe_trials(unjudged, total, "could not be scored")
    if len(trials) < total or not trials:
        return UNKNOWN, f"{total - len(trials)} of {total} trials have not ended."
    if unknown := next((metric for metric in metrics if metric.status != PASSED), None):
        return NOT_EVALUATED, f"{unknown.name} could not be scored in {unknown.missing} of {total} trials."
    return PASSED, ""


def _describe_trials(trials: Sequence[eval_result_pb2.CaseTrialResult], total: int, what: str) -> str:
    """Return a sentence that counts some trials and says why it is so of the first."""
    counted = f"{len(trials)} of {total} trials {what}" if total > 1 else f"The trial {what}"
    first = trials[0]
    if not first.reason:
        return f"{counted}."
    return f"{counted}. Trial {first.trial + 1}: {first.reason}" if total > 1 else f"{counted}: {first.reason}"


def _drop_recorded_invocation(turn: eval_set_pb2.EvalTurn) -> eval_set_pb2.EvalTurn:
    """Return a turn without the invocation that is judged in it, which may be large and is therefore never copied."""
    return eval_set_pb2.EvalTurn(
        id=turn.id,
        user=turn.user,
        input=turn.input if turn.HasField("input") else None,
        expect=turn.expect if turn.HasField("expect") else None,
    )


def totals(
    cases: Sequence[eval_result_pb2.CaseResult], *, planned_trials: int, planned_reruns: int = 0, digest: str
) -> eval_result_pb2.EvalTotals:
    """Return the numbers over all cases; the digest of the set seeds the resampling, so the same cases have the same.

    Resampling takes tenths of a second: call it in a thread.
    """
    statuses = [case.verdict for case in cases]
    every = [trial for case in cases for trial in (*case.trials, *case.reruns)]
    result = eval_result_pb2.EvalTotals(
        cases=len(cases),
        cases_passed=statuses.count(PASSED),
        cases_failed=statuses.count(FAILED),
        cases_not_evaluated=statuses.count(NOT_EVALUATED),
        trials=planned_trials,
        trials_ended=sum(len(case.trials) for case in cases),
        trials_passed=sum(case.statistics.passed for case in cases),
        metric_means={name: mean.value for name, mean in measure_metrics(cases).items() if mean.value is not None},
        usage=_sum(trial.usage for trial in every if trial.HasField("usage")),
        judge_usage=_sum(trial.judge_usage for trial in every if trial.HasField("judge_usage")),
        user_usage=_sum(trial.user_usage for trial in every if trial.HasField("user_usage")),
        flaky_cases=[case.case_id for case in cases if case.statistics.flaky][:MAX_FLAKY],
        reruns=planned_reruns,
        reruns_ended=sum(len(case.reruns) for case in cases),
        retried_trials=sum(bool(trial.crashed_attempts) for trial in every),
    )
    if rates := [case.statistics.pass_rate for case in cases if case.statistics.HasField("pass_rate")]:
        result.pass_rate = statistics.mean(rates)
        result.pass_rate_interval.CopyFrom(statistics.bootstrap(rates, digest))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMean:
    """The mean of a metric over the cases that have it, as totals and gates have it."""

    value: float | None
    """None if no trial has a score and none crashed."""
    crash_score: float
    """What a crashed trial counts as: 0, or the lowest score if that is below 0."""
    crashes: int
    """How many trials crashed."""
    unscored: int
    """In how many cases some trial that did not crash has no score."""


def measure_metrics(cases: Iterable[eval_result_pb2.CaseResult], names: Iterable[str] = ()) -> dict[str, MetricMean]:
    """Return the mean of each metric by its name, of those in `names` too.

    Crashed trials have no scores, and trials that could not be scored may have none: a case that has only such trials
    counts for every metric, one that crashed in all of them as `crash_score`.
    """
    found: dict[str, list[_ScoresOfCase]] = {name: [] for name in names}
    everywhere: list[_ScoresOfCase] = []
    for case in cases:
        named = [{score.name: score for score in trial.scores} for trial in case.trials]
        if metrics := dict.fromkeys(name for scores in named for name in scores):
            for name in metrics:
                found.setdefault(name, []).append(
                    [
                        (trial.crashed, _score_of(scores.get(name)))
                        for trial, scores in zip(case.trials, named, strict=True)
                    ]
                )
        elif not any(is_scored(trial) and not trial.crashed for trial in case.trials):
            everywhere.append([(trial.crashed, None) for trial in case.trials])
    return {name: _mean_of([*scores, *everywhere]) for name, scores in found.items()}


_ScoresOfCase: TypeAlias = Sequence[tuple[bool, float | None]]
"""Of each trial whether it crashed, and its score."""


def _score_of(score: eval_result_pb2.MetricScore | None) -> float | None:
    return score.score if score is not None and score.HasField("score") else None


def _mean_of(cases: Sequence[_ScoresOfCase]) -> MetricMean:
    lowest = min([0.0, *(score for case in cases for _, score in case if score is not None)])
    known = [[lowest if has_crashed else score for has_crashed, score in case] for case in cases]
    means = [statistics.mean(scores) for case in known if (scores := [score for score in case if score is not None])]
    return MetricMean(
        value=statistics.mean(means) if means else None,
        crash_score=lowest,
        crashes=sum(has_crashed for case in cases for has_crashed, _ in case),
        unscored=sum(None in case for case in known),
    )


def _sum(usages: Iterable[usage_pb2.Usage]) -> usage_pb2.Usage | None:
    """Return the sum of some usages; None if there is none."""
    sums: Sums | None = None
    for usage in usages:
        sums = sums or Sums()
        sums.add(Sums.of(usage))
    return sums.usage() if sums else None


def total_cost(numbers: eval_result_pb2.EvalTotals) -> usage_pb2.Usage:
    """Return what runs, judges and users used together; its cost is absent if it is not known at all."""
    sums = Sums()
    for used in list_usages(numbers):
        sums.add(Sums.of(used))
    return sums.usage()


def list_usages(
    numbers: eval_result_pb2.EvalTotals | eval_result_pb2.CaseTrialResult,
) -> tuple[usage_pb2.Usage, usage_pb2.Usage, usage_pb2.Usage]:
    """Return what runs, judges and simulated users used, of a trial or of all."""
    return numbers.usage, numbers.judge_usage, numbers.user_usage


def verdict(
    cases: Sequence[eval_result_pb2.CaseResult],
    gates: Sequence[eval_result_pb2.GateResult],
    *,
    removed: Sequence[str],
    counts_crashes: bool,
) -> Status:
    """Return the verdict of an evaluation; `removed` are the cases of the baseline that are missing without permission.

    Without gates every case has to pass. With gates, they alone decide which cases may fail. Most gates count a crashed
    trial as one that did not pass. If none of them counts crashed trials, `counts_crashes` is False, and a crashed
    trial fails the evaluation. No gate counts cases that could not be scored: if a case, or a trial of a failed case,
    is NOT_EVALUATED, the verdict is at best NOT_EVALUATED. Removed cases fail the evaluation with gates and without,
    and an evaluation of no case is NOT_EVALUATED.
    """
    statuses = [gate.verdict for gate in gates] if gates else [case.verdict for case in cases]
    if removed or (not counts_crashes and any(map(has_crashed, cases))):
        statuses.append(FAILED)
    if not cases or any(map(has_unscored, cases)):
        statuses.append(NOT_EVALUATED)
    return worst(statuses)


def has_crashed(case: eval_result_pb2.CaseResult) -> bool:
    """Return whether a trial crashed."""
    return any(trial.crashed for trial in case.trials)


def has_unscored(case: eval_result_pb2.CaseResult) -> bool:
    """Return whether a case, or a trial of it, could not be scored."""
    return case.verdict not in (PASSED, FAILED) or not all(map(is_scored, case.trials))
