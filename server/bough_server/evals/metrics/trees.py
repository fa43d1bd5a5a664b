"""The agent_trajectory metric: the score of tree comparisons over the turns of a run, and the marks of their agents."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2, eval_set_pb2
from bough_server.evals.metrics.agent_trajectory import TreeScore, compare_trees
from bough_server.evals.metrics.tool_trajectory import cut_call
from bough_server.evals.metrics.turn import Turn, TurnScore, mean_score, no_score

Marks: TypeAlias = Mapping[str, eval_result_pb2.TreeMark.ValueType]
"""The marks of a turn's agents by invocation id."""

_MAX_SENTENCES: Final = 5
"""The most differences of a turn that its reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeJudgement:
    """What an agent_trajectory metric found."""

    score: eval_result_pb2.MetricScore
    marks: Mapping[int, Marks]
    """By the number of the turn."""


def score(
    metric: eval_set_pb2.Metric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns with expected agents; None if there are none."""
    judgement = judge(metric, case, turns)
    return judgement.score if judgement is not None else None


def judge(metric: eval_set_pb2.Metric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]) -> TreeJudgement | None:
    """Return the mean over the turns with expected agents and how each agent compares; None if there are none."""
    found: dict[int, TreeScore] = {}
    for turn in turns:
        expected = turn.expect.agents if turn.expect is not None else ()
        if not expected:
            continue
        problem = cut_call(list(_tools(expected)), turn.invocation.tools)
        try:
            found[turn.index] = compare_trees(expected, turn.invocation, metric.agent_trajectory)
        except ValueError as error:  # the trees are too large to be compared
            problem = str(error)
        if problem:
            return TreeJudgement(score=no_score(metric, problem), marks={})
    scores = {index: TurnScore(value=tree.score, reason=_reason(tree.comparison)) for index, tree in found.items()}
    result = mean_score(metric, case, scores)
    if result is None:
        return None
    for index, tree in found.items():
        result.agents.add().CopyFrom(tree.comparison)
        result.agents[-1].turn = index
    return TreeJudgement(score=result, marks={index: tree.marks for index, tree in found.items()})


def _tools(agents: Iterable[eval_set_pb2.ExpectedAgent]) -> Iterator[eval_set_pb2.ExpectedTool]:
    """Yield the calls that agents and all below them are expected to make."""
    for agent in agents:
        yield from agent.tools
        yield from _tools(agent.children)


def _reason(comparison: eval_result_pb2.TreeComparison) -> str:
    messages = [difference.message.rstrip(".") for difference in comparison.differences]
    more = f" and {len(messages) - _MAX_SENTENCES} more" if len(messages) > _MAX_SENTENCES else ""
    return "; ".join(messages[:_MAX_SENTENCES]) + more
