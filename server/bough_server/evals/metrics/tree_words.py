"""The differences between an expected tree of agents and the one that there is, in words."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.evals.metrics.tree_matching import ANY, ExpectedNode, Match
from bough_server.evals.trees.agent_tree import AgentNode, join_path, path_of
from bough_server.truncation import truncate_text

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
            yield self._difference(
                eval_result_pb2.DIFFERENCE_KIND_MISSING, f"{name} is missing, {where}", expected=expected
            )
        for node in self.refused:
            if node not in self.moved:
                message = f"{node.name} {_describe_caller(node)}, which is not expected"
                yield self._difference(eval_result_pb2.DIFFERENCE_KIND_UNEXPECTED, message, node=node)

    def tools(self, failed: Callable[[ExpectedNode, AgentNode], str]) -> Iterator[Difference]:
        """Yield the matched agents whose tool calls `failed` describes."""
        for match in self._matches.values():
            if words := failed(match.expected, match.actual):
                yield self._difference(
                    eval_result_pb2.DIFFERENCE_KIND_TOOLS, f"{match.actual.name}: {words}", node=match.actual
                )

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
