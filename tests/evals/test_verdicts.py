"""Verdicts: of a case from its trials, and of an evaluation from its cases or its gates."""

from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, eval_set_pb2, usage_pb2
from bough.v1.invocation_pb2 import InvocationSource, RunRef
from bough_server.evals.metrics import statistics
from bough_server.evals.results import verdicts
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED
from tests.support.eval_results import CASES, case_of, crashed, passing, planned_case, scored, totals_of, unscored

Trial = eval_result_pb2.CaseTrialResult
Summary = eval_result_pb2.MetricSummary
Usage = usage_pb2.Usage


def gate(status: eval_result_pb2.Verdict.ValueType) -> eval_result_pb2.GateResult:
    return eval_result_pb2.GateResult(gate="pass_rate >= 0.5", verdict=status)


# A case.


def test_trials_that_share_a_judgment_are_one_in_the_interval_whatever_else_became_of_them() -> None:
    def judged(**scores: float) -> Trial:
        trial = scored(judge=1, **scores)
        trial.scores[0].judgments.add(run_id="j")
        return trial

    alike = [judged() for _ in range(19)]
    for last in (judged(), judged(answer=0), crashed()):
        counts = case_of("a", *alike, last).statistics
        assert (counts.trials, counts.distinct_trials) == (20, 1)
    crash, whole = (case_of("a", *alike, last).statistics.pass_rate_interval for last in (crashed(), judged()))
    assert crash.lower < whole.lower, "a crash proves nothing good"
    assert case_of("a", *(crashed() for _ in range(3))).statistics.distinct_trials == 3


def test_the_mean_over_the_trials_is_scored_although_one_of_them_failed() -> None:
    case = case_of("a", scored(quality=0.5), scored(quality=1.5))
    assert [run.verdict for run in case.trials] == [FAILED, PASSED]
    assert (case.verdict, case.reason) == (PASSED, "")
    assert list(case.metrics) == [Summary(name="quality", verdict=PASSED, mean=1.0, threshold=1)]
    assert (case.statistics.passed, case.statistics.trials, case.statistics.flaky) == (1, 2, True)


def test_one_crashed_and_one_passed_trial_are_not_a_pass() -> None:
    case = case_of("a", crashed(reason="The model failed."), scored(quality=1.5))
    assert (case.verdict, case.reason) == (FAILED, "1 of 2 trials crashed. Trial 1: The model failed.")
    # A crashed trial has no score, so the mean over the trials is not known; and it counts as one that did not pass.
    assert list(case.metrics) == [Summary(name="quality", verdict=NOT_EVALUATED, threshold=1)]
    assert case.statistics.pass_rate == 0.5


def test_a_mean_below_its_threshold_fails_the_case_and_says_what_differed() -> None:
    first, second = scored(answer=1, tools=1), scored(answer=1, tools=0)
    second.scores[1].reason = "search was not called."
    case = case_of("a", first, second)
    assert case.verdict == FAILED
    assert case.reason == "tools: the mean over 2 trials is 0.5, and has to be at least 1. search was not called."
    assert [metric.verdict for metric in case.metrics] == [PASSED, FAILED]


def test_a_trial_that_could_not_be_scored_keeps_the_case_from_passing() -> None:
    case = case_of("a", scored(answer=1), unscored(reason="Nothing answers the question."))
    assert (case.verdict, case.reason) == (
        NOT_EVALUATED,
        "1 of 2 trials could not be scored. Trial 2: Nothing answers the question.",
    )
    assert (case.statistics.passed, case.statistics.trials) == (1, 1)


def test_what_failed_counts_over_what_could_not_be_scored() -> None:
    assert case_of("a", scored(answer=0), unscored()).verdict == FAILED
    assert case_of("a", crashed(), unscored()).verdict == FAILED


def test_one_metric_that_could_not_be_scored_keeps_the_case_from_passing() -> None:
    case = case_of("a", scored(answer=1, judge=None), scored(answer=1, judge=1))
    assert case.verdict == NOT_EVALUATED
    partly = case_of("a", scored(answer=0, judge=None), scored(answer=2, judge=1))
    assert [run.verdict for run in partly.trials] == [FAILED, PASSED]
    assert (partly.verdict, partly.reason) == (NOT_EVALUATED, "judge could not be scored in 1 of 2 trials.")


