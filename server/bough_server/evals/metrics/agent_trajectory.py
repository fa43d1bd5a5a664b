"""Compare the tree of agents with the expected one: who called whom."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2, invocation_pb2
from bough_server.comparison_work import spend
from bough_server.evals.agent_tree import AgentNode, agent_tree
from bough_server.evals.metrics import tool_trajectory
from bough_server.evals.metrics.tree_matching import ANY, ExpectedNode, Match, best_matching, expected_tree
from bough_server.evals.metrics.tree_words import MAX_DIFFERENCES, TreeDifferences

TRANSPARENT: Final = frozenset(
    {
        execution_pb2.AGENT_KIND_SEQUENCE,
        execution_pb2.AGENT_KIND_PARALLEL,
        execution_pb2.AGENT_KIND_LOOP,
        execution_pb2.AGENT_KIND_PLAN_EXECUTE,
        execution_pb2.AGENT_KIND_GRAPH,
    }
)
"""Kinds whose agents do not count by default: composites by rule."""

_MAX_COUNT: Final = 2**31 - 1
_NODE_STEPS: Final = 10
"""The steps to look for a forbidden agent at one of those below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeScore:
    """How a tree compares with the expected one."""

    comparison: eval_result_pb2.TreeComparison
    """With turn 0 and at most 100 differences."""
    score: float
    """1 exactly if nothing is violated, else an F1 below 1.

    In that F1 a matched agent whose tool calls fail, or that has forbidden agents below it, does not count as matched;
    in the comparison's own recall, precision and F1 it does.
    """
    marks: Mapping[str, eval_result_pb2.TreeMark.ValueType]
    """By invocation id; without transparent agents, which are not compared."""


def compare_trees(
    expected: Sequence[eval_set_pb2.ExpectedAgent],
    actual: invocation_pb2.Invocation,
    metric: eval_set_pb2.AgentTrajectoryMetric,
) -> TreeScore:
    """Compare the tree of a record with the expected roots. The record must be whole, not cut to an answer's limits.

    Raises:
        ValueError: They cannot be compared: the trees are too large, or a call was cut. The message says so.
        TooMuchWork: It takes too many steps to compare them.
    """
    wanted = expected_tree(expected, order=metric.roots_order, extra=metric.extra_roots)
    there = agent_tree(actual, is_transparent=_transparent(wanted, metric))
    faults = _Faults(tool_trajectory.names_of(actual.agents))
    matches = best_matching(wanted, there, faults.count)
    differences = TreeDifferences(matches)
    counts = _Counts.of(matches, faults)
    comparison = eval_result_pb2.TreeComparison(
        violations=min(counts.violations, _MAX_COUNT),
        recall=counts.recall(),
        precision=counts.precision(),
        f1=_f1(counts.recall(), counts.precision()),
        differences=islice(
            chain(differences.agents(), differences.tools(faults.tools), differences.forbidden(faults.forbidden)),
            MAX_DIFFERENCES,
        ),
    )
    sound = _f1(counts.recall(sound=True), counts.precision(sound=True))
    return TreeScore(
        comparison=comparison,
        score=1.0 if not counts.violations else sound,
        marks=_marks(matches, differences, faults),
    )


def _transparent(
    wanted: Sequence[ExpectedNode], metric: eval_set_pb2.AgentTrajectoryMetric
) -> Callable[[invocation_pb2.AgentInvocation], bool]:
    """Return what tells the agents that do not count: those of transparent kinds that the expectation does not name."""
    kinds = frozenset(metric.transparent.kinds) if metric.HasField("transparent") else TRANSPARENT
    named = {name for node in wanted for name in (node.agent.name, *node.agent.forbidden)} - {ANY}
    return lambda agent: agent.kind in kinds and agent.name not in named


