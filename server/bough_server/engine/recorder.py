"""The only writer of a run's log: numbers events, coalesces deltas and appends batches.

Sequences are assigned in the order of the calls. Events recorded until a caller waits, or for 2 ms, form one atomic
append, and the appends of a run are committed in order: waiting for the newest means waiting for all before it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bough.v1 import event_pb2
from bough_server.clock import Clock, loop_time
from bough_server.engine.limits import SharedLimit
from bough_server.engine.run_log import log_events
from bough_server.log import events
from bough_server.log.blobs import StoredBlob
from bough_server.log.charges import MODEL_CALL_KINDS, MODEL_END_KINDS
from bough_server.store.ports.log import EventLog, LogEvent

MAX_PENDING_BYTES: Final = 1024 * 1024
"""Bytes of a run that may wait for their commit before producers of deltas have to wait."""

FIRST_INTERVAL: Final = 0.05
LATER_INTERVAL: Final = 0.1
"""Seconds for which deltas are held back at most, unless a policy says so: each message costs more than what it holds,
and who has read for a second does not see the difference."""

FIRST_SECONDS: Final = 1.0

TICK: Final = 0.01
"""Seconds between two times at which deltas are recorded, so that those of many runs share wake-ups and commits."""

MAX_DELAY: Final = 0.002
"""Seconds for which a batch is kept open for further events while no caller waits for its commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaCoalescing:
    """How deltas are coalesced: up to `max_chars` characters or `max_interval` seconds; 0 characters: not at all."""

    max_interval: float | None = None
    """None for FIRST_INTERVAL, and LATER_INTERVAL once a text has been streamed for FIRST_SECONDS."""
    max_chars: int = 256


# Not frozen, because one is made for every read: that would take four times as long.
@dataclass(slots=True)
class DeltaChunk:
    """Texts that an effect streamed at once, of one kind of payload.

    `subject` is the call id if several calls are streamed.
    """

    effect: str
    kind: int
    subject: str
    texts: Sequence[str]


class _Pending:
    """Buffered deltas of one kind and subject of one effect."""

    __slots__ = ("chunks", "event", "kind", "size", "subject", "timer")

    def __init__(self, event: event_pb2.AgentEvent, kind: int, subject: str) -> None:
        self.event, self.kind, self.subject = event, kind, subject
        self.chunks: list[str] = []
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None


