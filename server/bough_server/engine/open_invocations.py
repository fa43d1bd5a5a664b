"""The open invocations of a run with their steps, effects and usage: a fold of its events.

End events are built from it: by the dispatcher of a live run, by a cancellation, and when a run without a live owner is
closed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from google.protobuf import duration_pb2

from bough.v1 import action_pb2, error_pb2, event_pb2, execution_pb2, message_pb2, step_pb2, usage_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.limits import Budget
from bough_server.log import events
from bough_server.log.usage import ONE_TOOL_CALL, Sums
from bough_server.messages import copy_of
from bough_server.truncation import truncate_results, without_raw


@dataclass(slots=True)
class OpenStep:
    """A step that has started and not ended."""

    key: str
    step_id: str
    index: int
    start_ns: int
    attempt: int = 1
    response: step_pb2.LlmResponse | None = None
    results: dict[str, message_pb2.ToolResult] = field(default_factory=dict)


@dataclass(slots=True)
class OpenInvocation:
    """An invocation that has started and not ended; `key` is the scope of its effects."""

    key: str
    template: event_pb2.AgentEvent
    """The fields that all events of the invocation have in common."""
    start_ns: int
    is_root: bool
    own_start_ns: int
    """Where its duration begins: its start, or the fork if it was open then, as the time before is the origin's."""
    own: Sums = field(default_factory=Sums)
    below: Sums = field(default_factory=Sums)
    """Usage of the invocations below it that have ended."""
    steps: dict[str, OpenStep] = field(default_factory=dict)
    effects: dict[str, event_pb2.AgentEvent] = field(default_factory=dict)
    """Calls and visits of nodes that have started and not ended, by their first event.

    A call that waits for input has its input_requested.
    """
    called: dict[str, event_pb2.AgentEvent] = field(default_factory=dict)
    """Call to the template of the agent it runs; that agent may have ended while the call has not yet."""
    ended: set[str] = field(default_factory=set)
    """Calls that have ended: an input_requested that is applied after the end must not reopen its call."""
    attempts: dict[str, int] = field(default_factory=dict)
    partial_usage: dict[str, usage_pb2.Usage] = field(default_factory=dict)
    """Usage of model calls that were cancelled in flight, as far as their providers reported it."""
    unsent: set[str] = field(default_factory=set)
    """Model calls that were cancelled before their last attempt was sent to a provider."""
    last_step_id: str = ""
    budget: Budget | None = None
    """Its budget; None if no worker executes it, and in copies."""

    def event(self, key: str, *, traced: event_pb2.AgentEvent | None = None) -> event_pb2.AgentEvent:
        """Return a new event of this invocation, with the trace ids of `traced`, default: of the invocation's start."""
        event = copy_of(self.template)
        event.effect_key = key
        if traced is not None:
            event.trace_id, event.span_id = traced.trace_id, traced.span_id
        return event

    def set_step(self, event: event_pb2.AgentEvent, index: int | None) -> event_pb2.AgentEvent:
        """Set the step of an event, by its effect key, and return it; no step if `index` is None."""
        if index is None:
            return event
        event.step_id = ids.step_id(event.invocation_id, keys.step(event.effect_key))
        event.step_index = index
        return event

    def tree_usage(self) -> Sums:
        """Return the usage so far of the invocation and everything below it."""
        whole = self.own.copy()
        whole.add(self.below)
        return whole

    def build_step(self, opened: OpenStep, now_ns: int) -> step_pb2.AgentStep:
        """Return a step as it is now, its results in call order, each truncated if it is large."""
        step = step_pb2.AgentStep(
            step_id=opened.step_id,
            invocation_id=self.template.invocation_id,
            step_index=opened.index,
            attempt=opened.attempt,
            duration=to_duration(now_ns - opened.start_ns),
        )
        step.start_time.FromNanoseconds(opened.start_ns)
        if opened.response is not None:
            step.llm_response.CopyFrom(without_raw(opened.response))
            if opened.response.HasField("annotations"):
                step.annotations.CopyFrom(opened.response.annotations)
        # By number, not by text: "t10" comes after "t9".
        ordered = sorted(opened.results, key=lambda key: int(key.rpartition(".t")[2]))
        step.tool_results.extend(truncate_results([opened.results[key] for key in ordered]))
        return step


