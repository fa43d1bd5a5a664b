"""The turns that a metric judges, and its score over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2, invocation_pb2
from bough_server.evals.metrics.statistics import reaches

MAX_REASON: Final = 2_000
"""The most characters of a score's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a trial."""

    index: int
    """The number of the turn, from 0."""
    expect: eval_set_pb2.EvalExpectation | None
    """What is expected of it; None if nothing is."""
    invocation: invocation_pb2.Invocation
    """The whole record of its run, folded without the limits of an answer."""
    is_conversation: bool = False
    """Whether it is no turn but all of them, as SimulatedUser.expect is about them; its index is then their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScore:
    """What a metric found in one turn."""

    value: float | None
    """The score; None if the turn could not be scored."""
    reason: str = ""
    """What differs, or why the turn could not be scored; empty if there is nothing to say."""


def score_difference(difference: str) -> TurnScore:
    """Return the score of a turn that is either as expected or not: 1 without a difference, else 0."""
    return TurnScore(value=0.0 if difference else 1.0, reason=difference)


def no_turn_score(reason: str) -> TurnScore:
    """Return the score of a turn that could not be scored."""
    return TurnScore(value=None, reason=reason)


def list_expectations(case: eval_set_pb2.EvalCase) -> list[eval_set_pb2.EvalExpectation]:
    """Return what a case expects of its turns, and of the conversation with its simulated user."""
    return [*(turn.expect for turn in case.turns), case.user.expect]


def name_of(metric: eval_set_pb2.EvalMetric) -> str:
    """Return a metric's name; default: that of its function, else its kind."""
    return metric.name or metric.custom.name or metric.WhichOneof("kind") or "metric"


def threshold_of(metric: eval_set_pb2.EvalMetric) -> float:
    """Return what a metric's score has to reach."""
    return metric.threshold if metric.HasField("threshold") else 1.0


def is_configured(metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase) -> bool:
    """Return whether the case names the metric, so that it is not only there because something is expected."""
    return name_of(metric) in map(name_of, case.metrics)


def mean_score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, scores: Mapping[int, TurnScore]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns that a metric judges, by their numbers; None if it judges none.

    If one of them could not be scored, the whole run is not.
    """
    if not scores:
        return None
    missing = {index: score for index, score in scores.items() if score.value is None}
    if missing:
        return no_score(metric, _reason(case, missing))
    values = [score.value for score in scores.values() if score.value is not None]
    return with_score(metric, sum(values) / len(values), _reason(case, scores))


def with_score(metric: eval_set_pb2.EvalMetric, score: float, reason: str = "") -> eval_result_pb2.MetricScore:
    """Return a score, which passes if it reaches the threshold."""
    threshold = threshold_of(metric)
    has_passed = reaches(score, threshold)
    return eval_result_pb2.MetricScore(
        name=name_of(metric),
        verdict=eval_result_pb2.VERDICT_PASSED if has_passed else eval_result_pb2.VERDICT_FAILED,
        score=score,
        threshold=threshold,
        reason=reason[:MAX_REASON],
    )


def no_score(metric: eval_set_pb2.EvalMetric, reason: str) -> eval_result_pb2.MetricScore:
    """Return the score of a metric that could not be scored."""
    return eval_result_pb2.MetricScore(
        name=name_of(metric),
        verdict=eval_result_pb2.VERDICT_NOT_EVALUATED,
        threshold=threshold_of(metric),
        reason=reason[:MAX_REASON],
    )


def _reason(case: eval_set_pb2.EvalCase, scores: Mapping[int, TurnScore]) -> str:
    """Join the reasons of turns, each with its turn if the case has several."""
    found = [(index, score.reason) for index, score in scores.items() if score.reason]
    if len(case.turns) > 1:
        return " ".join(f"{name_turn(case, index)}: {_sentence(reason)}" for index, reason in found)
    return " ".join(_sentence(reason) for _, reason in found)


def name_turn(case: eval_set_pb2.EvalCase, index: int) -> str:
    """Return what sentences call a turn: its path, and its id if it has one; a conversation after its user."""
    if index == len(case.turns) and case.HasField("user"):
        return "user.expect"
    named = case.turns[index].id if index < len(case.turns) else ""
    return f"turns[{index}] ({named})" if named else f"turns[{index}]"


def name_state(state: execution_pb2.ExecutionState.ValueType) -> str:
    """Return a state as files write it, without the prefix of its enum; of a later version its number."""
    known = state in execution_pb2.ExecutionState.values()
    return execution_pb2.ExecutionState.Name(state).removeprefix("EXECUTION_STATE_") if known else str(state)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
