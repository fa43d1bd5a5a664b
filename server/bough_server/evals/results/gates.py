"""Gates of an evaluation: numbers that have to be within bounds, such as `pass_rate >= 0.9`.

A gate is read, refused before anything runs if so few trials or cases cannot reach it, and checked at the end.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final, assert_never

from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.documents.yaml import nearest, suggestion
from bough_server.evals.metrics import statistics
from bough_server.evals.metrics.scoring import applicable_metrics
from bough_server.evals.metrics.turn import name_of
from bough_server.evals.results import gate_numbers
from bough_server.evals.results.gate_numbers import Measured, pluralize
from bough_server.evals.results.significance import least_p_value, rejects
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED
from bough_server.evals.sets.eval_set import is_recorded

MAX_TRIALS: Final = 1_000
"""The most trials of a case, as EvalCase.trials says."""
MAX_CASES: Final = 10_000
"""The most cases of a set, as EvalSet.cases says."""


class GateNumber(StrEnum):
    """The numbers that a gate can bound.

    K is a number of trials, METRIC the name of a metric, and NUMBER one of pass_rate, METRIC.mean, cost, tokens and
    duration.
    """

    CASE_PASS_RATE_LOWER = "case.pass_rate.lower"
    PASS_RATE = "pass_rate"
    PASS_RATE_LOWER = "pass_rate.lower"
    PASS_ALL_K = "pass^K"
    PASS_AT_K = "pass@K"
    METRIC_MEAN = "METRIC.mean"
    COST_TOTAL = "cost.total"
    DURATION_P50 = "duration.p50"
    DURATION_P95 = "duration.p95"
    CHANGE = "NUMBER.change"
    CHANGE_LOWER = "NUMBER.change.lower"
    CHANGE_UPPER = "NUMBER.change.upper"
    REGRESSIONS = "regressions"
    REMOVED = "removed"


def _strictly(compare: Callable[[float, float], bool]) -> Callable[[float, float], bool]:
    """Return a strict comparison that does not hold for numbers that are equal up to rounding."""
    return lambda value, bound: compare(value, bound) and not statistics.is_close(value, bound)


_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": statistics.reaches,
    "<=": lambda value, bound: statistics.reaches(bound, value),
    "==": statistics.is_close,
    ">": _strictly(operator.gt),
    "<": _strictly(operator.lt),
}
"""The comparisons, all up to rounding; of those that begin alike the longer one first."""

_WIRE_OPERATORS: Final = {
    ">=": eval_result_pb2.GATE_OPERATOR_AT_LEAST,
    ">": eval_result_pb2.GATE_OPERATOR_ABOVE,
    "<=": eval_result_pb2.GATE_OPERATOR_AT_MOST,
    "<": eval_result_pb2.GATE_OPERATOR_BELOW,
    "==": eval_result_pb2.GATE_OPERATOR_EQUAL,
}

_GATE: Final = re.compile(
    rf"\s*(?P<name>[^\s<>=]+)\s*(?P<operator>{'|'.join(_OPERATORS)})\s*(?P<bound>[^\s<>=]+)"
    r"(?:\s+in\s+(?P<cell>\S.*?))?\s*"
)
_BOUND: Final = re.compile(r"[-+]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:[eE][-+]?[0-9]{1,2})?")
_PASS_K: Final = re.compile(r"pass[\^@](?P<k>[1-9][0-9]{0,8})")
_OF_K: Final = (GateNumber.PASS_ALL_K, GateNumber.PASS_AT_K)
_METRIC_MEAN: Final = re.compile(r"(?P<metric>[A-Za-z][A-Za-z0-9._-]{0,127})\.mean")
_CHANGES: Final = (GateNumber.CHANGE, GateNumber.CHANGE_LOWER, GateNumber.CHANGE_UPPER)
_CHANGE: Final = re.compile(
    rf"(?P<of>pass_rate|cost|tokens|duration|{_METRIC_MEAN.pattern})\.change(?P<bound>\.lower|\.upper)?"
)
_WHOLE_NAMES: Final = frozenset(GateNumber) - {*_OF_K, *_CHANGES, GateNumber.METRIC_MEAN}
"""The names of numbers of which no part is to be filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A number and its bound."""

    text: str
    """The gate as it was written."""
    number: GateNumber
    operator: str
    bound: float
    k: int = 0
    """Of how many trials all have to pass, of PASS_ALL_K, or one, of PASS_AT_K."""
    metric: str = ""
    """The name of the metric, of METRIC_MEAN, and of the change of one."""
    cell: str = ""
    """The cell of the matrix in which it has to hold; empty for each."""
    changed: str = ""
    """What the change is of, of CHANGE, CHANGE_LOWER and CHANGE_UPPER: EstimatedChange.name."""

    @property
    def needs_baseline(self) -> bool:
        """Whether the number is one of a comparison."""
        return self.number in (GateNumber.REGRESSIONS, GateNumber.REMOVED, *_CHANGES)

    @property
    def counts_crashes(self) -> bool:
        """Whether a crashed trial makes the number worse, whatever else is known of the trial."""
        match self.number:
            case GateNumber.COST_TOTAL | GateNumber.REMOVED | GateNumber.REGRESSIONS:
                return False  # a case that crashes and did not pass in the baseline is no regression
            case GateNumber.CHANGE | GateNumber.CHANGE_LOWER | GateNumber.CHANGE_UPPER:
                return self.changed == "pass_rate"
            case (
                GateNumber.CASE_PASS_RATE_LOWER
                | GateNumber.PASS_RATE
                | GateNumber.PASS_RATE_LOWER
                | GateNumber.PASS_ALL_K
                | GateNumber.PASS_AT_K
                | GateNumber.METRIC_MEAN
                | GateNumber.DURATION_P50
                | GateNumber.DURATION_P95
            ):
                return True
        assert_never(self.number)

    def measure_slack(self, value: float) -> float:
        """Return how far a value is within the bound; below 0 for one beyond it."""
        if self.operator == "==":
            return -abs(value - self.bound)
        return value - self.bound if self.is_lower_bound else self.bound - value

    def holds(self, value: float) -> bool:
        """Return whether a value is within the bound."""
        return _OPERATORS[self.operator](value, self.bound)

    @property
    def is_lower_bound(self) -> bool:
        """Whether every larger value is within the bound too."""
        return self.operator in (">=", ">")

    def can_hold(self, lowest: float, highest: float) -> bool:
        """Return whether some number from the lowest to the highest is within the bound; for == any of them may be."""
        if self.operator == "==":
            return statistics.reaches(self.bound, lowest) and statistics.reaches(highest, self.bound)
        return self.holds(highest if self.is_lower_bound else lowest)


def parse_gate(text: str) -> Gate:
    """Return the gate that a text such as "pass_rate >= 0.9" means. Raises ValueError with a sentence."""
    if not (match := _GATE.fullmatch(text)):
        raise ValueError(
            f"{text[:80]!r} is not a gate: it takes a number, one of {', '.join(_OPERATORS)}, and a bound,"
            " in quotes on a command line, as in 'pass_rate >= 0.9'."
        )
    if not _BOUND.fullmatch(match["bound"]):
        raise ValueError(f"{match['bound'][:80]!r} in the gate {text[:80]!r} is not a number such as 0.9.")
    number = _parse_number(match["name"])
    return replace(number, text=text, operator=match["operator"], bound=float(match["bound"]), cell=match["cell"] or "")


def _parse_number(name: str) -> Gate:
    """Return a gate on the number that a name means, with no bound yet. Raises ValueError with a sentence."""
    build = partial(Gate, text="", operator="", bound=0)
    if name.startswith(("pass^", "pass@")):
        if not (pass_k := _PASS_K.fullmatch(name)):
            sign = name[4]
            raise ValueError(
                f"{name[:80]!r} takes a number of trials, at least 1, after the {sign}, as pass{sign}3 does."
            )
        return build(number=_OF_K["^@".index(name[4])], k=int(pass_k["k"]))
    if change := _CHANGE.fullmatch(name):
        number = GateNumber(f"NUMBER.change{change['bound'] or ''}")
        return build(number=number, changed=change["of"], metric=change["metric"] or "")
    if mean := _METRIC_MEAN.fullmatch(name):
        return build(number=GateNumber.METRIC_MEAN, metric=mean["metric"])
    if name in _WHOLE_NAMES:
        return build(number=GateNumber(name))
    names = [number.value for number in GateNumber]
    hint = nearest(name, names) or f"A gate can be on {', '.join(names)}."
    raise ValueError(f"There is no number {name[:80]!r} for a gate. {hint}")


def explain_unreachable(gate: Gate, planned: Sequence[evaluation_pb2.CasePlanned]) -> str:
    """Return why the planned cases cannot meet a gate, and how many trials or cases it takes; empty if they can.

    A bound on the mean of a metric that no case has is unreachable too. Whether there is a baseline is not checked.
    """
    cells = list(dict.fromkeys(one.cell for one in planned if one.cell))
    if gate.cell and gate.cell not in cells:
        has = f"there is no cell {gate.cell!r}.{suggestion(gate.cell, cells)}" if cells else "there is no matrix."
        return f"{gate.text!r} cannot be reached: {has}"
    if gate.cell and gate.needs_baseline:
        return f"{gate.text!r} cannot be reached: {_name(gate)} is over all cells, and no cell can be named."
    if cells and not gate.needs_baseline:
        planned = [one for one in planned if one.cell == (gate.cell or cells[0])]
    fewest = min(planned, key=lambda case: case.trials)
    if gate.metric and gate.metric not in (names := _scales(planned)):
        return (
            f"{gate.text!r} cannot be reached: no case has the metric {gate.metric!r}.{suggestion(gate.metric, names)}"
        )
    if gate.number in _OF_K and fewest.trials < gate.k:
        return (
            f"{gate.text!r} cannot be reached: the case {fewest.eval_case.id!r} has "
            f"{pluralize(fewest.trials, 'trial')}. It takes {gate.k} trials of each case."
        )
    lowest, highest = _range(gate, planned)
    if gate.can_hold(lowest, highest):
        return ""
    return f"{gate.text!r} cannot be reached: {_explain_out_of_range(gate, planned, highest)}"


def _range(gate: Gate, planned: Sequence[evaluation_pb2.CasePlanned]) -> tuple[float, float]:
    """Return the lowest and the highest number that some results of the planned cases have."""
    match gate.number:
        case GateNumber.CASE_PASS_RATE_LOWER:
            return 0, statistics.highest_lower(min(case.trials for case in planned))
        case GateNumber.PASS_RATE_LOWER:
            return 0, statistics.highest_lower(len(planned))
        case GateNumber.PASS_RATE | GateNumber.PASS_ALL_K | GateNumber.PASS_AT_K:
            return 0, 1
        case GateNumber.METRIC_MEAN:
            return (0, 1) if _scales(planned)[gate.metric] else (-math.inf, math.inf)
        case GateNumber.CHANGE | GateNumber.CHANGE_LOWER | GateNumber.CHANGE_UPPER:
            is_rate = gate.changed == "pass_rate" or (gate.metric and _scales(planned)[gate.metric])
            return (-1, 1) if is_rate else (-math.inf, math.inf)
        case GateNumber.REGRESSIONS:
            return 0, len(planned)
        case GateNumber.COST_TOTAL | GateNumber.REMOVED | GateNumber.DURATION_P50 | GateNumber.DURATION_P95:
            return 0, math.inf
    assert_never(gate.number)


def explain_unmissable(
    gate: Gate,
    planned: Sequence[evaluation_pb2.CasePlanned],
    baseline: eval_result_pb2.EvalResult,
    *,
    reruns: int,
    has_baseline_reruns: bool,
) -> str:
    """Return why a gate on regressions could never fail with so few trials, and how many it takes; empty if it could.

    It cannot if even this proves nothing: that every trial passed in the baseline, and none passes now.
    """
    if gate.number is not GateNumber.REGRESSIONS:
        return ""
    before = {case.case_id: case.statistics.trials for case in baseline.cases if case.statistics.trials}
    both = [one for one in planned if one.eval_case.id in before]
    live = [one for one in both if not is_recorded(one.eval_case)]
    sizes = [(one.trials, before[one.eval_case.id]) for one in both if is_recorded(one.eval_case) or not reruns]
    if reruns:
        sizes += [(reruns, reruns if has_baseline_reruns else before[one.eval_case.id]) for one in live]
    if not both or rejects(least_p_value(sizes)):
        return ""
    has = pluralize(reruns, "fresh trial") if reruns else pluralize(min(one.trials for one in both), "trial")
    if reruns and len(live) < len(both):
        has += ", of recorded cases none,"
    return (
        f"{gate.text!r} could never fail: {has} of {pluralize(len(both), 'case')} cannot prove a regression, even if "
        "all passed in the baseline and none passes now. "
        + _describe_needed_reruns([before[one.eval_case.id] for one in live], has_baseline_reruns=has_baseline_reruns)
    )


def _describe_needed_reruns(before: Sequence[int], *, has_baseline_reruns: bool) -> str:
    """Return how many fresh trials it takes; `before` are the baseline's trials of each case that can have some."""
    if not before:
        return "Recorded cases do not run again: it takes more of them."
    needed = next(
        count
        for count in itertools.count(1)
        if rejects(least_p_value([(count, count if has_baseline_reruns else min(before))]))
    )
    return f"It takes rerun_suspects of {needed}."