def to_duration(nanoseconds: int) -> duration_pb2.Duration:
    """Return a duration, 0 for a negative number of nanoseconds: wall clocks may be set back."""
    made = duration_pb2.Duration()
    made.FromNanoseconds(max(0, nanoseconds))
    return made


def copy_invocation(invocation: OpenInvocation) -> OpenInvocation:
    """Return a copy of an invocation that can be changed independently, without its budget."""
    return replace(
        invocation,
        own=invocation.own.copy(),
        below=invocation.below.copy(),
        steps={name: replace(step, results=dict(step.results)) for name, step in invocation.steps.items()},
        effects=dict(invocation.effects),
        called=dict(invocation.called),
        ended=set(invocation.ended),
        attempts=dict(invocation.attempts),
        partial_usage=dict(invocation.partial_usage),
        unsent=set(invocation.unsent),
        budget=None,
    )


_RootEnd = event_pb2.RunCompleted | event_pb2.RunFailed | event_pb2.RunCancelled
_End = _RootEnd | event_pb2.SubAgentCompleted | event_pb2.SubAgentFailed
_BOUNDED = {
    events.LLM_STARTED,
    events.LLM_RETRYING,
    events.LLM_COMPLETED,
    events.LLM_FAILED,
    events.TOOL_STARTED,
    events.INPUT_REQUESTED,
}


