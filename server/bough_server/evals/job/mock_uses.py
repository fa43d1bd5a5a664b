"""How often mocks have answered and faults were injected in a trial, and what is left of them for its next turn."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.v1 import eval_set_pb2, invocation_pb2
from bough_server.messages import copy_of


@dataclass(frozen=True, slots=True)
class MockUses:
    """How often each mock has answered, by its number."""

    tools: Counter[int] = field(default_factory=Counter)
    agents: Counter[int] = field(default_factory=Counter)


def count_mock_uses(invocations: Sequence[invocation_pb2.Invocation]) -> MockUses:
    """Return how often mocks have answered in the turns of a trial."""
    uses = MockUses()
    for invocation in invocations:
        uses.tools.update(call.mock_index for call in invocation.tools if call.HasField("mock_index"))
        uses.agents.update(agent.mock_index for agent in invocation.agents if agent.HasField("mock_index"))
    return uses


def count_faults(invocations: Sequence[invocation_pb2.Invocation]) -> Counter[int]:
    """Return how often each fault was injected in the turns of a trial, by its number."""
    counts: Counter[int] = Counter()
    for invocation in invocations:
        counts.update(call.fault_index for call in invocation.tools if call.HasField("fault_index"))
        for fault in (fault for agent in invocation.agents for fault in agent.model_faults):
            counts[fault.index] += fault.count
    return counts


def build_remaining_mocks(mocks: eval_set_pb2.ToolMocks, uses: MockUses) -> eval_set_pb2.ToolMocks:
    """Return the mocks with what is left of their times: each turn is a run, and a run counts from 0."""
    left = copy_of(mocks)
    for index, mock in enumerate(left.tools):
        if mock.HasField("times"):
            mock.times = max(0, mock.times - uses.tools[index])
    for index, agent_mock in enumerate(left.agents):
        if agent_mock.HasField("times"):
            agent_mock.times = max(0, agent_mock.times - uses.agents[index])
    return left
