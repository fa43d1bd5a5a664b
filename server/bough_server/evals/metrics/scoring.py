"""Judge one trial: its metrics, its verdict, and what its result keeps of the trees."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from bough.v1 import execution_pb2, input_pb2
from bough.v1.eval_result_pb2 import (
    VERDICT_FAILED,
    VERDICT_NOT_EVALUATED,
    VERDICT_PASSED,
    CaseTrialResult,
    CrashedAttempt,
    MetricScore,
    Verdict,
)
from bough.v1.eval_set_pb2 import (
    AgentTrajectoryMetric,
    EvalCase,
    EvalMetric,
    FinalResponseMetric,
    RunOutcomeMetric,
    ToolTrajectoryMetric,
)
from bough.v1.invocation_pb2 import Invocation
from bough_server.evals.metrics import (
    agent_trajectory,
    budget,
    final_response,
    run_outcome,
    text_metrics,
    tool_trajectory,
)
from bough_server.evals.metrics.turn import Turn, list_expectations, name_of, name_turn, no_score
from bough_server.evals.metrics.turn_result import MAX_BYTES, turn_result
from bough_server.evals.trees.conversation import merge_turns
from bough_server.log.usage import Sums
from bough_server.matching.work import TooMuchWork, limit_work
from bough_server.messages import copy_of

MAX_REASON: Final = 1_000
"""The most characters of a trial's reason."""

_LONGEST_NS: Final = 315_576_000_000 * 1_000_000_000
"""The longest duration that has a JSON form: records of other systems may have any times."""

_MAX_SCORE_BYTES: Final = 512 * 1024
"""The most bytes of all scores; the turns have the rest."""

_KINDS: Final[Mapping[str, EvalMetric]] = MappingProxyType(
    {
        "answer": EvalMetric(final_response=FinalResponseMetric()),
        "tools": EvalMetric(tool_trajectory=ToolTrajectoryMetric()),
        "agents": EvalMetric(agent_trajectory=AgentTrajectoryMetric()),
        "run": EvalMetric(run_outcome=RunOutcomeMetric()),
    }
)
"""The metric that judges each field of an expectation if the case has none for it."""

_Score = Callable[[EvalMetric, EvalCase, Sequence[Turn]], MetricScore | None]

_SCORES: Final[Mapping[str, _Score]] = MappingProxyType(
    {
        "tool_trajectory": tool_trajectory.score,
        "final_response": final_response.score,
        "budget": budget.score,
        "run_outcome": run_outcome.score,
        **dict.fromkeys(text_metrics.KINDS, text_metrics.score),
    }
)

_CRASHED: Final = (execution_pb2.EXECUTION_STATE_FAILED, execution_pb2.EXECUTION_STATE_CANCELLED)
_ENDED: Final = (execution_pb2.EXECUTION_STATE_SUCCEEDED, *_CRASHED)


def applicable_metrics(case: EvalCase) -> list[EvalMetric]:
    """Return the metrics of a case, and a default one for each kind of expectation that none of them judges.

    All are copies that have their names.
    """
    metrics = [_copy_with_name(metric, name_of(metric)) for metric in case.metrics]
    taken = {metric.name for metric in metrics}
    for field, default in _KINDS.items():
        if _is_expected(case, field) and not any(_scores_field(metric, field) for metric in case.metrics):
            kind = name_of(default)
            metrics.append(_copy_with_name(default, f"{kind}.expected" if kind in taken else kind))
    return metrics


def is_scorable(case: EvalCase, invocations: Sequence[Invocation]) -> bool:
    """Return whether a trial has scores: that it did not crash, and that its records are whole."""
    return next(_problems(case, invocations), "") == ""


def score_trial(
    case: EvalCase,
    invocations: Sequence[Invocation],
    *,
    trial: int,
    extra_scores: Mapping[str, MetricScore] = MappingProxyType({}),
) -> CaseTrialResult:
    """Judge a trial by the records of its turns, folded with folding.UNLIMITED.

    `extra_scores` are the scores of llm_judge and custom metrics, by name.
    """
    # First, because a crash is a failure whatever its record lacks.
    if has_crashed(case, invocations):
        return _build_crash_result(case, invocations, trial=trial)
    if problem := next(_problems(case, invocations), ""):
        return build_not_evaluated_result(case, trial, problem, invocations=invocations)
    result = _begin_result(case, trial, invocations)
    turns = [
        Turn(index=number, expect=turn.expect if turn.HasField("expect") else None, invocation=invocation)
        for number, (turn, invocation) in enumerate(zip(case.turns, invocations, strict=True))
    ]
    merged: Mapping[str, str] = {}
    if case.user.HasField("expect") and invocations:
        whole, merged = merge_turns(invocations)
        turns.append(Turn(index=len(turns), expect=case.user.expect, invocation=whole, is_conversation=True))
    with limit_work():
        marks = _add_scores(result, case, turns, extra_scores)
    if of_whole := marks.get(len(invocations)):
        also = {one: of_whole[other] for one, other in merged.items() if other in of_whole}
        marks = {**marks, len(invocations): {**of_whole, **also}}
    result.verdict, result.reason = _verdict(result.scores)
    _add_turns(result, case, invocations, marks)
    return result


