"""Composite agents for tests, in a line each; the models of their children are teams.py's."""

from collections.abc import Sequence

from bough.v1 import agent_pb2

Link = str | agent_pb2.AgentLink


def composite(name: str, links: Sequence[Link], **kind: object) -> agent_pb2.AgentDefinition:
    """An agent of any kind but an LLM's, with its children in order; `kind` is the one field of its kind."""
    definition = agent_pb2.AgentDefinition(
        name=name,
        description=f"Does what {name} does.",
        **kind,  # type: ignore[arg-type]
    )
    definition.sub_agents.extend(agent_pb2.AgentLink(agent=one) if isinstance(one, str) else one for one in links)
    return definition


def sequence(name: str, *links: Link) -> agent_pb2.AgentDefinition:
    """Children in order."""
    return composite(name, links, sequence=agent_pb2.SequenceAgent())


def parallel(
    name: str, *links: Link, fails_fast: bool = False, max_concurrency: int | None = None
) -> agent_pb2.AgentDefinition:
    """Children at once."""
    on_failure = (
        agent_pb2.PARALLEL_FAILURE_POLICY_FAIL_FAST if fails_fast else agent_pb2.PARALLEL_FAILURE_POLICY_UNSPECIFIED
    )
    return composite(
        name, links, parallel=agent_pb2.ParallelAgent(on_failure=on_failure, max_concurrency=max_concurrency)
    )


def supervisor(
    name: str, *links: Link, tools: Sequence[str] = (), skip_transfer_messages: bool = False
) -> agent_pb2.AgentDefinition:
    """A model that hands over to members."""
    llm = agent_pb2.LlmAgent(
        instruction=f"You are {name}.",
        tools=[agent_pb2.ToolLink(name=tool) for tool in tools],
        skip_transfer_messages=skip_transfer_messages,
    )
    return composite(name, links, supervisor=agent_pb2.SupervisorAgent(llm=llm))


def swarm(name: str, *links: Link, entry: str = "") -> agent_pb2.AgentDefinition:
    """Members that hand over to one another."""
    return composite(name, links, swarm=agent_pb2.SwarmAgent(entry_agent=entry))


def plan_execute(
    name: str, *links: Link, roles: Sequence[str] = ("planner", "executor", "replanner"), rounds: int | None = None
) -> agent_pb2.AgentDefinition:
    """A planner, an executor and a replanner, linked as `links` or else by their names."""
    names = dict(zip(("planner", "executor", "replanner"), roles, strict=False))
    plan = agent_pb2.PlanExecuteAgent(max_iterations=rounds, **names)
    return composite(name, links or list(dict.fromkeys(roles)), plan_execute=plan)


def loop(name: str, *links: Link, rounds: int) -> agent_pb2.AgentDefinition:
    """Children in order, again and again."""
    return composite(name, links, loop=agent_pb2.LoopAgent(max_iterations=rounds))
