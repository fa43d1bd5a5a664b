"""A run's log, read as the effects that are already done.

An effect whose result is in the journal gets that result back and does not touch the world again.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bough.v1 import error_pb2, eval_set_pb2, event_pb2, execution_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.engine import keys
from bough_server.errors import NonDeterministic
from bough_server.log import events

_RESULTS: Final = frozenset(
    {
        events.LLM_COMPLETED,
        events.LLM_FAILED,
        events.TOOL_COMPLETED,
        events.TOOL_FAILED,
        events.VALUE_RECORDED,
        events.SESSION_STATE_CHANGED,
        *events.NODE_END_KINDS,
    }
)
_STARTS: Final = frozenset(
    {events.LLM_STARTED, events.TOOL_STARTED, events.SUB_AGENT_STARTED, events.RUN_STARTED, events.NODE_STARTED}
)
_WITH_MESSAGES: Final = frozenset({events.SUB_AGENT_STARTED, events.SUB_AGENT_COMPLETED, *events.TOOL_END_KINDS})
"""Events whose messages a replay builds again, ids included."""

EventIdentity = tuple[str, int, int]
"""Effect key, payload kind and attempt: what makes an event the same event on both sides of a replay."""


def identity_of(event: event_pb2.AgentEvent) -> EventIdentity:
    """Return the identity of an event in its run, the same on every execution."""
    return event.effect_key, events.kind_of(event), event.attempt


@dataclass(frozen=True, slots=True)
class Downtime:
    """An interval in which no worker executed the run, in nanoseconds since the Unix epoch."""

    begin_ns: int
    end_ns: int


class Forks:
    """The forks that led to a run, its own last: what they share of earlier logs, and their policies."""

    def __init__(self) -> None:
        self._forks: list[event_pb2.AgentEvent] = []
        self._roots: dict[tuple[str, int], str] = {}

    def apply(self, event: event_pb2.AgentEvent) -> None:
        """Apply a run_forked."""
        self._forks.append(event)

    def index_message_roots(self, recorded: Mapping[EventIdentity, event_pb2.AgentEvent]) -> None:
        """Note which run recorded each message that a replay makes again."""
        for (key, kind, _), event in recorded.items() if self._forks else ():
            following = next((fork for fork in self._forks if event.sequence < fork.sequence), None)
            if kind in _WITH_MESSAGES and following is not None:
                is_first = following is self._forks[0]
                self._roots[key, kind] = "" if is_first else following.run_forked.origin.run_id

    def message_root(self, key: str, kind: int, *, key_root: str, run_id: str) -> str:
        """Return the root from which the id of an effect's message is derived.

        A message keeps the id that it has in the log that it was recorded in: the key root is that of the first log,
        and each fork derives the ids of what it records itself from its own run id.
        """
        if not self._forks:
            return key_root
        return (self._roots[key, kind] or key_root) if (key, kind) in self._roots else run_id

    def policy_at(self, sequence: int, started: policy_pb2.RunPolicy) -> policy_pb2.RunPolicy:
        """The policy in force when an event was recorded; `started` is that of the run's start."""
        policy = started
        for fork in self._forks:
            if fork.sequence < sequence and fork.run_forked.HasField("policy"):
                policy = fork.run_forked.policy
        return policy

    def mocks(self, started: event_pb2.RunStarted, *, at_sequence: int | None = None) -> eval_set_pb2.ToolMocks | None:
        """Return what answers calls instead of tools and agents: as the last fork says that says it, else the start.

        With `at_sequence` those that were in force when that event was recorded.
        The faults are those of the last that says anything. A fork that brings nothing but faults has the mocks of its
        origin.
        """
        forks = (fork for fork in reversed(self._forks) if at_sequence is None or fork.sequence < at_sequence)
        brought = [fork.run_forked.mocks for fork in forks if fork.run_forked.HasField("mocks")]
        if started.HasField("mocks"):
            brought.append(started.mocks)
        if not brought:
            return None
        newest, mocks = brought[0], next(filter(_has_mocks, brought), brought[0])
        if mocks is newest:
            return newest
        both = eval_set_pb2.ToolMocks()
        both.CopyFrom(mocks)
        del both.faults[:]
        both.faults.extend(newest.faults)
        both.fault_seed = newest.fault_seed
        return both

    def has_mocks_at(self, sequence: int) -> bool:
        """Return whether the mocks that are in force now were when an event was recorded."""
        return all(fork.sequence < sequence for fork in self._forks if _has_mocks(fork.run_forked.mocks))


