"""A running agent invocation: its budget, toolset, history and session state."""

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
from bough_server.ids import agent_chain
from bough_server.log.session_state import values_of
from bough_server.models.model import ToolSpec
from bough_server.observability.tracing import Traced
from bough_server.runtime.agent import Agent, Resolver, llm_of
from bough_server.runtime.state import LaneState
from bough_server.runtime.toolset import Toolset, build_toolset

MAX_BRANCH_BYTES: Final = 256
MAX_RUN_PATH: Final = 32


def branch_below(branch: str, name: str) -> str:
    """Return the branch of a child; over 256 bytes its middle is left out, the root and the last name are kept."""
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
    """Return a run path with one more name, cut to the last 32."""
    return (*path, name)[-MAX_RUN_PATH:]


def choose_coalescing(policies: "list[policy_pb2.DeltaPolicy]") -> DeltaCoalescing:
    """Return the first policy that is set, of the request's, the agent's, the server's; default: 50 ms, 256 chars."""
    for policy in policies:
        if policy.HasField("passthrough"):
            return DeltaCoalescing(max_interval=0, max_chars=0)
        if policy.HasField("aggregated"):
            chosen = policy.aggregated
            default = DeltaCoalescing()
            return DeltaCoalescing(
                max_interval=chosen.max_interval.ToTimedelta().total_seconds()
                if chosen.HasField("max_interval")
                else default.max_interval,
                max_chars=chosen.max_chars if chosen.HasField("max_chars") else default.max_chars,
            )
    return DeltaCoalescing()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """The call of a child: its agent and link, and its caller's transcript and session state at the call."""

    agent: Agent
    link: agent_pb2.AgentLink
    above: Transcript
    state: LaneState
    input: message_pb2.Message
    path: tuple[str, ...]
    """The agents that have spoken before it."""
    is_transferred: bool = False
    """True if its caller transferred to it: it does not see the transfer call."""
    comes_back: bool = False
    """True if its caller continues after its end: it cannot transfer back to it."""
    closing: Sequence[ToolSpec] = ()
    """Tools of which it must call one to end; empty if it may end with any answer."""

    @property
    def is_for_good(self) -> bool:
        """True if its caller transferred to it and does not continue."""
        return self.is_transferred and not self.comes_back


@dataclass(slots=True, kw_only=True)
class RunningAgent:
    """An agent invocation while it runs: the settings fixed at its start, and its record in the run."""

    agent: Agent
    resolver: Resolver
    """Resolves the names in its definition as they were when the run started."""
    parent: "RunningAgent | None"
    run_path: tuple[str, ...]
    budget: Budget
    toolset: Toolset
    model_name: str
    """The name of its model, default: its caller's."""
    history: agent_pb2.HistoryPolicy
    delta_coalescing: DeltaCoalescing
    transcript: Transcript
    state: LaneState
    open_invocation: OpenInvocation
    """Its open steps and effects, and its usage, folded from its events."""
    traced: Traced
    input: message_pb2.Message
    """Its input."""
    call_ids: set[str] = field(default_factory=set)
    """The ids of its tool calls, which are unique in the invocation."""
    hops: tuple[str, ...] = ()
    """The agents that transferred to one another up to this one; itself alone if there was no transfer."""
    lanes: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    """Lanes of its code that are still running, each with its scope."""
    abort: RunError | None = None
    """The failure of a sub-agent that aborts it, even if its code catches the exception."""

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.agent.definition.name

    @property
    def invocation_id(self) -> str:
        """The invocation's id."""
        return self.open_invocation.template.invocation_id

    @property
    def scope(self) -> str:
        """The key under which all its effects are."""
        return self.open_invocation.key

    @property
    def depth(self) -> int:
        """Its depth in the agent tree; 0 for the root."""
        return self.open_invocation.template.depth

    @property
    def branch(self) -> str:
        """The names from the root down to it, `root/child`."""
        return self.open_invocation.template.branch

    def event(self, key: str, *, traced: Traced | None = None) -> event_pb2.AgentEvent:
        """Return a new event of this invocation, with the trace ids of `traced`, default: of the invocation's start."""
        event = self.open_invocation.event(key)
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
        opened = execution.invocations[started.invocation_id]
        opened.budget = budget
        return cls(
            agent=agent,
            resolver=resolver,
            parent=None,
            run_path=(definition.name,),
            budget=budget,
            toolset=build_toolset(definition, agent.tool_links, resolver, None),
            model_name=llm_of(definition).model,
            history=policy_of(definition),
            delta_coalescing=choose_coalescing([policy.deltas, definition.deltas, execution.default_deltas]),
            transcript=Transcript(agent=definition.name, chain=agent_chain("", definition.name)),
            state=LaneState(values_of(execution.state_json)),
            open_invocation=opened,
            traced=traced,
            input=execution.input,
            hops=(definition.name,),
        )

    def child(
        self, execution: Execution, call_site: CallSite, *, open_invocation: OpenInvocation, traced: Traced
    ) -> "RunningAgent":
        """Return a child of this agent, whose start is recorded."""
        definition, policy = call_site.agent.definition, execution.policy
        open_invocation.budget = budget = self._budget_of(call_site, open_invocation.template.depth)
        return RunningAgent(
            agent=call_site.agent,
            resolver=self.resolver,
            parent=self,
            run_path=run_path_below(call_site.path, definition.name),
            budget=budget,
            toolset=self._toolset_of(call_site),
            model_name=llm_of(definition).model or self.model_name,
            history=policy_of(definition, call_site.link, self.agent.definition),
            delta_coalescing=choose_coalescing([policy.deltas, definition.deltas, execution.default_deltas]),
            transcript=self._transcript_of(call_site),
            state=call_site.state,
            open_invocation=open_invocation,
            traced=traced,
            input=call_site.input,
            hops=(*(self.hops if call_site.is_for_good else ()), definition.name)[-TRANSFER_WINDOW:],
        )

    def _budget_of(self, call_site: CallSite, depth: int) -> Budget:
        budget, definition = self.budget, call_site.agent.definition
        for limits in (definition.limits, call_site.link.limits):
            if is_bounded(limits):
                budget = Budget(limits, owner=f"each call of the agent {definition.name!r}", depth=depth, above=budget)
        return budget

    def _toolset_of(self, call_site: CallSite) -> Toolset:
        caller, definition = self.agent.definition, call_site.agent.definition
        members = caller.sub_agents if caller.HasField("swarm") else ()
        return build_toolset(
            definition,
            call_site.agent.tool_links,
            self.resolver,
            self.toolset,
            parent=self.name if call_site.is_for_good else "",
            closing=call_site.closing,
            peers={link.agent: link for link in members if link.agent != definition.name},
        )

    def _transcript_of(self, call_site: CallSite) -> Transcript:
        name = call_site.agent.definition.name
        transcript = Transcript(agent=name, chain=agent_chain(self.transcript.chain, name), above=call_site.above)
        if call_site.is_transferred:
            # Without the transfer's result, the caller's last entry: its call is then open, and left out as well.
            transcript.above_end -= 1
        return transcript
