"""Compare the tree of agents with the expected one: who called whom."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, TypeAlias

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2, invocation_pb2
from bough_server.evals.metrics import tool_trajectory
from bough_server.evals.metrics.tree_matching import ANY, ExpectedNode, Match, best_matching, build_expected_tree
from bough_server.evals.metrics.turn import Turn, TurnScore, mean_score, name_state, no_turn_score
from bough_server.evals.trees.agent_tree import AgentNode, agent_tree, join_path, path_of
from bough_server.matching import values
from bough_server.matching.work import spend
from bough_server.runtime.agent import value_of
from bough_server.truncation import truncate_text

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
    wanted = build_expected_tree(expected, order=metric.roots_order, extra=metric.extra_roots)
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
            chain(
                differences.agents(),
                differences.of_matches(eval_result_pb2.DIFFERENCE_KIND_TOOLS, faults.tools),
                differences.of_matches(eval_result_pb2.DIFFERENCE_KIND_STATE, faults.state),
                differences.of_matches(eval_result_pb2.DIFFERENCE_KIND_INPUT, faults.input),
                differences.forbidden(faults.forbidden),
            ),
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
    """What is wrong with a matched agent in itself: its tool calls, state and input, and forbidden agents below it."""

    def __init__(self, agents: Collection[str]) -> None:
        self._agents = agents
        """The names of all agents of the record."""
        self._counts: dict[tuple[int, int], int] = {}

    def count(self, expected: ExpectedNode, actual: AgentNode) -> int:
        key = expected.index, actual.index
        if key not in self._counts:
            tools = self._select_calls(expected, actual)
            found = (
                tools is not None
                and tool_trajectory.has_mismatch(expected.agent.tools, tools, expected.agent.tools_mode),
                self.state(expected, actual),
                self.input(expected, actual),
            )
            self._counts[key] = sum(map(bool, found)) + len(self.forbidden(expected, actual))
        return self._counts[key]

    def state(self, expected: ExpectedNode, actual: AgentNode) -> str:
        """Say how the state in which the agent ended differs; empty if it does not."""
        wanted, found = expected.agent.state, actual.agent.state
        if not wanted or wanted == found:
            return ""
        return f"{name_state(found)}, expected {name_state(wanted)}"

    def input(self, expected: ExpectedNode, actual: AgentNode) -> str:
        """Say how the agent's input differs; empty if it does not. Raises ValueError if it was cut in the record."""
        if not expected.agent.HasField("input_match"):
            return ""
        given = actual.agent.input
        if any(part.truncated for part in given.parts):
            raise ValueError(f"The input of {actual.name} was cut in the record, so it cannot be compared.")
        wrong = values.mismatch(expected.agent.input_match, value_of(given))
        return f"the input differs: {wrong}" if wrong else ""

    def tools(self, expected: ExpectedNode, actual: AgentNode) -> str:
        """Say how the agent's tool calls differ; empty if they do not, or are not scored.

        Raises ValueError if a call that has to be compared was cut in the record.
        """
        calls = self._select_calls(expected, actual)
        agent = expected.agent
        return "" if calls is None else tool_trajectory.mismatch(agent.tools, calls, agent.tools_mode)

    def _select_calls(self, expected: ExpectedNode, actual: AgentNode) -> list[invocation_pb2.ToolInvocation] | None:
        agent = expected.agent
        if not agent.tools and not agent.tools_mode:
            return None
        calls = tool_trajectory.select_calls(agent.tools, actual.calls, agents=self._agents)
        if cut := tool_trajectory.find_truncated_call(agent.tools, calls):
            raise ValueError(cut)
        return calls

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
    matches: Sequence[Match], differences: "TreeDifferences", faults: _Faults
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


MAX_DIFFERENCES: Final = 100
"""The most differences of one tree."""

_MAX_MISSING: Final = 10_000
"""The most missing agents that are looked for elsewhere in the tree; repeats in repeats can be billions."""
_MAX_MESSAGE_BYTES: Final = 1_000

Difference = eval_result_pb2.TreeDifference


