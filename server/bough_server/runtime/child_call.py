"""The call of a child: what is asked for, what its admission fixes, the events of its start and end, and its result."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server import ids
from bough_server.engine.cancellation import failure_of_child
from bough_server.engine.execution import Execution
from bough_server.engine.limits import TRANSFER_WINDOW, Budget, is_bounded
from bough_server.engine.open_invocations import OpenInvocation, to_duration
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.history.visible import policy_of
from bough_server.ids import agent_chain
from bough_server.log import events
from bough_server.messages import copy_of
from bough_server.models.model import ToolSpec
from bough_server.observability.tracing import Traced
from bough_server.runtime.agent import Agent, Outcome, llm_of
from bough_server.runtime.lane import Lane
from bough_server.runtime.running_agent import RunningAgent, choose_coalescing
from bough_server.runtime.state import LaneState
from bough_server.runtime.toolset import Toolset, build_toolset

MAX_BRANCH_BYTES: Final = 256
MAX_RUN_PATH: Final = 32


class Abort(RunError):
    """Failure of a sub-agent that aborts its caller."""


OnFailure = Callable[[RunError], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The transfer to an agent: by its caller, or by another member of its caller's swarm."""

    by: str
    """The name of the agent that transfers."""
    from_invocation_id: str
    """The invocation that transfers."""
    call_id: str = ""
    """The transferring call; empty if code transfers."""
    path: tuple[str, ...] = ()
    """The agents that transferred to one another before it."""
    comes_back: bool = False
    """True if its caller continues after its end, although it transferred."""


