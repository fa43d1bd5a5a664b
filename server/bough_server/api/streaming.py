"""Turn pages of stored events into serialized responses of a stream.

In the FULL view stored bytes are joined with their stamp and never parsed, which makes catching up cheap. The four
streaming responses have one layout, an EventBatch as field 1, so the same bytes serve all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from bough_server.clock import Clock
from bough_server.errors import SequenceOutOfRange
from bough_server.log.views import EvaluationSelection, Selection
from bough_server.store.ports.log import StoredEvent
from bough_server.store.window import SharedPage, data_of

LAST_SEQUENCE_KEY: Final = "bough-last-sequence"
"""Trailing metadata of every stream: the through_sequence of the last response."""

MAX_EVENTS: Final = 256
MAX_BYTES: Final = 1 << 20
"""The most events and bytes of one response, unless its only event is larger."""

_BATCH_TAG: Final = b"\x0a"
"""Field 1 of a response, `batch`, length-delimited."""

_EVENTS_TAG: Final = b"\x0a"
"""Field 1 of a batch, `events`, length-delimited."""

_THROUGH_TAG: Final = b"\x10"
"""Field 2 of a batch, `through_sequence`, varint."""

Pages = AsyncGenerator[Sequence[StoredEvent], None]


class _EventPrefixes(dict[int, bytes]):
    """Bytes that precede an event's stored bytes in a batch, by the length of those: tag, length, stamp."""

    def __init__(self, stamp: bytes) -> None:
        super().__init__()
        self._stamp = stamp

    def __missing__(self, length: int) -> bytes:
        prefix = self[length] = _EVENTS_TAG + _varint(len(self._stamp) + length) + self._stamp
        return prefix


class StreamPosition:
    """Position of one stream in a log: the last event considered for its view, and the last sequence sent."""

    def __init__(self, *, stamp: bytes, selection: Selection | EvaluationSelection, after: int) -> None:
        self._stamp, self._selection = stamp, selection
        self._prefixes = _EventPrefixes(stamp)
        self._considered = after
        self.sent_through = after
        """The through_sequence of the last response."""

    @property
    def is_behind(self) -> bool:
        """True if events were considered that no response has covered."""
        return self.sent_through < self._considered

    def advance(self, page: Sequence[StoredEvent]) -> Iterator[bytes]:
        """Yield the responses for a page; none if the view shows none of it."""
        if not page:
            return
        # They depend on the run, the page and the view alone: one stream makes them, the others send the same bytes.
        shared = page.responses if isinstance(page, SharedPage) else {}
        made = shared.get(self._selection)
        if made is None:
            made = shared[self._selection] = list(self._build_responses(page))
        for response, through in made:
            self._considered = self.sent_through = through
            yield response
        self._considered = page[-1].sequence

    def _build_responses(self, page: Sequence[StoredEvent]) -> Iterator[tuple[bytes, int]]:
        """Yield the responses for a page, each with its through_sequence."""
        if self._selection.takes_all:
            data = data_of(page)
            if len(data) <= MAX_EVENTS and sum(map(len, data)) <= MAX_BYTES:
                yield self._join_page(data, page[-1].sequence), page[-1].sequence
                return
        entries: list[bytes] = []
        size, through = 0, 0
        for stored in page:
            shown = self._apply_view(stored)
            if shown is not None:
                # Before this event counts as considered: the response covers the events before it.
                if entries and (len(entries) == MAX_EVENTS or size + len(shown) > MAX_BYTES):
                    yield _response(entries, through), through
                    entries, size = [], 0
                entries.append(shown)
                size += len(shown)
            through = stored.sequence
        if entries:
            yield _response(entries, through), through

    def _join_page(self, data: Sequence[bytes], last: int) -> bytes:
        """Return the response for a whole page in the FULL view, without touching its events one by one in Python."""
        fields: list[bytes] = [b""] * (2 * len(data))
        # Slice assignment and map() keep the loop in C: this is the hot path of catching up.
        fields[::2] = map(self._prefixes.__getitem__, map(len, data))
        fields[1::2] = data
        return _encode_batch(fields, last)

    def empty(self) -> bytes:
        """Return a response without events: a heartbeat, or the sequence up to which the log was considered."""
        self.sent_through = self._considered
        return _response([], self.sent_through)

    def _apply_view(self, stored: StoredEvent) -> bytes | None:
        """Return the serialized event with its stamp as the view shows it; None if the view hides it."""
        if self._selection.takes_all:
            return self._stamp + stored.data
        if not self._selection.takes_kind(stored.kind):
            return None
        return self._selection.show(self._stamp + stored.data)


