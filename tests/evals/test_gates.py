"""Gates: how they are written, what they are refused for before anything runs, and what they find."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, usage_pb2
from bough_server.evals.metrics import statistics
from bough_server.evals.results import gates, verdicts
from bough_server.evals.results.compare import compare
from bough_server.evals.results.gates import Gate, GateNumber, explain_unreachable, parse_gate
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED
from tests.support.eval_results import (
    RECORDED,
    TRIALS,
    case_of,
    crashed,
    passing,
    planned_case,
    result_of,
    scored,
    totals_of,
    unscored,
)
from tests.support.examples import examples

Case = eval_result_pb2.CaseResult
GateResult = eval_result_pb2.GateResult
Metric = eval_set_pb2.EvalMetric
Usage = usage_pb2.Usage

CUSTOM = Metric(name="quality", custom=eval_set_pb2.CustomMetric(name="quality"))
ANSWER = Metric(name="answer", final_response=eval_set_pb2.FinalResponseMetric())


def checked(
    text: str,
    cases: list[Case],
    *,
    usage: usage_pb2.Usage | None = None,
    comparison: eval_result_pb2.EvalComparison | None = None,
    allow_removed: bool = False,
) -> GateResult:
    totals = totals_of(cases, usage=usage)
    return gates.check_gate(parse_gate(text), cases, totals, comparison, allow_removed=allow_removed)


# How gates are written.


ANSWER_CHANGE = {"operator": ">=", "bound": 0.0, "changed": "answer.mean", "metric": "answer"}


@pytest.mark.parametrize(
    ("text", "number", "rest"),
    [
        ("case.pass_rate.lower >= 0.8", GateNumber.CASE_PASS_RATE_LOWER, {"operator": ">=", "bound": 0.8}),
        ("pass_rate>.5", GateNumber.PASS_RATE, {"operator": ">", "bound": 0.5}),
        (" pass_rate.lower  ==1 ", GateNumber.PASS_RATE_LOWER, {"operator": "==", "bound": 1.0}),
        ("pass^3 >= 5e-1", GateNumber.PASS_ALL_K, {"operator": ">=", "bound": 0.5, "k": 3}),
        ("pass@2>=.9", GateNumber.PASS_AT_K, {"operator": ">=", "bound": 0.9, "k": 2}),
        ("duration.p50 < 1.5", GateNumber.DURATION_P50, {"operator": "<", "bound": 1.5}),
        ("duration.p95 <= 30", GateNumber.DURATION_P95, {"operator": "<=", "bound": 30.0}),
        ("my.metric-1.mean < 2", GateNumber.METRIC_MEAN, {"operator": "<", "bound": 2.0, "metric": "my.metric-1"}),
        ("cost.total <= 2.50", GateNumber.COST_TOTAL, {"operator": "<=", "bound": 2.5}),
        ("regressions == 0", GateNumber.REGRESSIONS, {"operator": "==", "bound": 0.0}),
        ("cost.change.upper <= 0", GateNumber.CHANGE_UPPER, {"operator": "<=", "bound": 0.0, "changed": "cost"}),
        ("answer.mean.change >= 0", GateNumber.CHANGE, ANSWER_CHANGE),
        ("removed <= +1", GateNumber.REMOVED, {"operator": "<=", "bound": 1.0}),
    ],
)
def test_a_gate_is_a_number_an_operator_and_a_bound(text: str, number: GateNumber, rest: dict[str, object]) -> None:
    assert parse_gate(text) == Gate(text=text, number=number, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("passrate >= 0.9", "There is no number 'passrate' for a gate. Did you mean 'pass_rate'?"),
        ("pass3 >= 0.9", "Did you mean 'pass"),
        ("pass@0 >= 0.9", "'pass@0' takes a number of trials, at least 1, after the @, as pass@3 does."),
        ("duration.p99 >= 0.9", "Did you mean 'duration.p95'?"),
        ("regression == 0", "Did you mean 'regressions'?"),
        ("xyz >= 0.9", "A gate can be on case.pass_rate.lower, pass_rate, pass_rate.lower, pass^K, pass@K, METRIC"),
        ("pass_rate", "'pass_rate' is not a gate: it takes a number, one of >=, <=, ==, >, <, and a bound, in quotes"),
        ("pass_rate = 1", "is not a gate"),
        ("pass_rate => 1", "is not a gate"),
        ("pass_rate >= 0.9 0.8", "is not a gate"),
        ("", "is not a gate"),
        ("pass_rate >= 90%", "'90%' in the gate 'pass_rate >= 90%' is not a number such as 0.9."),
        ("pass_rate >= nan", "is not a number"),
        ("pass_rate >= 1e999", "is not a number"),
        ("pass^0 >= 0.9", "'pass^0' takes a number of trials, at least 1, after the ^, as pass^3 does."),
        ("pass^K >= 0.9", "'pass^K' takes a number of trials"),
    ],
)
def test_what_is_not_a_gate_is_refused_with_what_to_write(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as refused:
        parse_gate(text)
    assert problem in str(refused.value)


def test_pass_rates_and_means_count_crashed_trials_and_the_other_numbers_do_not() -> None:
    texts = [
        *("case.pass_rate.lower > 0", "pass_rate > 0", "pass_rate.lower > 0", "pass^2 > 0", "answer.mean > 0"),
        *("pass@2 > 0", "duration.p50 > 0", "duration.p95 < 9"),
        *("cost.total < 1", "regressions == 0", "removed == 0"),
    ]
    assert [parse_gate(text).counts_crashes for text in texts] == [True] * 8 + [False] * 3


def test_the_numbers_of_a_comparison_need_a_baseline() -> None:
    needing = {number for number in GateNumber if Gate(text="", number=number, operator="==", bound=0).needs_baseline}
    changes = {GateNumber.CHANGE, GateNumber.CHANGE_LOWER, GateNumber.CHANGE_UPPER}
    assert needing == {GateNumber.REGRESSIONS, GateNumber.REMOVED, *changes}


# What is refused before anything runs.


def test_a_bound_that_so_few_trials_cannot_reach_is_refused_with_the_number_that_it_takes() -> None:
    planned = [planned_case("a", 20), planned_case("b", 5)]
    assert explain_unreachable(parse_gate("case.pass_rate.lower >= 0.8"), planned) == (
        "'case.pass_rate.lower >= 0.8' cannot be reached: the case 'b' has 5 trials, and the lower bound of 5 of 5 is"
        " 0.566. It takes 16 trials of each case."
    )
    assert explain_unreachable(parse_gate("case.pass_rate.lower >= 0.8"), [planned_case("a", 16)]) == ""
    assert explain_unreachable(parse_gate("case.pass_rate.lower >= 0.566"), planned).endswith(
        "It takes 6 trials of each case."
    )
    assert explain_unreachable(parse_gate("case.pass_rate.lower >= 0.565"), planned) == ""


def test_a_bound_that_so_few_cases_cannot_reach_is_refused_however_often_they_run() -> None:
    planned = [planned_case("a", 500)]
    assert explain_unreachable(parse_gate("pass_rate.lower > 0.9"), planned) == (
        "'pass_rate.lower > 0.9' cannot be reached: the set has 1 case, and the lower bound of 1 of 1 is 0.207."
        " It takes 35 cases."
    )


def test_a_lower_bound_never_reaches_one() -> None:
    for text in ("case.pass_rate.lower >= 1", "case.pass_rate.lower > 0.9999999999999999"):
        assert "It is below 1 for any number" in explain_unreachable(parse_gate(text), [planned_case("a", 1000)])


def test_a_bound_that_takes_more_trials_than_a_case_can_have_says_so() -> None:
    assert explain_unreachable(parse_gate("case.pass_rate.lower >= 0.999"), [planned_case("a", 1000)]).endswith(
        "It takes 3838 trials of each case, and there can be 1000."
    )


def test_that_k_trials_pass_takes_k_trials_of_each_case() -> None:
    planned = [planned_case("a", 8), planned_case("b", 1)]
    assert explain_unreachable(parse_gate("pass^8 >= 0.5"), planned) == (
        "'pass^8 >= 0.5' cannot be reached: the case 'b' has 1 trial. It takes 8 trials of each case."
    )
    assert explain_unreachable(parse_gate("pass^1 >= 1"), planned) == ""
    assert "It takes 2 trials of each case." in explain_unreachable(parse_gate("pass@2 >= 0.5"), planned)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pass_rate > 1", "pass_rate is never above 1."),
        ("pass_rate == 1.5", "pass_rate is never above 1."),
        ("pass_rate < 0", "pass_rate is never below 0."),
        ("pass^1 >= 2", "pass^1 is never above 1."),
        ("answer.mean >= 1.1", "answer.mean is never above 1."),
        ("cost.total < 0", "cost.total is never below 0."),
        ("duration.p50 < 0", "duration.p50 is never below 0."),
        ("regressions <= -1", "regressions is never below 0."),
        ("regressions > 1", "regressions is never above 1."),
        ("pass_rate.lower < 0", "pass_rate.lower is never below 0."),
        ("case.pass_rate.lower == -0.5", "case.pass_rate.lower is never below 0."),
    ],
)
def test_a_bound_outside_of_what_a_number_can_be_is_refused(text: str, problem: str) -> None:
    assert explain_unreachable(parse_gate(text), [planned_case("a", 3, metrics=[ANSWER])]) == (
        f"{text!r} cannot be reached: {problem}"
    )


@pytest.mark.parametrize("text", ["cost.total <= 2", "cost.total >= 1000", "regressions == 0", "removed == 7"])
def test_numbers_that_trials_do_not_bound_are_not_refused(text: str) -> None:
    assert explain_unreachable(parse_gate(text), [planned_case("a")]) == ""


def test_the_mean_of_a_metric_that_no_case_has_is_refused_with_a_suggestion() -> None:
    planned = [planned_case("a", metrics=[ANSWER]), planned_case("b", metrics=[CUSTOM])]
    assert explain_unreachable(parse_gate("anwser.mean >= 0.9"), planned) == (
        "'anwser.mean >= 0.9' cannot be reached: no case has the metric 'anwser'. Did you mean 'answer'?"
    )
    assert "There is answer, quality." in explain_unreachable(parse_gate("budget.mean >= 0.9"), planned)


def test_what_a_custom_metric_can_reach_is_not_known() -> None:
    assert explain_unreachable(parse_gate("quality.mean >= 10"), [planned_case("b", metrics=[CUSTOM])]) == ""


def test_metrics_without_a_name_and_those_of_expectations_have_the_names_of_their_kinds() -> None:
    expect = eval_set_pb2.EvalExpectation(
        answer=eval_set_pb2.ExpectedAnswer(exact="4"), agents=[eval_set_pb2.ExpectedAgent(name="desk")]
    )
    case = planned_case(
        "a", turns=[eval_set_pb2.EvalTurn(expect=expect)], metrics=[ANSWER, Metric(budget=eval_set_pb2.BudgetMetric())]
    )
    known = ["answer.mean >= 1", "budget.mean >= 1", "agent_trajectory.mean >= 1"]
    assert [explain_unreachable(parse_gate(text), [case]) for text in known] == ["", "", ""]
    # The expected answer is scored by the metric of its kind that the case has, and no tools are expected.
    for text in ("final_response.mean >= 1", "tool_trajectory.mean >= 1"):
        assert "no case has the metric" in explain_unreachable(parse_gate(text), [case])


# What gates find.


@pytest.mark.parametrize(
    ("sign", "operator", "verdict"),
    [
        (">=", eval_result_pb2.GATE_OPERATOR_AT_LEAST, PASSED),
        (">", eval_result_pb2.GATE_OPERATOR_ABOVE, FAILED),
        ("<=", eval_result_pb2.GATE_OPERATOR_AT_MOST, PASSED),
        ("<", eval_result_pb2.GATE_OPERATOR_BELOW, FAILED),
        ("==", eval_result_pb2.GATE_OPERATOR_EQUAL, PASSED),
    ],
)
@pytest.mark.parametrize("number", ["pass_rate", "pass^1", "answer.mean"])
def test_what_a_gate_finds_is_there_as_data_beside_its_text(
    number: str, sign: str, operator: eval_result_pb2.GateOperator.ValueType, verdict: int
) -> None:
    assert checked(f" {number}{sign} 75e-2", [passing("a", 1, 2), passing("b")]) == GateResult(
        gate=f" {number}{sign} 75e-2",
        number=number,
        operator=operator,
        bound=0.75,
        value=0.75,
        verdict=verdict,  # type: ignore[arg-type]
        reason="" if verdict == PASSED else f"{number} is 0.75, not {sign} 0.75.",
    )


@pytest.mark.parametrize("number", ["case.pass_rate.lower", "pass_rate.lower", "cost.total", "regressions", "removed"])
def test_a_gate_on_a_number_that_is_not_known_has_its_bound_but_no_value(number: str) -> None:
    found = checked(f"{number} == 0", [case_of("a", unscored())], usage=Usage(model_calls=1))
    assert (found.number, found.operator, found.bound, found.HasField("value"), found.verdict) == (
        *(number, eval_result_pb2.GATE_OPERATOR_EQUAL, 0.0),
        *(False, NOT_EVALUATED),
    )


def test_the_worst_case_decides_about_the_lower_bound_of_each_case() -> None:
    cases = [passing("a", 5, 5), passing("b", 4, 5), passing("c", 5, 5)]
    failed, passed = checked("case.pass_rate.lower >= 0.5", cases), checked("case.pass_rate.lower > 0.3", cases)
    assert (failed.verdict, failed.value) == (FAILED, statistics.wilson(4, 5).lower)
    assert failed.reason == "case.pass_rate.lower is 0.375535, not >= 0.5. In the case 'b' 4 of 5 trials passed."
    assert (passed.verdict, passed.value, passed.reason) == (PASSED, failed.value, "")


def test_the_pass_rate_is_the_mean_over_cases_whatever_the_number_of_their_trials() -> None:
    cases = [passing("a", 9, 9), passing("b", 0, 1)]
    assert checked("pass_rate == 0.5", cases).verdict == PASSED
    assert checked("pass_rate > 0.5", cases).reason == "pass_rate is 0.5, not > 0.5."
    assert checked("pass_rate < 0.5", cases).verdict == FAILED
    assert checked("pass_rate <= 0.5", cases).verdict == PASSED


def test_the_lower_bound_of_the_pass_rate_is_that_of_the_totals() -> None:
    cases = [passing("a", 5, 5), passing("b", 3, 5), passing("c", 4, 5)]
    lower = totals_of(cases).pass_rate_interval.lower
    assert checked("pass_rate.lower >= 0.2", cases).value == lower
    assert checked("pass_rate.lower >= 0.5", [passing("a", 5, 5)]).value == statistics.wilson(1, 1).lower


def test_that_k_trials_pass_is_the_mean_over_cases() -> None:
    cases = [passing("a", 5, 10), passing("b", 10, 10)]
    assert checked("pass^2 >= 0.6", cases).value == pytest.approx((2 / 9 + 1) / 2)
    assert checked("pass^2 >= 0.7", cases).reason == "pass^2 is 0.611111, not >= 0.7."


def test_that_one_of_k_trials_passes_is_the_mean_over_cases() -> None:
    cases = [passing("a", 5, 10), passing("b", 10, 10)]
    assert checked("pass@2 >= 0.8", cases).value == pytest.approx((7 / 9 + 1) / 2)
    assert checked("pass@2 >= 0.9", cases).reason == "pass@2 is 0.888889, not >= 0.9."


def lasting(seconds: float, trial: eval_result_pb2.CaseTrialResult | None = None) -> eval_result_pb2.CaseTrialResult:
    """A trial that took so long."""
    trial = trial or scored(answer=1)
    trial.duration.FromNanoseconds(round(seconds * 1e9))
    return trial


def test_times_are_those_of_all_trials_by_the_nearest_rank() -> None:
    cases = [case_of("a", *(lasting(number) for number in range(1, 11))), case_of("b", *map(lasting, range(11, 21)))]
    assert (checked("duration.p50 <= 10", cases).value, checked("duration.p95 <= 19", cases).value) == (10, 19)
    found = checked("duration.p95 <= 18.5", cases)
    assert (found.verdict, found.reason) == (FAILED, "duration.p95 is 19, not <= 18.5. Of 20 trials.")
    assert checked("duration.p95 < 1", [case_of("a", lasting(0.5))]).value == 0.5


def test_a_time_that_is_not_known_or_that_a_crash_cut_short_meets_no_bound() -> None:
    unknown = checked("duration.p50 <= 9", [case_of("a", lasting(1), scored(answer=1))])
    assert (unknown.verdict, unknown.reason) == (NOT_EVALUATED, "1 trial without a time.")
    assert checked("duration.p50 <= 9", [case_of("a", scored(answer=1))]).verdict == NOT_EVALUATED
    short = checked("duration.p50 <= 9", [case_of("a", lasting(1), lasting(0.1, crashed()))])
    assert (short.verdict, short.reason) == (FAILED, "duration.p50 has no upper bound: 1 trial crashed.")


def test_a_crashed_trial_counts_as_failed_in_pass_rates_and_as_zero_in_means() -> None:
    cases = [case_of("a", crashed(), scored(answer=1)), passing("b", 2, 2)]
    assert checked("pass_rate >= 0.75", cases).verdict == PASSED
    assert checked("answer.mean >= 0.75", cases).verdict == PASSED
    found = checked("answer.mean >= 0.8", cases)
    assert (found.verdict, found.value) == (FAILED, 0.75)
    assert found.reason == "answer.mean is 0.75, not >= 0.8. 1 crashed trial counted as 0."


def test_the_totals_count_crashed_trials_in_means_as_gates_do() -> None:
    cases = [case_of("a", crashed(), scored(answer=1)), passing("b", 2, 2), case_of("c", crashed())]
    assert totals_of(cases).metric_means == {"answer": 0.5}
    assert checked("answer.mean >= 0.5", cases).value == 0.5


def test_a_case_whose_trials_all_crashed_counts_in_every_mean() -> None:
    cases = [case_of("a", crashed(), crashed()), passing("b", 2, 2)]
    assert checked("answer.mean >= 0.9", cases).value == 0.5


@pytest.mark.parametrize("text", ["toxicity.mean <= 0.3", "toxicity.mean < 1", "toxicity.mean == 0"])
def test_a_crashed_trial_keeps_an_upper_bound_of_a_mean_from_holding(text: str) -> None:
    for cases in ([case_of("a", crashed())], [case_of("a", crashed(), scored(toxicity=0)), case_of("b")]):
        found = checked(text, cases)
        assert found.verdict == FAILED
        assert found.reason == f"{text.split()[0]} has no upper bound: 1 crashed trial has no score."


def test_a_crashed_trial_is_never_better_than_the_others() -> None:
    cases = [case_of("a", crashed(), scored(likelihood=-8))]
    assert checked("likelihood.mean >= -5", cases).verdict == FAILED
    assert checked("likelihood.mean >= -8", cases).verdict == PASSED


def test_a_case_without_a_metric_does_not_count_in_its_mean() -> None:
    cases = [
        case_of("a", scored()),
        case_of("b", scored(tools=0)),
        passing("c"),
        case_of("d", scored(tools=0), crashed()),
    ]
    assert checked("answer.mean >= 1", cases).verdict == PASSED
    missing = checked("judge.mean >= 1", [case_of("a", scored())])
    assert (missing.verdict, missing.reason) == (NOT_EVALUATED, "No trial has a score of judge.")


def test_a_case_that_another_metric_could_not_score_does_not_count_in_a_mean_either() -> None:
    cases = [passing("a"), case_of("b", scored(judge=None))]
    assert checked("answer.mean >= 1", cases).verdict == PASSED
    assert checked("judge.mean >= 1", cases).verdict == NOT_EVALUATED


def test_the_mean_of_a_metric_may_make_up_for_a_failed_trial() -> None:
    assert checked("quality.mean >= 1", [case_of("a", scored(quality=0.5), scored(quality=1.5))]).verdict == PASSED


@pytest.mark.parametrize(
    "text",
    ["pass_rate >= 0.5", "case.pass_rate.lower >= 0.2", "pass_rate.lower >= 0.2", "pass^2 >= 1", "answer.mean >= 1"],
)
def test_what_could_not_be_scored_keeps_a_gate_from_passing_but_not_from_failing(text: str) -> None:
    cases = [passing("a", 2, 2), case_of("b", scored(answer=1), scored(answer=1), unscored())]
    found = checked(text, cases)
    assert (found.verdict, found.HasField("value")) == (NOT_EVALUATED, True)
    assert "be scored" in found.reason
    assert checked(text, [*cases, passing("c", 0, 3), passing("d", 0, 3), passing("e", 0, 3)]).verdict == FAILED


@pytest.mark.parametrize("text", ["pass_rate >= 0", "case.pass_rate.lower >= 0", "pass_rate.lower >= 0", "pass^1 >= 0"])
def test_a_number_of_nothing_is_absent(text: str) -> None:
    found = checked(text, [case_of("a", unscored())])
    assert (found.verdict, found.HasField("value")) == (NOT_EVALUATED, False)
    assert "'a'" in found.reason


def test_a_trial_that_failed_by_one_metric_says_nothing_about_another() -> None:
    cases = [case_of("a", scored(answer=0, judge=None)), case_of("b", scored(answer=1, judge=1))]
    found = checked("judge.mean >= 1", cases)
    assert (found.verdict, found.value) == (NOT_EVALUATED, 1)
    assert found.reason == "1 case could not be scored by judge in every trial."


def test_the_cost_is_in_units_of_the_currency() -> None:
    usage = Usage(model_calls=3, cost_nanos=2_000_000_000, currency_code="EUR")
    assert checked("cost.total <= 2", [passing("a")], usage=usage).verdict == PASSED
    usage.cost_nanos += 1_000
    found = checked("cost.total <= 2", [passing("a")], usage=usage)
    assert (found.verdict, found.value) == (FAILED, 2.000001)
    assert found.reason == "cost.total is 2.000001, not <= 2. In EUR."


def test_a_cost_that_is_not_known_never_passes() -> None:
    assert checked("cost.total <= 2", [passing("a")], usage=Usage(model_calls=1)).verdict == NOT_EVALUATED
    assert checked("cost.total <= 2", [passing("a")], usage=Usage()).value == 0
    totals = totals_of([passing("a")], usage=Usage(model_calls=1, cost_nanos=1, currency_code="USD"))
    totals.judge_usage.model_calls = 1
    gate = parse_gate("cost.total <= 2")
    assert gates.check_gate(gate, [passing("a")], totals, None, allow_removed=False).verdict == NOT_EVALUATED
    totals.usage.cost_nanos = 3_000_000_000
    assert gates.check_gate(gate, [passing("a")], totals, None, allow_removed=False).verdict == FAILED


@pytest.mark.parametrize(
    "usages",
    [
        [Usage(model_calls=2, model_calls_without_usage=1, cost_nanos=1, currency_code="USD")],
        [Usage(model_calls=2, model_calls_without_cost=1, cost_nanos=1, currency_code="USD")],
        [Usage(model_calls=1, cost_nanos=1, currency_code="USD"), Usage(model_calls=1)],
    ],
)
def test_a_cost_that_is_known_in_part_passes_no_gate(usages: list[usage_pb2.Usage]) -> None:
    case = passing("a", len(usages), len(usages))
    for run, used in zip(case.trials, usages, strict=True):
        run.usage.CopyFrom(used)
    gate, totals = parse_gate("cost.total <= 2"), totals_of([case])
    found = gates.check_gate(gate, [case], totals, None, allow_removed=False)
    assert (found.verdict, found.value) == (NOT_EVALUATED, 1e-9)
    assert "is not known" in found.reason
    case.trials[0].usage.cost_nanos = 3_000_000_000
    assert gates.check_gate(gate, [case], totals_of([case]), None, allow_removed=False).verdict == FAILED


def test_regressions_are_the_cases_that_are_worse_than_in_the_baseline() -> None:
    before = [passing("a", 7, 7), passing("b"), passing("c", 7, 7), passing("d", 0)]
    after = [passing("a", 0, 7), passing("b"), case_of("c", *(crashed() for _ in range(7))), passing("d")]
    found = checked("regressions == 0", after, comparison=compare(result_of(*before), result_of(*after)))
    assert (found.verdict, found.value) == (FAILED, 2)
    assert found.reason == (
        "regressions is 2, not == 0. 2 of 16 trials of 4 cases passed, 15 of 16 in the baseline (p = 4.2e-06). "
        "Worse: 'a', 'c'."
    )


def test_a_drop_that_no_case_proves_by_itself_is_one_regression() -> None:
    before, after = ([passing(name, passed, 5) for name in "abcdef"] for passed in (5, 4))
    found = checked("regressions == 0", after, comparison=compare(result_of(*before), result_of(*after)))
    assert (found.verdict, found.value) == (FAILED, 1)
    assert found.reason.endswith("(p = 0.016). No case is worse by its own trials alone.")


def test_regressions_are_not_known_while_fresh_trials_could_not_be_scored() -> None:
    after = result_of(passing("a", 4, 5))
    after.suspects.case_ids.append("a")
    after.suspects.trials = 3
    found = checked("regressions == 0", after.cases, comparison=compare(result_of(passing("a", 5, 5)), after))
    assert (found.verdict, found.value) == (NOT_EVALUATED, 0)
    assert found.reason == "3 fresh trials could not be scored, such as of the case 'a'."


@pytest.mark.parametrize(
    ("trials", "before", "reruns", "has_baseline_reruns", "needed"),
    [
        (1, 1, 0, False, 19),
        (1, 5, 0, False, 2),
        (1, 1, 2, True, 3),
        (1, 1, 3, True, 0),
        (5, 5, 0, False, 0),
        (1, 1, 19, False, 0),
    ],
)
def test_a_gate_on_regressions_that_could_never_fail_is_refused_with_what_it_takes(
    trials: int, before: int, reruns: int, has_baseline_reruns: bool, needed: int
) -> None:
    found = gates.explain_unmissable(
        parse_gate("regressions == 0"),
        [planned_case("a", trials)],
        result_of(passing("a", before, before)),
        reruns=reruns,
        has_baseline_reruns=has_baseline_reruns,
    )
    has = f"{reruns} fresh trials" if reruns else "1 trial"
    assert found == (
        f"'regressions == 0' could never fail: {has} of 1 case cannot prove a regression, even if all passed in the "
        f"baseline and none passes now. It takes rerun_suspects of {needed}."
        if needed
        else ""
    )


def test_recorded_cases_have_no_fresh_trials_that_a_gate_on_regressions_could_count_on() -> None:
    recorded = [planned_case(name, turns=[RECORDED]) for name in "ab"]

    def explain(*live: str, reruns: int) -> str:
        return gates.explain_unmissable(
            parse_gate("regressions == 0"),
            [*recorded, *map(planned_case, live)],
            result_of(*map(passing, "abc")),
            reruns=reruns,
            has_baseline_reruns=True,
        )

    assert explain(reruns=0) == (
        "'regressions == 0' could never fail: 1 trial of 2 cases cannot prove a regression, even if all passed in the "
        "baseline and none passes now. Recorded cases do not run again: it takes more of them."
    )
    assert explain("c", reruns=1) == (
        "'regressions == 0' could never fail: 1 fresh trial, of recorded cases none, of 3 cases cannot prove a "
        "regression, even if all passed in the baseline and none passes now. It takes rerun_suspects of 3."
    )
    assert not explain("c", reruns=3)


def test_changes_from_the_baseline_are_numbers_of_gates() -> None:
    before = [passing(name, 4, 4) for name in "abcd"]
    after = [passing("a", 2, 4), *before[1:]]
    comparison = compare(result_of(*before), result_of(*after))
    for text, verdict, value in [
        ("pass_rate.change >= -0.2", PASSED, -0.125),
        ("pass_rate.change.lower >= -0.2", FAILED, -0.375),
        ("answer.mean.change.upper <= 0", PASSED, 0),
        ("tokens.change <= 0", PASSED, 0),
    ]:
        found = checked(text, after, comparison=comparison)
        assert (found.verdict, found.value, found.number) == (verdict, value, text.split()[0]), text
    assert checked("pass_rate.change >= 0", after, comparison=comparison).reason == (
        "pass_rate.change is -0.125, not >= 0. Over 4 cases."
    )


def test_a_crash_makes_no_change_of_what_is_used_small() -> None:
    before, after = [passing("a"), passing("b")], [passing("a"), case_of("b", crashed())]
    found = checked("tokens.change <= 0", after, comparison=compare(result_of(*before), result_of(*after)))
    assert (found.verdict, found.reason) == (FAILED, "tokens.change has no upper bound: 1 trial crashed.")
    mean = checked("answer.mean.change >= -1", after, comparison=compare(result_of(*before), result_of(*after)))
    assert (mean.verdict, mean.reason) == (NOT_EVALUATED, "1 case without answer.mean here or there.")


def test_a_case_that_could_not_be_scored_is_not_known_to_be_a_regression() -> None:
    after = [case_of("a", unscored())]
    found = checked("regressions == 0", after, comparison=compare(result_of(passing("a")), result_of(*after)))
    assert (found.verdict, found.value) == (NOT_EVALUATED, 0)
    assert found.reason == "Could not be scored, and passed in the baseline: 'a'."


def test_a_case_that_could_not_be_scored_in_the_baseline_may_be_a_regression() -> None:
    before = result_of(case_of("a", unscored()), case_of("b", unscored()))
    failing = [passing("a", 0), passing("b")]
    found = checked("regressions == 0", failing, comparison=compare(before, result_of(*failing)))
    assert (found.verdict, found.value) == (NOT_EVALUATED, 0)
    assert found.reason == "Fails, and could not be scored in the baseline: 'a'."
    sound = [passing("a"), passing("b")]
    assert checked("regressions == 0", sound, comparison=compare(before, result_of(*sound))).verdict == PASSED


def test_without_a_baseline_the_numbers_of_a_comparison_are_not_known() -> None:
    for text in ("regressions == 0", "removed == 0"):
        found = checked(text, [passing("a")])
        assert (found.verdict, found.HasField("value")) == (NOT_EVALUATED, False)
        assert found.reason == "The gate needs a baseline, and there is none."


def test_dropping_six_of_seven_cases_fails_against_the_baseline() -> None:
    baseline = result_of(*(passing(case_id, 1 if case_id == "a" else 0) for case_id in "abcdefg"))
    now = [passing("a")]
    comparison = compare(baseline, result_of(*now))
    assert verdicts.verdict(now, [], removed=[], counts_crashes=True) == PASSED
    removed = [case.case_id for case in comparison.cases if case.change == eval_result_pb2.CASE_CHANGE_REMOVED]
    assert verdicts.verdict(now, [], removed=removed, counts_crashes=True) == FAILED
    assert checked("removed == 0", now, comparison=comparison).verdict == FAILED
    # The bound says how many may be removed, if any may.
    refused = checked("removed <= 6", now, comparison=comparison)
    assert (refused.verdict, refused.value) == (FAILED, 6)
    assert refused.reason == (
        "Cases of the baseline may not be removed unless that is allowed. Removed: 'b', 'c', 'd', 'e', 'f' and others."
    )
    assert checked("removed <= 6", now, comparison=comparison, allow_removed=True).verdict == PASSED
    assert checked("removed <= 5", now, comparison=comparison, allow_removed=True).verdict == FAILED


# Laws.

NUMBERS = st.sampled_from(
    [
        "case.pass_rate.lower",
        "pass_rate",
        "pass_rate.lower",
        "pass^1",
        "pass^2",
        "pass^3",
        "pass@1",
        "pass@3",
        "answer.mean",
    ]
)
BOUNDS = st.sampled_from([-0.1, 0.0, 0.2, 0.34, 0.5, 0.56, 0.57, 0.72, 0.9, 1.0, 1.1]) | st.integers(1, 6).map(
    lambda n: statistics.wilson(n, n).lower
)
PLANS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def planned_of(plan: list[int]) -> list[evaluation_pb2.CasePlanned]:
    return [planned_case(f"case {number}", trials, metrics=[ANSWER]) for number, trials in enumerate(plan)]


@given(NUMBERS, st.sampled_from([">=", ">"]), BOUNDS, PLANS)
@examples(50)
def test_a_gate_that_is_not_refused_is_met_if_everything_passes_and_one_that_is_refused_is_not(
    number: str, operator: str, bound: float, plan: list[int]
) -> None:
    gate = parse_gate(f"{number} {operator} {bound!r}")
    cases = [passing(f"case {number}", trials, trials) for number, trials in enumerate(plan)]
    found = gates.check_gate(gate, cases, totals_of(cases), None, allow_removed=False)
    assert (found.verdict == PASSED) == (explain_unreachable(gate, planned_of(plan)) == "")


@given(NUMBERS, st.sampled_from([">=", ">", "<=", "<", "=="]), BOUNDS, PLANS, st.data())
@examples(50)
def test_no_results_meet_a_gate_that_is_refused(
    number: str, operator: str, bound: float, plan: list[int], data: st.DataObject
) -> None:
    gate = parse_gate(f"{number} {operator} {bound!r}")
    cases = [
        case_of(f"case {number}", *data.draw(st.lists(TRIALS, min_size=trials, max_size=trials)))
        for number, trials in enumerate(plan)
    ]
    if explain_unreachable(gate, planned_of(plan)):
        assert gates.check_gate(gate, cases, totals_of(cases), None, allow_removed=False).verdict != PASSED


@given(PLANS, st.data())
@examples(40)
def test_a_gate_on_a_mean_has_the_mean_of_the_totals(plan: list[int], data: st.DataObject) -> None:
    cases = [
        case_of(f"case {number}", *data.draw(st.lists(TRIALS, min_size=trials, max_size=trials)))
        for number, trials in enumerate(plan)
    ]
    means = totals_of(cases).metric_means
    for name in means:
        assert checked(f"{name}.mean >= 0", cases).value == means[name]


@given(st.sampled_from(["case.pass_rate.lower", "pass_rate.lower"]), BOUNDS, st.sampled_from([">=", ">"]))
def test_the_number_that_a_refused_gate_takes_is_enough_and_one_less_is_not(
    number: str, bound: float, operator: str
) -> None:
    gate = parse_gate(f"{number} {operator} {bound!r}")

    def planned(count: int) -> list[evaluation_pb2.CasePlanned]:
        return planned_of([count]) if number.startswith("case") else planned_of([1] * count)

    problem = explain_unreachable(gate, planned(1))
    if "It takes" in problem:
        needed = int(problem.partition("It takes ")[2].split()[0])
        assert explain_unreachable(gate, planned(needed)) == ""
        assert explain_unreachable(gate, planned(needed - 1)) != ""