class Invocations:
    """Every open invocation of a run, in the order of their starts.

    `fork_ns` is the time of the last fork, in nanoseconds since the Unix epoch; 0 if the run is none.
    """

    def __init__(self, *, fork_ns: int = 0) -> None:
        self._fork_ns = fork_ns
        self._open: dict[str, OpenInvocation] = {}
        self.kinds: dict[str, execution_pb2.AgentKind.ValueType] = {}
        """The agent kind of every invocation, open or ended."""
        self._cancelled: dict[str, execution_pb2.CancelReason.ValueType] = {}
        """Cancelled scope to its reason, in the order of the requests."""

    def __contains__(self, invocation_id: str) -> bool:
        return invocation_id in self._open

    def __getitem__(self, invocation_id: str) -> OpenInvocation:
        return self._open[invocation_id]

    def get(self, invocation_id: str) -> OpenInvocation | None:
        """Return the open invocation with this id, or None."""
        return self._open.get(invocation_id)

    def root(self) -> OpenInvocation:
        """Return the run's root, which must be open."""
        return next(one for one in self._open.values() if one.is_root)

    def children_of(self, invocation_id: str) -> list[str]:
        """Return the scopes of the open children of an invocation."""
        return [one.key for one in self._open.values() if one.template.parent_invocation_id == invocation_id]

    def observe(self, event: event_pb2.AgentEvent, kind: int = 0) -> None:
        """Apply an event, recorded now or read from the log; `kind` is that of its payload, if it is known already."""
        kind = kind or events.kind_of(event)
        if kind in (events.RUN_STARTED, events.SUB_AGENT_STARTED):
            self._begin(event, is_root=kind == events.RUN_STARTED)
            return
        if kind == events.CANCEL_REQUESTED:
            self._cancelled.setdefault(event.cancel_requested.effect_scope, event.cancel_requested.reason)
            return
        opened = self._open.get(event.invocation_id)
        if opened is None:
            return
        if kind in events.AGENT_END_KINDS:
            self._end(opened)
        elif kind in events.STEP_END_KINDS:
            opened.steps.pop(event.effect_key, None)
            opened.last_step_id = event.step_id
        else:
            _apply_effect(opened, event, kind)

    def _begin(self, event: event_pb2.AgentEvent, *, is_root: bool) -> None:
        template = event_pb2.AgentEvent(
            invocation_id=event.invocation_id,
            parent_invocation_id=event.parent_invocation_id,
            agent=event.agent,
            branch=event.branch,
            depth=event.depth,
            trace_id=event.trace_id,
            span_id=event.span_id,
        )
        self.kinds[event.invocation_id] = event.run_started.kind or event.sub_agent_started.kind
        caller = self._open.get(event.parent_invocation_id)
        if caller is not None and event.sub_agent_started.call_id:
            caller.called[event.effect_key] = template
        start_ns = event.record_time.ToNanoseconds()
        self._open[event.invocation_id] = OpenInvocation(
            event.effect_key, template, start_ns, is_root, own_start_ns=max(start_ns, self._fork_ns)
        )

    def _end(self, opened: OpenInvocation) -> None:
        del self._open[opened.template.invocation_id]
        parent = self._open.get(opened.template.parent_invocation_id)
        if parent is not None:
            parent.below.add(opened.tree_usage())

    def sort_by_depth(self) -> list[OpenInvocation]:
        """Return the open invocations, the deepest first."""
        return sorted(self._open.values(), key=lambda one: one.template.depth, reverse=True)

    def copy(self) -> "Invocations":
        """Return a copy on which ends can be applied without changing this one."""
        made = Invocations(fork_ns=self._fork_ns)
        made._open = {key: copy_invocation(one) for key, one in self._open.items()}
        made._cancelled = dict(self._cancelled)
        return made

    def build_step_failures(
        self, opened: OpenInvocation, error: error_pb2.AgentError, now_ns: int, *, scope: str = ""
    ) -> Sequence[event_pb2.AgentEvent]:
        """Return the step_failed events of the open steps of an invocation in a scope, by default of all of them."""
        made = []
        for step in [step for step in opened.steps.values() if keys.covers(scope, step.key)]:
            event = opened.set_step(opened.event(step.key), step.index)
            event.attempt = step.attempt
            event.step_failed.step.CopyFrom(opened.build_step(step, now_ns))
            event.step_failed.error.CopyFrom(error)
            made.append(event)
        return made

    def build_step_ends(self, opened: OpenInvocation, now_ns: int) -> Sequence[event_pb2.AgentEvent]:
        """Return the step_completed events of the open steps of an invocation."""
        return [self.build_step_end(opened, step, now_ns) for step in opened.steps.values()]

    def build_step_end(self, opened: OpenInvocation, step: OpenStep, now_ns: int) -> event_pb2.AgentEvent:
        """Return the step_completed of one open step."""
        event = opened.set_step(opened.event(step.key), step.index)
        event.attempt = step.attempt
        event.step_completed.step.CopyFrom(opened.build_step(step, now_ns))
        return event

    def build_success_end(
        self,
        opened: OpenInvocation,
        output: message_pb2.Message,
        end_reason: execution_pb2.EndReason.ValueType,
        now_ns: int,
        *,
        action: action_pb2.AgentAction | None = None,
    ) -> event_pb2.AgentEvent:
        """Return the end event of an invocation that answered."""
        event = opened.event(opened.key)
        end: event_pb2.RunCompleted | event_pb2.SubAgentCompleted
        if opened.is_root:
            end = event.run_completed
            end.final_answer.CopyFrom(output)
        else:
            end = event.sub_agent_completed
            end.output.CopyFrom(output)
        if action is not None:
            end.action.CopyFrom(action)
        _fill(end, opened, end_reason, now_ns)
        return event

    def build_failure_end(
        self, opened: OpenInvocation, error: error_pb2.AgentError, now_ns: int
    ) -> event_pb2.AgentEvent:
        """Return the end event of an invocation that failed, or was cancelled if the error's reason is CANCELLED."""
        event = opened.event(opened.key)
        end: event_pb2.RunFailed | event_pb2.RunCancelled | event_pb2.SubAgentFailed
        if not opened.is_root:
            end = event.sub_agent_failed
        elif error.reason == error_pb2.ERROR_REASON_CANCELLED:
            end = event.run_cancelled
        else:
            end = event.run_failed
        end.error.CopyFrom(error)
        end.error.agent, end.error.invocation_id = event.agent, event.invocation_id
        _fill(end, opened, _END_REASONS.get(error.reason, execution_pb2.END_REASON_FAILED), now_ns)
        if end.end_reason == execution_pb2.END_REASON_CANCELLED and not isinstance(end, event_pb2.RunFailed):
            end.cancel_reason = self._cancel_reason(opened.key)
        return event

    def _cancel_reason(self, scope: str) -> execution_pb2.CancelReason.ValueType:
        """Return the reason of the first request that covers a scope; unspecified if its own code raised CANCELLED."""
        covering = (reason for cancelled, reason in self._cancelled.items() if keys.covers(cancelled, scope))
        return next(covering, execution_pb2.CANCEL_REASON_UNSPECIFIED)


