"""The agents of a record as a tree of objects: callers, callees in order, and the calls that each made.

Nothing here recurses: the depth of a tree is not bounded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import invocation_pb2
from bough_server.tree.record import arrange
from bough_server.truncation import truncate_text

_MAX_NAME_BYTES: Final = 256
_MAX_PATH_NAMES: Final = 16


@dataclass(slots=True, eq=False, kw_only=True)
class AgentNode:
    """An agent invocation of the tree. The one at the top is virtual: its children are the roots."""

    index: int
    """The position in preorder; 0 for the virtual root."""
    agent: invocation_pb2.AgentInvocation
    parent: "AgentNode | None" = None
    children: "list[AgentNode]" = field(default_factory=list)
    calls: list[invocation_pb2.ToolInvocation] = field(default_factory=list)
    """Its tool calls, in order of sequence."""
    size: int = 1
    """The number of agents in its subtree, itself included."""

    @property
    def name(self) -> str:
        """Its name, cut to what a sentence holds; empty on the virtual root."""
        return truncate_text(self.agent.name, _MAX_NAME_BYTES)

    def subtree(self) -> Iterator["AgentNode"]:
        """Yield it and everything below it, in preorder."""
        ahead = [self]
        while ahead:
            node = ahead.pop()
            yield node
            ahead.extend(reversed(node.children))


def agent_tree(
    invocation: invocation_pb2.Invocation,
    *,
    is_transparent: Callable[[invocation_pb2.AgentInvocation], bool] = lambda _: False,
) -> list[AgentNode]:
    """Return the agents of a record in preorder, below a virtual root that comes first.

    Transparent agents are left out, and their children stand in their place, in order. An agent whose caller is not in
    the record is a root, and so is one whose callers lead back to it.
    """
    # Reversed, so that the first of several with one id is kept.
    agents = {agent.invocation_id: agent for agent in reversed(invocation.agents)}
    forest = arrange({agent.invocation_id: agent.parent_invocation_id for agent in invocation.agents})
    nodes = [AgentNode(index=0, agent=invocation_pb2.AgentInvocation())]
    places = {"": nodes[0]}
    for one in forest.order:
        caller = places[forest.parents.get(one, "")]
        if is_transparent(agents[one]):
            places[one] = caller
        else:
            places[one] = AgentNode(index=len(nodes), agent=agents[one], parent=caller)
            caller.children.append(places[one])
            nodes.append(places[one])
    own = {node.agent.invocation_id: node for node in nodes[1:]}
    for call in sorted(invocation.tools, key=lambda call: call.sequence):
        if call.invocation_id in own:
            own[call.invocation_id].calls.append(call)
    # Backwards, as in preorder a caller comes before those that it called.
    for node in reversed(nodes[1:]):
        assert node.parent is not None
        node.parent.size += node.size
    return nodes


def path_of(node: AgentNode | None) -> str:
    """Return the names from the root down to an agent, joined by "/"; empty for the virtual root.

    Of a deep path the middle is left out.
    """
    names = []
    while node is not None and node.parent is not None:
        names.append(node.name)
        node = node.parent
    return join_path(names[::-1])


def join_path(names: list[str]) -> str:
    """Return names joined by "/"; "..." replaces all but the first and the last ones if there are more than 16."""
    if len(names) > _MAX_PATH_NAMES:
        names = [names[0], "...", *names[2 - _MAX_PATH_NAMES :]]
    return "/".join(names)
