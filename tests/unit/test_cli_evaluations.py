"""Results of evaluations as lines of a terminal."""

import json
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import eval_result_pb2 as pb
from bough.v1 import evaluation_pb2, execution_pb2
from bough_server.cli.eval.files import read_result
from bough_server.cli.render.evaluations import comparison_lines, evaluations_table, result_lines
from bough_server.errors import ConfigurationError

PASSED, FAILED = pb.VERDICT_PASSED, pb.VERDICT_FAILED
NOT_EVALUATED = pb.VERDICT_NOT_EVALUATED


def shown(result: pb.EvalResult, *, width: int = 1000) -> list[str]:
    return [line.plain for line in result_lines(result, width=width)]


def failing(*reasons: str, why: str = "") -> pb.CaseResult:
    """A case whose trials fail, each with its reason."""
    trials = [pb.CaseTrialResult(trial=index, verdict=FAILED, reason=reason) for index, reason in enumerate(reasons)]
    return pb.CaseResult(case_id="oslo", verdict=FAILED, reason=why, trials=trials)


def test_a_reason_that_the_case_its_trial_and_its_score_have_is_shown_once() -> None:
    case = failing("answer is 0, below 1: no boat", why="answer: the mean over 1 trial is 0. no boat")
    case.trials[0].scores.add(name="answer", verdict=FAILED, reason="no boat")
    case.trials[0].scores.add(name="budget", verdict=FAILED, reason="7 model calls, at most 3")
    case.trials[0].scores.add(name="tools", verdict=PASSED, reason="all there")

    assert shown(pb.EvalResult(cases=[case]))[1:-1] == [
        "            answer: the mean over 1 trial is 0. no boat",
        "            budget: 7 model calls, at most 3",
    ]


def test_of_many_trials_that_fail_in_many_ways_only_some_reasons_are_shown() -> None:
    case = failing(*(f"answer is 0, below 1: it says {number:03}" for number in range(50)))

    lines = shown(pb.EvalResult(cases=[case]))[1:-1]
    assert lines[0] == "            trial 1: answer is 0, below 1: it says 000"
    assert (len(lines), lines[-1]) == (11, "            and 40 more reasons")


def test_text_of_models_cannot_control_the_terminal_and_reasons_are_not_cut() -> None:
    case = failing("answer is 0, below 1: \x1b[31m" + "long " * 40)

    lines = shown(pb.EvalResult(cases=[case]), width=40)
    assert "\x1b" not in "".join(lines)
    assert len(lines[1]) > 200
    assert len(lines[0]) <= 40


def test_the_last_line_has_the_verdict_or_why_there_is_none() -> None:
    totals = pb.EvalTotals(cases=1, cases_passed=1, trials=1, trials_ended=1, trials_passed=1)
    cancelled, failed = (
        pb.EvalResult(totals=totals, state=state)
        for state in (execution_pb2.EXECUTION_STATE_CANCELLED, execution_pb2.EXECUTION_STATE_FAILED)
    )

    assert shown(pb.EvalResult(totals=totals, verdict=PASSED)) == ["passed: 1 of 1 case passed"]
    assert shown(cancelled) == [
        "The evaluation was cancelled. It has no verdict: 1 of 1 trial ended.",
        "cancelled: 1 of 1 case passed",
    ]
    assert shown(pb.EvalResult(totals=totals))[-1] == "running: 1 of 1 case passed"
    assert shown(failed)[-1] == "ended without a verdict: 1 of 1 case passed"


def test_gates_are_shown_with_their_value_and_the_reason_of_those_that_do_not_hold() -> None:
    held = pb.GateResult(gate="pass_rate >= 0.5", verdict=PASSED, value=0.75)
    missed = pb.GateResult(gate="cost.total <= 2", verdict=NOT_EVALUATED, reason="The cost is not known.")

    assert shown(pb.EvalResult(gates=[held, missed]))[:-1] == [
        "passed      gate pass_rate >= 0.5  is 0.75",
        "not scored  gate cost.total <= 2  The cost is not known.",
    ]


def test_the_reason_of_a_verdict_that_no_gate_has_comes_before_the_totals() -> None:
    result = pb.EvalResult(gates=[pb.GateResult(gate="cost.total <= 2", verdict=PASSED)], reason="1 trial crashed.")

    assert shown(result)[:-1] == ["passed      gate cost.total <= 2", "1 trial crashed."]


def test_a_comparison_lists_what_changed_and_counts() -> None:
    worse = pb.CaseComparison(
        case_id="oslo", change=pb.CASE_CHANGE_WORSE, verdict_baseline=PASSED, verdict_candidate=FAILED
    )
    worse.pass_rate_baseline, worse.pass_rate_candidate = 1, 0.2
    worse.differences.add(message="writer is missing below lead")
    same = pb.CaseComparison(case_id="bergen", change=pb.CASE_CHANGE_SAME)
    removed = pb.CaseComparison(case_id="tromso", change=pb.CASE_CHANGE_REMOVED, verdict_baseline=PASSED)
    removed.pass_rate_baseline = 0.5
    comparison = pb.EvalComparison(
        cases=[worse, same, removed],
        worse=1,
        removed=1,
        pins_changed=["The set changed."],
        state_baseline=execution_pb2.EXECUTION_STATE_SUCCEEDED,
        state_candidate=execution_pb2.EXECUTION_STATE_CANCELLED,
    )

    assert [line.plain for line in comparison_lines(comparison, pb.EvalSuspects(), width=1000)] == [
        "The set changed.",
        "The candidate is of an evaluation that is cancelled: it may lack cases.",
        "worse       oslo  passed -> failed, 1.00 to 0.20",
        "            writer is missing below lead",
        "removed     tromso  0.50 to -",
        "compared with the baseline: 0 better, 1 worse, 0 unclear, 1 removed, 0 added",
    ]


@pytest.mark.parametrize("old", [{"setName": "desk"}, {}], ids=["of an evaluation", "of scored runs"])
def test_a_result_file_of_version_0_1_is_refused_with_what_to_do(tmp_path: Path, old: dict[str, str]) -> None:
    kept = pb.EvalResult(
        eval_set_name="desk", state=execution_pb2.EXECUTION_STATE_SUCCEEDED, cases=[pb.CaseResult(case_id="a")]
    )
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json_format.MessageToJson(kept))
    assert read_result(baseline) == kept
    baseline.write_text(json.dumps({**old, "status": "METRIC_STATUS_PASSED", "cases": [{"caseId": "a", "runs": [{}]}]}))
    with pytest.raises(ConfigurationError) as refused:
        read_result(baseline)
    assert refused.value.message == (
        f"{baseline}: The result has no `state`, as those of version 0.1: make a new one with `bough eval run --json`."
    )


def test_a_list_has_the_verdict_of_those_that_have_one_and_the_state_of_others() -> None:
    succeeded = evaluation_pb2.Evaluation(
        evaluation_id="e1",
        eval_set_name="trips",
        agent="guide",
        verdict=FAILED,
        state=execution_pb2.EXECUTION_STATE_SUCCEEDED,
    )
    running = evaluation_pb2.Evaluation(
        evaluation_id="e2", eval_set_name="given", state=execution_pb2.EXECUTION_STATE_RUNNING
    )

    _, first, second = [line.plain.split() for line in evaluations_table([succeeded, running], 1000)]
    assert (first[:2], first[-2:]) == (["e1", "failed"], ["trips,", "guide"])
    assert (second[:2], second[-2:]) == (["e2", "running"], ["given,", "-"])
