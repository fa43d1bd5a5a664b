"""What an invocation has open, has used and has done, while it runs; which there are is invocations.py's."""

from dataclasses import dataclass, field, replace

from google.protobuf import duration_pb2

from bough.v1 import event_pb2, message_pb2, step_pb2
from bough_server import ids, usage
from bough_server.runtime.limits import Budget
from bough_server.truncation import cut_results


@dataclass(slots=True)
class OpenStep:
    """A step that has begun and not ended."""

    key: str
    step_id: str
    index: int
    start_ns: int
    attempt: int = 1
    response: step_pb2.LlmResponse | None = None
    results: dict[str, message_pb2.ToolResult] = field(default_factory=dict)


@dataclass(slots=True)
class OpenInvocation:
    """An invocation that has begun and not ended; `key` is the scope of its effects."""

    key: str
    template: event_pb2.AgentEvent
    start_ns: int
    is_root: bool
    own: message_pb2.Usage = field(default_factory=message_pb2.Usage)
    below: message_pb2.Usage = field(default_factory=message_pb2.Usage)
    steps: dict[str, OpenStep] = field(default_factory=dict)
    effects: dict[str, event_pb2.AgentEvent] = field(default_factory=dict)
    """Calls that have begun and not ended, by their first event; of one that waits for input the input_requested."""
    called: dict[str, event_pb2.AgentEvent] = field(default_factory=dict)
    """Whom open calls run, as an event of theirs begins; they may have ended, and their calls not yet."""
    ended: set[str] = field(default_factory=set)
    """Calls that have ended: what was asked about one, read after it, opens it no more."""
    attempts: dict[str, int] = field(default_factory=dict)
    lost: dict[str, message_pb2.Usage] = field(default_factory=dict)
    """What model calls had used that were left before their ends, as far as their providers said."""
    unsent: set[str] = field(default_factory=set)
    """Model calls that were left while their last attempt waited, and had not gone to a provider."""
    last_step_id: str = ""
    budget: Budget | None = None
    """What bounds it; None where nobody runs it, and in copies."""

    def event(self, key: str, *, traced: event_pb2.AgentEvent | None = None) -> event_pb2.AgentEvent:
        """A new event of this invocation; ids of the trace are those of `traced`, else of the invocation's start."""
        event = event_pb2.AgentEvent()
        event.CopyFrom(self.template)
        event.effect_key = key
        if traced is not None:
            event.trace_id, event.span_id = traced.trace_id, traced.span_id
        return event

    def in_step(self, event: event_pb2.AgentEvent, index: int | None) -> event_pb2.AgentEvent:
        """The same event, placed in a step; None where it is of none."""
        if index is None:
            return event
        event.step_id = ids.step_id(event.invocation_id, index)
        event.step_index = index
        return event

    def tree_usage(self) -> message_pb2.Usage:
        """What it and everything below it has used so far."""
        return usage.summed((self.own, self.below))

    def step(self, opened: OpenStep, now_ns: int) -> step_pb2.AgentStep:
        """A step as it is now, its results in call order, each cut where it is large."""
        step = step_pb2.AgentStep(
            step_id=opened.step_id,
            invocation_id=self.template.invocation_id,
            index=opened.index,
            attempt=opened.attempt,
            latency=duration(now_ns - opened.start_ns),
        )
        step.start_time.FromNanoseconds(opened.start_ns)
        if opened.response is not None:
            step.llm_response.CopyFrom(opened.response)
            if opened.response.HasField("annotations"):
                step.annotations.CopyFrom(opened.response.annotations)
        ordered = sorted(opened.results, key=lambda key: int(key.rpartition(".t")[2]))
        step.tool_results.extend(cut_results([opened.results[key] for key in ordered]))
        return step


def duration(nanoseconds: int) -> duration_pb2.Duration:
    """A duration; never a negative one, whatever a clock did."""
    lasted = duration_pb2.Duration()
    lasted.FromNanoseconds(max(0, nanoseconds))
    return lasted


def copied(one: OpenInvocation) -> OpenInvocation:
    """The same invocation, to be changed without it."""
    own, below = message_pb2.Usage(), message_pb2.Usage()
    own.CopyFrom(one.own)
    below.CopyFrom(one.below)
    return replace(
        one,
        own=own,
        below=below,
        steps={name: replace(step, results=dict(step.results)) for name, step in one.steps.items()},
        effects=dict(one.effects),
        called=dict(one.called),
        ended=set(one.ended),
        attempts=dict(one.attempts),
        lost=dict(one.lost),
        unsent=set(one.unsent),
        budget=None,
    )
