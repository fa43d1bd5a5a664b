"""Run-level facts of a fold: state, start, end, forks, and the requests that are still open."""

from bisect import bisect_right
from collections.abc import Iterable, KeysView, Mapping
from operator import itemgetter
from typing import Final, TypeAlias

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, execution_pb2, fork_pb2, input_pb2, invocation_pb2, message_pb2
from bough_server import events
from bough_server.tree.nodes import End, Node, anomaly, copied, time_of
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
"""An invocation's id and the id of a call of it; the call's is empty where none is meant."""


class Run:
    """A run as far as its own events tell of it."""

    def __init__(self) -> None:
        self.state: execution_pb2.ExecutionState.ValueType = execution_pb2.EXECUTION_STATE_UNSPECIFIED
        """What its last event says, for as long as it has no end; unspecified where none says anything."""
        self.end: End | None = None
        self.start_time: timestamp_pb2.Timestamp | None = None
        """When it began, where its events say so; of a run that was queued, when its wait ended."""
        self.was_queued = False
        self.input: message_pb2.Message | None = None
        self.labels: dict[str, str] = {}
        self.forked_from: fork_pb2.ForkOrigin | None = None
        self.inherited = Sums()
        """What was used before the fork."""
        self.generation = 0
        """How many forks its log has gone through so far."""
        self._root_of_start = ""
        self._root_of_end = ""
        self._has_begun = False
        self._revisions: dict[str, list[tuple[int, str]]] = {}
        self._anomalies: dict[str, invocation_pb2.AnomalyKind.ValueType] = {}

    @property
    def root(self) -> str:
        """The root's invocation id: where the run starts, else where it ends; empty where no event names it."""
        return self._root_of_start or self._root_of_end

    @property
    def anomalies(self) -> tuple[invocation_pb2.Anomaly, ...]:
        """What is inconsistent about the run as a whole."""
        return tuple(anomaly(kind, message) for message, kind in self._anomalies.items())

    def note(self, kind: invocation_pb2.AnomalyKind.ValueType, message: str) -> None:
        """Note an anomaly, once."""
        self._anomalies[message] = kind

    def begin(self, event: event_pb2.AgentEvent, invocation_id: str) -> None:
        """Takes in a run_started; the first one counts."""
        if self._has_begun:
            self.note(invocation_pb2.ANOMALY_KIND_REPEATED, "The run began more than once.")
            return
        started = event.run_started
        self._has_begun, self._root_of_start = True, invocation_id
        self.state = self.state or execution_pb2.EXECUTION_STATE_RUNNING
        if not self.was_queued:
            self.start_time = time_of(event)
        self.labels = dict(started.labels)
        self.input = copied(started.input) if started.HasField("input") else None
        self._define(started.definition_refs)

    def go_on(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """Takes in what becomes of a run between its beginning and its end."""
        if kind == events.RUN_RESUMED and self.state == execution_pb2.EXECUTION_STATE_PENDING:
            return  # a new owner gives a run that waits no session
        self.state = _STATES[kind]
        if kind == events.RUN_QUEUED:
            self.was_queued, self.start_time = True, None
        elif kind in _BEGINNINGS and self.was_queued and self.start_time is None:
            self.start_time = time_of(event)

    def fork(self, event: event_pb2.AgentEvent, used: Sums) -> None:
        """Takes in a run_forked: everything so far is another run's, which has used that much."""
        forked = event.run_forked
        self.go_on(event, events.RUN_FORKED)
        self.generation += 1
        self.inherited = used.copy()
        self.forked_from = fork_pb2.ForkOrigin(run_id=forked.origin.run_id, sequence=forked.origin.sequence)
        if forked.labels:
            self.labels = dict(forked.labels)
        if forked.changes.HasField("input"):
            self.input = copied(forked.changes.input)
        self._define(forked.definition_refs)

    def finish(self, end: End, invocation_id: str) -> None:
        """Takes in an end; the first one counts."""
        if self.end is None:
            self.end, self._root_of_end = end, invocation_id
        else:
            self.note(invocation_pb2.ANOMALY_KIND_REPEATED, "The run ended more than once.")

    def revision(self, node: Node) -> str:
        """The revision of an invocation's definition; empty if it has none.

        It is the one that its start names, unless a fork that it was open in has changed the definition since. A start
        that names none, as the root's, has the run's.
        """
        said = node.start.sub_agent_started.revision if node.start is not None else ""
        generation = self.generation if node.end is None else node.end.generation
        named = self._revisions.get(node.name, [])
        place = bisect_right(named, generation, key=itemgetter(0))
        if not place:
            return said
        defined, revision = named[place - 1]
        return said if said and defined <= node.start_generation else revision

    def _define(self, definitions: Iterable[event_pb2.DefinitionRef]) -> None:
        for named in definitions:
            self._revisions.setdefault(named.name, []).append((self.generation, named.revision))


class Requests:
    """The open requests of a run, each with who waits for it."""

    def __init__(self) -> None:
        self._asker_of: dict[str, CallKey] = {}
        self._open_of: dict[CallKey, dict[str, None]] = {}

    @property
    def calls(self) -> KeysView[CallKey]:
        """The calls that wait."""
        return self._open_of.keys()

    def invocations(self) -> frozenset[str]:
        """The invocations that wait, for a call of theirs or for themselves."""
        return frozenset(invocation_id for invocation_id, _ in self._open_of)

    def ask(self, request: input_pb2.InputRequest, invocation_id: str) -> None:
        """Takes in a request that an invocation makes."""
        self.answer(request.input_id)
        asker = (invocation_id, request.call_id)
        self._asker_of[request.input_id] = asker
        self._open_of.setdefault(asker, {})[request.input_id] = None

    def answer(self, request_id: str) -> None:
        """Takes in that a request is answered."""
        asker = self._asker_of.pop(request_id, None)
        if asker is not None:
            waiting = self._open_of[asker]
            del waiting[request_id]
            if not waiting:
                del self._open_of[asker]

    def end(self, call: CallKey) -> None:
        """Takes in that a call has ended: what it asked is asked no more."""
        for request_id in self._open_of.pop(call, ()):
            del self._asker_of[request_id]

    def replace(self, requests: Iterable[input_pb2.InputRequest]) -> None:
        """Takes in what an interruption says: these requests are open and no others.

        What was asked by a part of the run that was left behind, as the loser of a race, has no end of its own.
        """
        self._asker_of, self._open_of = {}, {}
        for request in requests:
            self.ask(request, request.invocation_id)