def test_a_single_trial_is_spoken_of_as_the_trial() -> None:
    assert case_of("a", crashed(reason="The model failed.")).reason == "The trial crashed: The model failed."
    assert case_of("a", unscored(reason="")).reason == "The trial could not be scored."


def test_a_case_of_which_trials_are_missing_has_no_verdict_unless_one_decides() -> None:
    case = verdicts.case_result(planned_case("a", 5), [scored(answer=1), scored(1, answer=1)])
    assert (case.verdict, case.reason) == (verdicts.UNKNOWN, "3 of 5 trials have not ended.")
    assert verdicts.case_result(planned_case("a", 5), []).verdict == verdicts.UNKNOWN
    assert verdicts.case_result(planned_case("a", 5), [crashed()]).verdict == FAILED


def test_a_case_without_metrics_passes_if_its_trials_succeed() -> None:
    assert case_of("a", scored()).verdict == PASSED


def test_trials_come_by_number_and_turns_without_what_was_recorded() -> None:
    expect = eval_set_pb2.EvalExpectation(answer=eval_set_pb2.ExpectedAnswer(exact="4"))
    turn = eval_set_pb2.EvalTurn(id="first", expect=expect, recorded=InvocationSource(run=RunRef(run_id="r")))
    planned = planned_case("a", 2, labels={"area": "sums"})
    planned.eval_case.turns[0].CopyFrom(turn)
    case = verdicts.case_result(planned, [scored(1, answer=1), scored(0, answer=1)])
    assert case == eval_result_pb2.CaseResult(
        case_id="a",
        labels={"area": "sums"},
        turns=[eval_set_pb2.EvalTurn(id="first", expect=expect)],
        verdict=PASSED,
        trials=[scored(0, answer=1), scored(1, answer=1)],
        metrics=[Summary(name="answer", verdict=PASSED, mean=1, threshold=1)],
        statistics=statistics.pass_statistics(2, 2),
        trial_means=eval_result_pb2.TrialMeans(cost_nanos=0, tokens=0),
    )


# All cases.


def test_the_totals_count_cases_and_trials_and_name_the_flaky_cases() -> None:
    cases = [passing("a", 2, 2), passing("b", 1, 2), case_of("c", unscored(), unscored())]
    usage = Usage(model_calls=1, cost_nanos=5, currency_code="USD")
    for case in cases:
        for run in case.trials:
            run.usage.CopyFrom(usage)
    cases[0].trials[0].judge_usage.CopyFrom(usage)
    cases[1].trials[0].user_usage.CopyFrom(usage)
    assert verdicts.totals(cases, planned_trials=9, digest="d") == eval_result_pb2.EvalTotals(
        cases=3,
        cases_passed=1,
        cases_failed=1,
        cases_not_evaluated=1,
        trials=9,
        trials_ended=6,
        trials_passed=3,
        pass_rate=0.75,
        pass_rate_interval=statistics.bootstrap([1.0, 0.5], "d"),
        metric_means={"answer": 0.75},
        usage=Usage(model_calls=6, cost_nanos=30, currency_code="USD"),
        judge_usage=usage,
        user_usage=usage,
        flaky_cases=["b"],
    )


def test_without_a_scored_trial_there_is_no_pass_rate() -> None:
    assert totals_of([case_of("a", unscored())]) == eval_result_pb2.EvalTotals(
        cases=1, cases_not_evaluated=1, trials=1, trials_ended=1
    )


def test_the_total_cost_is_that_of_runs_and_judges_in_one_currency() -> None:
    def cost(nanos: int, currency: str = "USD") -> usage_pb2.Usage:
        return Usage(cost_nanos=nanos, currency_code=currency)

    both = eval_result_pb2.EvalTotals(usage=cost(3), judge_usage=cost(4))
    assert verdicts.total_cost(both).cost_nanos == 7
    mixed = eval_result_pb2.EvalTotals(usage=cost(3), judge_usage=cost(4, "EUR"))
    assert not verdicts.total_cost(mixed).HasField("cost_nanos")