# Not frozen, because one is made for every call: that would take four times as long.
@dataclass(slots=True, kw_only=True)
class Dispatch:
    """A child to run: `call` and `step_index` if a model called it, `input` if code did.

    Without either it runs with its caller's input.
    """

    key: str
    """Its effect, and the scope of what it does itself."""
    link: agent_pb2.AgentLink
    """The link to the agent."""
    call: message_pb2.ToolCall | None = None
    step_index: int | None = None
    input: message_pb2.Message | None = None
    trigger: execution_pb2.InvocationTrigger.ValueType = execution_pb2.INVOCATION_TRIGGER_WORKFLOW
    """What makes it run; TOOL if a model called it."""
    transfer: Transfer | None = None
    """The transfer that it results from, if any."""
    state: LaneState | None = None
    """The session state that it sees; None for that of its caller's lane."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further values for an input builder: `plan`, `step`, `executed_steps`."""
    closing: Sequence[ToolSpec] = ()
    """Tools of which it must call one to end; empty if it may end with any answer."""
    iteration: int | None = None
    """The iteration of its caller, from 0; None if its caller has no loop and no plan."""
    beside_start: Sequence[event_pb2.AgentEvent] = ()
    """Events to append together with its start, before it, or with its refusal."""
    beside_end: "Callable[[DispatchResult, Abort | None], Sequence[event_pb2.AgentEvent]] | None" = None
    """Makes the events to append together with its end, after it; not called if it was refused or timed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchResult:
    """How a child ended: its outcome or error, the result of the call that dispatched it, and its transcript."""

    result: message_pb2.ToolResult
    outcome: Outcome | None = None
    author: str = ""
    """The agent that wrote the outcome's output."""
    path: tuple[str, ...] = ()
    """The agents that have spoken up to its end."""
    error: RunError | None = None
    transcript: Transcript | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCall:
    """An admitted call of a child, from which its events, its result and the consequences of its failure follow."""

    lane: Lane
    """The lane of its caller."""
    work: Dispatch
    agent: Agent
    message: message_pb2.Message
    """Its input."""
    digest: str
    path: tuple[str, ...]
    """The agents that have spoken up to it, itself included."""
    timeout: float | None
    """The seconds that it may take; None if unlimited."""
    mock_index: int | None
    """The mock that answers instead of it, if one does."""
    aborts_caller: bool
    """True if its failure aborts its caller."""
    on_failure: OnFailure
    """Awaited with its error, or with the Abort of its caller, before its end is recorded."""

    def start(self) -> RunningAgent:
        """Record its start, in one append with the call that dispatched it, and return the child."""
        execution, caller, work = self.lane.execution, self.lane.running, self.work
        started = self.build_start()
        traced = self._open_span(started)
        started.trace_id, started.span_id = traced.trace_id, traced.span_id
        batch: list[event_pb2.AgentEvent] = [*work.beside_start]
        if work.call is not None:
            batch.append(self.build_call(work.call, traced))
        if work.transfer is not None:
            batch.append(caller.event(work.key, traced=traced))
            transferred = batch[-1].agent_transferred
            transferred.from_agent, transferred.to_agent = work.transfer.by, work.link.agent
            transferred.call_id, transferred.to_invocation_id = work.transfer.call_id, started.invocation_id
        is_new = (work.key, events.SUB_AGENT_STARTED, 0) not in execution.journal.recorded
        if self.mock_index is not None and is_new:
            execution.journal.agent_mock_uses[self.mock_index] += 1
        execution.emit(*batch, started)
        return self._build_child(execution.invocations[started.invocation_id], traced)

    def build_start(self) -> event_pb2.AgentEvent:
        """Return its sub_agent_started, without trace ids."""
        caller, work, definition = self.lane.running, self.work, self.agent.definition
        event = event_pb2.AgentEvent(
            invocation_id=self.message.invocation_id,
            parent_invocation_id=caller.invocation_id,
            agent=work.link.agent,
            branch=branch_below(caller.branch, work.link.agent),
            depth=caller.depth + 1,
            effect_key=work.key,
            effect_digest=self.digest,
        )
        started = event.sub_agent_started
        started.kind, started.description = self.agent.kind, definition.description
        started.trigger, started.node = work.trigger, self.lane.node
        if self.lane.node and work.trigger == execution_pb2.INVOCATION_TRIGGER_WORKFLOW:
            started.trigger = execution_pb2.INVOCATION_TRIGGER_GRAPH_NODE
        started.run_path.extend(self.path)
        started.input.CopyFrom(self.message)
        # A fork may have changed the definition since: the start is compared with the recorded one.
        recorded = self.lane.execution.journal.recorded.get((work.key, events.SUB_AGENT_STARTED, 0))
        own = self.agent.revision if definition.WhichOneof("kind") else ""
        started.revision = own if recorded is None else recorded.sub_agent_started.revision
        if work.call is not None:
            started.trigger, started.call_id = execution_pb2.INVOCATION_TRIGGER_TOOL, work.call.call_id
        if work.transfer is not None:
            started.call_id, started.from_invocation_id = work.transfer.call_id, work.transfer.from_invocation_id
        if work.iteration is not None:
            started.iteration = work.iteration
        if recorded is not None:
            # As recorded, also by a fork with other mocks: the start is compared.
            if recorded.sub_agent_started.HasField("mock_index"):
                started.mock_index = recorded.sub_agent_started.mock_index
        elif self.mock_index is not None:
            started.mock_index = self.mock_index
        return event

    def build_call(self, call: message_pb2.ToolCall, traced: Traced) -> event_pb2.AgentEvent:
        """Return the tool_started of the model's call that dispatched it."""
        execution, key = self.lane.execution, self.work.key
        event = self.lane.running.event(key, self.work.step_index, traced=traced)
        event.attempt, event.effect_digest = 1, self.digest
        event.tool_started.call.CopyFrom(call)
        # After a crash or in a fork the recorded key is kept: this start is compared with the recorded one.
        earlier = execution.journal.started.get(key)
        event.tool_started.idempotency_key = (
            earlier.tool_started.idempotency_key if earlier else ids.derive_id(execution.facts.run_id, key)
        )
        return event

    def build_result(
        self, running: RunningAgent, *, outcome: Outcome | None = None, error: RunError | None = None
    ) -> message_pb2.ToolResult:
        """Return the result of the call that dispatched it; if code dispatched it, its end in the form of a result."""
        caller = self.lane.running
        result = message_pb2.ToolResult(
            agent=caller.name,
            invocation_id=caller.invocation_id,
            child_invocation_id=running.invocation_id,
            call=self.work.call,
        )
        result.start_time.FromNanoseconds(running.open_invocation.own_start_ns)
        if outcome is not None:
            result.parts.extend(outcome.output.parts)
        if error is not None:
            result.error.CopyFrom(failure_of_child(self.work.link.agent, running.invocation_id, error.message))
        return result

    def build_end(
        self, running: RunningAgent, result: message_pb2.ToolResult, outcome: Outcome | None, error: RunError | None
    ) -> list[event_pb2.AgentEvent]:
        """Return the events of its end, the last that of the call which dispatched it; that takes `result`."""
        execution, work = self.lane.execution, self.work
        batch = build_end_events(execution, running, outcome, error)
        if work.call is not None:
            result.duration.CopyFrom(to_duration(execution.clock.now_ns() - running.open_invocation.own_start_ns))
            batch.append(self.lane.running.event(work.key, work.step_index, traced=running.traced))
            batch[-1].attempt = 1
            (batch[-1].tool_failed if error else batch[-1].tool_completed).result.CopyFrom(result)
        return batch

    def build_abort(self, error: RunError) -> Abort | None:
        """Return the error with which its failure aborts its caller; None if its caller continues."""
        if not self.aborts_caller:
            return None
        return Abort(
            f"The agent {self.work.link.agent!r} failed and its failure aborts {self.lane.running.name!r}: "
            f"{error.message}",
            reason=error_pb2.ERROR_REASON_SUB_AGENT_FAILED,
            details_json=error.details_json,
        )

    async def fail(self, error: RunError) -> Abort | None:
        """Apply the consequences of its failure to its siblings and its caller; return what aborts its caller."""
        abort = self.build_abort(error)
        if abort is not None:
            self.lane.running.abort = abort
        await self.on_failure(abort or error)
        return abort

    def _open_span(self, started: event_pb2.AgentEvent) -> Traced:
        execution, key = self.lane.execution, self.work.key
        traced = execution.tracing.invoke_agent(
            agent=started.agent,
            kind=started.sub_agent_started.kind,
            description=started.sub_agent_started.description,
            invocation_id=started.invocation_id,
            run_id=execution.facts.run_id,
            session_id=execution.facts.session_id,
            branch=started.branch,
            depth=started.depth,
            parent=self.lane.traced.below,
            is_over=key in execution.journal.ends,
        )
        execution.spans[key] = traced
        return traced

    def _build_child(self, record: OpenInvocation, traced: Traced) -> RunningAgent:
        """Return the child, whose start is recorded."""
        lane, caller, link, definition = self.lane, self.lane.running, self.work.link, self.agent.definition
        policy, transfer = lane.execution.policy, self.work.transfer
        # Another member's transfer, in a swarm, is no transfer of the swarm itself, which is its caller.
        own = transfer if transfer is not None and transfer.by == caller.name else None
        is_for_good = own is not None and not own.comes_back
        record.budget = budget = self._budget(record.template.depth)
        return RunningAgent(
            agent=self.agent,
            resolver=caller.resolver,
            parent=caller,
            run_path=self.path,
            budget=budget,
            toolset=self._toolset(parent=caller.name if is_for_good else ""),
            model_name=llm_of(definition).model or caller.model_name,
            history=policy_of(definition, link, caller.agent.definition),
            delta_coalescing=choose_coalescing([policy.deltas, definition.deltas, lane.execution.default_deltas]),
            transcript=self._transcript(is_transferred=own is not None),
            state=self.work.state or lane.lane_state,
            open_invocation=record,
            traced=traced,
            input=self.message,
            hops=(*(caller.hops if is_for_good else ()), definition.name)[-TRANSFER_WINDOW:],
        )

    def _budget(self, depth: int) -> Budget:
        budget, definition = self.lane.running.budget, self.agent.definition
        owner, limits = f"each call of the agent {definition.name!r}", self.work.link.limits
        budget = Budget.of_definition(definition, owner=owner, depth=depth, above=budget)
        if is_bounded(limits):
            place = f"`limits` of the link of {self.lane.running.name!r} to it"
            budget = Budget(limits, owner=owner, place=place, depth=depth, above=budget)
        return budget

    def _toolset(self, *, parent: str) -> Toolset:
        caller, definition = self.lane.running, self.agent.definition
        members = caller.agent.definition.sub_agents if caller.agent.definition.HasField("swarm") else ()
        return build_toolset(
            definition,
            self.agent.tool_links,
            caller.resolver,
            caller.toolset,
            parent=parent,
            closing=self.work.closing,
            peers={link.agent: link for link in members if link.agent != definition.name},
        )

    def _transcript(self, *, is_transferred: bool) -> Transcript:
        name, above = self.agent.definition.name, self.lane.transcript
        chain = agent_chain(self.lane.running.transcript.chain, name)
        transcript = Transcript(agent=name, chain=chain, above=above)
        if is_transferred:
            # Without the transfer's result, the caller's last entry: its call is then open, and left out as well.
            transcript.above_end -= 1
        return transcript


