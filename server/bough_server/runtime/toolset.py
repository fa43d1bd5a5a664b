"""Toolset of an invocation: the tools, linked agents and final-answer tool that it may call."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bough.v1 import agent_pb2
from bough_server.history.visible import CALL_PREFIX
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
    """A tool or a linked agent offered to a model: `tool` or `link` is set, or neither for a built-in tool."""

    spec: ToolSpec
    tool: Tool | None = None
    link: agent_pb2.AgentLink | None = None
    max_calls: int | None = None
    requires_approval: bool = False
    timeout: float | None = None


class Toolset:
    """The offers of one invocation by name, in the order in which they are sent to models."""

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
        """The agents to which it may transfer, each with its link."""
        self.peers = frozenset(peers)
        """The other members of its swarm: it ends when it transfers to one, and the swarm runs that member."""
        self.closing = tuple(closing)
        """The tools that end the agent; the answer is the call's argument."""
        self.must_close = must_close
        """True if a text is no answer: the model must call one of those tools."""

    def tool_offers(self) -> list[ToolOffer]:
        """Return the ordinary tools, which an agent with `inherit_tools` inherits from its caller."""
        return [offer for offer in self.offers.values() if offer.tool is not None]


def build_toolset(
    definition: agent_pb2.AgentDefinition,
    links: Iterable[agent_pb2.ToolLink],
    resolver: Resolver,
    inherited: "Toolset | None",
    *,
    parent: str = "",
    peers: Mapping[str, agent_pb2.AgentLink] = MappingProxyType({}),
    closing: Sequence[ToolSpec] = (),
) -> Toolset:
    """Return the toolset of an invocation: its own tools, inherited ones and its linked agents.

    `parent` is the agent that transferred to it; `peers` are the other members of its swarm, over which its own links
    take precedence; `closing` are the tools of which it must call one to end, if any.
    """
    llm = llm_of(definition)
    offers = [_tool_offer(link, name, resolver.tools.get(name)) for link, name in name_linked_tools(links, resolver)]
    if inherited is not None and (llm.inherit_tools or _passes_tools_on(definition)):
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
                spec=builtin.transfer_spec({name: resolver.agents[name].definition.description for name in targets})
            )
        )
    ending = closing or ([builtin.FINAL_ANSWER_SPEC] if llm.final_answer_tool else [])
    offers.extend(ToolOffer(spec=spec) for spec in ending)
    return Toolset(offers, targets, peers=peers, closing=[spec.name for spec in ending], must_close=bool(closing))


def name_linked_tools(
    links: Iterable[agent_pb2.ToolLink], resolver: Resolver
) -> Iterator[tuple[agent_pb2.ToolLink, str]]:
    """Yield the name of each tool that links are to, with its link: of a tool server all tools that no link names."""
    links = list(links)
    named = {link.name for link in links}
    for link in links:
        if not link.server:
            yield link, link.name
            continue
        for name, tool in sorted(resolver.tools.items()):
            if tool.server == link.server and name not in named:
                yield link, name


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


def _passes_tools_on(definition: agent_pb2.AgentDefinition) -> bool:
    """True if an agent calls no model itself: it takes its caller's tools so that its children can inherit them."""
    return definition.WhichOneof("kind") not in (None, "function", "llm", "supervisor")


def _tool_offer(link: agent_pb2.ToolLink, name: str, tool: Tool | None) -> ToolOffer:
    timeout = tool.timeout if tool is not None else None
    return ToolOffer(
        spec=spec(tool) if tool is not None else builtin.SPECS[name],
        tool=tool,
        max_calls=link.max_calls_per_run if link.HasField("max_calls_per_run") else None,
        requires_approval=link.requires_approval,
        timeout=link.timeout.ToTimedelta().total_seconds() if link.HasField("timeout") else timeout,
    )


def _agent_offer(link: agent_pb2.AgentLink, resolver: Resolver) -> ToolOffer:
    child = resolver.agents[link.agent].definition
    schema = child.input_schema_json or _MESSAGE_SCHEMA
    return ToolOffer(
        spec=ToolSpec(name=f"{CALL_PREFIX}{link.agent}", description=child.description, input_schema_json=schema),
        link=link,
    )