# An evaluation.


def test_without_gates_every_case_has_to_pass() -> None:
    good, bad, unknown = passing("a"), passing("b", 0), case_of("c", unscored())
    assert verdicts.verdict([good], [], removed=[], counts_crashes=True) == PASSED
    assert verdicts.verdict([good, unknown], [], removed=[], counts_crashes=True) == NOT_EVALUATED
    assert verdicts.verdict([good, unknown, bad], [], removed=[], counts_crashes=True) == FAILED


def test_with_gates_they_alone_decide_about_failed_and_crashed_cases() -> None:
    cases = [passing("a"), passing("b", 0), case_of("c", crashed())]
    assert verdicts.verdict(cases, [gate(PASSED)], removed=[], counts_crashes=True) == PASSED
    assert (
        verdicts.verdict(cases, [gate(PASSED), gate(NOT_EVALUATED)], removed=[], counts_crashes=True) == NOT_EVALUATED
    )
    assert verdicts.verdict(cases, [gate(NOT_EVALUATED), gate(FAILED)], removed=[], counts_crashes=True) == FAILED


def test_a_crashed_trial_fails_an_evaluation_whose_gates_do_not_count_it() -> None:
    cases = [passing("a"), case_of("b", scored(answer=1), crashed())]
    assert verdicts.verdict(cases, [gate(PASSED)], removed=[], counts_crashes=False) == FAILED
    assert verdicts.verdict([passing("a", 0)], [gate(PASSED)], removed=[], counts_crashes=False) == PASSED


def test_what_could_not_be_scored_counts_with_gates_too() -> None:
    assert (
        verdicts.verdict([case_of("a", unscored())], [gate(PASSED)], removed=[], counts_crashes=True) == NOT_EVALUATED
    )
    assert (
        verdicts.verdict([case_of("a", crashed(), unscored())], [gate(PASSED)], removed=[], counts_crashes=True)
        == NOT_EVALUATED
    )
    assert verdicts.verdict([case_of("a", unscored())], [gate(FAILED)], removed=[], counts_crashes=True) == FAILED


def test_removed_cases_fail_an_evaluation_with_gates_and_without() -> None:
    assert verdicts.verdict([passing("a")], [], removed=["b"], counts_crashes=True) == FAILED
    assert verdicts.verdict([passing("a")], [gate(PASSED)], removed=["b"], counts_crashes=True) == FAILED


def test_an_evaluation_of_nothing_never_passes() -> None:
    assert verdicts.verdict([], [], removed=[], counts_crashes=True) == NOT_EVALUATED
    assert verdicts.verdict([], [gate(PASSED)], removed=[], counts_crashes=True) == NOT_EVALUATED


@given(CASES)
def test_an_evaluation_passes_exactly_if_every_case_does_and_a_case_only_if_all_its_trials_are_scored(
    cases: list[eval_result_pb2.CaseResult],
) -> None:
    statuses = {case.verdict for case in cases}
    assert (verdicts.verdict(cases, [], removed=[], counts_crashes=True) == PASSED) == (statuses == {PASSED})
    for case in cases:
        outcomes = [run.verdict for run in case.trials]
        if case.verdict == PASSED:
            assert NOT_EVALUATED not in outcomes
            assert not any(run.crashed for run in case.trials)
        if set(outcomes) == {PASSED}:
            assert case.verdict == PASSED
        if any(run.crashed for run in case.trials):
            assert case.verdict == FAILED


@given(CASES.flatmap(lambda cases: st.tuples(st.just(cases), st.permutations(cases))))
def test_the_totals_do_not_depend_on_the_order_in_which_cases_end(
    orders: tuple[list[eval_result_pb2.CaseResult], list[eval_result_pb2.CaseResult]],
) -> None:
    left, right = map(totals_of, orders)
    assert sorted(left.flaky_cases) == sorted(right.flaky_cases)
    for totals in (left, right):
        totals.ClearField("flaky_cases")
    assert left == right
