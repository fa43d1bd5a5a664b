"""Judging a trial: which metrics apply, what its verdict is, and what its result keeps."""

import pytest
from google.protobuf import duration_pb2

from bough.v1 import error_pb2, eval_result_pb2, execution_pb2, follow_pb2, input_pb2, invocation_pb2
from bough.v1.eval_result_pb2 import (
    VERDICT_FAILED,
    VERDICT_NOT_EVALUATED,
    VERDICT_PASSED,
    CaseTrialResult,
    Judgment,
    MetricScore,
)
from bough.v1.eval_set_pb2 import (
    AgentTrajectoryMetric,
    BudgetMetric,
    CustomMetric,
    EvalExpectation,
    EvalMetric,
    ExpectedAgent,
    ExpectedAnswer,
    FinalResponseMetric,
    JudgeRubric,
    LlmJudgeMetric,
    ToolTrajectoryMetric,
)
from bough.v1.invocation_pb2 import Invocation
from bough.v1.policy_pb2 import Limits
from bough.v1.usage_pb2 import Usage
from bough_server.evals.metrics.scoring import applicable_metrics, build_not_evaluated_result, score_trial
from bough_server.evals.metrics.turn import name_of
from bough_server.evals.metrics.turn_result import MAX_BYTES, turn_result
from bough_server.evals.trees.folding import UNLIMITED
from bough_server.log.views import Selection
from bough_server.tree.fold import fold, fold_log
from tests.evals.records import FAILED, SUCCEEDED, WHOLE, case_of, did, node, record, trajectory, wants
from tests.support.logs import LOOK, RUN_ID, SESSION_ID, desk, stored

ANSWER = EvalExpectation(answer=ExpectedAnswer(exact="Done."))
TOOLS = EvalExpectation(tools=[wants("search")])


def tree_of(lead: str, *children: str) -> list[invocation_pb2.AgentInvocation]:
    agents = [node(lead), *(node(child, 1, lead) for child in children)]
    for agent in agents:
        agent.branch = f"{lead}/{agent.name}" if agent.depth else lead
    return agents


def verdict(result: CaseTrialResult) -> tuple[int, str]:
    return result.verdict, result.reason


def test_the_reasons_of_many_judgments_are_cut_to_the_bound_of_the_scores() -> None:
    metric = EvalMetric(name="polite", llm_judge=LlmJudgeMetric(model="judge"))
    judgments = [Judgment(rubric_id=str(number), holds=True, reason="x" * 2_000) for number in range(1_000)]
    score = MetricScore(name="polite", verdict=VERDICT_PASSED, score=1, judgments=judgments)
    result = score_trial(case_of(None, metrics=[metric]), [record()], trial=0, extra_scores={"polite": score})
    (kept,) = result.scores
    assert kept.ByteSize() <= 512 * 1024
    assert {(said.holds, said.reason) for said in kept.judgments} == {(True, "x" * 500)}
    assert len(kept.judgments) == 1_000


def test_the_metrics_of_a_case_are_its_own_and_one_for_each_kind_that_is_expected() -> None:
    everything = EvalExpectation(answer=ANSWER.answer, tools=TOOLS.tools, agents=[ExpectedAgent(name="lead")])
    names = [name_of(metric) for metric in applicable_metrics(case_of(None, everything))]
    assert names == ["final_response", "tool_trajectory", "agent_trajectory"]
    own = [trajectory(name="mine"), EvalMetric(name="tree", agent_trajectory=AgentTrajectoryMetric())]
    names = [name_of(metric) for metric in applicable_metrics(case_of(everything, metrics=own))]
    assert names == ["mine", "tree", "final_response"]
    assert applicable_metrics(case_of(None, EvalExpectation())) == []


def test_an_expectation_that_the_metrics_have_replaced_for_themselves_is_still_scored() -> None:
    both = EvalExpectation(answer=ANSWER.answer, tools=TOOLS.tools)
    own = [
        EvalMetric(tool_trajectory=ToolTrajectoryMetric(tools=[wants("other")])),
        EvalMetric(name="final", final_response=FinalResponseMetric(answer=ExpectedAnswer(contains=["x"]))),
    ]
    names = [name_of(metric) for metric in applicable_metrics(case_of(both, metrics=own))]
    assert names == ["tool_trajectory", "final", "final_response", "tool_trajectory.expected"]