def has_crashed(case: EvalCase, invocations: Sequence[Invocation]) -> bool:
    """Return whether a turn of a trial failed or was cancelled unexpectedly."""
    return any(_find_crashes(case, invocations))


def build_crashed_attempt(case: EvalCase, invocations: Sequence[Invocation]) -> CrashedAttempt:
    """Return what is kept of an attempt at a trial that crashed."""
    result = _build_crash_result(case, invocations, trial=0)
    return CrashedAttempt(
        reason=result.reason,
        run_ids=[invocation.run_id for invocation in invocations],
        usage=result.usage if result.HasField("usage") else None,
    )


def _find_crashes(case: EvalCase, invocations: Sequence[Invocation]) -> Iterator[tuple[int, Invocation]]:
    """Yield the turns that failed or were cancelled unexpectedly, with their numbers."""
    for number, (turn, one) in enumerate(zip(case.turns, invocations, strict=False)):
        expected = {run_outcome.find_expected_state(turn.expect.run)}
        if number == len(invocations) - 1:
            expected.add(run_outcome.find_expected_state(case.user.expect.run))
        if one.state in _CRASHED and one.state not in expected:
            yield number, one


def build_not_evaluated_result(
    case: EvalCase,
    trial: int,
    reason: str,
    *,
    invocations: Sequence[Invocation] = (),
    unanswered: input_pb2.InputRequest | None = None,
) -> CaseTrialResult:
    """Return the result of a trial that could not be scored, with the turns that were run."""
    result = _begin_result(case, trial, invocations)
    result.verdict, result.reason = VERDICT_NOT_EVALUATED, reason[:MAX_REASON]
    if unanswered is not None:
        result.unanswered.CopyFrom(unanswered)
    _add_turns(result, case, invocations, {})
    return result


def _copy_with_name(metric: EvalMetric, name: str) -> EvalMetric:
    named = copy_of(metric)
    named.name = name
    return named


def _is_expected(case: EvalCase, field: str) -> bool:
    return any(field in (known.name for known, _ in expect.ListFields()) for expect in list_expectations(case))


def _scores_field(metric: EvalMetric, field: str) -> bool:
    """Return whether a metric judges a field of expectations: not if it has its own expectation instead."""
    if field == "answer":
        compares_exactly = metric.HasField("final_response") and not metric.final_response.HasField("answer")
        return compares_exactly or text_metrics.has_expected_reference(metric)
    if field == "tools":
        return metric.HasField("tool_trajectory") and not metric.tool_trajectory.tools
    return metric.HasField("run_outcome" if field == "run" else "agent_trajectory")


def _begin_result(case: EvalCase, trial: int, invocations: Sequence[Invocation]) -> CaseTrialResult:
    """Return what is known of a trial before it is scored."""
    result = CaseTrialResult(case_id=case.id, trial=trial)
    used, durations = Sums(), [budget.duration_ns(invocation) for invocation in invocations]
    for invocation in invocations:
        used.add(budget.compute_own_usage(invocation))
    if any(invocation.HasField("tree_usage") for invocation in invocations):
        result.usage.CopyFrom(used.usage())
    if any(duration is not None for duration in durations):
        result.duration.FromNanoseconds(min(_LONGEST_NS, sum(filter(None, durations))))
    return result


def _build_crash_result(case: EvalCase, invocations: Sequence[Invocation], *, trial: int) -> CaseTrialResult:
    number, crash = next(_find_crashes(case, invocations))
    result = _begin_result(case, trial, invocations)
    ended = "was cancelled" if crash.state == execution_pb2.EXECUTION_STATE_CANCELLED else "failed"
    why = f": {crash.error.message}" if crash.error.message else "."
    result.reason = f"{_subject(case, number)} {ended}{why}"[:MAX_REASON]
    result.crashed, result.verdict = True, VERDICT_FAILED
    _add_turns(result, case, invocations, {})
    return result