def _explain_out_of_range(gate: Gate, planned: Sequence[evaluation_pb2.CasePlanned], highest: float) -> str:
    """Return why a gate is out of range, and how many trials or cases it takes."""
    of_trials = gate.number is GateNumber.CASE_PASS_RATE_LOWER
    lowest, _ = _range(gate, planned)
    if not (of_trials or gate.number is GateNumber.PASS_RATE_LOWER) or gate.bound <= lowest:
        return f"{_name(gate)} is never {f'below {lowest:g}' if gate.bound <= lowest else f'above {highest:g}'}."
    fewest = min(planned, key=lambda case: case.trials)
    count = fewest.trials if of_trials else len(planned)
    has = f"the case {fewest.eval_case.id!r} has" if of_trials else "the set has"
    return (
        f"{has} {pluralize(count, 'trial' if of_trials else 'case')}, and the lower bound of {count} of {count} is"
        f" {highest:.3g}. {_describe_requirement(gate, of_trials=of_trials)}"
    )


def _describe_requirement(gate: Gate, *, of_trials: bool) -> str:
    """Return how many trials or cases the gate's bound takes; all have to pass then."""
    if statistics.reaches(gate.bound, 1):
        return "It is below 1 for any number of them."
    needed = statistics.find_least_trials(gate.bound)
    if not gate.holds(statistics.highest_lower(needed)):  # > of just the bound
        needed += 1
    most = MAX_TRIALS if of_trials else MAX_CASES
    enough = f"It takes {needed} {'trials of each case' if of_trials else 'cases'}"
    return f"{enough}." if needed <= most else f"{enough}, and there can be {most}."


