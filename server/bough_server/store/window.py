"""Recent events of running logs in memory, bounded over all of them, and pages of stored events as packed bytes.

Readers pull: a window has no list of readers and no queue for any of them. All of it lives on the event loop.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter, itemgetter
from typing import Final, overload
from weakref import WeakValueDictionary

from bough_server import events
from bough_server.store.ports import Record, StoredEvent

PAGE_EVENTS: Final = 256
"""The most events of a page that a reader is given."""

PAGE_BYTES: Final = 1024 * 1024
"""The most bytes of a page that a reader is given; a page of one event may be larger."""

_CHUNK_BYTES: Final = 64 * 1024
_EVENT_OVERHEAD: Final = 160
"""What an event costs in memory besides its bytes: three objects and their places."""

_kind: Final = itemgetter(0)
_data: Final = itemgetter(1)
_data_of_one: Final = attrgetter("data")

Rows = Sequence[tuple[int, bytes]]
"""Kinds and bytes."""


def page_of(stored: Sequence[StoredEvent], *, first: int = 0) -> Sequence[StoredEvent]:
    """The events from a place on that are one page."""
    page = stored[first : first + PAGE_EVENTS]
    if sum(map(len, data_of(page))) <= PAGE_BYTES:
        return page
    size = 0
    for taken, event in enumerate(page):
        size += len(event.data)
        if size > PAGE_BYTES and taken:
            return page[:taken]
    return page


def pages_of(stored: Sequence[StoredEvent]) -> Iterator[Sequence[StoredEvent]]:
    """All of some events, page by page."""
    first = 0
    while first < len(stored):
        page = page_of(stored, first=first)
        yield page
        first += len(page)


class _Chunk:
    """Consecutive events, dropped together."""

    __slots__ = ("size", "stored")

    def __init__(self) -> None:
        self.stored: list[StoredEvent] = []
        self.size = 0


class RecentEvents:
    """The last committed events of one run, and its committed head."""

    __slots__ = ("__weakref__", "_changed", "_chunks", "_starts", "failure", "head", "is_ended", "size")

    def __init__(self) -> None:
        self.head = 0
        """The last committed sequence; 0 while nothing was committed or looked up here."""
        self.is_ended = False
        self.failure: Exception | None = None
        """Why nothing more will be committed by this process, although the run has not ended."""
        self.size = 0
        self._chunks: list[_Chunk] = []
        self._starts: list[int] = []
        self._changed: asyncio.Event | None = None

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before looking, wait for it after."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def is_known_through(self, after: int) -> bool:
        """Whether it is known here that nothing is committed after a sequence."""
        return 0 < self.head <= after

    def learn(self, last_sequence: int, *, is_ended: bool) -> None:
        """Takes in what was read of the log's end; it may be older than what is known here."""
        if last_sequence >= self.head:
            self.head, self.is_ended = last_sequence, self.is_ended or is_ended

    def page(self, after: int) -> Sequence[StoredEvent]:
        """A page of events after a sequence; empty where the window does not hold the next one."""
        index = bisect_right(self._starts, after + 1) - 1
        if index < 0:
            return ()
        skipped = after + 1 - self._starts[index]
        stored = self._chunks[index].stored
        if skipped >= len(stored):
            return ()
        taken: list[StoredEvent] = []
        while len(taken) < PAGE_EVENTS and index < len(self._chunks):
            taken.extend(self._chunks[index].stored[skipped:])
            skipped, index = 0, index + 1
        return page_of(taken)

    def add(self, records: Sequence[Record]) -> None:
        """Takes what was committed, right after what it has."""
        before = self.size
        for record in records:
            if not self._chunks or self._chunks[-1].size >= _CHUNK_BYTES or len(self._chunks[-1].stored) >= PAGE_EVENTS:
                self._chunks.append(_Chunk())
                self._starts.append(record.sequence)
            chunk = self._chunks[-1]
            chunk.stored.append(StoredEvent(record.sequence, record.kind, record.data))
            size = len(record.data) + _EVENT_OVERHEAD
            chunk.size += size
            self.size += size
        assert self.size > before, "an append has at least one event"
        self.head = records[-1].sequence
        self.is_ended = records[-1].kind in events.TERMINAL_KINDS
        self.wake()

    def clear(self) -> None:
        """Forgets all events."""
        self._chunks, self._starts, self.size = [], [], 0

    def drop_oldest(self) -> None:
        """Forgets its oldest events; the disk has them."""
        self.size -= self._chunks.pop(0).size
        self._starts.pop(0)

    def keep_last(self) -> None:
        """Forgets all but the newest events: for readers that are close to the end."""
        while len(self._chunks) > 1:
            self.drop_oldest()

    def wake(self) -> None:
        """Lets every waiting reader look again."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class RecentEventsOfRuns:
    """The windows of all runs, within one bound of bytes; the largest run gives up its oldest events first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._live: dict[str, RecentEvents] = {}
        self._known: WeakValueDictionary[str, RecentEvents] = WeakValueDictionary()
        self._failures: dict[str, Exception] = {}
        self.dismissal: Exception | None = None
        """Why no reader waits for more."""

    @property
    def size(self) -> int:
        """Bytes held for live runs."""
        return self._size

    def of(self, run_id: str) -> RecentEvents:
        """A run's window; of a run that is not live, it lasts as long as somebody holds it."""
        window = self._known.get(run_id)
        if window is None:
            window = self._known[run_id] = RecentEvents()
            window.failure = self._failures.get(run_id)
        return window

    def add(self, run_id: str, records: Sequence[Record]) -> None:
        """Takes what was committed of a run."""
        window = self._live.get(run_id)
        if window is None:
            window = self._live[run_id] = self.of(run_id)
            window.clear()
            self.resume(run_id)
        before = window.size
        window.add(records)
        self._size += window.size - before
        if window.is_ended:
            self._release(run_id)
        while self._size > self._max_bytes:
            largest = max(self._live.values(), key=lambda live: live.size)
            before = largest.size
            largest.drop_oldest()
            self._size -= before - largest.size

    def fail(self, run_id: str, error: Exception) -> None:
        """Tells a run's readers that nothing more comes; what is committed they still get."""
        self._failures[run_id] = error
        window = self._known.get(run_id)
        if window is not None:
            window.failure = error
            self._release(run_id)
            window.wake()

    def resume(self, run_id: str) -> None:
        """Takes back a failure: the run has a new owner."""
        if self._failures.pop(run_id, None) is not None and (window := self._known.get(run_id)) is not None:
            window.failure = None

    def dismiss(self, error: Exception) -> None:
        """Sends every reader home, of now and of later; runs may go on being written."""
        self.dismissal = error
        for window in list(self._known.values()):
            window.wake()

    def _release(self, run_id: str) -> None:
        window = self._live.pop(run_id, None)
        if window is not None:
            self._size -= window.size
            window.keep_last()


class PackedEvents(Sequence[StoredEvent]):
    """Events without a gap, from a sequence on; each is made when it is looked at."""

    __slots__ = ("_first", "_rows")

    def __init__(self, first: int, rows: Rows) -> None:
        self._first, self._rows = first, rows

    def data(self) -> list[bytes]:
        """The stored bytes of all."""
        return list(map(_data, self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StoredEvent]:
        return map(StoredEvent, count(self._first), map(_kind, self._rows), map(_data, self._rows))

    @overload
    def __getitem__(self, place: int) -> StoredEvent: ...
    @overload
    def __getitem__(self, place: slice) -> "PackedEvents": ...
    def __getitem__(self, place: int | slice) -> "StoredEvent | PackedEvents":
        if isinstance(place, slice):
            first, _, step = place.indices(len(self._rows))
            assert step == 1, "a stretch has no gap"
            return PackedEvents(self._first + first, self._rows[place])
        row = self._rows[place]
        return StoredEvent(self._first + place % len(self._rows), *row)


def data_of(stored: Sequence[StoredEvent]) -> list[bytes]:
    """The stored bytes of events, one by one."""
    return stored.data() if isinstance(stored, PackedEvents) else list(map(_data_of_one, stored))
