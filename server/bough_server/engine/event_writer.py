"""Write the events of a run: each is recorded once, and compared with the log while that is replayed.

While a log is replayed, an event that it does not hold yet is buffered until the run is live: what cannot be replayed
to the end writes nothing. A replay without a recorder must make no such event at all.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from bough.v1 import event_pb2
from bough_server import events
from bough_server.engine import keys
from bough_server.engine.journal import EventIdentity, Journal, identity_of
from bough_server.engine.open_invocations import Invocations, OpenStep
from bough_server.engine.recorder import DeltaChunk, DeltaCoalescing, Recorder
from bough_server.engine.run_metrics import RunMetrics
from bough_server.errors import NonDeterministic
from bough_server.metrics import Metrics

_ENVELOPE: Final[Sequence[Literal["run_id", "session_id", "sequence", "record_time", "trace_id", "span_id"]]] = (
    "run_id",
    "session_id",
    "sequence",
    "record_time",
    "trace_id",
    "span_id",
)
_MEASURED: Final = ("duration", "start_time", "create_time")


def same_event(made: event_pb2.AgentEvent, recorded: event_pb2.AgentEvent) -> bool:
    """Whether two events say the same, times, durations and trace ids apart."""
    return _without_measures(made) == _without_measures(recorded)


def _without_measures(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    plain = event_pb2.AgentEvent()
    plain.CopyFrom(event)
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
    """The fields of a message that are measures, and those that hold some further down, with whether they are lists."""
    measured = tuple(field.name for field in kind.fields if field.name in _MEASURED)
    nested = [field for field, below in _nested(kind) if any(map(_has_measures, _within(below)))]
    return measured, tuple((field.name, field.is_repeated) for field in nested)


def _has_measures(kind: Descriptor) -> bool:
    return any(field.name in _MEASURED for field in kind.fields)


def _nested(kind: Descriptor) -> Iterator[tuple[FieldDescriptor, Descriptor]]:
    for field in kind.fields:
        below = field.message_type
        if below is None or field.name in _MEASURED:
            continue
        if not (below.GetOptions().map_entry or below.full_name.startswith("google.")):
            yield field, below


def _within(kind: Descriptor) -> set[Descriptor]:
    """A message's kind, and the kinds of everything in it."""
    found, waiting = {kind}, [kind]
    while waiting:
        new = {below for _, below in _nested(waiting.pop())} - found
        found |= new
        waiting.extend(new)
    return found