def _name(gate: Gate) -> str:
    """Return the name of the number in a gate, as it is written there."""
    match gate.number:
        case GateNumber.PASS_ALL_K | GateNumber.PASS_AT_K:
            return gate.number.value.replace("K", str(gate.k))
        case GateNumber.METRIC_MEAN:
            return f"{gate.metric}.mean"
        case GateNumber.CHANGE | GateNumber.CHANGE_LOWER | GateNumber.CHANGE_UPPER:
            return gate.number.value.replace("NUMBER", gate.changed)
    return gate.number.value


def _scales(planned: Sequence[evaluation_pb2.CasePlanned]) -> dict[str, bool]:
    """Return the names of the metrics that judge some case, and whether the scores of all of that name are 0 to 1."""
    found: dict[str, bool] = {}
    for case in planned:
        for metric in applicable_metrics(case.eval_case):
            found[name_of(metric)] = found.get(name_of(metric), True) and not metric.HasField("custom")
    return found


def check_gate(
    gate: Gate,
    cases: Sequence[eval_result_pb2.CaseResult],
    totals: eval_result_pb2.EvalTotals,
    comparison: eval_result_pb2.EvalComparison | None,
    *,
    allow_removed: bool,
) -> eval_result_pb2.GateResult:
    """Return whether the results meet a gate; `cases` have their trials with scores, `comparison` is with the baseline.

    The result is FAILED if the known results miss the bound; otherwise NOT_EVALUATED if a value that the number needs
    is unknown, such as the pass rate of a case that could not be scored. A crashed trial counts as known: it did not
    pass, and improves no mean of a metric. `removed` fails whenever a case is missing, unless that is allowed: then its
    bound decides.
    """
    measured = _measure(gate, cases, totals, comparison)
    result = eval_result_pb2.GateResult(
        gate=gate.text,
        number=_name(gate),
        operator=_WIRE_OPERATORS[gate.operator],
        bound=gate.bound,
        value=measured.value,
        verdict=PASSED,
    )
    if measured.value is None:
        result.verdict, result.reason = NOT_EVALUATED, measured.unknown
    elif gate.number is GateNumber.REMOVED and measured.value and not allow_removed:
        result.verdict = FAILED
        result.reason = f"Cases of the baseline may not be removed unless that is allowed. {measured.note}"
    elif measured.unbounded and not gate.is_lower_bound:
        result.verdict = FAILED
        result.reason = f"{_name(gate)} has no upper bound: {measured.unbounded}"
    elif not gate.holds(measured.value):
        result.verdict = FAILED
        value = _format_value(gate, measured.value)
        result.reason = f"{_name(gate)} is {value}, not {gate.operator} {gate.bound:.12g}. {measured.note}"
    elif measured.unknown:
        result.verdict, result.reason = NOT_EVALUATED, measured.unknown
    result.reason = result.reason.rstrip()
    return result