def _has_mocks(mocks: eval_set_pb2.ToolMocks) -> bool:
    """Return whether mocks are more than faults."""
    return any(field.name not in ("faults", "fault_seed") for field, _ in mocks.ListFields())


class Journal:
    """The effects, requests, cancellations and ends that a log records. The log may lack its deltas."""

    def __init__(self, log: Iterable[event_pb2.AgentEvent] = ()) -> None:
        self.recorded: dict[EventIdentity, event_pb2.AgentEvent] = {}
        self.of_effect: dict[str, list[event_pb2.AgentEvent]] = {}
        self.started: dict[str, event_pb2.AgentEvent] = {}
        self.results: dict[str, event_pb2.AgentEvent] = {}
        self.requested: dict[str, input_pb2.InputRequest] = {}
        """Effect to its request for input."""
        self.answered: dict[str, input_pb2.InputAnswer] = {}
        """Effect to the answer of its request."""
        self.attempts: dict[str, int] = {}
        """Effect to the highest attempt that was started."""
        self.dispatched: set[str] = set()
        self.ends: dict[str, event_pb2.AgentEvent] = {}
        """Scope of an invocation to its end."""
        self.cancelled: dict[str, int] = {}
        """Cancelled scope to the sequence of its first cancel_requested."""
        self.timeouts: dict[int, event_pb2.AgentEvent] = {}
        """Sequence to cancel_requested, of sub-agents that were cancelled by a timeout: their callers continued."""
        self.gaps: list[Downtime] = []
        self.fork_ns = 0
        """Time of the last fork in nanoseconds since the Unix epoch; 0 if the run is none."""
        self.dequeued: event_pb2.AgentEvent | None = None
        self.is_interrupted = False
        """True if the log ends with the run waiting for input."""
        self.shared_through = 0
        """The last sequence that a fork shares with its origin's log; 0 if the run is no fork."""
        self.changed_input: message_pb2.Message | None = None
        """The input that replaces the origin's in a fork; None if unchanged."""
        self.node_outputs: dict[str, str] = {}
        """Visit of a graph's node to the output, as JSON text, that a fork replaces its own with."""
        self.forks = Forks()
        self.of_the_run: list[event_pb2.AgentEvent] = []
        """The events of RUN_KINDS, in log order."""
        self.last_sequence = 0
        self.todo: deque[event_pb2.AgentEvent] = deque()
        """Events that are still to be delivered to the run's coroutines, in log order."""
        self._requested_again: set[str] = set()
        """Effects that the replay has asked for."""
        self.tool_mock_uses: Counter[int] = Counter()
        self.agent_mock_uses: Counter[int] = Counter()
        """How often each mock that is in force has answered, by its number."""
        self._read_all(log)
        self._count_mock_uses()
        self.forks.index_message_roots(self.recorded)
        self.todo.extend(self._collect_deliveries())

    def _count_mock_uses(self) -> None:
        counted: set[str] = set()
        for (key, kind, _), event in self.recorded.items():
            if not self.forks.has_mocks_at(event.sequence):
                continue
            if kind == events.SUB_AGENT_STARTED and event.sub_agent_started.HasField("mock_index"):
                self.agent_mock_uses[event.sub_agent_started.mock_index] += 1
            # A further attempt is answered by the mock of the one before.
            if kind == events.TOOL_STARTED and event.tool_started.HasField("mock_index") and key not in counted:
                counted.add(key)
                self.tool_mock_uses[event.tool_started.mock_index] += 1

    def find_tool_mock(self, key: str) -> int | None:
        """Return the number of the mock that answered an earlier attempt of a call; None if none in force did."""
        starts = (event for event in self.of_effect.get(key, ()) if event.tool_started.HasField("mock_index"))
        return next((each.tool_started.mock_index for each in starts if self.forks.has_mocks_at(each.sequence)), None)

    def _collect_deliveries(self) -> list[event_pb2.AgentEvent]:
        results = [event for event in self.results.values() if event.effect_key not in self.dispatched]
        # Ends are delivered too: only their place in the log says which of two ends, or an end and a cancellation,
        # came first.
        delivered = [*results, *self.timeouts.values(), *self.ends.values()]
        return sorted(delivered, key=lambda event: event.sequence)

    @property
    def is_empty(self) -> bool:
        """True if nothing but the start of the run is recorded."""
        return len(self.recorded) <= 1

    def _read_all(self, log: Iterable[event_pb2.AgentEvent]) -> None:
        before: event_pb2.AgentEvent | None = None
        for event in log:
            kind = events.kind_of(event)
            if kind in events.RUN_KINDS:
                self._read_run_event(event, kind, before)
            elif kind and kind not in events.DELTA_KINDS:
                self._read(event, kind)
            before = event
        if before is not None:
            self.last_sequence = before.sequence
            # Any later event, such as a run_resumed, ends the interruption: only the last event counts.
            self.is_interrupted = before.HasField("run_interrupted")

    def _read(self, event: event_pb2.AgentEvent, kind: int) -> None:
        key, attempt = event.effect_key, event.attempt
        self.recorded.setdefault((key, kind, attempt), event)
        self.of_effect.setdefault(key, []).append(event)
        if kind in _STARTS:
            self.started.setdefault(key, event)
        if attempt:
            self.attempts[key] = max(attempt, self.attempts.get(key, 0))
        if kind == events.SUB_AGENT_STARTED:
            self.dispatched.add(key)
        if kind in events.AGENT_END_KINDS:
            self.ends[key] = event
        if kind in _RESULTS:
            self.results[key] = event
        elif kind == events.INPUT_REQUESTED:
            self._read_request(event)
        elif kind == events.INPUT_RECEIVED:
            self._read_answer(event)
        elif kind == events.CANCEL_REQUESTED:
            self.cancelled.setdefault(event.cancel_requested.effect_scope, event.sequence)
            if (
                event.cancel_requested.reason == execution_pb2.CANCEL_REASON_LIMIT
                and event.cancel_requested.effect_scope
            ):
                self.timeouts[event.sequence] = event

    def _read_run_event(self, event: event_pb2.AgentEvent, kind: int, before: event_pb2.AgentEvent | None) -> None:
        self.of_the_run.append(event)
        if kind in (events.RUN_STARTED, events.CANCEL_REQUESTED):
            self._read(event, kind)
        elif kind != events.RUN_INTERRUPTED:
            self._read_change(event, kind, before)

    def _read_change(self, event: event_pb2.AgentEvent, kind: int, before: event_pb2.AgentEvent | None) -> None:
        if kind in (events.RUN_RESUMED, events.RUN_FORKED):
            begin_ns = before.record_time.ToNanoseconds() if before is not None else 0
            self.gaps.append(Downtime(begin_ns, max(begin_ns, event.record_time.ToNanoseconds())))
        if kind == events.RUN_DEQUEUED:
            self.dequeued = event
        elif kind == events.RUN_FORKED:
            self.forks.apply(event)
            self.shared_through = event.run_forked.origin.sequence
            self.fork_ns = event.record_time.ToNanoseconds()
            changes = event.run_forked.changes
            if changes.HasField("input"):
                self.changed_input = changes.input
            self.node_outputs.update((edited.effect_key, edited.output_json) for edited in changes.node_outputs)
        # Keyed by sequence, as a run may have many. They keep `is_empty` False: a run that was queued, or taken over
        # before its first effect, has no result to deliver but is not new either.
        self.recorded.setdefault(("", kind, event.sequence), event)

    def _read_request(self, event: event_pb2.AgentEvent) -> None:
        request = event.input_requested.request
        self.requested[event.effect_key] = request
        # Only a question is an effect by itself; an approval or a client tool is part of its tool call.
        if request.kind == input_pb2.INPUT_KIND_QUESTION:
            self.started.setdefault(event.effect_key, event)

    def _read_answer(self, event: event_pb2.AgentEvent) -> None:
        self.answered[event.effect_key] = event.input_received.answer
        request = self.requested.get(event.effect_key)
        if request is not None and request.kind == input_pb2.INPUT_KIND_QUESTION:
            self.results[event.effect_key] = event

    def open_requests(self) -> "Iterator[tuple[str, input_pb2.InputRequest]]":
        """Yield the requests for input that are neither answered nor over, each with its effect, in log order."""
        for key, request in self.requested.items():
            owner = keys.owner(key)
            is_over = owner in self.results or self.is_in_cancelled(owner)
            if key not in self.answered and not is_over and not self._is_ended(key):
                yield key, request

    def _is_ended(self, key: str) -> bool:
        return any(keys.covers(scope, key) for scope in self.ends)

    def is_in_cancelled(self, key: str) -> bool:
        """True if an effect lies in a scope that was cancelled at any point of the log."""
        return any(keys.covers(scope, key) for scope in self.cancelled)

    def holds(self, key: str, kind: int) -> bool:
        """True if the log has this effect's event of a kind that has no attempts."""
        return (key, kind, 0) in self.recorded

    def running_ns(self, since_ns: int, until_ns: int) -> int:
        """Return for how long, in nanoseconds, a worker executed the run between two times."""
        down = sum(max(0, min(gap.end_ns, until_ns) - max(gap.begin_ns, since_ns)) for gap in self.gaps)
        return max(0, until_ns - since_ns - down)

    def is_timed_out(self, scope: str) -> bool:
        """True if a sub-agent was cancelled by its own timeout."""
        return any(event.cancel_requested.effect_scope == scope for event in self.timeouts.values())

    def is_timeout_end(self, event: event_pb2.AgentEvent) -> bool:
        """True if this is the end of a sub-agent by its own timeout, after which its caller continued.

        If something else ended it while the timeout was being applied, its caller was ended as well.
        """
        scope = event.effect_key
        if self.ends.get(scope) is not event or not self.is_timed_out(scope):
            return False
        if event.sub_agent_failed.error.reason != error_pb2.ERROR_REASON_LIMIT_EXCEEDED:
            return False
        above = ((other, sequence) for other, sequence in self.cancelled.items() if other != scope)
        return not any(keys.covers(other, scope) and sequence < event.sequence for other, sequence in above)

    def is_step_cancelled(self, key: str) -> bool:
        """True if a step was ended by a cancellation, whatever results it had."""
        ends = (event for event in self.of_effect.get(key, ()) if events.kind_of(event) in events.STEP_END_KINDS)
        return bool(self.cancelled) and any(self.is_cancelled(event) for event in ends)

    def is_cancelled(self, event: event_pb2.AgentEvent) -> bool:
        """True if an event was recorded after its scope was cancelled, when no coroutine waited for it any more."""
        return bool(self.cancelled) and any(
            event.sequence > sequence and keys.covers(scope, event.effect_key)
            for scope, sequence in self.cancelled.items()
        )

    def check(self, key: str, digest: str) -> None:
        """Note that an effect was asked for. Raises NonDeterministic if the log holds another request under its key."""
        self._requested_again.add(key)
        recorded = self.started.get(key) or self.results.get(key)
        if recorded is not None and recorded.effect_digest and recorded.effect_digest != digest:
            raise NonDeterministic(
                f"The effect {key} asked for something else than the log holds ({events.name_of(recorded)} at sequence "
                f"{recorded.sequence}). Agent code must touch the world through effects only."
            )

    def prune(self) -> None:
        """Free the events of effects and invocations that are over, once the replay is; only open ones are read again.

        Those in cancelled scopes stay: a cancellation that a crash cut short continues from them.
        """
        done = {*self.results, *self.ends}
        if self.cancelled:
            done = {key for key in done if not self.is_in_cancelled(key)}
        for key in done:
            for of_effect in (self.of_effect, self.started, self.results, self.ends):
                of_effect.pop(key, None)
        self.recorded = {identity: event for identity, event in self.recorded.items() if identity[0] not in done}
        self._requested_again.clear()

    def find_skipped_effect(self) -> event_pb2.AgentEvent | None:
        """Return the start of an effect without a result that the replay did not ask for again, or None."""
        for key, event in self.started.items():
            is_over = key in self.results or key in self.ends
            if key and key not in self._requested_again and not is_over and not self.is_in_cancelled(key):
                return event
        return None
