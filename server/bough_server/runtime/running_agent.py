"""A running agent invocation: its budget, toolset, history and session state."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, policy_pb2
from bough_server.engine.execution import Execution
from bough_server.engine.limits import Budget
from bough_server.engine.open_invocations import OpenInvocation
from bough_server.engine.recorder import DeltaCoalescing
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.history.visible import policy_of
from bough_server.ids import agent_chain
from bough_server.log.session_state import values_of
from bough_server.observability.tracing import Traced
from bough_server.runtime.agent import Agent, Resolver, llm_of
from bough_server.runtime.state import LaneState
from bough_server.runtime.toolset import Toolset, build_toolset


def choose_coalescing(policies: "list[policy_pb2.DeltaPolicy]") -> DeltaCoalescing:
    """Return the first policy that is set, of the request's, the agent's, the server's; else the defaults."""
    for policy in policies:
        if policy.HasField("passthrough"):
            return DeltaCoalescing(max_interval=0, max_chars=0)
        if policy.HasField("aggregated"):
            chosen = policy.aggregated
            default = DeltaCoalescing()
            return DeltaCoalescing(
                max_interval=chosen.max_interval.ToTimedelta().total_seconds()
                if chosen.HasField("max_interval")
                else None,
                max_chars=chosen.max_chars if chosen.HasField("max_chars") else default.max_chars,
            )
    return DeltaCoalescing()


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

    def event(self, key: str, index: int | None = None, *, traced: Traced | None = None) -> event_pb2.AgentEvent:
        """Return a new event of an effect, in the step `index` if it belongs to one.

        It has the trace ids of `traced`, default: of the invocation's start.
        """
        event = self.open_invocation.set_step(self.open_invocation.event(key), index)
        if traced is not None:
            event.trace_id, event.span_id = traced.trace_id, traced.span_id
        return event

    def error_of(self, error: RunError) -> error_pb2.AgentError:
        """Return an error as events of this invocation carry it."""
        return error.to_agent_error(agent=self.name, invocation_id=self.invocation_id)

    @classmethod
    def root(cls, execution: Execution, resolver: Resolver, agent: Agent, traced: Traced) -> "RunningAgent":
        """Return the root of a run, whose start is recorded."""
        started, definition = execution.facts.started, agent.definition
        policy = execution.policy
        place = "`policy.limits` of the request, or else by `limits.default` of bough.yaml"
        budget = Budget(policy.limits, owner="the run", place=place, depth=0, shared=execution.shared_limit)
        budget = Budget.of_definition(definition, owner=f"the agent {definition.name!r}", depth=0, above=budget)
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