def _format_value(gate: Gate, value: float) -> str:
    """Return a value in a few digits, or in all of them if few would be within the bound."""
    text = f"{value:.6g}"
    return repr(value) if gate.holds(float(text)) else text


def _measure(
    gate: Gate,
    cases: Sequence[eval_result_pb2.CaseResult],
    totals: eval_result_pb2.EvalTotals,
    comparison: eval_result_pb2.EvalComparison | None,
) -> Measured:
    match gate.number:
        case GateNumber.CASE_PASS_RATE_LOWER:
            return gate_numbers.worst_case(cases)
        case GateNumber.PASS_RATE:
            value = totals.pass_rate if totals.HasField("pass_rate") else None
            return Measured(value=value, unknown=gate_numbers.describe_missing_scores(cases))
        case GateNumber.PASS_RATE_LOWER:
            value = totals.pass_rate_interval.lower if totals.HasField("pass_rate_interval") else None
            return Measured(value=value, unknown=gate_numbers.describe_missing_scores(cases))
        case GateNumber.PASS_ALL_K:
            return gate_numbers.pass_k(cases, gate.k, lambda case: case.statistics.pass_all_k)
        case GateNumber.PASS_AT_K:
            return gate_numbers.pass_k(cases, gate.k, lambda case: case.statistics.pass_at_k)
        case GateNumber.DURATION_P50:
            return gate_numbers.duration(cases, 0.5)
        case GateNumber.DURATION_P95:
            return gate_numbers.duration(cases, 0.95)
        case GateNumber.METRIC_MEAN:
            return gate_numbers.metric_mean(cases, gate.metric)
        case GateNumber.COST_TOTAL:
            return gate_numbers.cost(cases, totals)
        case GateNumber.CHANGE:
            return gate_numbers.change(cases, comparison, gate.changed, lambda change: change.value)
        case GateNumber.CHANGE_LOWER:
            return gate_numbers.change(cases, comparison, gate.changed, lambda change: change.interval.lower)
        case GateNumber.CHANGE_UPPER:
            return gate_numbers.change(cases, comparison, gate.changed, lambda change: change.interval.upper)
        case GateNumber.REGRESSIONS:
            return gate_numbers.regressions(comparison)
        case GateNumber.REMOVED:
            return gate_numbers.count_removed_cases(comparison)
    assert_never(gate.number)