def _problems(case: EvalCase, invocations: Sequence[Invocation]) -> Iterator[str]:
    """Yield why a trial cannot be scored."""
    for number, invocation in enumerate(invocations):
        subject = _subject(case, number)
        if invocation.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            yield f"{subject} waits for input."
        if invocation.state not in _ENDED:
            yield f"{subject} has not ended."
        if invocation.agents_total > len(invocation.agents) or invocation.tools_total > len(invocation.tools):
            yield f"{subject} has more agents or tool calls than its record."
        if len({agent.invocation_id for agent in invocation.agents}) < len(invocation.agents):
            yield f"The record of {subject[:1].lower()}{subject[1:]} has several agents with the same invocation_id."
        for anomaly in (*invocation.anomalies, *(one for agent in invocation.agents for one in agent.anomalies)):
            yield f"The record of {subject[:1].lower()}{subject[1:]} is inconsistent: {anomaly.message}"[:MAX_REASON]
    if len(invocations) != len(case.turns):
        yield f"The case has {len(case.turns)} turns, and {len(invocations)} were run."


def _subject(case: EvalCase, number: int) -> str:
    return name_turn(case, number) if len(case.turns) > 1 else "The run"


def _add_scores(
    result: CaseTrialResult, case: EvalCase, turns: Sequence[Turn], extra_scores: Mapping[str, MetricScore]
) -> Mapping[int, agent_trajectory.Marks]:
    """Add the score of each metric, and return the marks of the first agent_trajectory by turn."""
    marks: Mapping[int, agent_trajectory.Marks] | None = None
    for metric in applicable_metrics(case):
        score = extra_scores.get(metric.name)
        try:
            if score is None and metric.HasField("agent_trajectory"):
                judgment = agent_trajectory.score_with_marks(metric, case, turns)
                if judgment is None:
                    continue
                marks, score = judgment.marks if marks is None else marks, judgment.score
            elif score is None:
                score = _score(metric, case, turns)
        except TooMuchWork as error:
            score = no_score(metric, str(error))
        if score is not None:
            result.scores.append(score)
    _shorten(result)
    return marks or {}


def _score(metric: EvalMetric, case: EvalCase, turns: Sequence[Turn]) -> MetricScore | None:
    kind = metric.WhichOneof("kind") or ""
    if kind in _SCORES:
        return _SCORES[kind](metric, case, turns)
    return no_score(metric, "It was not asked." if kind else "The metric is of no kind that this server knows.")


def _verdict(scores: Sequence[MetricScore]) -> tuple[Verdict.ValueType, str]:
    """Return the verdict of a trial and the reason of the first score that decides it."""
    for status in (VERDICT_FAILED, VERDICT_NOT_EVALUATED):
        for score in scores:
            if score.verdict == status:
                short = f" is {score.score:.4g}, below {score.threshold:.4g}" if score.HasField("score") else ""
                words = f"{score.name}{short}: {score.reason}" if score.reason else f"{score.name}{short}."
                return status, words[:MAX_REASON]
    return VERDICT_PASSED, ""


def _shorten(result: CaseTrialResult) -> None:
    """Leave out differences of trees, the last ones first, then the ends of judges' reasons, until the scores fit."""
    # By halves, as each look at the sizes passes over all scores.
    keep = max((len(tree.differences) for score in result.scores for tree in score.tree_comparisons), default=0)
    while keep and sum(score.ByteSize() for score in result.scores) > _MAX_SCORE_BYTES:
        keep //= 2
        for score in result.scores:
            for tree in score.tree_comparisons:
                del tree.differences[keep:]
    keep = max((len(judgment.reason) for score in result.scores for judgment in score.judgments), default=0)
    while keep and sum(score.ByteSize() for score in result.scores) > _MAX_SCORE_BYTES:
        keep //= 2
        for judgment in (judgment for score in result.scores for judgment in score.judgments):
            judgment.reason = judgment.reason[:keep]


def _add_turns(
    result: CaseTrialResult,
    case: EvalCase,
    invocations: Sequence[Invocation],
    marks: Mapping[int, agent_trajectory.Marks],
) -> None:
    """Add the trees of the turns, cut so that the whole result is within its bound."""
    room = MAX_BYTES - result.ByteSize()
    has_user = case.HasField("user")
    whole = marks.get(len(invocations), {})  # of the conversation; the ids of invocations are unique in it
    marks = {number: marks.get(number, whole) for number in range(len(invocations))}
    made = [
        turn_result(one, marks=marks[number], max_bytes=room, has_user=has_user)
        for number, one in enumerate(invocations)
    ]
    if sum(turn.ByteSize() for turn in made) > room:
        # Those below an equal share stay whole; what they leave of it is not shared out again.
        share = room // len(made)
        for number, turn in enumerate(made):
            if turn.ByteSize() > share:
                made[number] = turn_result(invocations[number], marks=marks[number], max_bytes=share, has_user=has_user)
    result.turns.extend(made)
