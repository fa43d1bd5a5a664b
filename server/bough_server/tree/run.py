"""Facts of a run as a whole while its events are folded: state, root, end, forks and definitions."""

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter

from bough.v1 import event_pb2, fork_pb2, invocation_pb2, message_pb2
from bough_server.log.run_state import RunStateFold
from bough_server.log.usage import Sums
from bough_server.messages import copy_of
from bough_server.tree.nodes import End, Node, anomaly


class Run:
    """What is known of a run so far from its own events."""

    def __init__(self) -> None:
        self.progress = RunStateFold()
        """State, start and open requests, as long as it has no end."""
        self.end: End | None = None
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
        self.progress.apply(event)
        self.labels = dict(started.labels)
        self.input = copy_of(started.input) if started.HasField("input") else None
        self._define(started.definition_refs)

    def apply_fork(self, event: event_pb2.AgentEvent, used: Sums) -> None:
        """Apply a run_forked: all events before it are those of its origin, which used `used`."""
        forked = event.run_forked
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
