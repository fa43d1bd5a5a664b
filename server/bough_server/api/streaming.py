"""Following a log: from pages of stored events to the responses of a stream; which run and which pages is not its own.

A response is made as bytes. In the FULL view the stored bytes are joined with their stamp and never parsed, which is
what makes catching up cheap. The four responses have one layout, an EventBatch as field 1, so the bytes serve all.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Final

from bough_server.clock import Clock
from bough_server.events import parse
from bough_server.store.ports import StoredEvent
from bough_server.store.window import data_of
from bough_server.views import Selection

MAX_EVENTS: Final = 256
MAX_BYTES: Final = 1 << 20
"""A response holds this much at most, and one event at least."""

_BATCH_TAG: Final = b"\x0a"
"""Field 1 of a response, `batch`, length-delimited."""

_EVENTS_TAG: Final = b"\x0a"
"""Field 1 of a batch, `events`, length-delimited."""

_THROUGH_TAG: Final = b"\x10"
"""Field 2 of a batch, `through_sequence`, varint."""

Pages = AsyncGenerator[Sequence[StoredEvent], None]


class _Heads(dict[int, bytes]):
    """What stands before an event's stored bytes in a batch, by how many those are: tag, length, stamp."""

    def __init__(self, stamp: bytes) -> None:
        super().__init__()
        self._stamp = stamp

    def __missing__(self, length: int) -> bytes:
        head = self[length] = _EVENTS_TAG + _varint(len(self._stamp) + length) + self._stamp
        return head


class Following:
    """One stream's place in a log: what has been considered for its view, and what it has been told."""

    def __init__(self, *, stamp: bytes, selection: Selection, after: int) -> None:
        self._stamp, self._selection = stamp, selection
        self._heads = _Heads(stamp)
        self._considered = after
        self.told = after
        """The through_sequence of the last response."""

    @property
    def is_behind(self) -> bool:
        """Whether events were considered that no response has told of."""
        return self.told < self._considered

    def take(self, page: Sequence[StoredEvent]) -> Iterator[bytes]:
        """The responses that a page makes; none where the view shows none of it."""
        if self._selection.takes_all and page:
            data = data_of(page)
            if len(data) <= MAX_EVENTS and sum(map(len, data)) <= MAX_BYTES:
                yield self._joined(data, page[-1].sequence)
                return
        entries: list[bytes] = []
        size = 0
        for stored in page:
            shown = self._shown(stored)
            if shown is not None:
                if entries and (len(entries) == MAX_EVENTS or size + len(shown) > MAX_BYTES):
                    yield self._response(entries)
                    entries, size = [], 0
                entries.append(shown)
                size += len(shown)
            self._considered = stored.sequence
        if entries:
            yield self._response(entries)

    def _joined(self, data: Sequence[bytes], last: int) -> bytes:
        """The response of a whole page in the FULL view, without touching its events one by one in Python."""
        fields: list[bytes] = [b""] * (2 * len(data))
        fields[::2] = map(self._heads.__getitem__, map(len, data))
        fields[1::2] = data
        self._considered = self.told = last
        return _batched(fields, last)

    def empty(self) -> bytes:
        """A response without events: a heartbeat, or how far the log was considered."""
        return self._response([])

    def _response(self, entries: Sequence[bytes]) -> bytes:
        self.told = self._considered
        fields = [part for entry in entries for part in (_EVENTS_TAG, _varint(len(entry)), entry)]
        return _batched(fields, self.told)

    def _shown(self, stored: StoredEvent) -> bytes | None:
        """The event as the view shows it, serialized with its stamp; None where it does not."""
        if self._selection.takes_all:
            return self._stamp + stored.data
        if not self._selection.takes_kind(stored.kind):
            return None
        event = self._selection.apply(parse(self._stamp + stored.data))
        return None if event is None else event.SerializeToString()


async def responses(
    pages: Pages, following: Following, *, clock: Clock, heartbeat: float | None = None
) -> AsyncGenerator[bytes, None]:
    """The serialized responses of a stream, to the end of the pages.

    With a heartbeat, in seconds, an empty response is sent whenever nothing was for that long. Closes the pages.
    """
    due = clock.monotonic() + (heartbeat or 0.0)
    source = pages if heartbeat is None else _ticking(pages, lambda: due - clock.monotonic())
    async with aclosing(source):
        async for page in source:
            has_sent = False
            for response in following.take(page):
                yield response
                has_sent = True
            if heartbeat is None:
                continue
            if not has_sent and clock.monotonic() >= due:
                yield following.empty()
                has_sent = True
            if has_sent:
                due = clock.monotonic() + heartbeat
    if following.is_behind:
        yield following.empty()


async def _ticking(pages: Pages, patience: Callable[[], float]) -> Pages:
    """The pages as they come, and an empty one whenever none came for `patience()` seconds.

    A page is awaited in a task, because a generator that is cancelled while it waits cannot be asked again.
    """
    pull: asyncio.Task[Sequence[StoredEvent] | None] | None = None
    try:
        while True:
            pull = pull or asyncio.create_task(_next(pages))
            await asyncio.wait({pull}, timeout=max(0.0, patience()))
            if not pull.done():
                yield ()
                continue
            page, pull = pull.result(), None
            if page is None:
                return
            yield page
    finally:
        if pull is not None:
            pull.cancel()
            await asyncio.wait({pull})
        await pages.aclose()


async def _next(pages: Pages) -> Sequence[StoredEvent] | None:
    return await anext(pages, None)


def _batched(fields: list[bytes], through: int) -> bytes:
    """The response whose batch has these events, given as tags, lengths and bytes. Appends to the list."""
    fields.append(_THROUGH_TAG + _varint(through))
    return b"".join((_BATCH_TAG, _varint(sum(map(len, fields))), *fields))


def _varint(value: int) -> bytes:
    """Protobuf's base-128 encoding of a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
