"""State of a run while its events are folded: state, start, end, forks, and open input requests."""

from bisect import bisect_right
from collections.abc import Iterable, KeysView, Mapping
from operator import itemgetter
from typing import Final, TypeAlias

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, execution_pb2, fork_pb2, input_pb2, invocation_pb2, message_pb2
from bough_server import events
from bough_server.messages import copy_of
from bough_server.tree.nodes import End, Node, anomaly, time_of
from bough_server.usage import Sums

_STATES: Final[Mapping[int, execution_pb2.ExecutionState.ValueType]] = {
    events.RUN_QUEUED: execution_pb2.EXECUTION_STATE_PENDING,
    events.RUN_DEQUEUED: execution_pb2.EXECUTION_STATE_RUNNING,
    events.RUN_RESUMED: execution_pb2.EXECUTION_STATE_RUNNING,
    events.RUN_FORKED: execution_pb2.EXECUTION_STATE_RUNNING,
    events.RUN_INTERRUPTED: execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
}
_BEGINNINGS: Final = frozenset({events.RUN_DEQUEUED, events.RUN_FORKED})

CallKey: TypeAlias = tuple[str, str]
"""An invocation's id and the id of one of its calls; the call's id is empty for the invocation itself."""


class Run:
    """What is known of a run so far from its own events."""

    def __init__(self) -> None:
        self.state: execution_pb2.ExecutionState.ValueType = execution_pb2.EXECUTION_STATE_UNSPECIFIED
        """State after its last event, as long as it has no end; unspecified if no event implies one."""
        self.end: End | None = None
        self.start_time: timestamp_pb2.Timestamp | None = None
        """When it began, if its events say so; for a queued run, when it was dequeued."""
        self.was_queued = False
        self.input: message_pb2.Message | None = None
        self.labels: dict[str, str] = {}
        self.forked_from: fork_pb2.ForkOrigin | None = None
        self.inherited = Sums()
        """Usage before the fork."""
        self.generation = 0
        """Number of forks in its log so far."""
        self._root_of_start = ""
        self._root_of_end = ""
        self._has_begun = False
        self._revisions: dict[str, list[tuple[int, str]]] = {}
        self._anomalies: dict[str, invocation_pb2.AnomalyKind.ValueType] = {}

    @property
    def root(self) -> str:
        """Invocation id of the root: from the run's start, else from its end; empty if no event names it."""
        return self._root_of_start or self._root_of_end

    @property
    def anomalies(self) -> tuple[invocation_pb2.Anomaly, ...]:
        """Inconsistencies of the run as a whole."""
        return tuple(anomaly(kind, message) for message, kind in self._anomalies.items())

    def note(self, kind: invocation_pb2.AnomalyKind.ValueType, message: str) -> None:
        """Record an anomaly, once."""
        self._anomalies[message] = kind

    def apply_start(self, event: event_pb2.AgentEvent, invocation_id: str) -> None:
        """Apply a run_started; the first one wins."""
        if self._has_begun:
            self.note(invocation_pb2.ANOMALY_KIND_REPEATED, "The run began more than once.")
            return
        started = event.run_started
        self._has_begun, self._root_of_start = True, invocation_id
        self.state = self.state or execution_pb2.EXECUTION_STATE_RUNNING
        if not self.was_queued:
            self.start_time = time_of(event)
        self.labels = dict(started.labels)
        self.input = copy_of(started.input) if started.HasField("input") else None
        self._define(started.definition_refs)

    def apply_progress(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """Apply an event of the run between its start and its end."""
        if kind == events.RUN_RESUMED and self.state == execution_pb2.EXECUTION_STATE_PENDING:
            return  # a worker took over a queued run, which still waits for its session
        self.state = _STATES[kind]
        if kind == events.RUN_QUEUED:
            self.was_queued, self.start_time = True, None
        elif kind in _BEGINNINGS and self.was_queued and self.start_time is None:
            self.start_time = time_of(event)

    def apply_fork(self, event: event_pb2.AgentEvent, used: Sums) -> None:
        """Apply a run_forked: all events before it are those of its origin, which used `used`."""
        forked = event.run_forked
        self.apply_progress(event, events.RUN_FORKED)
        self.generation += 1
        self.inherited = used.copy()
        self.forked_from = fork_pb2.ForkOrigin(run_id=forked.origin.run_id, sequence=forked.origin.sequence)
        if forked.labels:
            self.labels = dict(forked.labels)
        if forked.changes.HasField("input"):
            self.input = copy_of(forked.changes.input)
        self._define(forked.definition_refs)

    def apply_end(self, end: End, invocation_id: str) -> None:
        """Apply an end; the first one wins."""
        if self.end is None:
            self.end, self._root_of_end = end, invocation_id
        else:
            self.note(invocation_pb2.ANOMALY_KIND_REPEATED, "The run ended more than once.")

    def revision(self, node: Node) -> str:
        """Return the revision of an invocation's definition; empty if it has none.

        It is the one that its start names, unless a fork changed the definition while the invocation was open. If its
        start names none, as the root's, it is the run's.
        """
        at_start = node.start.sub_agent_started.revision if node.start is not None else ""
        generation = self.generation if node.end is None else node.end.generation
        named = self._revisions.get(node.name, [])
        # The last definition before the invocation ended is the one that it ran with.
        count = bisect_right(named, generation, key=itemgetter(0))
        if not count:
            return at_start
        defined, revision = named[count - 1]
        return at_start if at_start and defined <= node.start_generation else revision

    def _define(self, definitions: Iterable[event_pb2.DefinitionRef]) -> None:
        for named in definitions:
            self._revisions.setdefault(named.name, []).append((self.generation, named.revision))


class Requests:
    """Open input requests of a run, each with the call or invocation that waits for it."""

    def __init__(self) -> None:
        self._asker_of: dict[str, CallKey] = {}
        self._open_of: dict[CallKey, dict[str, None]] = {}

    @property
    def calls(self) -> KeysView[CallKey]:
        """The calls, and invocations, that wait."""
        return self._open_of.keys()

    def invocations(self) -> frozenset[str]:
        """Return the invocations that wait, with one of their calls or themselves."""
        return frozenset(invocation_id for invocation_id, _ in self._open_of)

    def ask(self, request: input_pb2.InputRequest, invocation_id: str) -> None:
        """Open a request of an invocation."""
        self.answer(request.input_id)
        asker = (invocation_id, request.call_id)
        self._asker_of[request.input_id] = asker
        self._open_of.setdefault(asker, {})[request.input_id] = None

    def answer(self, request_id: str) -> None:
        """Close a request that was answered."""
        asker = self._asker_of.pop(request_id, None)
        if asker is not None:
            waiting = self._open_of[asker]
            del waiting[request_id]
            if not waiting:
                del self._open_of[asker]

    def end(self, call: CallKey) -> None:
        """Close the requests of a call that has ended."""
        for request_id in self._open_of.pop(call, ()):
            del self._asker_of[request_id]

    def replace(self, requests: Iterable[input_pb2.InputRequest]) -> None:
        """Replace all open requests by those of a run_interrupted.

        Requests of an abandoned part of the run, such as the loser of a race, are closed by no event.
        """
        self._asker_of, self._open_of = {}, {}
        for request in requests:
            self.ask(request, request.invocation_id)
