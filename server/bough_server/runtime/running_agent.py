"""One running agent invocation: what bounds it, what it may call and what it has said."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bough.v1 import agent_pb2, event_pb2, message_pb2, policy_pb2
from bough_server.engine.execution import Execution
from bough_server.engine.limits import TRANSFER_WINDOW, Budget, is_bounded
from bough_server.engine.open_invocations import OpenInvocation
from bough_server.engine.recorder import DeltaCoalescing
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.history.visible import policy_of
from bough_server.models.model import ToolSpec
from bough_server.runtime.agent import Agent, Resolver, llm_of
from bough_server.runtime.state import LaneState
from bough_server.runtime.toolset import Toolset, toolset
from bough_server.session_state import values_of
from bough_server.store.projection import agent_chain
from bough_server.telemetry import Traced

MAX_BRANCH_BYTES: Final = 256
MAX_RUN_PATH: Final = 32


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


def joining(policies: "list[policy_pb2.DeltaPolicy]") -> DeltaCoalescing:
    """The first policy that says anything: the request's, the agent's, the server's; else 50 ms or 256 characters."""
    for policy in policies:
        if policy.HasField("passthrough"):
            return DeltaCoalescing(max_interval=0, max_chars=0)
        if policy.HasField("aggregated"):
            said = policy.aggregated
            default = DeltaCoalescing()
            return DeltaCoalescing(
                max_interval=said.max_interval.ToTimedelta().total_seconds()
                if said.HasField("max_interval")
                else default.max_interval,
                max_chars=said.max_chars if said.HasField("max_chars") else default.max_chars,
            )
    return DeltaCoalescing()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """Where a child is called: by which link, after what its caller saw and said."""

    agent: Agent
    link: agent_pb2.AgentLink
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

    @property
    def is_for_good(self) -> bool:
        """Whether its caller handed over to it and does not go on."""
        return self.is_handed_over and not self.comes_back


@dataclass(slots=True, kw_only=True)
class RunningAgent:
    """One agent invocation while it runs: what was settled when it began, and its record in the run."""

    agent: Agent
    resolver: Resolver
    """What its definition names, as it was when the run began."""
    parent: "RunningAgent | None"
    run_path: tuple[str, ...]
    budget: Budget
    toolset: Toolset
    model_name: str
    """The model's name in force: its own, else its caller's."""
    history: agent_pb2.HistoryPolicy
    joining: DeltaCoalescing
    transcript: Transcript
    state: LaneState
    record: OpenInvocation
    """What it has open, has used and has done, as its events say."""
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

    @property
    def invocation_id(self) -> str:
        """The invocation."""
        return self.record.template.invocation_id

    @property
    def scope(self) -> str:
        """The key below which all its effects lie."""
        return self.record.key

    @property
    def depth(self) -> int:
        """How many agents called one another above it; 0 for the root."""
        return self.record.template.depth

    @property
    def branch(self) -> str:
        """The names from the root down to it."""
        return self.record.template.branch

    def event(self, key: str, *, traced: Traced | None = None) -> event_pb2.AgentEvent:
        """A new event of this invocation."""
        event = self.record.event(key)
        if traced is not None:
            event.trace_id, event.span_id = traced.trace_id, traced.span_id
        return event

    @classmethod
    def root(cls, execution: Execution, resolver: Resolver, agent: Agent, traced: Traced) -> "RunningAgent":
        """Return the root of a run, whose start is recorded."""
        started, definition = execution.facts.started, agent.definition
        policy = execution.policy
        budget = Budget(policy.limits, owner="the run", depth=0)
        if is_bounded(definition.limits):
            budget = Budget(definition.limits, owner=f"the agent {definition.name!r}", depth=0, above=budget)
        record = execution.invocations[started.invocation_id]
        record.budget = budget
        return cls(
            agent=agent,
            resolver=resolver,
            parent=None,
            run_path=(definition.name,),
            budget=budget,
            toolset=toolset(definition, agent.tool_links, resolver, None),
            model_name=llm_of(definition).model,
            history=policy_of(definition),
            joining=joining([policy.deltas, definition.deltas, execution.default_deltas]),
            transcript=Transcript(agent=definition.name, chain=agent_chain("", definition.name)),
            state=LaneState(values_of(execution.state_json)),
            record=record,
            traced=traced,
            told=execution.told,
            hops=(definition.name,),
        )

    def child(self, execution: Execution, place: CallSite, *, record: OpenInvocation, traced: Traced) -> "RunningAgent":
        """Return a child of this agent, whose start is recorded."""
        definition, policy = place.agent.definition, execution.policy
        record.budget = budget = self._budget_of(place, record.template.depth)
        return RunningAgent(
            agent=place.agent,
            resolver=self.resolver,
            parent=self,
            run_path=run_path_below(place.path, definition.name),
            budget=budget,
            toolset=self._toolset_of(place),
            model_name=llm_of(definition).model or self.model_name,
            history=policy_of(definition, place.link),
            joining=joining([policy.deltas, definition.deltas, execution.default_deltas]),
            transcript=self._transcript_of(place),
            state=place.state,
            record=record,
            traced=traced,
            told=place.told,
            hops=(*(self.hops if place.is_for_good else ()), definition.name)[-TRANSFER_WINDOW:],
        )

    def _budget_of(self, place: CallSite, depth: int) -> Budget:
        budget, definition = self.budget, place.agent.definition
        for limits in (definition.limits, place.link.limits):
            if is_bounded(limits):
                budget = Budget(limits, owner=f"each call of the agent {definition.name!r}", depth=depth, above=budget)
        return budget

    def _toolset_of(self, place: CallSite) -> Toolset:
        caller, definition = self.agent.definition, place.agent.definition
        members = caller.sub_agents if caller.HasField("swarm") else ()
        return toolset(
            definition,
            place.agent.tool_links,
            self.resolver,
            self.toolset,
            parent=self.name if place.is_for_good else "",
            closing=place.closing,
            peers={link.agent: link for link in members if link.agent != definition.name},
        )

    def _transcript_of(self, place: CallSite) -> Transcript:
        name = place.agent.definition.name
        transcript = Transcript(agent=name, chain=agent_chain(self.transcript.chain, name), above=place.above)
        if place.is_handed_over:
            transcript.cut -= 1  # the result of the transfer, which its caller said last
        return transcript
