"""The agent_trajectory metric: the score of tree comparisons over the turns of a run, and the marks of their agents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2, eval_set_pb2
from bough_server.evals.metrics.agent_trajectory import TreeScore, compare_trees
from bough_server.evals.metrics.turn import Turn, TurnScore, mean_score, no_turn_score

Marks: TypeAlias = Mapping[str, eval_result_pb2.TreeMark.ValueType]
"""The marks of a turn's agents by invocation id."""

_MAX_SENTENCES: Final = 5
"""The most differences of a turn that its reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryScore:
    """What an agent_trajectory metric found."""

    score: eval_result_pb2.MetricScore
    marks: Mapping[int, Marks]
    """By the number of the turn."""


def score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns with expected agents; None if there are none."""
    judgment = score_with_marks(metric, case, turns)
    return judgment.score if judgment is not None else None


def score_with_marks(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> TrajectoryScore | None:
    """Return the mean over the turns with expected agents and how each agent compares; None if there are none."""
    scores: dict[int, TurnScore] = {}
    found: dict[int, TreeScore] = {}
    for turn in turns:
        if turn.expect is None or not turn.expect.agents:
            continue
        try:
            tree = compare_trees(turn.expect.agents, turn.invocation, metric.agent_trajectory)
        except ValueError as error:
            scores[turn.index] = no_turn_score(str(error))
            continue
        found[turn.index] = tree
        scores[turn.index] = TurnScore(value=tree.score, reason=_reason(tree.comparison))
    result = mean_score(metric, case, scores)
    if result is None:
        return None
    for index, tree in found.items():
        result.tree_comparisons.add().CopyFrom(tree.comparison)
        result.tree_comparisons[-1].turn = index
    return TrajectoryScore(score=result, marks={index: tree.marks for index, tree in found.items()})


def _reason(comparison: eval_result_pb2.TreeComparison) -> str:
    messages = [difference.message for difference in comparison.differences]
    more = [f"and {len(messages) - _MAX_SENTENCES} more"] if len(messages) > _MAX_SENTENCES else []
    return "; ".join(messages[:_MAX_SENTENCES] + more)