def test_a_trial_passes_if_every_score_reaches_its_threshold() -> None:
    metrics = [trajectory(), EvalMetric(budget=BudgetMetric(limits=Limits(tool_calls=3)))]
    case = case_of(EvalExpectation(answer=ANSWER.answer, tools=TOOLS.tools), metrics=metrics)
    usage = Usage(model_calls=1, tool_calls=1, total_tokens=9)
    result = score_trial(case, [record(did("search"), usage=usage, seconds=(3, 8))], trial=4)
    assert result == CaseTrialResult(
        case_id="one",
        trial=4,
        verdict=VERDICT_PASSED,
        turns=[turn_result(record(did("search"), usage=usage))],
        scores=[
            MetricScore(name=name, verdict=VERDICT_PASSED, score=1, threshold=1)
            for name in ("tool_trajectory", "budget", "final_response")
        ],
        usage=usage,
        duration=duration_pb2.Duration(seconds=5),
    )


def test_a_trial_fails_by_the_first_score_that_misses_its_threshold() -> None:
    metrics = [EvalMetric(name="judge", llm_judge=LlmJudgeMetric(model="m", rubrics=[JudgeRubric(id="a", text="b")]))]
    case = case_of(EvalExpectation(answer=ANSWER.answer, tools=TOOLS.tools), metrics=metrics)
    words = "tool_trajectory is 0, below 1: call 1 is missing, expected search."
    result = score_trial(case, [record()], trial=0)
    assert verdict(result) == (VERDICT_FAILED, words)
    assert [score.verdict for score in result.scores] == [
        VERDICT_NOT_EVALUATED,
        VERDICT_PASSED,
        VERDICT_FAILED,
    ]


def test_a_mean_that_misses_its_threshold_by_a_rounding_error_passes() -> None:
    case = case_of(*[ANSWER] * 10, metrics=[EvalMetric(threshold=0.7 + 1e-12, final_response=FinalResponseMetric())])
    runs = [record(answer="Done.")] * 7 + [record(answer="No.")] * 3
    assert score_trial(case, runs, trial=0).verdict == VERDICT_PASSED
    case.metrics[0].threshold = 0.7 + 1e-6
    assert score_trial(case, runs, trial=0).verdict == VERDICT_FAILED


def test_a_trial_without_anything_expected_passes_if_it_succeeded() -> None:
    assert verdict(score_trial(case_of(None), [record(did("a"))], trial=0)) == (VERDICT_PASSED, "")


def test_scores_made_elsewhere_are_taken_by_name_and_missing_ones_are_not_scored() -> None:
    metric = EvalMetric(name="polite", custom=CustomMetric(name="polite"))
    case = case_of(None, metrics=[metric])
    score = MetricScore(name="polite", verdict=VERDICT_FAILED, score=0.5, threshold=1)
    result = score_trial(case, [record()], trial=0, extra_scores={"polite": score})
    assert (verdict(result), list(result.scores)) == ((VERDICT_FAILED, "polite is 0.5, below 1."), [score])
    missing = score_trial(case, [record()], trial=0)
    assert verdict(missing) == (VERDICT_NOT_EVALUATED, "polite: It was not asked.")
    unknown = score_trial(case_of(None, metrics=[EvalMetric(name="rouge")]), [record()], trial=0)
    assert verdict(unknown)[1] == "rouge: The metric is of no kind that this server knows."


@pytest.mark.parametrize(
    ("state", "words"),
    [(FAILED, "failed"), (execution_pb2.EXECUTION_STATE_CANCELLED, "was cancelled")],
)
def test_a_turn_without_an_answer_is_a_crash_and_has_no_scores(
    state: execution_pb2.ExecutionState.ValueType, words: str
) -> None:
    broken = record(did("x"), answer=None)
    broken.state, broken.error.message = state, "The model is gone."
    alone = score_trial(case_of(TOOLS), [broken], trial=0)
    assert (alone.crashed, list(alone.scores), len(alone.turns)) == (True, [], 1)
    assert verdict(alone) == (VERDICT_FAILED, f"The run {words}: The model is gone.")
    several = score_trial(case_of(TOOLS, TOOLS, TOOLS), [record(did("search")), broken], trial=0)
    assert (several.crashed, len(several.turns)) == (True, 2)
    assert verdict(several) == (VERDICT_FAILED, f"turns[1] {words}: The model is gone.")
    broken.ClearField("error")
    assert score_trial(case_of(TOOLS), [broken], trial=0).reason == f"The run {words}."


def waiting() -> Invocation:
    run = record(answer=None)
    run.state = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
    return run


def running() -> Invocation:
    run = record(answer=None)
    run.state = execution_pb2.EXECUTION_STATE_RUNNING
    return run