class _Faults:
    """What is wrong with a matched agent in itself: its tool calls, and forbidden agents below it."""

    def __init__(self, agents: Collection[str]) -> None:
        self._agents = agents
        """The names of all agents of the record."""
        self._counts: dict[tuple[int, int], int] = {}

    def count(self, expected: ExpectedNode, actual: AgentNode) -> int:
        key = expected.index, actual.index
        if key not in self._counts:
            self._counts[key] = bool(self.tools(expected, actual)) + len(self.forbidden(expected, actual))
        return self._counts[key]

    def tools(self, expected: ExpectedNode, actual: AgentNode) -> str:
        """Say how the agent's tool calls differ; empty if they do not, or are not scored.

        Raises ValueError if a call that has to be compared was cut in the record.
        """
        agent = expected.agent
        if not agent.tools and not agent.tools_mode:
            return ""
        calls = tool_trajectory.counted(agent.tools, actual.calls, agents=self._agents)
        if cut := tool_trajectory.cut_call(agent.tools, calls):
            raise ValueError(cut)
        return tool_trajectory.mismatch(agent.tools, calls, agent.tools_mode)

    def forbidden(self, expected: ExpectedNode, actual: AgentNode) -> list[AgentNode]:
        """Return the agents below that are forbidden, in preorder."""
        if not expected.agent.forbidden:
            return []
        spend(_NODE_STEPS * (actual.size + 5))
        names = frozenset(expected.agent.forbidden)
        return [node for node in actual.subtree() if node is not actual and node.agent.name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    violations: int
    matched: int
    matched_required: int
    required: int
    extra: int
    faulty: int
    """Matched agents that are wrong in themselves."""
    faulty_required: int

    @classmethod
    def of(cls, matches: Sequence[Match], faults: _Faults) -> "_Counts":
        found = [(match, faults.count(match.expected, match.actual)) for match in matches[1:]]
        required = sum(match.is_required for match, _ in found)
        missing = sum(child.required * count for match in matches for child, count in match.missing)
        refused = [node for match in matches if match.expected.refuses_extra for node in match.extra]
        return cls(
            violations=missing + len(refused) + sum(count for _, count in found),
            matched=len(found),
            matched_required=required,
            required=required + missing,
            extra=sum(node.size for node in refused),
            faulty=sum(count > 0 for _, count in found),
            faulty_required=sum(match.is_required and count > 0 for match, count in found),
        )

    def recall(self, *, sound: bool = False) -> float:
        """Return the part of the required agents that is matched, by sound agents alone if that is asked."""
        return (self.matched_required - sound * self.faulty_required) / self.required if self.required else 1.0

    def precision(self, *, sound: bool = False) -> float:
        """Return the part of the agents that are not allowed as extra that is matched."""
        counting = self.matched + self.extra
        return (self.matched - sound * self.faulty) / counting if counting else 1.0


def _f1(recall: float, precision: float) -> float:
    return 2 * recall * precision / (recall + precision) if recall + precision else 0.0


def _marks(
    matches: Sequence[Match], differences: TreeDifferences, faults: _Faults
) -> dict[str, eval_result_pb2.TreeMark.ValueType]:
    """Return the mark of each agent.

    A matched one is VIOLATED if its calls or forbidden agents below it are, or if its children are not as expected.
    """
    marks: dict[str, eval_result_pb2.TreeMark.ValueType] = {}
    for match in matches[1:]:
        is_violated = (
            match.missing
            or (match.extra and match.expected.refuses_extra)
            or faults.count(match.expected, match.actual)
        )
        mark = eval_result_pb2.TREE_MARK_VIOLATED if is_violated else eval_result_pb2.TREE_MARK_MATCHED
        marks[match.actual.agent.invocation_id] = mark
    for nodes, mark in (
        (differences.refused, eval_result_pb2.TREE_MARK_UNEXPECTED),
        (differences.allowed, eval_result_pb2.TREE_MARK_ALLOWED),
        (differences.moved, eval_result_pb2.TREE_MARK_MOVED),
    ):
        marks.update((node.agent.invocation_id, mark) for node in nodes)
    return marks
