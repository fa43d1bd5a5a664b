"""`--model`: definitions that a run uses instead of the catalog's, with another model."""

from collections.abc import Iterable, Sequence

from bough import AsyncClient, NotFound
from bough.v1 import agent_pb2
from bough_server.errors import ConfigurationError


async def with_model(
    client: AsyncClient, agent: str, model: str, definitions: Sequence[agent_pb2.AgentDefinition] = ()
) -> list[agent_pb2.AgentDefinition]:
    """Return the definitions to send with a run of `agent` so that every agent that it can reach uses a model.

    `definitions` are those that are sent anyway. Agents that call no model by their definition, such as those in code,
    keep the catalog's. Raises ConfigurationError if no agent would change.
    """
    sent = {each.name: each for each in definitions}
    reached = await _reached(client, agent, sent)
    changed = {each.name: other for each in reached if (other := _changed(each, model)) is not None}
    if not changed:
        raise ConfigurationError(f"No agent that {agent!r} reaches names a model: omit --model.")
    return list({**sent, **changed}.values())


async def _reached(
    client: AsyncClient, agent: str, sent: dict[str, agent_pb2.AgentDefinition]
) -> Iterable[agent_pb2.AgentDefinition]:
    found: dict[str, agent_pb2.AgentDefinition] = {}
    pending = [agent]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = sent[name] if name in sent else (await client.catalog.get_agent(name)).definition
        except NotFound:
            continue  # the server refuses the run and says so better
        pending += [link.agent for link in found[name].sub_agents]
    return found.values()


def _changed(definition: agent_pb2.AgentDefinition, model: str) -> agent_pb2.AgentDefinition | None:
    changed = agent_pb2.AgentDefinition()
    changed.CopyFrom(definition)
    if changed.HasField("llm"):
        changed.llm.model = model
    elif changed.HasField("supervisor"):
        changed.supervisor.llm.model = model
    else:
        return None
    return changed