class Recorder:
    """Writes one run's log under one epoch."""

    def __init__(
        self,
        log: EventLog,
        run_id: str,
        *,
        epoch: int,
        last_sequence: int,
        clock: Clock,
        shared_limit: SharedLimit | None = None,
    ) -> None:
        self._log = log
        self._shared_limit = shared_limit
        self._run_id = run_id
        self._epoch = epoch
        self._sequence = last_sequence
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._begun: dict[str, tuple[int, str]] = {}
        """Kind and subject of the text that each effect is streaming."""
        self._begin_times: dict[str, float] = {}
        """When each effect began to stream that text, by the event loop's clock."""
        self._batch: list[LogEvent] = []
        self._batch_bytes = 0
        self._last: asyncio.Future[None] | None = None
        """Done when the newest batch is committed; None before the first."""
        self._timer: asyncio.TimerHandle | None = None
        """Submits the open batch; None if there is none, or its submission is scheduled already."""
        self._files: list[StoredBlob] = []
        """Files to store with the next event."""
        self._waiting_bytes = 0
        """Bytes that are not committed yet, the open batch included."""
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda _: None

    @property
    def last_sequence(self) -> int:
        """The last sequence that was assigned."""
        return self._sequence

    @property
    def is_full(self) -> bool:
        """True if so much is not committed yet that producers have to await `wait_for_room`."""
        return self._waiting_bytes > MAX_PENDING_BYTES

    def record(self, batch: Sequence[event_pb2.AgentEvent]) -> None:
        """Append events atomically and set their sequences and times, after the buffered deltas of their effects."""
        if self._begun:
            for event in batch:
                self.flush(event.effect_key)
                self._begun.pop(event.effect_key, None)
                self._begin_times.pop(event.effect_key, None)
        self._append(batch)
        log_events(self._run_id, batch)

    def attach_files(self, files: Sequence[StoredBlob]) -> None:
        """Store files with the next event that is recorded: no event may refer to one that is not stored."""
        self._files.extend(files)

    def buffer_delta(
        self, chunk: DeltaChunk, coalescing: DeltaCoalescing, make: Callable[[], event_pb2.AgentEvent]
    ) -> bool:
        """Buffer streamed texts; return True if the producer has to await `wait_for_room` before the next.

        Consecutive texts of one effect, kind and subject (the call, for tools) are coalesced, but for the first, which
        is recorded at once: its reader has waited for the model. `make` builds their event, without the text.
        """
        effect, begun = chunk.effect, (chunk.kind, chunk.subject)
        is_first = self._begun.get(effect) != begun
        if is_first:
            # One buffer per effect, so that text, reasoning and calls keep the order in which the model streamed them.
            self.flush(effect)
            self._begun[effect], self._begin_times[effect] = begun, loop_time()
        # The arguments of a call are of no use before they are complete.
        is_due = is_first and chunk.kind != events.LLM_TOOL_CALL_DELTA
        pending = self._pending.get(effect)
        for text in chunk.texts:
            if pending is None:
                pending = self._pending[effect] = _Pending(make(), chunk.kind, chunk.subject)
            pending.chunks.append(text)
            pending.size += len(text)
            if is_due or pending.size >= coalescing.max_chars:
                self.flush(effect)
                pending = None
                if is_first:
                    self._submit_soon()
            is_first = is_due = False
        if pending is not None and pending.timer is None:
            pending.timer = self._flush_later(effect, coalescing.max_interval)
        return self.is_full

    def _flush_later(self, effect: str, interval: float | None) -> asyncio.TimerHandle:
        now = loop_time()
        if interval is None:
            is_later = now - self._begin_times[effect] >= FIRST_SECONDS
            interval = LATER_INTERVAL if is_later else FIRST_INTERVAL
        due = now + interval
        return asyncio.get_running_loop().call_at(max(now, due - due % TICK), self.flush, effect)

    def flush(self, effect: str) -> None:
        """Record the buffered deltas of an effect, if any."""
        pending = self._pending.pop(effect, None)
        if pending is None:
            return
        if pending.timer is not None:
            pending.timer.cancel()
        event, text = pending.event, "".join(pending.chunks)
        if pending.kind == events.LLM_OUTPUT_TEXT_DELTA:
            event.llm_output_text_delta.text = text
        elif pending.kind == events.LLM_REASONING_DELTA:
            event.llm_reasoning_delta.text = text
        elif pending.kind == events.LLM_TOOL_CALL_DELTA:
            event.llm_tool_call_delta.arguments_delta = text
        else:
            event.tool_output.text = text
        self._append((event,))

    def flush_below(self, covers: Callable[[str], bool]) -> None:
        """Record the buffered deltas of every effect that `covers` selects."""
        for effect in [effect for effect in self._pending if covers(effect)]:
            self.flush(effect)

    def drop_deltas(self) -> None:
        """Discard the buffered deltas: the run stops unrecorded."""
        for pending in self._pending.values():
            if pending.timer is not None:
                pending.timer.cancel()
        self._pending.clear()
        self._begun.clear()
        self._begin_times.clear()

    async def wait_for_commit(self) -> None:
        """Wait until everything recorded so far is committed. Raises what the append raised."""
        if self.failure is not None:
            raise self.failure
        self._submit_soon()
        if self._last is not None and not self._last.done():
            # Shielded because all waiters share the future: a cancelled one must not cancel it for the others.
            await asyncio.shield(self._last)

    async def wait_for_room(self) -> None:
        """Wait until producers of deltas may continue. Raises what the append raised."""
        await self.wait_for_commit()

    def _submit_soon(self) -> None:
        """Submit the open batch without waiting for MAX_DELAY."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            # Not at once: other coroutines of the run that are ready now may still add to the batch.
            asyncio.get_running_loop().call_soon(self._submit)

    def _append(self, batch: Sequence[event_pb2.AgentEvent]) -> None:
        """Add events to the open batch, which is submitted when a caller waits for it, or after MAX_DELAY."""
        # After a failed append the log refuses every later one of this run.
        if self.failure is not None:
            return
        if not self._batch:
            loop = asyncio.get_running_loop()
            self._last = loop.create_future()
            self._timer = loop.call_later(MAX_DELAY, self._submit)
        now = self._clock.now_ns()
        files: Sequence[StoredBlob] = ()
        if self._files and batch:
            files, self._files = tuple(self._files), []
            size = sum(len(file.data or b"") for file in files)
            self._batch_bytes += size
            self._waiting_bytes += size
        for event in batch:
            self._sequence += 1
            event.sequence = self._sequence
            event.record_time.seconds, event.record_time.nanos = divmod(now, 1_000_000_000)
            data = event.SerializeToString()
            self._batch_bytes += len(data)
            # Counted before it is submitted: a producer that never yields keeps the loop from submitting anything.
            self._waiting_bytes += len(data)
            kind = events.kind_of(event)
            self._batch.append(LogEvent(sequence=self._sequence, kind=kind, data=data, event=event, blobs=files))
            if self._shared_limit is not None and kind in MODEL_CALL_KINDS:
                self._shared_limit.on_record(event, kind)
            files = ()

    def _submit(self) -> None:
        records, size, done = self._batch, self._batch_bytes, self._last
        assert done is not None, "a batch is opened with its future"
        self._batch, self._batch_bytes, self._timer = [], 0, None
        # Not awaited here: the log keeps the order of a run's appends, so the next batch need not wait for this one.
        appended = asyncio.ensure_future(self._log.append(self._run_id, epoch=self._epoch, log_events=records))
        shared = self._shared_limit
        ends = [] if shared is None else [one.sequence for one in records if one.kind in MODEL_END_KINDS]
        appended.add_done_callback(partial(self._on_append, size, done, ends))

    def _on_append(
        self, size: int, done: "asyncio.Future[None]", ends: Sequence[int], appended: "asyncio.Future[None]"
    ) -> None:
        """`ends` are the sequences of ends of model calls' attempts, for the limit that the run shares."""
        self._waiting_bytes -= size
        error = None if appended.cancelled() else appended.exception()
        if error is None:
            for sequence in ends:
                assert self._shared_limit is not None
                self._shared_limit.on_commit(sequence)
            done.set_result(None)
            return
        done.set_exception(error)
        done.exception()  # mark it as retrieved: if no caller waits, asyncio would log it
        # Batches that were submitted after the failed one fail too; only the first error is the cause.
        if self.failure is None:
            self.failure = error
            self.drop_deltas()
            self.on_failure(error)