class EventWriter:
    """What one run says, and what is open in it."""

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
        self.invocations = Invocations()
        self._measuring = RunMetrics(metrics, self.invocations, journal) if metrics is not None else None
        self.is_live = journal.is_empty
        self._recorder = recorder
        self._observed: set[EventIdentity] = set()
        self._kept: list[event_pb2.AgentEvent] = []

    @property
    def is_offline(self) -> bool:
        """Whether nothing can be recorded at all."""
        return self._recorder is None

    def emit(self, *batch: event_pb2.AgentEvent) -> None:
        """Record events in one append, those that the log does not hold yet.

        Raises CancelledError if they are not what the log holds: then the run is stopped.
        """
        try:
            fresh = batch if self.journal.is_empty else [event for event in batch if not self._holds(event)]
            if fresh:
                self._record(fresh)
        except NonDeterministic as error:
            raise self._diverged(error) from None
        for event in fresh if self.is_live else batch:  # what the log holds was taken in before it went live
            self.observe(event)
        self._on_emitted(batch)

    def _diverged(self, error: NonDeterministic) -> asyncio.CancelledError:
        """Stop a replay that cannot go on, and return what to end the code of its agents with."""
        self._on_divergence(error)
        return asyncio.CancelledError()

    def check(self, key: str, digest: str) -> None:
        """Stop the run if an effect asks for something else than the log holds under its key."""
        try:
            self.journal.check(key, digest)
        except NonDeterministic as error:
            raise self._diverged(error) from None

    def append(self, event: event_pb2.AgentEvent) -> None:
        """Records an event that a run may have many of."""
        assert self._recorder is not None, "a replay adds nothing"
        self._recorder.record([event])

    def go_live(self) -> None:
        """Takes in what nobody has made again yet, and records what was kept: all the log holds has been handed back.

        What a lost server had begun is open from now on, whether or not it ever gets to go on.
        """
        self.observe_scope("")
        self.is_live = True
        self.journal.let_go()
        self._observed.clear()
        kept, self._kept = self._kept, []
        if kept and self._recorder is not None:
            self._recorder.record(kept)
            self._measure(kept)

    def observe(self, event: event_pb2.AgentEvent) -> None:
        """Takes in an event that is recorded, or was."""
        self.invocations.observe(event)
        if not self.is_live:
            self._observed.add(identity_of(event))

    def observe_recorded(self, key: str) -> None:
        """Takes in what the log holds of an effect, as if made now; not how a step ended, which is made again."""
        for event in self.journal.of_effect.get(key, ()):
            is_step_end = event.HasField("step_completed") or event.HasField("step_failed")
            if identity_of(event) not in self._observed and not is_step_end and not self.journal.is_cancelled(event):
                self.observe(event)

    def ends_again(self, step: OpenStep) -> bool:
        """Takes in the end of a step that the log holds; False where it is to be made.

        What it says follows from results that were handed back, so only a replay offline makes it again to compare.
        """
        if self.is_live or self.is_offline:
            return False
        recorded = self.journal.recorded.get((step.key, events.STEP_COMPLETED, step.attempt))
        if recorded is not None:
            self.observe(recorded)
        return recorded is not None

    def observe_scope(self, scope: str) -> None:
        """Takes in everything that the log holds of a scope; from the moment when the run is live, it has been."""
        if self.is_live:
            return
        for identity, event in self.journal.recorded.items():
            if keys.covers(scope, event.effect_key) and identity not in self._observed:
                self.observe(event)

    async def committed(self) -> None:
        """Waits until everything recorded so far is on disk."""
        if self._recorder is not None:
            await self._recorder.committed()

    def delta(self, piece: DeltaChunk, joining: DeltaCoalescing, make: Callable[[], event_pb2.AgentEvent]) -> bool:
        """Takes a piece of streamed text; gives whether the producer has to wait for `room`."""
        assert self._recorder is not None, "a replay streams nothing"
        return self._recorder.delta(piece, joining, make)

    def flush_below(self, scope: str) -> None:
        """Records the text that waits to be joined of every effect in a scope."""
        if self._recorder is not None:
            self._recorder.flush_below(lambda key: keys.covers(scope, key))

    async def room(self) -> None:
        """Waits until producers of deltas may go on."""
        assert self._recorder is not None, "a replay streams nothing"
        await self._recorder.room()

    def _record(self, fresh: Sequence[event_pb2.AgentEvent]) -> None:
        if self._recorder is None:
            raise NonDeterministic(
                f"The replay made {events.name_of(fresh[0])} of the effect {fresh[0].effect_key!r}, "
                "which the log does not hold."
            )
        if self.is_live:
            self._recorder.record(fresh)
            self._measure(fresh)
        else:
            self._kept.extend(fresh)

    def _measure(self, recorded: Sequence[event_pb2.AgentEvent]) -> None:
        if self._measuring is not None:
            for event in recorded:
                self._measuring.take(event)

    def _holds(self, event: event_pb2.AgentEvent) -> bool:
        recorded = self.journal.recorded.get(identity_of(event))
        if recorded is None:
            return False
        if not same_event(event, recorded):
            raise NonDeterministic(
                f"The replay's {events.name_of(event)} of the effect {event.effect_key!r} differs from the one at "
                f"sequence {recorded.sequence}."
            )
        event.record_time.CopyFrom(recorded.record_time)
        event.sequence = recorded.sequence
        return True
