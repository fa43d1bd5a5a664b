"""Definitions made into the agents that they describe; what each kind does is its own module's."""

from collections.abc import Callable, Mapping
from typing import Final

from bough.v1 import agent_pb2
from bough_server.agents.flow import LoopAgent, ParallelAgent, SequenceAgent
from bough_server.agents.function import DefinedCode
from bough_server.agents.llm import LlmAgent
from bough_server.agents.plan_execute import PlanExecuteAgent
from bough_server.agents.team import SupervisorAgent, SwarmAgent
from bough_server.runtime.agent import Agent

_KINDS: Final[Mapping[str, Callable[[agent_pb2.AgentDefinition], Agent]]] = {
    "llm": LlmAgent,
    "sequence": SequenceAgent,
    "parallel": ParallelAgent,
    "loop": LoopAgent,
    "supervisor": SupervisorAgent,
    "swarm": SwarmAgent,
    "plan_execute": PlanExecuteAgent,
}


def agent_of(definition: agent_pb2.AgentDefinition, code: Callable[[str], Agent]) -> Agent:
    """The agent of a definition that has been judged; `code` finds agents in code and raises KeyError."""
    if definition.HasField("function"):
        return DefinedCode(definition, code)
    return _KINDS[definition.WhichOneof("kind") or "llm"](definition)
