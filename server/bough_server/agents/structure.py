"""What a composite agent must be made of, and that none is its own ancestor; names and numbers are judged elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Final

from bough.v1 import agent_pb2
from bough_server.agents.bounds import FieldMistake

_MOST_ROUNDS: Final = 10_000


def structure_mistakes(
    definition: agent_pb2.AgentDefinition, agents: Mapping[str, agent_pb2.AgentDefinition]
) -> Iterator[FieldMistake]:
    """Everything that is wrong with how a definition is put together; `agents` are all that it may link, by name."""
    if definition.HasField("supervisor") and not definition.sub_agents:
        yield "sub_agents", "is required: they are its members."
    if not is_composite(definition):
        return
    for index, link in enumerate(definition.sub_agents):
        if link.link_mode == agent_pb2.LINK_MODE_TRANSFER:
            yield f"sub_agents[{index}].link_mode", "TRANSFER is for models to choose by; here a rule runs the agent."
    if not definition.sub_agents:
        yield "sub_agents", "is required: they are its children, in order."
    if definition.HasField("loop"):
        yield from _loop_mistakes(definition.loop)
    if definition.parallel.HasField("max_concurrency") and definition.parallel.max_concurrency < 1:
        yield "parallel.max_concurrency", "must be at least 1."
    for index, link in enumerate(definition.sub_agents):
        if link.agent != definition.name and definition.name in _below(link.agent, agents):
            yield (
                f"sub_agents[{index}].agent",
                f"{link.agent!r} runs {definition.name!r} in turn: nothing would ever end that.",
            )


def is_composite(definition: agent_pb2.AgentDefinition) -> bool:
    """Whether an agent runs its sub-agents by a rule, and not where a model or its code wants to."""
    return definition.WhichOneof("kind") not in (None, "function", "llm", "supervisor")


def _loop_mistakes(loop: agent_pb2.LoopAgent) -> Iterator[FieldMistake]:
    if not loop.HasField("max_iterations"):
        yield "loop.max_iterations", "is required: a loop without a bound may never end."
    elif not 1 <= loop.max_iterations <= _MOST_ROUNDS:
        yield "loop.max_iterations", f"must be between 1 and {_MOST_ROUNDS}."


def _below(name: str, agents: Mapping[str, agent_pb2.AgentDefinition]) -> set[str]:
    """Whom an agent runs in any case, at any depth."""
    found: set[str] = set()
    pending = [name]
    while pending:
        definition = agents.get(pending.pop())
        if definition is not None and is_composite(definition):
            links = {link.agent for link in definition.sub_agents} - found
            found |= links
            pending.extend(links)
    return found
