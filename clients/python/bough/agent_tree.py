"""Navigate the agent tree of an invocation: who called whom, and with which tools."""

from collections.abc import Iterator

from bough.v1 import invocation_pb2


class AgentTree:
    """The agents of an invocation; iterating yields them in preorder, each before those that it called.

    Every lookup takes constant time but `find`, which goes through the agents. An answer that was cut holds the first
    agents of the tree; `invocation.agents_total` says how many there are.
    """

    def __init__(self, invocation: invocation_pb2.Invocation) -> None:
        self.invocation = invocation
        """The invocation whose agents these are."""
        self._agents = {agent.invocation_id: agent for agent in invocation.agents}
        self._children: dict[str, list[invocation_pb2.AgentInvocation]] = {}
        for agent in invocation.agents:
            self._children.setdefault(agent.parent_invocation_id, []).append(agent)
        self._tools: dict[str, list[invocation_pb2.ToolInvocation]] = {}
        for tool in invocation.tools:
            self._tools.setdefault(tool.invocation_id, []).append(tool)

    def __iter__(self) -> Iterator[invocation_pb2.AgentInvocation]:
        return iter(self.invocation.agents)

    def __len__(self) -> int:
        return len(self.invocation.agents)

    @property
    def root(self) -> invocation_pb2.AgentInvocation | None:
        """The agent that was run; None in a tree without agents."""
        return self.invocation.agents[0] if self.invocation.agents else None

    def get(self, invocation_id: str) -> invocation_pb2.AgentInvocation | None:
        """Return the agent of an id, or None."""
        return self._agents.get(invocation_id)

    def find(self, name: str) -> list[invocation_pb2.AgentInvocation]:
        """Return the invocations of an agent by its name, in preorder; empty if it was not called."""
        return [agent for agent in self if agent.name == name]

    def children(self, agent: invocation_pb2.AgentInvocation) -> list[invocation_pb2.AgentInvocation]:
        """Return the agents that an agent called, in the order of their calls."""
        return list(self._children.get(agent.invocation_id, ()))

    def parent(self, agent: invocation_pb2.AgentInvocation) -> invocation_pb2.AgentInvocation | None:
        """Return the agent that called an agent; None for the root."""
        return self._agents.get(agent.parent_invocation_id)

    def path(self, agent: invocation_pb2.AgentInvocation) -> list[invocation_pb2.AgentInvocation]:
        """Return the agents from the root down to an agent, which is the last one."""
        path = [agent]
        while (above := self.parent(path[-1])) is not None and len(path) <= len(self):
            path.append(above)
        return path[::-1]

    def tools(self, agent: invocation_pb2.AgentInvocation) -> list[invocation_pb2.ToolInvocation]:
        """Return the tool calls of an agent, calls of other agents included, in their order."""
        return list(self._tools.get(agent.invocation_id, ()))
