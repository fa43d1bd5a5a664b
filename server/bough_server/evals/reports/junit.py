"""Results as JUnit XML, which CI servers show as tests: the set is a suite, and each case a test case.

The root is a suite, as Surefire writes it, and a test case has no properties: Jenkins' and Surefire's schemas know
neither several suites in one file nor properties of a case. What a case has of them is in its output.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from junitparser import Error, Failure, TestCase, TestSuite

from bough.v1 import eval_result_pb2
from bough_server.evals.reports.tree_text import trees_text
from bough_server.evals.reports.words import (
    CHANGES,
    best_text,
    cell_rows,
    change_reasons,
    comparison_sentences,
    comparison_text,
    incomplete_text,
    rates_text,
    reasons_of,
    retries_text,
    retry_texts,
)

_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, escaped or not; the library writes them as they are."""

_MOST_MESSAGE: Final = 300
_MOST_TRIALS: Final = 3
"""The most trials of a case whose trees are shown; a file of --json or --html has all."""

_Changes = Mapping[str, eval_result_pb2.CaseComparison]


def junit_text(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None) -> str:
    """Return a result as JUnit XML.

    A case that failed is a failure, and one that crashed or could not be scored an error; a gate is a test case too,
    and so is the verdict if it has a reason that no case and no gate has, and the evaluation if it did not succeed.
    Scores, bounds, labels, the ids of runs and traces, how the case changed, and the trees of trials that did not pass
    are the output of a case.
    """
    name = _clean(result.eval_set_name or "evaluation")
    suite = TestSuite(name)
    for key, value in _suite_properties(result, comparison):
        suite.add_property(_clean(key), _clean(value))
    changes = {case.case_id: case for case in comparison.cases if case.change in CHANGES} if comparison else {}
    for case in result.cases:
        suite.add_testcase(_test_case(case, name, changes))
    for gate in result.gates:
        is_held = gate.verdict == eval_result_pb2.VERDICT_PASSED
        outcome = None if is_held else _outcome(gate.verdict, [gate.reason or "The gate does not hold."])
        suite.add_testcase(_build_case(f"gate {gate.gate}", name, outcome))
    if result.reason:
        suite.add_testcase(_build_case("verdict", name, _outcome(result.verdict, [result.reason])))
    if incomplete := incomplete_text(result):
        # Cases that passed before the end must not look like an evaluation that did.
        outcome = _outcome(eval_result_pb2.VERDICT_NOT_EVALUATED, [incomplete])
        suite.add_testcase(_build_case("evaluation", name, outcome))
    suite.time = round(sum(case.time for case in suite), 3)
    return str(suite.tostring().decode()) + "\n"


def _suite_properties(
    result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None
) -> Iterator[tuple[str, str]]:
    if result.evaluation_id:
        yield "evaluation_id", result.evaluation_id
    for metric, mean in sorted(result.totals.metric_means.items()):
        yield f"mean.{metric}", f"{mean:g}"
    if retries := retries_text(result.totals):
        yield "retries", retries
    for cell in cell_rows(result):
        yield f"cell.{cell.name}", f"{cell.cases} cases passed, pass rate {cell.rate}{', the best' * cell.is_best}"
    if best := best_text(result):
        yield "best", best
    if comparison is not None:
        yield "comparison", comparison_text(comparison)
        for text in (*comparison_sentences(comparison, result.suspects), *comparison.pins_changed):
            yield "comparison", text
        for case in comparison.cases:
            if case.change == eval_result_pb2.CASE_CHANGE_REMOVED:
                yield "removed", case.case_id


def _test_case(case: eval_result_pb2.CaseResult, suite: str, changes: _Changes) -> TestCase:
    outcome = None
    if case.verdict != eval_result_pb2.VERDICT_PASSED:
        status = case.verdict
        if any(trial.crashed for trial in case.trials):
            status = eval_result_pb2.VERDICT_NOT_EVALUATED
        outcome = _outcome(status, reasons_of(case) or ["Not all of its trials are scored."])
    one = _build_case(case.case_id, suite, outcome)
    one.time = round(sum(trial.duration.ToTimedelta().total_seconds() for trial in case.trials), 3)
    lines = [f"{name}: {' '.join(value.split())}" for name, value in _facts(case)]
    if change := changes.get(case.case_id):
        lines.append(f"against the baseline: {CHANGES[change.change]}, pass rate {rates_text(change)}")
        lines += [f"  - {' '.join(reason.split())}" for reason in change_reasons(change)]
    if outcome is not None and (trees := trees_text(case, most_trials=_MOST_TRIALS)):
        lines.append(trees)
    if lines:
        one.system_out = _clean("\n".join(lines))
    return one


def _build_case(name: str, suite: str, outcome: Failure | Error | None) -> TestCase:
    case = TestCase(_clean(name), classname=suite, time=0.0)
    if outcome is not None:
        case.result = [outcome]
    return case


def _outcome(status: eval_result_pb2.Verdict.ValueType, reasons: Sequence[str]) -> Failure | Error:
    """Return a failure, or an error for what could not be scored; the message is one line, the first reason."""
    is_failure = status == eval_result_pb2.VERDICT_FAILED
    first = " ".join(_clean(reasons[0]).split())
    message = first if len(first) <= _MOST_MESSAGE else first[: _MOST_MESSAGE - 1] + "…"
    outcome = Failure(message, "failed") if is_failure else Error(message, "not scored")
    outcome.text = _clean("\n".join(reasons))
    return outcome


def _facts(case: eval_result_pb2.CaseResult) -> Iterator[tuple[str, str]]:
    for metric in case.metrics:
        if metric.HasField("mean"):
            yield f"score.{metric.name}", f"{metric.mean:g}"
        yield f"threshold.{metric.name}", f"{metric.threshold:g}"
    statistics = case.statistics
    if statistics.HasField("pass_rate"):
        yield "pass_rate", f"{statistics.pass_rate:g}"
        yield "pass_rate.lower", f"{statistics.pass_rate_interval.lower:g}"
        yield "pass_rate.upper", f"{statistics.pass_rate_interval.upper:g}"
    if statistics.flaky:
        yield "flaky", "true"
    for trial in case.trials:
        for text in retry_texts(trial):
            yield f"retried.{trial.trial}", text
        for number, turn in enumerate(trial.turns):
            place = f"{trial.trial}.{number}"
            if turn.run_id:
                yield f"run_id.{place}", turn.run_id
            if turn.trace_id:
                yield f"trace_id.{place}", turn.trace_id
    for name, value in sorted(case.labels.items()):
        yield f"label.{name}", value


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
