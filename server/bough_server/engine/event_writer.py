"""Write the events of a run: each is recorded once, and in a replay it is compared with the recorded one.

During a replay, an event that the log does not hold yet is buffered until the run is live, so a run that cannot be
replayed to the end writes nothing. In a replay without a recorder (offline) any such event is a divergence.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from bough.v1 import event_pb2
from bough_server.engine import keys
from bough_server.engine.journal import EventIdentity, Journal, identity_of
from bough_server.engine.open_invocations import Invocations, OpenStep
from bough_server.engine.recorder import DeltaChunk, DeltaCoalescing, Recorder
from bough_server.engine.run_metrics import RunMetrics
from bough_server.errors import NonDeterministic
from bough_server.log import events
from bough_server.log.blobs import StoredBlob, drop_file_bytes
from bough_server.messages import copy_of
from bough_server.observability.metrics import Metrics

_ENVELOPE: Final[Sequence[Literal["run_id", "session_id", "sequence", "record_time", "trace_id", "span_id"]]] = (
    "run_id",
    "session_id",
    "sequence",
    "record_time",
    "trace_id",
    "span_id",
)
_MEASURED: Final = ("duration", "start_time", "create_time", "model_calls_without_cost")
"""Fields that may differ when an event is made again. Logs of earlier versions do not count calls without a cost."""


def is_same_event(rebuilt: event_pb2.AgentEvent, recorded: event_pb2.AgentEvent) -> bool:
    """True if two events are equal but for run, session and trace ids, sequence, times and durations."""
    return _without_measures(rebuilt) == _without_measures(recorded)


def _without_measures(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    plain = copy_of(event)
    for name in _ENVELOPE:
        plain.ClearField(name)
    payload = plain.WhichOneof("payload")
    if payload is not None:
        _clear_measures(getattr(plain, payload))
    return plain


def _clear_measures(message: Any) -> None:
    measured, nested = _measures(message.DESCRIPTOR)
    for name in measured:
        message.ClearField(name)
    for name, is_repeated in nested:
        if is_repeated:
            for item in getattr(message, name):
                _clear_measures(item)
        elif message.HasField(name):
            _clear_measures(getattr(message, name))


@cache
def _measures(kind: Descriptor) -> tuple[tuple[str, ...], tuple[tuple[str, bool], ...]]:
    """Return a message's measured fields, and the fields that contain some further down, each with `is_repeated`."""
    measured = tuple(field.name for field in kind.fields if field.name in _MEASURED)
    nested = [field for field, below in _iter_message_fields(kind) if any(map(_has_measures, _collect_types(below)))]
    return measured, tuple((field.name, field.is_repeated) for field in nested)


def _has_measures(kind: Descriptor) -> bool:
    return any(field.name in _MEASURED for field in kind.fields)


def _iter_message_fields(kind: Descriptor) -> Iterator[tuple[FieldDescriptor, Descriptor]]:
    for field in kind.fields:
        below = field.message_type
        if below is None or field.name in _MEASURED:
            continue
        # Well-known types hold no measures, and maps cannot be walked like lists: iterating one yields its keys.
        if not (below.GetOptions().map_entry or below.full_name.startswith("google.")):
            yield field, below


def _collect_types(kind: Descriptor) -> set[Descriptor]:
    """Return a message's type and the types of everything in it."""
    found, waiting = {kind}, [kind]  # types are recursive: a set of those seen ends the walk
    while waiting:
        new = {below for _, below in _iter_message_fields(waiting.pop())} - found
        found |= new
        waiting.extend(new)
    return found