class TreeDifferences:
    """The differences of a matching.

    A missing and an unmatched agent of one name are paired as moved, both in preorder.
    """

    def __init__(self, matches: Sequence[Match]) -> None:
        self._matches = {match.actual: match for match in matches}
        self.refused = _below_extra(match for match in matches if match.expected.refuses_extra)
        """Agents that are there and not expected, in preorder."""
        self.allowed = _below_extra(match for match in matches if not match.expected.refuses_extra)
        """Agents that are there, not expected and allowed, in preorder."""
        self.missing: list[ExpectedNode] = []
        """Agents that are expected and nowhere, in preorder, repeats included."""
        self.moved: dict[AgentNode, ExpectedNode] = {}
        """Agents that are there, and where they are expected."""
        self._pair_moves(matches)

    def _pair_moves(self, matches: Sequence[Match]) -> None:
        unmatched: dict[str, deque[AgentNode]] = {}
        for node in sorted([*self.refused, *self.allowed], key=lambda node: node.index):
            unmatched.setdefault(node.agent.name, deque()).append(node)
        for expected in islice(_missing(matches), _MAX_MISSING):
            elsewhere = unmatched.get(expected.name)
            if elsewhere:
                self.moved[elsewhere.popleft()] = expected
            else:
                self.missing.append(expected)

    def agents(self) -> Iterator[Difference]:
        """Yield the agents that are moved, missing and unexpected."""
        for node, expected in self.moved.items():
            yield self._difference(
                eval_result_pb2.DIFFERENCE_KIND_MOVED, self._describe_move(node, expected), node=node, expected=expected
            )
        for expected in self.missing:
            name = "an agent" if expected.name == ANY else expected.name
            caller = _caller(expected)
            where = f"expected to be called by {caller}" if caller else "expected as a root"
            if not expected.at_least:
                where += f", not at all or at least {expected.least_if_there} times"
            yield self._difference(
                eval_result_pb2.DIFFERENCE_KIND_MISSING, f"{name} is missing, {where}", expected=expected
            )
        for node in self.refused:
            if node not in self.moved:
                message = f"{node.name} {_describe_caller(node)}, which is not expected"
                yield self._difference(eval_result_pb2.DIFFERENCE_KIND_UNEXPECTED, message, node=node)

    def of_matches(
        self,
        kind: eval_result_pb2.DifferenceKind.ValueType,
        describe: Callable[[ExpectedNode, AgentNode], str],
    ) -> Iterator[Difference]:
        """Yield the matched agents of which `describe` says how they differ."""
        for match in self._matches.values():
            if words := describe(match.expected, match.actual):
                yield self._difference(kind, f"{match.actual.name}: {words}", node=match.actual)

    def forbidden(self, found: Callable[[ExpectedNode, AgentNode], list[AgentNode]]) -> Iterator[Difference]:
        """Yield the agents that are `found` below a matched agent that forbids them."""
        for match in self._matches.values():
            for node in found(match.expected, match.actual):
                message = f"{node.name} {_describe_caller(node)}, forbidden below {match.actual.name}"
                yield self._difference(eval_result_pb2.DIFFERENCE_KIND_FORBIDDEN, message, node=node)

    def _difference(
        self,
        kind: eval_result_pb2.DifferenceKind.ValueType,
        message: str,
        *,
        node: AgentNode | None = None,
        expected: ExpectedNode | None = None,
    ) -> Difference:
        return Difference(
            kind=kind,
            agent=node.name if node is not None else expected.name if expected is not None else "",
            expected_parent=build_expected_path(expected.parent) if expected is not None else "",
            actual_parent=path_of(node.parent) if node is not None else "",
            message=truncate_text(message, _MAX_MESSAGE_BYTES),
            invocation_id=node.agent.invocation_id if node is not None else "",
        )

    def _describe_move(self, node: AgentNode, expected: ExpectedNode) -> str:
        """Say where an agent is and where it is expected: by its callers' names, or their paths if those are equal."""
        assert node.parent is not None
        assert expected.parent is not None
        actual_caller, expected_caller = node.parent.name, _caller(expected)
        if actual_caller == expected_caller:
            actual_caller, expected_caller = path_of(node.parent), build_expected_path(expected.parent)
        if actual_caller != expected_caller:
            wanted = f"expected by {expected_caller}" if expected_caller else "expected as a root"
            return f"{node.name} {_describe_caller(node, actual_caller)}, {wanted}"
        caller = self._matches.get(node.parent)
        if caller is not None and caller.expected is expected.parent:
            return (
                f"{node.name} {_describe_caller(node)} in another order, or with other agents or tools, than expected"
            )
        return f"{node.name} {_describe_caller(node)}, expected by another {expected_caller}"


def build_expected_path(node: ExpectedNode | None) -> str:
    """Return the names from the root down to an expected agent, joined by "/"; empty for the virtual root."""
    names = []
    while node is not None and node.parent is not None:
        names.append(node.name)
        node = node.parent
    return join_path(names[::-1])


def _caller(expected: ExpectedNode) -> str:
    return expected.parent.name if expected.parent is not None else ""


def _describe_caller(node: AgentNode, caller: str = "") -> str:
    caller = caller or (node.parent.name if node.parent is not None else "")
    return f"was called by {caller}" if caller else "was a root"


def _below_extra(matches: Iterator[Match]) -> list[AgentNode]:
    found = (node for match in matches for extra in match.extra for node in extra.subtree())
    return sorted(found, key=lambda node: node.index)


def _missing(matches: Sequence[Match]) -> Iterator[ExpectedNode]:
    """Yield the required agents that are not there, in preorder, repeats included; there can be billions."""
    for match in matches:
        for child, count in match.missing:
            for _ in range(count):
                yield from _walk_required_nodes(child)


def _walk_required_nodes(root: ExpectedNode) -> Iterator[ExpectedNode]:
    # Repeats are iterated, not listed: a thousand times a thousand of them would not fit into memory.
    ahead: list[Iterator[ExpectedNode]] = [iter((root,))]
    while ahead:
        node = next(ahead[-1], None)
        if node is None:
            ahead.pop()
            continue
        yield node
        ahead.append(child for child in node.children for _ in range(child.at_least))


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