def larger(**totals: int) -> Invocation:
    run = record(did("search"), agents=[node("lead")])
    for name, value in totals.items():
        setattr(run, name, value)
    return run


def inconsistent(*, below: bool) -> Invocation:
    run = record(did("search"), agents=[node("lead")])
    where = run.agents[0] if below else run
    where.anomalies.add(kind=invocation_pb2.ANOMALY_KIND_CUT, message="It is odd.")
    return run


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (waiting(), "The run waits for input."),
        (running(), "The run has not ended."),
        (larger(agents_total=2), "The run has more agents or tool calls than its record."),
        (larger(tools_total=2), "The run has more agents or tool calls than its record."),
        (inconsistent(below=False), "The record of the run is inconsistent: It is odd."),
        (inconsistent(below=True), "The record of the run is inconsistent: It is odd."),
    ],
)
def test_a_record_that_is_not_whole_is_not_scored(run: Invocation, words: str) -> None:
    result = score_trial(case_of(TOOLS), [run], trial=0)
    assert (result.verdict, result.reason, result.crashed) == (VERDICT_NOT_EVALUATED, words, False)
    assert (list(result.scores), len(result.turns)) == ([], 1)


def test_a_case_of_which_a_turn_was_not_run_is_not_scored() -> None:
    words = "The case has 2 turns, and 1 were run."
    assert verdict(score_trial(case_of(TOOLS, None), [record(did("search"))], trial=0)) == (
        VERDICT_NOT_EVALUATED,
        words,
    )
    assert score_trial(case_of(TOOLS), [], trial=0).verdict == VERDICT_NOT_EVALUATED


def test_a_trial_that_cannot_be_scored_says_why_and_what_is_unanswered() -> None:
    question = input_pb2.InputRequest(input_id="q", prompt="May I?")
    result = build_not_evaluated_result(case_of(None), 2, "May I?", invocations=[waiting()], unanswered=question)
    assert (result.case_id, result.trial, verdict(result)) == ("one", 2, (VERDICT_NOT_EVALUATED, "May I?"))
    assert (result.unanswered, len(result.turns)) == (question, 1)
    assert not build_not_evaluated_result(case_of(None), 0, "Why.").HasField("unanswered")


def test_the_tree_of_each_turn_is_compared_and_its_agents_are_marked() -> None:
    expected = EvalExpectation(agents=[ExpectedAgent(name="lead", children=[ExpectedAgent(name="writer")])])
    case = case_of(None, expected, expected)
    right, wrong = record(agents=tree_of("lead", "writer")), record(agents=tree_of("lead", "critic"))
    result = score_trial(case, [wrong, right, wrong], trial=0)
    [score] = result.scores
    assert (score.name, score.score, score.verdict) == ("agent_trajectory", 0.75, VERDICT_FAILED)
    assert score.reason.startswith("turns[2]: ")
    assert "writer" in score.reason
    assert [(tree.turn, tree.violations) for tree in score.tree_comparisons] == [(1, 0), (2, 2)]
    matched, unexpected = eval_result_pb2.TREE_MARK_MATCHED, eval_result_pb2.TREE_MARK_UNEXPECTED
    unset, all_matched, last = ([agent.mark for agent in turn.agents] for turn in result.turns)
    assert (unset, all_matched, last[1]) == ([0, 0], [matched, matched], unexpected)


def test_a_cut_call_that_an_agent_is_expected_to_make_is_not_scored() -> None:
    lead = ExpectedAgent(name="lead", children=[ExpectedAgent(name="w", tools=[wants("a", result_json="1")])])
    call = did("a", result=1, agent="w")
    call.invocation_id, call.result_truncated = "w", True
    result = score_trial(case_of(EvalExpectation(agents=[lead])), [record(call, agents=tree_of("lead", "w"))], trial=0)
    assert result.verdict == VERDICT_NOT_EVALUATED
    assert "The result of a of w was cut" in result.reason


def test_the_calls_of_a_child_count_although_a_clients_view_hides_them() -> None:
    case = case_of(
        EvalExpectation(tools=[wants("search", arguments_json=LOOK.arguments_json, result_json='{"it": 1}')])
    )
    whole = fold_log(stored(desk()), run_id=RUN_ID, session_id=SESSION_ID, options=WHOLE)
    assert verdict(score_trial(case, [whole], trial=0)) == (VERDICT_PASSED, "")
    summary = Selection(follow_pb2.EVENT_VIEW_SUMMARY)
    seen = fold(shown for event in desk() if (shown := summary.apply(event)) is not None)
    assert [call.name for call in seen.tools] == ["call_researcher"]


