"""The only writer of a run's events: numbers them, joins deltas, hands them to the log; it decides nothing.

Sequences are given in the order of the calls. What is recorded until somebody waits for it is one append, atomic, and
appends of one run are committed in order: waiting for the newest is waiting for everything recorded so far.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bough.v1 import event_pb2
from bough_server import events
from bough_server.clock import Clock
from bough_server.store.ports import EventLog, Record

MAX_PENDING_BYTES: Final = 1024 * 1024
"""How many bytes of a run may wait for their commit before producers of deltas wait as well."""


MAX_DELAY: Final = 0.002
"""How long, in seconds, what is recorded may wait for company on its way to the log while nobody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaCoalescing:
    """How deltas are joined: until `max_chars` characters or `max_interval` seconds; zero characters joins nothing."""

    max_interval: float = 0.05
    max_chars: int = 256


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """Streamed text of an effect: its payload's kind and, where one effect streams several things, which of them."""

    effect: str
    kind: int
    subject: str
    text: str


class _Pending:
    """Deltas of one kind of one effect that wait to be joined."""

    __slots__ = ("event", "kind", "pieces", "size", "subject", "timer")

    def __init__(self, event: event_pb2.AgentEvent, kind: int, subject: str) -> None:
        self.event, self.kind, self.subject = event, kind, subject
        self.pieces: list[str] = []
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None


class Recorder:
    """Writes one run's log under one epoch."""

    def __init__(self, log: EventLog, run_id: str, *, epoch: int, last_sequence: int, clock: Clock) -> None:
        self._log = log
        self._run_id = run_id
        self._epoch = epoch
        self._sequence = last_sequence
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._batch: list[Record] = []
        self._batch_bytes = 0
        self._last: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_bytes = 0
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda _: None

    @property
    def last_sequence(self) -> int:
        """The last sequence given out."""
        return self._sequence

    def record(self, batch: Sequence[event_pb2.AgentEvent]) -> None:
        """Appends events atomically; each gets its sequence and time. Deltas of the same effects go first."""
        if self._pending:
            for event in batch:
                self.flush(event.effect_key)
        self._append(batch)

    def delta(self, piece: DeltaChunk, joining: DeltaCoalescing, make: Callable[[], event_pb2.AgentEvent]) -> bool:
        """Takes a piece of streamed text; gives whether the producer has to wait for `room` before the next.

        `make` builds the event of the first piece of a row, without its text. Pieces of one effect, kind and subject
        (the call, for tools) are joined.
        """
        effect = piece.effect
        pending = self._pending.get(effect)
        if pending is not None and (pending.kind != piece.kind or pending.subject != piece.subject):
            self.flush(effect)
            pending = None
        if pending is None:
            pending = self._pending[effect] = _Pending(make(), piece.kind, piece.subject)
            if joining.max_chars:
                loop = asyncio.get_running_loop()
                pending.timer = loop.call_later(joining.max_interval, self.flush, effect)
        pending.pieces.append(piece.text)
        pending.size += len(piece.text)
        if pending.size >= joining.max_chars:
            self.flush(effect)
        return self._waiting_bytes > MAX_PENDING_BYTES

    def flush(self, effect: str) -> None:
        """Records what waits of an effect's deltas."""
        pending = self._pending.pop(effect, None)
        if pending is None:
            return
        if pending.timer is not None:
            pending.timer.cancel()
        event, text = pending.event, "".join(pending.pieces)
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
        """Records what waits of every effect in a scope."""
        for effect in [effect for effect in self._pending if covers(effect)]:
            self.flush(effect)

    def drop_deltas(self) -> None:
        """Forgets what waits: the run stops unrecorded."""
        for pending in self._pending.values():
            if pending.timer is not None:
                pending.timer.cancel()
        self._pending.clear()

    async def committed(self) -> None:
        """Waits until everything recorded so far is on disk. Raises what the append raised."""
        if self.failure is not None:
            raise self.failure
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            asyncio.get_running_loop().call_soon(self._submit)
        if self._last is not None and not self._last.done():
            await asyncio.shield(self._last)

    async def room(self) -> None:
        """Waits until producers of deltas may go on."""
        await self.committed()

    def _append(self, batch: Sequence[event_pb2.AgentEvent]) -> None:
        """Takes events into the append that goes out when somebody waits for it, or a moment later."""
        if self.failure is not None:
            return
        if not self._batch:
            loop = asyncio.get_running_loop()
            self._last = loop.create_future()
            self._timer = loop.call_later(MAX_DELAY, self._submit)
        now = self._clock.now_ns()
        for event in batch:
            self._sequence += 1
            event.sequence = self._sequence
            event.record_time.seconds, event.record_time.nanos = divmod(now, 1_000_000_000)
            data = event.SerializeToString()
            self._batch_bytes += len(data)
            # Counted before it goes out: a producer that never waits by itself would keep the loop from sending it.
            self._waiting_bytes += len(data)
            kind = events.kind_of(event)
            self._batch.append(Record(sequence=self._sequence, kind=kind, data=data, event=event))

    def _submit(self) -> None:
        records, size, done = self._batch, self._batch_bytes, self._last
        assert done is not None, "a batch has somebody to tell"
        self._batch, self._batch_bytes, self._timer = [], 0, None
        appended = asyncio.ensure_future(self._log.append(self._run_id, epoch=self._epoch, records=records))
        appended.add_done_callback(partial(self._settled, size, done))

    def _settled(self, size: int, done: "asyncio.Future[None]", appended: "asyncio.Future[None]") -> None:
        self._waiting_bytes -= size
        error = None if appended.cancelled() else appended.exception()
        if error is None:
            done.set_result(None)
            return
        done.set_exception(error)
        done.exception()  # whoever waits gets it; nobody has to
        if self.failure is None:
            self.failure = error
            self.drop_deltas()
            self.on_failure(error)