_END_REASONS = {
    error_pb2.ERROR_REASON_CANCELLED: execution_pb2.END_REASON_CANCELLED,
    error_pb2.ERROR_REASON_LIMIT_EXCEEDED: execution_pb2.END_REASON_LIMIT,
    error_pb2.ERROR_REASON_INSUFFICIENT_BALANCE: execution_pb2.END_REASON_LIMIT,
    error_pb2.ERROR_REASON_QUOTA_EXCEEDED: execution_pb2.END_REASON_LIMIT,
    error_pb2.ERROR_REASON_DEADLINE_EXCEEDED: execution_pb2.END_REASON_LIMIT,
}


def _fill(end: _End, opened: OpenInvocation, end_reason: execution_pb2.EndReason.ValueType, now_ns: int) -> None:
    end.usage.CopyFrom(opened.own.usage())
    end.tree_usage.CopyFrom(opened.tree_usage().usage())
    end.duration.CopyFrom(to_duration(now_ns - opened.own_start_ns))
    end.step_id = opened.last_step_id
    end.end_reason = end_reason


def _apply_effect(opened: OpenInvocation, event: event_pb2.AgentEvent, kind: int) -> None:
    key = event.effect_key
    if opened.budget is not None and kind in _BOUNDED:
        opened.budget.observe(event)
    if kind == events.LLM_STARTED:
        opened.effects[key] = event
        if not events.is_summarizing(event):
            start_ns = max(event.record_time.ToNanoseconds(), opened.own_start_ns)
            opened.steps[key] = OpenStep(key, event.step_id, event.step_index, start_ns)
    elif kind == events.LLM_RETRYING:
        if not event.llm_retrying.not_sent:
            # This event begins the next attempt and carries the usage of the one that it replaces.
            _count_attempt(opened, event.llm_retrying.lost_usage)
        if (step := opened.steps.get(key)) is not None:
            step.attempt = event.attempt
        opened.attempts[key] = event.attempt
    elif kind == events.LLM_COMPLETED:
        opened.effects.pop(key, None)
        _count_attempt(opened, event.llm_completed.response.usage)
        if (step := opened.steps.get(key)) is not None:
            step.attempt = event.attempt
            step.response = event.llm_completed.response
    elif kind == events.LLM_FAILED:
        # A refused call fails without having started: it was no attempt.
        if opened.effects.pop(key, None) is not None and not event.llm_failed.not_sent:
            _count_attempt(opened, event.llm_failed.lost_usage)
    elif kind == events.INPUT_REQUESTED:
        owner = keys.owner(key)
        if event.input_requested.request.HasField("call") and owner not in opened.ended:
            opened.effects.setdefault(owner, event)
    elif kind == events.TOOL_STARTED:
        before = opened.effects.get(key)
        # A second tool_started is another attempt of the same call after a crash: usage counts the call once.
        if before is None or not before.HasField("tool_started"):
            opened.own.add(ONE_TOOL_CALL)
        opened.effects[key] = event
    elif kind in events.TOOL_END_KINDS:
        _end_call(opened, event, key)
    elif kind == events.NODE_STARTED:
        opened.effects[key] = event
    elif kind in events.NODE_END_KINDS:
        opened.effects.pop(key, None)


def _end_call(opened: OpenInvocation, event: event_pb2.AgentEvent, key: str) -> None:
    opened.effects.pop(key, None)
    opened.called.pop(key, None)
    opened.ended.add(key)
    step_key = key.rpartition(".t")[0] + ".m"
    if step_key in opened.steps:
        opened.steps[step_key].results[key] = events.tool_result_of(event)


def _count_attempt(opened: OpenInvocation, used: usage_pb2.Usage) -> None:
    opened.own.add(Sums.of_attempt(used))
