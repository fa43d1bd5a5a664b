"""What a composite agent must be made of, and that none is its own ancestor; names and numbers are judged elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Final

from bough.v1 import agent_pb2
from bough_server.agents.bounds import FieldMistake
from bough_server.agents.circles import circles
from bough_server.documents import suggestion

_MOST_ROUNDS: Final = 10_000
_MOST_STEPS: Final = 1000
"""Of a plan: all that was done goes along with every step."""


def structure_mistakes(
    definition: agent_pb2.AgentDefinition,
    agents: Mapping[str, agent_pb2.AgentDefinition],
    circle_of: Mapping[str, str],
) -> Iterator[FieldMistake]:
    """Everything that is wrong with how a definition is put together.

    `agents` are all that it may link, by name, and `circle_of` is what `rule_circles` says of them.
    """
    if definition.HasField("supervisor") and not definition.sub_agents:
        yield "sub_agents", "is required: they are its members."
    if not is_composite(definition):
        return
    yield from _link_mistakes(definition)
    if definition.output_schema_json:
        yield "output_schema_json", _schema_mistake(definition)
    if definition.HasField("loop"):
        yield from _loop_mistakes(definition.loop)
    if definition.parallel.HasField("max_concurrency") and definition.parallel.max_concurrency < 1:
        yield "parallel.max_concurrency", "must be at least 1."
    if definition.HasField("swarm"):
        yield from _member_mistakes(definition.swarm.entry, definition, "swarm.entry")
    if definition.HasField("plan_execute"):
        yield from _plan_mistakes(definition, agents)
    certain = _run_in_any_case(definition)
    for index, link in enumerate(definition.sub_agents):
        is_itself = link.agent == definition.name
        if link.agent in certain and not is_itself and circle_of.get(link.agent) == circle_of[definition.name]:
            yield (
                f"sub_agents[{index}].agent",
                f"{link.agent!r} runs {definition.name!r} in turn: nothing would ever end that.",
            )


def rule_circles(agents: Mapping[str, agent_pb2.AgentDefinition]) -> dict[str, str]:
    """Who runs one another in turn whatever models say: the circle that each agent is in, by name."""
    return circles({name: _run_in_any_case(each) if is_composite(each) else () for name, each in agents.items()})


def is_composite(definition: agent_pb2.AgentDefinition) -> bool:
    """Whether an agent runs its sub-agents by a rule, and not where a model or its code wants to."""
    return definition.WhichOneof("kind") not in (None, "function", "llm", "supervisor")


def _schema_mistake(definition: agent_pb2.AgentDefinition) -> str:
    """Nobody asks again for an answer that a rule hands on, so it is no place for a schema."""
    if definition.HasField("plan_execute"):
        return "is not for a plan_execute, which answers in words. Let an agent that has it follow in a sequence."
    kind = definition.WhichOneof("kind")
    return f"is not for a {kind}, which hands on what others say. Give the schema to who answers."


def _link_mistakes(definition: agent_pb2.AgentDefinition) -> Iterator[FieldMistake]:
    is_swarm = definition.HasField("swarm")
    for index, link in enumerate(definition.sub_agents):
        place = f"sub_agents[{index}].link_mode"
        if is_swarm and link.link_mode == agent_pb2.LINK_MODE_TOOL:
            yield place, "TOOL is for an agent's own links: members of a swarm hand over to one another."
        elif not is_swarm and link.link_mode == agent_pb2.LINK_MODE_TRANSFER:
            yield place, "TRANSFER is for models to choose by; here a rule runs the agent."
    if not definition.sub_agents:
        yield "sub_agents", f"is required: they are its {'members' if is_swarm else 'children, in order'}."


def _member_mistakes(name: str, definition: agent_pb2.AgentDefinition, place: str) -> Iterator[FieldMistake]:
    """What is wrong with the name of a sub-agent, where one is given."""
    names = [link.agent for link in definition.sub_agents]
    if name and name not in names:
        yield place, f"{name!r} is none of its sub_agents.{suggestion(name, names)}"


def _plan_mistakes(
    definition: agent_pb2.AgentDefinition, agents: Mapping[str, agent_pb2.AgentDefinition]
) -> Iterator[FieldMistake]:
    plan = definition.plan_execute
    for role, name in (("planner", plan.planner), ("executor", plan.executor)):
        if not name:
            yield f"plan_execute.{role}", "is required: it is one of the sub_agents."
    for role, name in (("planner", plan.planner), ("executor", plan.executor), ("replanner", plan.replanner)):
        missing = list(_member_mistakes(name, definition, f"plan_execute.{role}"))
        yield from missing
        found = None if missing or role == "executor" else agents.get(name)
        if found is not None and found.WhichOneof("kind") not in ("llm", "supervisor"):
            yield f"plan_execute.{role}", f"{name!r} asks no model that could call `plan`: give an llm or a supervisor."
    roles = (plan.planner, plan.executor, plan.replanner)
    for index, link in enumerate(definition.sub_agents):
        if link.agent and link.agent not in roles:
            yield f"sub_agents[{index}].agent", f"{link.agent!r} is no planner, executor or replanner: nothing runs it."
    if plan.HasField("max_rounds") and not 1 <= plan.max_rounds <= _MOST_STEPS:
        yield "plan_execute.max_rounds", f"must be between 1 and {_MOST_STEPS}."


def _run_in_any_case(definition: agent_pb2.AgentDefinition) -> set[str]:
    """Whom a composite runs whatever models say: of a swarm the member that begins, of any other all."""
    if definition.HasField("swarm") and definition.sub_agents:
        return {definition.swarm.entry or definition.sub_agents[0].agent}
    return {link.agent for link in definition.sub_agents}


def _loop_mistakes(loop: agent_pb2.LoopAgent) -> Iterator[FieldMistake]:
    if not loop.HasField("max_iterations"):
        yield "loop.max_iterations", "is required: a loop without a bound may never end."
    elif not 1 <= loop.max_iterations <= _MOST_ROUNDS:
        yield "loop.max_iterations", f"must be between 1 and {_MOST_ROUNDS}."
