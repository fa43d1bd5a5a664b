"""Results as JUnit XML, which CI servers show as tests: the set is a suite, and each case a test case."""

import re
from collections.abc import Iterator
from typing import Final

from junitparser import Error, Failure, JUnitXml, Properties, Property, TestCase, TestSuite

from bough.v1 import eval_result_pb2
from bough_server.evals.reports.words import reasons_of

_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, escaped or not; the library writes them as they are."""

_MOST_MESSAGE: Final = 300


def junit_text(result: eval_result_pb2.EvalResult) -> str:
    """Return a result as JUnit XML.

    A case that failed is a failure, and one that crashed or could not be scored an error; a gate is a test case too,
    and so is the verdict if it has a reason that no case and no gate has.
    Scores, bounds, and the ids of runs and traces are properties of a case.
    """
    name = _clean(result.eval_set_name or "evaluation")
    suite = TestSuite(name)
    if result.evaluation_id:
        suite.add_property("evaluation_id", _clean(result.evaluation_id))
    for metric, mean in sorted(result.totals.metric_means.items()):
        suite.add_property(f"mean.{_clean(metric)}", f"{mean:g}")
    for case in result.cases:
        suite.add_testcase(_test_case(case, name))
    for gate in result.gates:
        one = TestCase(_clean(f"gate {gate.gate}"), classname=name)
        if gate.verdict != eval_result_pb2.VERDICT_PASSED:
            one.result = [_outcome(gate.verdict, [gate.reason or "The gate does not hold."])]
        suite.add_testcase(one)
    if result.reason:
        one = TestCase("verdict", classname=name)
        one.result = [_outcome(result.verdict, [result.reason])]
        suite.add_testcase(one)
    xml = JUnitXml()
    xml.add_testsuite(suite)
    return str(xml.tostring().decode()) + "\n"


def _test_case(case: eval_result_pb2.CaseResult, suite: str) -> TestCase:
    one = TestCase(_clean(case.case_id), classname=suite)
    one.time = sum(trial.duration.ToTimedelta().total_seconds() for trial in case.trials)
    # A TestCase has no add_property, as suites have: the element is appended instead.
    properties = Properties()
    for name, value in _properties(case):
        properties.add_property(Property(_clean(name), _clean(value)))
    one.append(properties)
    if case.verdict != eval_result_pb2.VERDICT_PASSED:
        status = case.verdict
        if any(trial.crashed for trial in case.trials):
            status = eval_result_pb2.VERDICT_NOT_EVALUATED
        one.result = [_outcome(status, reasons_of(case))]
    return one


def _outcome(status: eval_result_pb2.Verdict.ValueType, reasons: list[str]) -> Failure | Error:
    """Return a failure, or an error for what could not be scored; the message is one line, the first reason."""
    kind = Failure if status == eval_result_pb2.VERDICT_FAILED else Error
    first = " ".join(_clean(reasons[0] if reasons else "It did not pass.").split())
    outcome = kind(first if len(first) <= _MOST_MESSAGE else first[: _MOST_MESSAGE - 1] + "…")
    outcome.text = _clean("\n".join(reasons))
    return outcome


def _properties(case: eval_result_pb2.CaseResult) -> Iterator[tuple[str, str]]:
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
