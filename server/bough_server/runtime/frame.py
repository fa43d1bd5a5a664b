"""One agent invocation while it runs: who it is, what bounds it, what it may call and what it has said."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bough.v1 import agent_pb2, event_pb2, message_pb2, policy_pb2
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.history.visible import policy_of
from bough_server.models.model import ToolSpec
from bough_server.runtime.agent import Agent, llm_of
from bough_server.runtime.execution import Execution
from bough_server.runtime.handoffs import WINDOW
from bough_server.runtime.limits import Budget, is_bounded
from bough_server.runtime.open_invocation import OpenInvocation
from bough_server.runtime.recorder import Joining
from bough_server.runtime.state import LaneState
from bough_server.runtime.toolset import Toolset, toolset
from bough_server.session_state import values_of
from bough_server.store.projection import agent_chain
from bough_server.telemetry import Traced

MAX_BRANCH_BYTES: Final = 256
MAX_RUN_PATH: Final = 32


@dataclass(slots=True, kw_only=True)
class Frame:
    """One agent invocation while it runs; `scope` is the key below which all its effects lie."""

    agent: Agent
    invocation_id: str
    parent: "Frame | None"
    scope: str
    depth: int
    branch: str
    run_path: tuple[str, ...]
    budget: Budget
    toolset: Toolset
    model_name: str
    """The model's name in force: its own, else its caller's."""
    on_failure: policy_pb2.OnSubAgentFailure.ValueType
    history: agent_pb2.HistoryPolicy
    joining: Joining
    transcript: Transcript
    state: LaneState
    opened: OpenInvocation
    traced: Traced
    told: message_pb2.Message
    """What it was told."""
    call_ids: set[str] = field(default_factory=set)
    hops: tuple[str, ...] = ()
    """The agents that handed over to one another up to this one; itself alone where nobody did."""
    lanes: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    """Lanes of its code that still run, each with its scope."""
    abort: RunError | None = None
    """What aborts it, whatever its code makes of it: the failure of a sub-agent."""

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.agent.definition.name

    def event(self, key: str, *, traced: Traced | None = None) -> event_pb2.AgentEvent:
        """A new event of this invocation."""
        event = self.opened.event(key)
        if traced is not None:
            event.trace_id, event.span_id = traced.trace_id, traced.span_id
        return event


def branch_below(branch: str, name: str) -> str:
    """The branch of a child: over 256 bytes its middle is left out, the root and the last name kept."""
    whole = f"{branch}/{name}" if branch else name
    if len(whole.encode()) <= MAX_BRANCH_BYTES:
        return whole
    head = whole.partition("/")[0]
    room = MAX_BRANCH_BYTES - len(f"{head}/…/{name}".encode())
    middle: list[str] = []
    for part in whole.split("/")[1:-1]:
        if part == "…" or len(part) + 1 > room:
            break
        room -= len(part) + 1
        middle.append(part)
    return "/".join([head, *middle, "…", name])


def run_path_below(path: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Who has spoken on the way, with one more name; the last 32."""
    return (*path, name)[-MAX_RUN_PATH:]


def joining(policies: "list[policy_pb2.DeltaPolicy]") -> Joining:
    """The first policy that says anything: the request's, the agent's, the server's; else 50 ms or 256 characters."""
    for policy in policies:
        if policy.HasField("passthrough"):
            return Joining(max_interval=0, max_chars=0)
        if policy.HasField("aggregated"):
            said = policy.aggregated
            default = Joining()
            return Joining(
                max_interval=said.max_interval.ToTimedelta().total_seconds()
                if said.HasField("max_interval")
                else default.max_interval,
                max_chars=said.max_chars if said.HasField("max_chars") else default.max_chars,
            )
    return Joining()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a child is called: by which link, below which effect, after what its caller saw and said."""

    agent: Agent
    link: agent_pb2.AgentLink
    scope: str
    above: Transcript
    state: LaneState
    told: message_pb2.Message
    path: tuple[str, ...]
    """Who has spoken before it."""
    is_handed_over: bool = False
    """Whether its caller handed over to it: it does not see the transfer."""
    comes_back: bool = False
    """Whether its caller goes on when it has ended: it has nobody to hand back to."""
    closing: Sequence[ToolSpec] = ()
    """The tools by one of which it has to end; empty where it ends as it likes."""


def child_frame(execution: Execution, caller: Frame, place: Place, *, opened: OpenInvocation, traced: Traced) -> Frame:
    """The frame of a child whose start is recorded."""
    definition, link = place.agent.definition, place.link
    depth, budget = caller.depth + 1, caller.budget
    for limits in (definition.limits, link.limits):
        if is_bounded(limits):
            budget = Budget(limits, owner=f"each call of the agent {definition.name!r}", depth=depth, above=budget)
    opened.budget = budget
    transcript = Transcript(
        agent=definition.name, chain=agent_chain(caller.transcript.chain, definition.name), above=place.above
    )
    if place.is_handed_over:
        transcript.cut -= 1  # the result of the transfer, which its caller said last
    policy = execution.facts.started.run_started.policy
    return Frame(
        agent=place.agent,
        invocation_id=opened.template.invocation_id,
        parent=caller,
        scope=place.scope,
        depth=depth,
        branch=opened.template.branch,
        run_path=run_path_below(place.path, definition.name),
        budget=budget,
        toolset=toolset(
            definition,
            place.agent.tool_links,
            execution.resolver,
            caller.toolset,
            parent=caller.name if place.is_handed_over and not place.comes_back else "",
            closing=place.closing,
            peers=_peers(caller.agent.definition, definition.name),
        ),
        model_name=llm_of(definition).model or caller.model_name,
        on_failure=definition.on_sub_agent_failure or policy.on_sub_agent_failure,
        history=policy_of(definition, link),
        joining=joining([policy.delta, definition.delta, execution.default_delta]),
        transcript=transcript,
        state=place.state,
        opened=opened,
        traced=traced,
        told=place.told,
        hops=(*(caller.hops if place.is_handed_over and not place.comes_back else ()), definition.name)[-WINDOW:],
    )


def _peers(caller: agent_pb2.AgentDefinition, name: str) -> dict[str, agent_pb2.AgentLink]:
    """The other members of a swarm that runs an agent."""
    links = caller.sub_agents if caller.HasField("swarm") else ()
    return {link.agent: link for link in links if link.agent != name}


def root_frame(execution: Execution, agent: Agent, traced: Traced) -> Frame:
    """The frame of a run's root, whose start is recorded."""
    started, definition = execution.facts.started, agent.definition
    policy = started.run_started.policy
    budget = Budget(policy.limits, owner="the run", depth=0)
    if is_bounded(definition.limits):
        budget = Budget(definition.limits, owner=f"the agent {definition.name!r}", depth=0, above=budget)
    opened = execution.invocations[started.invocation_id]
    opened.budget = budget
    return Frame(
        agent=agent,
        invocation_id=started.invocation_id,
        parent=None,
        scope="",
        depth=0,
        branch=definition.name,
        run_path=(definition.name,),
        budget=budget,
        toolset=toolset(definition, agent.tool_links, execution.resolver, None),
        model_name=llm_of(definition).model,
        on_failure=definition.on_sub_agent_failure or policy.on_sub_agent_failure,
        history=policy_of(definition),
        joining=joining([policy.delta, definition.delta, execution.default_delta]),
        transcript=Transcript(agent=definition.name, chain=agent_chain("", definition.name)),
        state=LaneState(values_of(execution.state_json)),
        opened=opened,
        traced=traced,
        told=execution.told,
        hops=(definition.name,),
    )