async def stream_responses(
    pages: Pages,
    position: StreamPosition,
    context: aio.ServicerContext[Any, Any],
    *,
    clock: Clock,
    heartbeat: Duration | None,
) -> AsyncGenerator[bytes, None]:
    """Yield the responses of a call until the pages end, and name the last sequence in its trailing metadata."""
    seconds = None if heartbeat is None else heartbeat.ToTimedelta().total_seconds()
    try:
        async with aclosing(responses(pages, position, clock=clock, heartbeat=seconds)) as messages:
            async for message in messages:
                yield message
    except SequenceOutOfRange:
        raise  # a client could not resume from a sequence that does not exist
    except BaseException:  # also when cancelled: a client that reconnects continues after this sequence
        _set_last_sequence(context, position)
        raise
    _set_last_sequence(context, position)


def _set_last_sequence(context: aio.ServicerContext[Any, Any], position: StreamPosition) -> None:
    context.set_trailing_metadata(((LAST_SEQUENCE_KEY, str(position.sent_through)),))


async def responses(
    pages: Pages, position: StreamPosition, *, clock: Clock, heartbeat: float | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the serialized responses of a stream until the pages end; close the pages.

    With `heartbeat`, in seconds, an empty response is sent whenever nothing was sent for that long.
    """
    due = clock.monotonic() + (heartbeat or 0.0)
    source = pages if heartbeat is None else _add_heartbeats(pages, lambda: due - clock.monotonic())
    async with aclosing(source):
        async for page in source:
            has_sent = False
            for response in position.advance(page):
                yield response
                has_sent = True
            if heartbeat is None:
                continue
            if not has_sent and clock.monotonic() >= due:
                yield position.empty()
                has_sent = True
            if has_sent:
                due = clock.monotonic() + heartbeat
    if position.is_behind:
        yield position.empty()


async def _add_heartbeats(pages: Pages, time_left: Callable[[], float]) -> Pages:
    """Yield the pages, and an empty page whenever none arrived for `time_left()` seconds.

    Each page is awaited in a task: cancelling a generator while it waits would finish it.
    """
    pull: asyncio.Task[Sequence[StoredEvent] | None] | None = None
    try:
        while True:
            pull = pull or asyncio.create_task(_next(pages))
            await asyncio.wait({pull}, timeout=max(0.0, time_left()))
            if not pull.done():
                yield ()
                continue
            page, pull = pull.result(), None
            if page is None:
                return
            yield page
    finally:
        if pull is not None:
            # aclose() raises RuntimeError while a task still runs the generator.
            pull.cancel()
            await asyncio.wait({pull})
        await pages.aclose()


async def _next(pages: Pages) -> Sequence[StoredEvent] | None:
    return await anext(pages, None)


def _response(entries: Sequence[bytes], through: int) -> bytes:
    fields = [part for entry in entries for part in (_EVENTS_TAG, _varint(len(entry)), entry)]
    return _encode_batch(fields, through)


def _encode_batch(fields: list[bytes], through: int) -> bytes:
    """Return the response whose batch has these events, given as tags, lengths and bytes. Appends to the list."""
    fields.append(_THROUGH_TAG + _varint(through))
    return b"".join((_BATCH_TAG, _varint(sum(map(len, fields))), *fields))


def _varint(value: int) -> bytes:
    """Encode a non-negative number in protobuf's base-128 encoding."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