def test_a_turn_keeps_its_tree_with_the_calls_of_each_agent() -> None:
    run = fold_log(stored(desk()), run_id=RUN_ID, session_id=SESSION_ID, options=WHOLE)
    kept = turn_result(run, marks={"C": eval_result_pb2.TREE_MARK_MOVED})
    assert (kept.run_id, kept.trace_id, kept.state, kept.answer) == (RUN_ID, "a" * 32, SUCCEEDED, "One.")
    assert (kept.truncated, kept.HasField("error")) == (False, False)
    assert [(agent.name, agent.depth, agent.invocation_id, agent.mark, agent.answer) for agent in kept.agents] == [
        ("lead", 0, "L", 0, "One."),
        ("researcher", 1, "C", eval_result_pb2.TREE_MARK_MOVED, "It is one."),
    ]
    assert [(agent.step_count, agent.usage.model_calls) for agent in kept.agents] == [(2, 2), (2, 2)]
    assert [[(call.name, call.result_json) for call in agent.calls] for agent in kept.agents] == [
        [("call_researcher", '"It is one."')],
        [("search", '{"it": 1}')],
    ]


def test_long_texts_of_a_turn_are_cut_and_details_are_left_out() -> None:
    size, most = 20_000, 16_384
    run = record(did("a", "x" * size, "y"), agents=[node("lead", answer="z" * size)], answer="é" * size)
    run.tools[0].invocation_id = "lead"
    run.error.CopyFrom(error_pb2.AgentError(message="m" * size, details_json="{}"))
    kept = turn_result(run)
    assert kept.truncated
    assert (kept.answer, kept.error.message, kept.error.details_json) == ("é" * most, "m" * most, "")
    assert (kept.agents[0].answer, len(kept.agents[0].calls[0].arguments_json)) == ("z" * most, most)


def test_a_turn_keeps_its_steps_and_the_step_of_each_call() -> None:
    run = fold_log(stored(desk()), run_id=RUN_ID, session_id=SESSION_ID, options=UNLIMITED)
    kept = turn_result(run)
    assert not kept.truncated
    assert [[(step.index, step.text) for step in agent.steps] for agent in kept.agents] == [
        [(0, "Let me ask."), (1, "")],
        [(0, ""), (1, "")],
    ]
    assert [[call.step_index for call in agent.calls] for agent in kept.agents] == [[0], [0]]


def test_a_result_is_within_its_bound_however_large_the_trees_are() -> None:
    calls = [did("a", "x" * 1_900, "y" * 1_900) for _ in range(2_500)]
    for call in calls:
        call.invocation_id = "lead"
    run = record(*calls, agents=[node("lead"), *(node(f"n{number}", 1, "lead") for number in range(1_500))])
    alone = turn_result(run)
    assert alone.truncated
    assert (len(alone.agents), len(alone.agents[0].calls)) == (1_000, 2_000)
    assert alone.ByteSize() <= MAX_BYTES
    case = case_of(*[None] * 8)
    result = score_trial(case, [run] * 4 + [record()] * 4, trial=0)
    assert result.verdict == VERDICT_PASSED
    assert result.ByteSize() <= MAX_BYTES
    assert [turn.truncated for turn in result.turns] == [True] * 4 + [False] * 4


def test_differences_of_trees_are_left_out_before_a_result_is_too_large() -> None:
    names = [f"{'n' * 200}{number}" for number in range(400)]
    expected = EvalExpectation(agents=[ExpectedAgent(name=name) for name in names])
    result = score_trial(case_of(*[expected] * 40), [record(agents=tree_of("lead"))] * 40, trial=0)
    assert result.ByteSize() <= MAX_BYTES
    assert [tree.violations for tree in result.scores[0].tree_comparisons] == [401] * 40
    assert 0 < len(result.scores[0].tree_comparisons[0].differences) < 401


def test_what_all_turns_used_is_the_sum_without_what_a_fork_shares() -> None:
    fork = record(usage=Usage(model_calls=3, total_tokens=30))
    fork.inherited_usage.CopyFrom(Usage(model_calls=1, total_tokens=10))
    result = score_trial(case_of(None, None), [fork, record(usage=Usage(model_calls=1, total_tokens=5))], trial=0)
    assert result.usage == Usage(model_calls=3, total_tokens=25)
    assert not score_trial(case_of(None), [record()], trial=0).HasField("usage")
