"""Two results of evaluations side by side: what they depended on, and what became of each case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2, execution_pb2, usage_pb2
from bough_server.evals.reports.words import comparison_sentences, comparison_text
from bough_server.evals.results.compare import (
    ADDED,
    BETTER,
    REMOVED,
    SAME,
    UNCLEAR,
    WORSE,
    baseline_of,
    compare,
    shrink_comparison,
)
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED
from tests.support.eval_results import CASES, case_of, crashed, passing, rerun, result_of, scored, unscored

CaseComparison = eval_result_pb2.CaseComparison
Difference = eval_result_pb2.TreeDifference
PassCounts = eval_result_pb2.PassCounts
Pins = eval_result_pb2.EvalPins
Result = eval_result_pb2.EvalResult
Trial = eval_result_pb2.CaseTrialResult
SUCCEEDED = execution_pb2.EXECUTION_STATE_SUCCEEDED


def moved(agent: str, invocation_id: str = "") -> eval_result_pb2.TreeDifference:
    return Difference(
        kind=eval_result_pb2.DIFFERENCE_KIND_MOVED, agent=agent, message=f"{agent} moved.", invocation_id=invocation_id
    )


def with_tree(score: float, *differences: eval_result_pb2.TreeDifference) -> Trial:
    """A trial with the score and the differences of an agent_trajectory."""
    trial = scored(tree=score)
    trial.scores[0].tree_comparisons.add(violations=len(differences), differences=differences)
    return trial


def of_costs(nanos: int | None, currency: str = "USD") -> Result:
    usage = usage_pb2.Usage(cost_nanos=nanos, currency_code=currency if nanos is not None else "")
    return Result(totals=eval_result_pb2.EvalTotals(usage=usage))


def only(comparison: eval_result_pb2.EvalComparison) -> CaseComparison:
    assert len(comparison.cases) == 1
    return comparison.cases[0]


def test_cases_are_compared_in_pairs_in_the_new_order_and_the_removed_ones_come_last() -> None:
    before = result_of(passing("gone"), passing("worse", 9, 9), passing("better", 0, 9), passing("same"))
    after = result_of(passing("same"), passing("better", 9, 9), passing("new", 0), passing("worse", 0, 9))
    comparison = compare(before, after)
    assert [(case.case_id, case.change) for case in comparison.cases] == [
        ("same", SAME),
        ("better", BETTER),
        ("new", ADDED),
        ("worse", WORSE),
        ("gone", REMOVED),
    ]
    assert (comparison.better, comparison.worse, comparison.removed, comparison.added) == (1, 1, 1, 1)
    assert comparison.pass_rate_change == after.totals.pass_rate - before.totals.pass_rate == -0.25


def test_a_pair_says_what_there_was_and_what_there_is() -> None:
    before, after = result_of(case_of("a", scored(answer=1, tree=1))), result_of(case_of("a", scored(answer=0.25)))
    assert only(compare(before, after)) == CaseComparison(
        case_id="a",
        change=UNCLEAR,
        verdict_baseline=PASSED,
        verdict_candidate=FAILED,
        pass_rate_baseline=1,
        pass_rate_candidate=0,
        metric_changes={"answer": -0.75},
        trials_baseline=PassCounts(trials=1, passed=1),
        trials_candidate=PassCounts(trials=1),
        p_value=0.5,
        reason="0 of 1 trial passed, 1 of 1 in the baseline, which may be chance (p = 0.5).",
    )
    nothing = result_of()
    assert only(compare(nothing, after)) == CaseComparison(
        case_id="a", change=ADDED, verdict_candidate=FAILED, pass_rate_candidate=0
    )
    assert only(compare(before, nothing)) == CaseComparison(
        case_id="a", change=REMOVED, verdict_baseline=PASSED, pass_rate_baseline=1
    )


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (passing("a", 5, 5), passing("a", 4, 5), UNCLEAR),
        (passing("a", 5, 5), passing("a", 1, 5), WORSE),
        (passing("a", 1, 5), passing("a", 2, 5), UNCLEAR),
        (passing("a", 1, 5), passing("a", 5, 5), BETTER),
        (passing("a", 1, 5), passing("a", 2, 10), SAME),
        (passing("a"), case_of("a", unscored()), UNCLEAR),
        (passing("a", 0), case_of("a", unscored()), SAME),
        (passing("a", 0), case_of("a", crashed()), SAME),
        # It passes by the mean over its trials, and did not before.
        (passing("a", 1, 2), case_of("a", scored(answer=0.5), scored(answer=1.5)), UNCLEAR),
    ],
)
def test_a_case_is_worse_or_better_only_beyond_chance_and_unclear_if_its_verdict_or_rate_moved(
    before: eval_result_pb2.CaseResult,
    after: eval_result_pb2.CaseResult,
    change: eval_result_pb2.CaseChange.ValueType,
) -> None:
    assert only(compare(result_of(before), result_of(after))).change == change


def test_first_comes_what_is_not_the_same_of_what_the_results_depended_on() -> None:
    before = Result(
        eval_set_name="desk",
        pins=Pins(
            eval_set_digest="sha256:" + "a" * 64,
            agent="lead",
            agents={"lead": "1", "writer": "1", "gone": "1"},
            models={"small": "x"},
            tools={"search": "t"},
            prices="p1",
            judges={"big": "j"},
            server_version="0.6.0",
        ),
    )
    after = Result(
        eval_set_name="counter",
        pins=Pins(
            eval_set_digest="sha256:" + "b" * 64,
            agent="chief",
            agents={"lead": "2", "writer": "1", "new": "1"},
            models={"small": "y"},
            tools={"search": "u"},
            judges={"big": "k"},
            server_version="0.7.0",
        ),
    )
    assert list(compare(before, after).pins_changed) == [
        "The name of the set has changed: desk, now counter.",
        "The content of the set has changed: sha256:aaaaaaaaaaaaa, now sha256:bbbbbbbbbbbbb.",
        "The evaluated agent has changed: lead, now chief.",
        "The agent 'gone' was removed.",
        "The agent 'lead' has changed: 1, now 2.",
        "The agent 'new' was added.",
        "The model 'small' has changed: x, now y.",
        "The tool 'search' has changed: t, now u.",
        "The price list has changed: p1, now none.",
        "The judge 'big' has changed: j, now k.",
        "The version of the server has changed: 0.6.0, now 0.7.0.",
    ]
    assert list(compare(before, before).pins_changed) == []


def test_hashes_that_begin_alike_are_shown_in_full() -> None:
    before, after = (Result(pins=Pins(prices=f"sha256:{'0' * 32}{end}")) for end in "ab")
    assert list(compare(before, after).pins_changed) == [
        f"The price list has changed: sha256:{'0' * 32}a, now sha256:{'0' * 32}b."
    ]


def test_costs_are_compared_in_one_currency_if_both_are_known() -> None:
    less = compare(of_costs(5, "EUR"), of_costs(3, "EUR"))
    assert (less.cost_nanos_change, less.cost_currency_code) == (-2, "EUR")
    for left, right in [
        (of_costs(5), of_costs(None)),
        (of_costs(None), of_costs(5)),
        (of_costs(5), of_costs(5, "EUR")),
    ]:
        comparison = compare(left, right)
        assert (comparison.HasField("cost_nanos_change"), comparison.cost_currency_code) == (False, "")


def test_a_comparison_says_in_which_states_the_evaluations_ended() -> None:
    before, after = Result(state=execution_pb2.EXECUTION_STATE_CANCELLED), Result(state=SUCCEEDED)
    assert compare(before, after) == eval_result_pb2.EvalComparison(
        state_baseline=execution_pb2.EXECUTION_STATE_CANCELLED,
        state_candidate=SUCCEEDED,
        regression_test=eval_result_pb2.RegressionTest(level=0.05, candidate=PassCounts(), baseline=PassCounts()),
    )
    assert baseline_of(before).state == execution_pb2.EXECUTION_STATE_CANCELLED, "a kept baseline has its state"


def test_a_rate_that_one_side_has_not_has_no_change() -> None:
    comparison = compare(result_of(passing("a")), result_of(case_of("a", unscored())))
    assert not comparison.HasField("pass_rate_change")
    assert only(comparison) == CaseComparison(
        case_id="a",
        change=UNCLEAR,
        verdict_baseline=PASSED,
        verdict_candidate=NOT_EVALUATED,
        pass_rate_baseline=1,
        reason="Not enough of its trials could be scored to compare it.",
    )


def test_behind_a_worse_case_are_the_differences_that_its_first_trial_that_differs_has_and_had_not() -> None:
    before = result_of(case_of("a", with_tree(1, moved("lead", "1")), with_tree(1), with_tree(1)))
    after = result_of(
        case_of(
            "a",
            with_tree(1, moved("lead", "2")),
            with_tree(0.5, moved("writer"), moved("lead")),
            with_tree(0, moved("x")),
        )
    )
    assert list(only(compare(before, after)).differences) == [moved("writer"), moved("lead")]
    # Of the better case the same have gone.
    assert list(only(compare(after, before)).differences) == [moved("writer"), moved("lead")]


def test_a_difference_that_comes_twice_and_came_once_is_a_difference() -> None:
    before = result_of(case_of("a", with_tree(1, moved("writer"))))
    after = result_of(case_of("a", with_tree(0, moved("writer"), moved("writer"))))
    assert list(only(compare(before, after)).differences) == [moved("writer")]


def test_a_case_that_fails_in_another_way_is_the_same_and_shows_what_differs_now() -> None:
    before, after = result_of(case_of("a", with_tree(0, moved("x")))), result_of(case_of("a", with_tree(0, moved("y"))))
    assert (only(compare(before, after)).change, list(only(compare(before, after)).differences)) == (SAME, [moved("y")])


def test_against_a_baseline_without_trials_what_is_worse_shows_all_its_differences() -> None:
    before, failing = result_of(case_of("a", with_tree(1))), result_of(case_of("a", with_tree(0, moved("writer"))))
    assert list(only(compare(baseline_of(before), failing)).differences) == [moved("writer")]
    # Whether those of a case that is as bad as before are new is not known.
    assert not only(compare(baseline_of(failing), failing)).differences
    assert not only(compare(baseline_of(failing), before)).differences


def test_a_trial_that_the_other_result_lacks_explains_a_worse_case_but_not_one_that_is_as_before() -> None:
    before = result_of(case_of("a", with_tree(1)))
    worse = result_of(case_of("a", with_tree(1), with_tree(0, moved("writer"))))
    assert list(only(compare(before, worse)).differences) == [moved("writer")]
    same = result_of(case_of("a", with_tree(1), with_tree(1, moved("writer"))))
    assert not only(compare(before, same)).differences


def test_what_does_not_fit_an_answer_is_left_out_from_the_last_case_on() -> None:
    names = [f"case-{number}" for number in range(100)]
    before = result_of(*(case_of(name, with_tree(1)) for name in names))
    after = result_of(*(case_of(name, with_tree(0, *map(moved, "abcdefgh"))) for name in names))
    for number in range(600):
        after.pins.tools[f"tool-{number}"] = "x"
    whole = compare(before, after)
    found = compare(before, after)
    assert shrink_comparison(found, most=30_000) is found
    shown = [len(case.differences) for case in found.cases]
    assert found.ByteSize() <= 30_000
    assert shown == sorted(shown, reverse=True)
    assert (len(found.pins_changed), [case.change for case in found.cases]) == (500, [UNCLEAR] * 100)
    least = shrink_comparison(compare(before, after), most=0)
    assert [(len(case.differences), len(case.metric_changes)) for case in least.cases] == [(0, 0)] * 100
    assert shrink_comparison(compare(before, after)).cases == whole.cases


def test_cases_of_one_id_are_paired_in_order() -> None:
    before = result_of(passing("run"), passing("run", 0))
    after = result_of(passing("run"), passing("run"), passing("run"))
    assert [case.change for case in compare(before, after).cases] == [SAME, UNCLEAR, ADDED]


def test_a_baseline_keeps_the_numbers_of_cases_without_their_trials_and_turns() -> None:
    result = result_of(case_of("a", with_tree(1, moved("writer")), with_tree(0)), pins=Pins(eval_set_digest="d"))
    result.cases[0].turns.add(user="Hello")
    result.cases[0].labels["area"] = "sums"
    result.evaluation_id, result.verdict = "e", FAILED
    kept = baseline_of(result)
    statistics = result.cases[0].statistics
    assert kept == Result(
        evaluation_id="e",
        eval_set_name="desk",
        verdict=FAILED,
        pins=result.pins,
        totals=result.totals,
        cases=[
            eval_result_pb2.CaseResult(
                case_id="a",
                verdict=FAILED,
                metrics=result.cases[0].metrics,
                statistics=eval_result_pb2.PassStatistics(
                    trials=2,
                    passed=1,
                    pass_rate=0.5,
                    pass_rate_interval=statistics.pass_rate_interval,
                    flaky=True,
                    distinct_trials=2,
                ),
                trial_means=result.cases[0].trial_means,
            )
        ],
    )
    assert statistics.pass_at_k


RESULTS = CASES.map(lambda cases: result_of(*cases))


@given(RESULTS)
def test_nothing_has_become_of_a_result_compared_with_itself_or_with_what_is_kept_of_it(result: Result) -> None:
    for before in (result, baseline_of(result)):
        comparison = compare(before, result)
        assert {case.change for case in comparison.cases} == {SAME}
        assert (comparison.better, comparison.worse, comparison.removed, comparison.added) == (0, 0, 0, 0)
        assert not comparison.pins_changed
        assert comparison.pass_rate_change == 0
        assert not any(case.differences or any(case.metric_changes.values()) for case in comparison.cases)


_MIRRORED = {SAME: SAME, UNCLEAR: UNCLEAR, BETTER: WORSE, WORSE: BETTER, REMOVED: ADDED, ADDED: REMOVED}


@given(RESULTS, RESULTS, st.sampled_from(["d", "e"]), st.sampled_from(["d", "e"]))
def test_the_other_way_round_better_is_worse_and_added_is_removed(a: Result, b: Result, left: str, right: str) -> None:
    a.pins.eval_set_digest, b.pins.eval_set_digest = left, right
    there, back = compare(a, b), compare(b, a)
    assert {case.case_id: _MIRRORED[case.change] for case in there.cases} == {
        case.case_id: case.change for case in back.cases
    }
    assert (there.better, there.removed) == (back.worse, back.added)
    assert (there.worse, there.added) == (back.better, back.removed)
    assert len(there.pins_changed) == len(back.pins_changed) == (left != right)
    assert there.HasField("pass_rate_change") == back.HasField("pass_rate_change")
    assert there.pass_rate_change == -back.pass_rate_change
    returned = {case.case_id: case for case in back.cases}
    for case in there.cases:
        mirror = returned[case.case_id]
        assert (case.verdict_baseline, case.verdict_candidate) == (mirror.verdict_candidate, mirror.verdict_baseline)
        assert dict(case.metric_changes) == {name: -change for name, change in mirror.metric_changes.items()}


def suspected(result: Result, *names: str, baseline: Result | None = None) -> Result:
    """The result, of which these cases ran again, 20 times; with a baseline, as often with what that ran with."""
    result.suspects.case_ids.extend(names)
    result.suspects.trials = 20
    if baseline is not None:
        result.suspects.baseline_pins.CopyFrom(baseline.pins)
    return result


def test_all_cases_are_tested_together_and_regressions_are_zero_unless_that_rejects() -> None:
    names = [f"case-{number}" for number in range(40)]
    before = result_of(*(passing(name, 5, 5) for name in names))
    few = result_of(*(passing(name, 4 if index < 4 else 5, 5) for index, name in enumerate(names)))
    chance = compare(before, few)
    assert (chance.regressions, chance.worse, chance.unclear) == (0, 0, 4)
    assert chance.regression_test.p_value == pytest.approx(1 / 16)
    many = compare(before, result_of(*(passing(name, 4 if index < 5 else 5, 5) for index, name in enumerate(names))))
    assert (many.regressions, many.worse) == (1, 0), "more fail than chance explains, and none by itself"
    assert many.regression_test.p_value == pytest.approx(1 / 32)
    assert (many.regression_test.candidate, many.regression_test.baseline, many.regression_test.cases) == (
        PassCounts(trials=200, passed=195),
        PassCounts(trials=200, passed=200),
        40,
    )


def test_fresh_trials_of_suspects_decide_and_those_that_made_them_suspects_do_not() -> None:
    pins = Pins(eval_set_digest="d", agents={"lead": "1"})
    before = result_of(passing("a", 5, 5), passing("b", 5, 5), passing("c", 5, 5), pins=pins)
    after = result_of(passing("a", 0, 5), passing("b", 4, 5), passing("c", 5, 5))
    rerun(after.cases[0], candidate=(19, 20), baseline=(20, 20))
    rerun(after.cases[1], candidate=(5, 20), baseline=(19, 20))
    comparison = compare(before, suspected(after, "a", "b", baseline=before))
    assert [case.change for case in comparison.cases] == [UNCLEAR, WORSE, SAME]
    assert comparison.cases[0].reason == (
        "19 of 20 trials passed, 20 of 20 in the baseline, which may be chance (p = 0.5)."
    )
    assert (comparison.regressions, comparison.regression_test.cases) == (1, 2)
    assert comparison.regression_test.baseline == PassCounts(trials=40, passed=39)
    # Against another baseline the fresh trials of this one say nothing: its own trials do.
    other = compare(result_of(passing("a", 0, 5), passing("b", 1, 5), pins=Pins(eval_set_digest="d")), after)
    assert other.regression_test.baseline == PassCounts(trials=10, passed=1)
    assert (other.regressions, other.regression_test.candidate) == (0, PassCounts(trials=40, passed=24))


def test_without_a_suspect_nothing_is_a_regression() -> None:
    before, after = result_of(passing("a", 5, 5)), suspected(result_of(passing("a", 5, 5)))
    comparison = compare(before, after)
    assert (comparison.regressions, comparison.regression_test.HasField("p_value")) == (0, False)
    assert not comparison.regression_test.incomplete_reason


def test_recorded_cases_are_tested_beside_suspects_by_the_trials_that_they_have() -> None:
    names = [f"recorded-{number}" for number in range(6)]
    before = result_of(passing("live", 5, 5), *map(passing, names))
    after = suspected(result_of(passing("live", 5, 5), *(passing(name, 0) for name in names)))
    after.suspects.recorded_case_ids.extend(names)
    found = compare(before, after)
    assert (found.regressions, found.regression_test.p_value) == (1, pytest.approx(1 / 64))
    assert (found.regression_test.candidate, found.regression_test.baseline) == (
        PassCounts(trials=6),
        PassCounts(trials=6, passed=6),
    )
    assert "20 fresh trials against 5 of 1 case" in found.regression_test.power


def test_against_a_baseline_among_whose_cases_no_suspects_were_chosen_the_planned_trials_are_tested() -> None:
    before = result_of(passing("known", 5, 5), passing("other", 5, 5))
    after = suspected(result_of(passing("known", 4, 5), passing("other", 0, 5)), "known")
    rerun(after.cases[0], candidate=(20, 20))
    found = compare(before, after)
    assert [case.change for case in found.cases] == [UNCLEAR, WORSE]
    assert (found.regressions, found.regression_test.candidate) == (1, PassCounts(trials=10, passed=4))
    assert "5 trials against 5 of 2 cases" in found.regression_test.power


def test_reports_claim_no_regression_only_if_no_trial_of_a_common_case_failed() -> None:
    def sentences(before: Result, after: Result) -> list[str]:
        return [*comparison_sentences(compare(before, after), after.suspects)]

    claim = "No regression: no trial failed of a case that the baseline has."
    assert claim in sentences(result_of(passing("a")), suspected(result_of(passing("a"), passing("new", 0))))
    unknown = result_of(case_of("a", unscored()))
    assert claim not in sentences(unknown, suspected(result_of(passing("a", 0))))
    assert claim not in sentences(result_of(passing("a")), suspected(result_of(passing("a", 0)), "a"))


def test_the_change_of_the_pass_rate_in_reports_is_that_of_gates_which_added_cases_do_not_move() -> None:
    before = result_of(passing("a"), passing("b"))
    found = compare(before, result_of(passing("a"), passing("b"), passing("new", 0)))
    assert [change.value for change in found.changes if change.name == "pass_rate"] == [0]
    assert comparison_text(found) == "0 better, 0 worse, 0 unclear, 0 removed, 1 added, pass rate +0.00"


def test_numbers_without_a_scale_from_0_to_1_have_intervals_around_their_change() -> None:
    def costing(score: float) -> list[eval_result_pb2.CaseResult]:
        return [case_of(name, scored(q=score, threshold=0.5)) for name in "abc"]

    for before, after in [(1.0, 6.0), (0.0, -5.0), (5.0, 5.0)]:
        changes = compare(result_of(*costing(before)), result_of(*costing(after))).changes
        (found,) = (change for change in changes if change.name == "q.mean")
        assert (found.interval.lower, found.interval.upper) == (found.value, found.value) == (after - before,) * 2
    (found,) = (each for each in compare(result_of(*costing(1)), result_of(*costing(1))).changes if each.name[0] == "q")
    assert found.interval.lower < 0 < found.interval.upper, "of a rate three cases that are equal prove little"


def test_a_case_that_is_no_suspect_passed_every_trial_which_proves_nothing() -> None:
    before = result_of(passing("fixed", 0, 5), passing("open", 0, 5))
    after = suspected(result_of(passing("fixed", 5, 5), passing("open", 1, 5)), "open")
    rerun(after.cases[1], candidate=(20, 20))
    fixed, opened = compare(before, after).cases
    assert (fixed.change, fixed.HasField("p_value"), opened.change) == (UNCLEAR, False, BETTER)
    assert fixed.reason == (
        "5 of 5 trials passed, 0 of 5 in the baseline. "
        "No trial failed, so it has no fresh ones, which a proof would take."
    )


def test_fresh_trials_that_could_not_be_scored_are_named() -> None:
    before, after = result_of(passing("a", 5, 5)), result_of(passing("a", 4, 5))
    rerun(after.cases[0], candidate=(17, 17))
    after.cases[0].reruns.append(Trial(verdict=NOT_EVALUATED, purpose=eval_result_pb2.TRIAL_PURPOSE_RERUN))
    comparison = compare(before, suspected(after, "a"))
    assert comparison.regression_test.incomplete_reason == (
        "3 fresh trials could not be scored, such as of the case 'a'."
    )


def test_changes_of_numbers_are_estimated_over_the_cases_that_have_them() -> None:
    def costing(name: str, passed: int, nanos: int, currency: str = "USD") -> eval_result_pb2.CaseResult:
        trials = [scored(answer=1 if number < passed else 0) for number in range(4)]
        for trial in trials:
            trial.usage.model_calls = 1
            trial.usage.cost_nanos, trial.usage.currency_code = nanos, currency
            trial.usage.input_tokens, trial.usage.output_tokens = 100, nanos // 1_000_000
            trial.duration.FromMilliseconds(500)
        return case_of(name, *trials)

    before = result_of(costing("a", 4, 1_000_000), costing("b", 4, 3_000_000), costing("c", 2, 1, "EUR"), passing("x"))
    after = result_of(costing("a", 2, 2_000_000), costing("b", 4, 3_000_000), costing("c", 2, 2), passing("y"))
    changes = {change.name: change for change in compare(before, after).changes}
    assert {name: (change.cases, round(change.value, 9)) for name, change in changes.items()} == {
        "pass_rate": (3, round(-0.5 / 3, 9)),
        "answer.mean": (3, round(-0.5 / 3, 9)),
        "cost": (2, 0.0005),
        "tokens": (3, round(1 / 3, 9)),
        "duration": (3, 0),
    }
    rate = changes["pass_rate"].interval
    assert (rate.lower, rate.upper, rate.level) == (-0.5, 0, 0.95)
    assert (changes["duration"].interval.lower, changes["duration"].interval.upper) == (0, 0)
    same = {change.name: change for change in compare(before, before).changes}["pass_rate"].interval
    assert (same.lower, same.upper) == (-same.upper, pytest.approx(0.4899, abs=1e-4)), "four cases prove no more"
