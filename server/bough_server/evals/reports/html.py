"""Results as one HTML page: cases, gates, and the expected tree beside the actual one with the differences marked."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2, input_pb2
from bough_server.evals.reports.page import Block, Note, indent_json, render
from bough_server.evals.reports.trees import TurnView, iter_turn_views, usage_facts
from bough_server.evals.reports.words import (
    CHANGES,
    best_text,
    cell_rows,
    change_reasons,
    comparison_sentences,
    comparison_text,
    describe_judgment,
    describe_unused_mocks,
    incomplete_text,
    means_texts,
    pass_rate_text,
    rate_text,
    rates_text,
    reasons_of,
    reasons_of_trial,
    result_text,
    retries_text,
    trial_text,
    value_text,
    verdict_text,
)
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.evals.results.verdicts import list_usages

_CHANGE_STYLES: Final = {
    eval_result_pb2.CASE_CHANGE_BETTER: "passed",
    eval_result_pb2.CASE_CHANGE_WORSE: "failed",
    eval_result_pb2.CASE_CHANGE_REMOVED: "anomaly",
}
_PASSED: Final = eval_result_pb2.VERDICT_PASSED
_ORDER: Final = (
    eval_result_pb2.VERDICT_FAILED,
    eval_result_pb2.VERDICT_NOT_EVALUATED,
    eval_result_pb2.VERDICT_UNSPECIFIED,
    _PASSED,
)
"""The order of cases by verdict."""

_MOST_METRICS: Final = 20
"""The most columns of metrics; what more there are, trials show."""
_MOST_LABELS: Final = 200
"""The most labels to choose from; the search finds the others."""
_MOST_FLAKY: Final = 20
_MOST_REASONS: Final = 3
_MOST_REASON: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """A row of the table of gates."""

    gate: str
    verdict: str
    style: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    """A row of the table of changes."""

    case_id: str
    change: str
    style: str
    rates: str
    reasons: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the summary bar: how many cases have a verdict."""

    count: int
    verdict: str
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A cell of a metric's column; `order` is the number that it is sorted by, empty without one."""

    text: str
    order: str
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A trial of a case."""

    id: str
    name: str
    number: int
    verdict: str
    style: str
    facts: Sequence[str]
    notes: Sequence[Note]
    blocks: Sequence[Block]
    turns: Sequence[TurnView]
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseView:
    """A row of the table of cases, and what it unfolds to."""

    id: str
    name: str
    verdict: str
    style: str
    order: int
    rate: str
    rate_order: str
    is_flaky: bool
    labels: Sequence[str]
    scores: Sequence[Score]
    reasons: str
    notes: Sequence[Note]
    trials: Sequence[TrialView]
    """All trials, the planned ones first."""
    planned_count: int


def html_page(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None) -> str:
    """Return the page of a result. It loads nothing, works from a file, and shows everything without its script too.

    Cases that did not pass come first. The page sorts, filters and searches them.
    """
    metrics = list(dict.fromkeys(metric.name for case in result.cases for metric in case.metrics))
    labels = Counter(label for case in result.cases for label in _labels(case))
    cases = sorted(enumerate(result.cases), key=lambda numbered: _order(numbered[1].verdict))
    return render(
        "result.html.jinja",
        script="result.js",
        title=result.eval_set_name or "evaluation",
        verdict=result_text(result),
        style=_result_style(result),
        shares=list(_shares(result.totals)),
        head=list(_head(result, comparison)),
        cells=cell_rows(result),
        best=best_text(result),
        gates=[_gate(gate) for gate in result.gates],
        changes=list(_changes(comparison)) if comparison is not None else [],
        metrics=metrics[:_MOST_METRICS],
        labels=sorted(label for label, _ in labels.most_common(_MOST_LABELS)),
        # One after another: the views of all trees together would be hundreds of megabytes.
        cases=(_case(index, case, metrics[:_MOST_METRICS]) for index, case in cases),
        case_count=len(result.cases),
    )


def _shares(totals: eval_result_pb2.EvalTotals) -> Iterator[Share]:
    known = (
        (eval_result_pb2.VERDICT_FAILED, totals.cases_failed),
        (eval_result_pb2.VERDICT_NOT_EVALUATED, totals.cases_not_evaluated),
        (_PASSED, totals.cases_passed),
    )
    pending = totals.cases - sum(count for _, count in known)
    for verdict, count in (*known, (eval_result_pb2.VERDICT_UNSPECIFIED, pending)):
        if count > 0:
            yield Share(count=count, verdict=verdict_text(verdict), style=_style(verdict))


def _order(verdict: eval_result_pb2.Verdict.ValueType) -> int:
    return _ORDER.index(verdict) if verdict in _ORDER else 0


def _labels(case: eval_result_pb2.CaseResult) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(case.labels.items())]


def _head(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None) -> Iterator[Note]:
    found = result.totals
    parts = [
        f"{found.cases_passed:,} of {pluralize(found.cases, 'case')} passed",
        f"{found.trials_passed:,} of {pluralize(found.trials, 'trial')} passed",
    ]
    if found.cases_not_evaluated:
        parts.append(f"{found.cases_not_evaluated} not scored")
    if found.HasField("pass_rate"):
        parts.append(f"pass rate {pass_rate_text(found)}")
    style = _result_style(result)
    if incomplete := incomplete_text(result):
        yield Note(text=incomplete, style=style)
    yield Note(text=" · ".join(parts), style=style)
    if result.reason:
        yield Note(text=result.reason, style=style)
    if retries := retries_text(found):
        yield Note(text=retries, style="anomaly")
    if means := means_texts(found):
        yield Note(text=f"means: {' · '.join(means)}")
    for name, usage in zip(("runs", "judges", "simulated users"), list_usages(found), strict=True):
        if used := list(usage_facts(usage)):
            yield Note(text=f"{name}: {' · '.join(used)}")
    if found.flaky_cases:
        more = len(found.flaky_cases) - _MOST_FLAKY
        names = [*found.flaky_cases[:_MOST_FLAKY], *([f"and {more} more"] if more > 0 else [])]
        yield Note(text=f"flaky: {', '.join(names)}", style="anomaly")
    if result.evaluation_id:
        yield Note(text=f"evaluation {result.evaluation_id}, agent {result.pins.agent or '-'}")
    if comparison is not None:
        yield Note(text=f"against the baseline: {comparison_text(comparison)}")
        yield from (Note(text=text) for text in comparison_sentences(comparison, result.suspects))
        yield from (Note(text=text, style="anomaly") for text in comparison.pins_changed)


def _gate(gate: eval_result_pb2.GateResult) -> GateRow:
    verdict, value = verdict_text(gate.verdict), value_text(gate)
    return GateRow(gate=gate.gate, verdict=verdict, style=_style(gate.verdict), value=value, reason=gate.reason)


def _changes(comparison: eval_result_pb2.EvalComparison) -> Iterator[ChangeRow]:
    for case in comparison.cases:
        if case.change in CHANGES:
            yield ChangeRow(
                case_id=case.case_id,
                change=CHANGES[case.change],
                style=_CHANGE_STYLES.get(case.change, ""),
                rates=rates_text(case),
                reasons=_join_lines(change_reasons(case)),
            )


def _case(index: int, case: eval_result_pb2.CaseResult, metrics: Sequence[str]) -> CaseView:
    found = {metric.name: metric for metric in case.metrics}
    reasons = [reason if len(reason) <= _MOST_REASON else f"{reason[:_MOST_REASON]}…" for reason in reasons_of(case)]
    notes = [Note(text=case.reason, style=_style(case.verdict))] if case.reason else []
    trials = [*case.trials, *case.reruns]
    opened = next((trial for trial in trials if trial.verdict != _PASSED), None)
    statistics = case.statistics
    return CaseView(
        id=f"case-{index}",
        name=case.case_id,
        verdict=verdict_text(case.verdict),
        style=_style(case.verdict),
        order=_order(case.verdict),
        rate=rate_text(statistics),
        rate_order=f"{statistics.pass_rate:.6g}" if statistics.HasField("pass_rate") else "",
        is_flaky=statistics.flaky,
        labels=_labels(case),
        scores=[_score(found[name]) if name in found else Score(text="", order="", style="") for name in metrics],
        reasons=_join_lines(reasons[:_MOST_REASONS]),
        notes=[*notes, *(Note(text=text, style="anomaly") for text in describe_unused_mocks(case))],
        trials=[
            _trial(trial, case, place=f"case-{index}-trial-{number}", is_open=trial is opened)
            for number, trial in enumerate(trials)
        ],
        planned_count=len(case.trials),
    )


def _join_lines(reasons: Sequence[str]) -> str:
    """Return reasons as one text, a line for each."""
    return "\n".join(" ".join(reason.split()) for reason in reasons)


def _score(metric: eval_result_pb2.MetricSummary) -> Score:
    is_known = metric.HasField("mean")
    return Score(
        text=f"{metric.mean:.3g}" if is_known else "-",
        order=f"{metric.mean:.6g}" if is_known else "",
        style=_style(metric.verdict),
    )


def _trial(
    trial: eval_result_pb2.CaseTrialResult, case: eval_result_pb2.CaseResult, *, place: str, is_open: bool
) -> TrialView:
    facts = [f"{score.name} {score.score:.3g}" for score in trial.scores if score.HasField("score")]
    if trial.HasField("duration"):
        facts.append(f"{trial.duration.ToTimedelta().total_seconds():.1f} s")
    facts += usage_facts(trial.usage)
    notes = [Note(text=reason, style=_style(trial.verdict)) for reason in reasons_of_trial(trial)]
    notes += [Note(text=f"{score.name}, {describe_judgment(one)}") for score in trial.scores for one in score.judgments]
    return TrialView(
        id=place,
        name=trial_text(trial),
        number=trial.trial + 1,
        verdict=verdict_text(trial.verdict),
        style=_style(trial.verdict),
        facts=facts,
        notes=notes,
        blocks=list(_question(trial.unanswered)) if trial.HasField("unanswered") else [],
        turns=list(iter_turn_views(trial, case)),
        is_open=is_open,
    )


def _question(request: input_pb2.InputRequest) -> Iterator[Block]:
    """Yield the question that no answer of the case answers."""
    asker = " / ".join(request.agent_path)
    yield Block(title=f"asked by {asker}" if asker else "asked", text=request.prompt)
    if request.call.name:
        yield Block(title=f"about {request.call.name}", text=indent_json(request.call.arguments_json))


def _style(status: eval_result_pb2.Verdict.ValueType) -> str:
    return verdict_text(status).replace(" ", "-")


def _result_style(result: eval_result_pb2.EvalResult) -> str:
    return "cancelled" if incomplete_text(result) else _style(result.verdict)