def build_end_events(
    execution: Execution, running: RunningAgent, outcome: Outcome | None, error: RunError | None
) -> list[event_pb2.AgentEvent]:
    """Return the end events of an invocation: of its open steps, then its own.

    A new answer is added to its transcript and gets a message id, which gives it a place in the session.
    """
    now, opened, invocations = execution.clock.now_ns(), running.open_invocation, execution.invocations
    failure = running.error_of(error) if error is not None else None
    if failure is None:
        steps = invocations.build_step_ends(opened, now)
    else:
        steps = invocations.build_step_failures(opened, failure, now)
    if steps:
        opened.last_step_id = steps[-1].step_id  # set before the end is built, which names it
    if failure is not None:
        return [*steps, invocations.build_failure_end(opened, failure, now)]
    assert outcome is not None, "an invocation without an error has an answer"
    output = _build_answer(execution, running, outcome)
    return [*steps, invocations.build_success_end(opened, output, outcome.end_reason, now, action=outcome.action)]


def _build_answer(execution: Execution, running: RunningAgent, outcome: Outcome) -> message_pb2.Message:
    output, is_root = copy_of(outcome.output), running.parent is None
    output.role, output.invocation_id = message_pb2.ROLE_ASSISTANT, running.invocation_id
    output.author = outcome.author or running.name
    is_new = not outcome.author and not outcome.is_in_transcript
    if is_root or is_new:  # the session must hold the answer to its user, whichever agent wrote it
        kind = "ASSISTANT" if is_root else "SUB_AGENT_ASSISTANT"
        output.kind = message_pb2.MessageKind.Value(f"MESSAGE_KIND_{kind}")
        recorded_by = events.RUN_COMPLETED if is_root else events.SUB_AGENT_COMPLETED
        output.message_id = execution.message_id(running.scope, recorded_by, kind)
    if is_new:
        running.transcript.add_message(output)
    return output


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
