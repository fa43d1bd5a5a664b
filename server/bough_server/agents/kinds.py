"""Which agent a definition makes: the closed set of kinds that are data; agents in code are function.py's."""

from bough.v1 import agent_pb2
from bough_server.agents.llm import LlmAgent
from bough_server.runtime.agent import Agent


def agent_of(definition: agent_pb2.AgentDefinition) -> Agent:
    """The agent that a definition describes."""
    return LlmAgent(definition)
