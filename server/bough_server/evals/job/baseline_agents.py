"""What a baseline ran with: whether this server still has it, so that suspects can run again with it."""

from collections.abc import Mapping, Sequence

from bough.v1 import agent_pb2, eval_result_pb2
from bough_server.agents.registry import VersionHashes, find_reachable
from bough_server.errors import CallError, StorageFailed
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.identity import Principal
from bough_server.runtime.agent import Resolver


def pin_agents(pins: eval_result_pb2.EvalPins, agent: str, resolver: Resolver, versions: VersionHashes) -> None:
    """Set what a result depends on, if this agent of a resolver is evaluated."""
    pins.agent = agent
    for one in find_reachable(resolver, agent):
        pins.agents[one.name] = resolver.agents[one.name].revision or versions.agents.get(one.name, "")
    pins.models.update(versions.models)
    pins.tools.update(versions.tools)
    pins.prices = versions.prices


async def read_pinned_definitions(
    dependencies: EvaluationDependencies, principal: Principal, pins: eval_result_pb2.EvalPins
) -> list[agent_pb2.AgentDefinition]:
    """Return the definitions that a result names and that a run of the tenant had; code has none."""
    catalog = dependencies.store.catalog
    found = [await catalog.get_for_tenant(principal.tenant_id, revision) for revision in pins.agents.values()]
    return [definition for definition in found if definition is not None]


async def explain_missing_pins(
    dependencies: EvaluationDependencies, principal: Principal, pins: eval_result_pb2.EvalPins
) -> str:
    """Return why this server cannot run what a result ran with, in a sentence; empty if it can.

    Raises StorageFailed.
    """
    if not pins.agent:
        return "It is not known which agent the baseline is of."
    definitions = await read_pinned_definitions(dependencies, principal, pins)
    found = eval_result_pb2.EvalPins()
    try:
        resolver, versions = await dependencies.agents.for_run(principal.tenant_id, pins.agent, definitions)
        pin_agents(found, pins.agent, resolver, versions)
    except StorageFailed:
        raise
    except CallError as error:
        return f"The agent {pins.agent!r} of the baseline cannot run here: {error.message}"
    return (
        _explain_difference("agent", pins.agents, found.agents)
        or _explain_difference("model", pins.models, found.models)
        or _explain_difference("tool", pins.tools, found.tools)
        or _explain_other_code(pins.code_digest, dependencies.code_digest)
    )


def _explain_other_code(before: str, now: str) -> str:
    """Return why the code of this server's agents and tools is not what a baseline ran with; empty if it is."""
    if before == now:
        return ""
    if not before:
        return "It is not known which Python code the baseline ran with."
    return "The Python code of this server is not that which the baseline ran with."


def _explain_difference(kind: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    names: Sequence[str] = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if not names:
        return ""
    return f"The {kind} {names[0]!r} is not stored here as the baseline ran with it."