class EventWriter:
    """Writes the events of one run and keeps its open invocations."""

    def __init__(
        self,
        journal: Journal,
        recorder: Recorder | None,
        metrics: Metrics | None = None,
        *,
        on_divergence: Callable[[NonDeterministic], None],
        on_emitted: Callable[[Sequence[event_pb2.AgentEvent]], None],
    ) -> None:
        self.journal = journal
        self._on_divergence = on_divergence
        self._on_emitted = on_emitted
        self.invocations = Invocations(fork_ns=journal.fork_ns)
        self._run_metrics = RunMetrics(metrics, self.invocations, journal) if metrics is not None else None
        self.is_live = journal.is_empty
        self._recorder = recorder
        self._observed: set[EventIdentity] = set()
        self._buffered: list[event_pb2.AgentEvent] = []
        """New events made during the replay; recorded when it is over."""

    @property
    def is_offline(self) -> bool:
        """True if there is no recorder: the log is replayed only to compare."""
        return self._recorder is None

    def emit(self, *batch: event_pb2.AgentEvent) -> None:
        """Record the events that the log does not hold yet, in one append.

        Raises CancelledError if one differs from the log's; the run is stopped with NonDeterministic.
        """
        try:
            fresh = batch if self.journal.is_empty else [event for event in batch if not self._holds(event)]
            if fresh:
                self._record(fresh)
        except NonDeterministic as error:
            raise self._report_divergence(error) from None
        # Events of the log were observed before the run went live; a second time would count their usage twice.
        for event in fresh if self.is_live else batch:
            self.observe(event)
        self._on_emitted(batch)

    def _report_divergence(self, error: NonDeterministic) -> asyncio.CancelledError:
        """Stop the run and return the exception that ends its agents' code; it must not catch the divergence."""
        self._on_divergence(error)
        return asyncio.CancelledError()

    def check(self, key: str, digest: str) -> None:
        """Check an effect against the log.

        Raises CancelledError and stops the run if the log holds another request under its key.
        """
        try:
            self.journal.check(key, digest)
        except NonDeterministic as error:
            raise self._report_divergence(error) from None

    def append(self, event: event_pb2.AgentEvent) -> None:
        """Record an event without comparing it with the log: one of a kind that a run may have many of."""
        assert self._recorder is not None, "an offline replay records nothing"
        self._recorder.record([event])

    def go_live(self) -> None:
        """Switch from replay to live: apply recorded events no coroutine re-emitted, then flush buffered events.

        Effects that a crashed server had begun are open from now on, even if they never continue.
        """
        self.observe_scope("")
        self.is_live = True
        self.journal.prune()
        self._observed.clear()
        buffered, self._buffered = self._buffered, []
        if buffered and self._recorder is not None:
            self._recorder.record(buffered)
            self._measure(buffered)

    def observe(self, event: event_pb2.AgentEvent) -> None:
        """Apply an event, recorded now or read from the log, to the open invocations."""
        self._observe(event, identity_of(event))

    def _observe(self, event: event_pb2.AgentEvent, identity: EventIdentity) -> None:
        self.invocations.observe(event, identity[1])
        if not self.is_live:
            self._observed.add(identity)

    def observe_effect(self, key: str) -> None:
        """Apply the log's events of an effect; not the end of its step, which the replay emits again."""
        for event in self.journal.of_effect.get(key, ()):
            identity = identity_of(event)
            if (
                identity not in self._observed
                and identity[1] not in events.STEP_END_KINDS
                and not self.journal.is_cancelled(event)
            ):
                self._observe(event, identity)

    def replay_step_end(self, step: OpenStep) -> bool:
        """Apply the recorded end of a step; return False if there is none and it has to be emitted.

        It follows from results that were replayed, so only an offline replay builds it again, to compare it.
        """
        if self.is_live or self.is_offline:
            return False
        recorded = self.journal.recorded.get((step.key, events.STEP_COMPLETED, step.attempt))
        if recorded is not None:
            self.observe(recorded)
        return recorded is not None

    def observe_scope(self, scope: str) -> None:
        """Apply all recorded events of a scope that were not applied yet; no effect once the run is live."""
        if self.is_live:
            return
        for identity, event in self.journal.recorded.items():
            if identity not in self._observed and keys.covers(scope, event.effect_key):
                self.observe(event)

    def attach_files(self, files: Sequence[StoredBlob]) -> None:
        """Store files with the next event that is recorded; in an offline replay nothing is stored."""
        if self._recorder is not None and files:
            self._recorder.attach_files(files)

    async def wait_for_commit(self) -> None:
        """Wait until everything recorded so far is committed. Raises what the append raised."""
        if self._recorder is not None:
            await self._recorder.wait_for_commit()

    async def wait_if_full(self) -> None:
        """Wait until producers may continue if too much is not committed yet. Raises what the append raised."""
        if self._recorder is not None and self._recorder.is_full:
            await self._recorder.wait_for_room()

    def buffer_delta(
        self, chunk: DeltaChunk, coalescing: DeltaCoalescing, make: Callable[[], event_pb2.AgentEvent]
    ) -> bool:
        """Buffer streamed texts; return True if the producer has to await `wait_for_room` before the next."""
        assert self._recorder is not None, "a replay streams nothing"
        return self._recorder.buffer_delta(chunk, coalescing, make)

    def flush_below(self, scope: str) -> None:
        """Record the buffered deltas of every effect in a scope."""
        if self._recorder is not None:
            self._recorder.flush_below(lambda key: keys.covers(scope, key))

    async def wait_for_room(self) -> None:
        """Wait until producers of deltas may continue."""
        assert self._recorder is not None, "a replay streams nothing"
        await self._recorder.wait_for_room()

    def _record(self, fresh: Sequence[event_pb2.AgentEvent]) -> None:
        if self._recorder is None:
            raise NonDeterministic(
                f"The replay emitted {events.name_of(fresh[0])} of the effect {fresh[0].effect_key!r}, "
                "which the log does not hold."
            )
        if self.is_live:
            self._recorder.record(fresh)
            self._measure(fresh)
        else:
            self._buffered.extend(fresh)

    def _measure(self, recorded: Sequence[event_pb2.AgentEvent]) -> None:
        if self._run_metrics is not None:
            for event in recorded:
                self._run_metrics.report(event)

    def _holds(self, event: event_pb2.AgentEvent) -> bool:
        recorded = self.journal.recorded.get(identity_of(event))
        if recorded is None:
            return False
        # Logs of before the server kept files hold the bytes of those that agents' code made.
        if not is_same_event(event, recorded) and not is_same_event(event, drop_file_bytes(recorded)):
            raise NonDeterministic(
                f"The replay's {events.name_of(event)} of the effect {event.effect_key!r} differs from the one at "
                f"sequence {recorded.sequence}."
            )
        # Start times and the order of open requests derive from these: they must be those of the first execution.
        event.record_time.CopyFrom(recorded.record_time)
        event.sequence = recorded.sequence
        return True
