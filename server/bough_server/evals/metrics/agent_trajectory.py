"""Compare the tree of agents with the expected one: who called whom, by names alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bough.v1 import eval_result_pb2, eval_set_pb2, invocation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeScore:
    """How a tree compares with the expected one."""

    comparison: eval_result_pb2.TreeComparison
    score: float
    marks: Mapping[str, eval_result_pb2.TreeMark.ValueType]
    """By invocation id."""


def compare_trees(
    expected: Sequence[eval_set_pb2.ExpectedAgent],
    actual: invocation_pb2.Invocation,
    metric: eval_set_pb2.AgentTrajectoryMetric,
) -> TreeScore:
    """Compare the branches of a tree with the expected ones, in any order."""
    wanted = Counter(_branches(expected, ""))
    there = {agent.invocation_id: agent.branch for agent in actual.agents}
    missing, surplus = wanted - Counter(there.values()), Counter(there.values()) - wanted
    differences = [
        *(_difference(eval_result_pb2.DIFFERENCE_KIND_MISSING, branch) for branch in missing.elements()),
        *(_difference(eval_result_pb2.DIFFERENCE_KIND_UNEXPECTED, branch) for branch in surplus.elements()),
    ]
    matched = wanted.total() - missing.total()
    f1 = 2 * matched / (wanted.total() + len(there)) if wanted or there else 1.0
    matching, other = eval_result_pb2.TREE_MARK_MATCHED, eval_result_pb2.TREE_MARK_UNEXPECTED
    return TreeScore(
        comparison=eval_result_pb2.TreeComparison(violations=len(differences), f1=f1, differences=differences),
        score=f1,
        marks={one: other if surplus[branch] else matching for one, branch in there.items()},
    )


def _branches(agents: Sequence[eval_set_pb2.ExpectedAgent], above: str) -> Iterator[str]:
    for agent in agents:
        yield above + agent.name
        yield from _branches(agent.children, f"{above}{agent.name}/")


def _difference(kind: eval_result_pb2.DifferenceKind.ValueType, branch: str) -> eval_result_pb2.TreeDifference:
    words = "missing" if kind == eval_result_pb2.DIFFERENCE_KIND_MISSING else "not expected"
    return eval_result_pb2.TreeDifference(kind=kind, agent=branch.rpartition("/")[2], message=f"{branch} is {words}")
