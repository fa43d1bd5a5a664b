"""What an invocation may call: tools, linked agents and the final answer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bough.v1 import agent_pb2
from bough_server.models.model import ToolSpec
from bough_server.runtime.agent import Resolver, llm_of
from bough_server.tools import builtin
from bough_server.tools.tool import Tool, spec

_MESSAGE_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "What to tell the agent."}},
        "required": ["message"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """Something that a model may call. Exactly one of `tool` and `link` is set, or neither for a built-in tool."""

    spec: ToolSpec
    tool: Tool | None = None
    link: agent_pb2.AgentLink | None = None
    max_calls: int | None = None
    requires_approval: bool = False
    timeout: float | None = None


class Toolset:
    """The offers of one invocation by name, in the order in which models are told of them."""

    def __init__(
        self,
        offers: Iterable[ToolOffer],
        targets: Mapping[str, agent_pb2.AgentLink],
        *,
        peers: Iterable[str] = (),
        closing: Iterable[str] = (),
        must_close: bool = False,
    ) -> None:
        self.offers: Mapping[str, ToolOffer] = {offer.spec.name: offer for offer in offers}
        self.targets = targets
        """The agents that it may transfer to, each with the link that says how."""
        self.peers = frozenset(peers)
        """The other members of its swarm: it ends when it hands over to one, and the swarm runs that."""
        self.closing = tuple(closing)
        """The tools whose call ends the agent with what it says."""
        self.must_close = must_close
        """Whether an answer in words is none: the model has to call until it has called one of those."""

    def tool_offers(self) -> list[ToolOffer]:
        """The ordinary tools: what an agent with `inherit_tools` gets of its caller's."""
        return [offer for offer in self.offers.values() if offer.tool is not None]


def toolset(
    definition: agent_pb2.AgentDefinition,
    links: Iterable[agent_pb2.ToolLink],
    resolver: Resolver,
    inherited: "Toolset | None",
    *,
    parent: str = "",
    peers: Mapping[str, agent_pb2.AgentLink] = MappingProxyType({}),
    closing: Sequence[ToolSpec] = (),
) -> Toolset:
    """The toolset of an invocation: its own tools, its caller's where it inherits them, its linked agents.

    `parent` is the agent that handed over to it; `peers` are the other members of its swarm, of which its own links
    come first; `closing` are the tools by one of which it has to end, if any.
    """
    offers = [_tool_offer(link, None if link.name in builtin.SPECS else resolver.tool(link.name)) for link in links]
    if inherited is not None and (llm_of(definition).inherit_tools or _hands_on(definition)):
        own = {offer.spec.name for offer in offers}
        offers.extend(offer for offer in inherited.tool_offers() if offer.spec.name not in own)
    targets = _targets(definition, parent)
    offers.extend(_agent_offer(link, resolver) for link in definition.sub_agents if link.agent not in targets)
    if _asks_a_model(definition):
        peers = {name: link for name, link in peers.items() if name not in targets}
        targets |= peers
    if targets:
        offers.append(
            ToolOffer(
                spec=builtin.transfer_spec({name: resolver.agent(name).definition.description for name in targets})
            )
        )
    ending = closing or ([builtin.FINAL_ANSWER_SPEC] if llm_of(definition).final_answer_tool else [])
    offers.extend(ToolOffer(spec=spec) for spec in ending)
    return Toolset(offers, targets, peers=peers, closing=[spec.name for spec in ending], must_close=bool(closing))


def _targets(definition: agent_pb2.AgentDefinition, parent: str) -> dict[str, agent_pb2.AgentLink]:
    usual = agent_pb2.LINK_MODE_TRANSFER if definition.HasField("supervisor") else agent_pb2.LINK_MODE_TOOL
    targets = {
        link.agent: link for link in definition.sub_agents if (link.link_mode or usual) == agent_pb2.LINK_MODE_TRANSFER
    }
    if parent and _asks_a_model(definition) and not llm_of(definition).disallow_transfer_to_parent:
        targets.setdefault(parent, agent_pb2.AgentLink(agent=parent))
    return targets


def _asks_a_model(definition: agent_pb2.AgentDefinition) -> bool:
    return definition.HasField("llm") or definition.HasField("supervisor")


def _hands_on(definition: agent_pb2.AgentDefinition) -> bool:
    """Whether an agent asks no model itself, so that its caller's tools are its children's to inherit."""
    return definition.WhichOneof("kind") not in (None, "function", "llm", "supervisor")


def _tool_offer(link: agent_pb2.ToolLink, tool: Tool | None) -> ToolOffer:
    timeout = tool.timeout if tool is not None else None
    return ToolOffer(
        spec=spec(tool) if tool is not None else builtin.SPECS[link.name],
        tool=tool,
        max_calls=link.max_calls_per_run if link.HasField("max_calls_per_run") else None,
        requires_approval=link.requires_approval,
        timeout=link.timeout.ToTimedelta().total_seconds() if link.HasField("timeout") else timeout,
    )


def _agent_offer(link: agent_pb2.AgentLink, resolver: Resolver) -> ToolOffer:
    child = resolver.agent(link.agent).definition
    schema = child.input_schema_json or _MESSAGE_SCHEMA
    return ToolOffer(
        spec=ToolSpec(name=f"call_{link.agent}", description=child.description, input_schema_json=schema), link=link
    )
