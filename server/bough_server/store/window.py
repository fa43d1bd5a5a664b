"""Recent events of logs in memory, within one bound for all of them, and pages of stored events as packed bytes.

They are those of live logs, which this process writes, and of logs that other processes write while readers follow them
here. Readers pull: there is no queue per reader. Everything here runs on the event loop.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple, overload
from weakref import WeakValueDictionary, ref

from bough_server.log import evaluation_events, events
from bough_server.store.ports.log import AnyLogEvent, StoredEvent

PAGE_EVENTS: Final = 256
"""The most events in a page."""

PAGE_BYTES: Final = 1024 * 1024
"""The most bytes in a page; a page of one event may be larger."""

END_KINDS: Final = events.TERMINAL_KINDS | evaluation_events.TERMINAL_KINDS
"""The last event of any log."""

_CHUNK_BYTES: Final = 64 * 1024
_EVENT_OVERHEAD: Final = 160
"""Bytes of memory per event besides its data: three objects and their slots in lists."""

_kind: Final = itemgetter(0)
_data: Final = itemgetter(1)
_event_data: Final = attrgetter("data")

_NO_END: Final = 2**63 - 1

Rows = Sequence[tuple[int, bytes]]
"""Pairs of an event's kind and its data."""


def page_of(stored: Sequence[StoredEvent], *, first: int = 0) -> Sequence[StoredEvent]:
    """Return the page of events that starts at index `first`."""
    page = stored[first : first + PAGE_EVENTS]
    # Most pages are far below the bound of bytes: check that first, without a Python loop.
    if sum(map(len, data_of(page))) <= PAGE_BYTES:
        return page
    size = 0
    for taken, event in enumerate(page):
        size += len(event.data)
        if size > PAGE_BYTES and taken:
            return page[:taken]
    return page


def pages_of(stored: Sequence[StoredEvent]) -> Iterator[Sequence[StoredEvent]]:
    """Yield all of some events, page by page."""
    first = 0
    while first < len(stored):
        page = page_of(stored, first=first)
        yield page
        first += len(page)


class SharedPage(list[StoredEvent]):
    """A page that readers at the same place of a log get as one object, with what is sent for it."""

    __slots__ = ("__weakref__", "responses")

    def __init__(self, stored: Iterable[StoredEvent]) -> None:
        super().__init__(stored)
        self.responses: dict[Hashable, Sequence[tuple[bytes, int]]] = {}
        """By view, the responses that show it, each with the sequence up to which it covers the log."""


class _Chunk:
    """Consecutive events, which are dropped together."""

    __slots__ = ("size", "stored")

    def __init__(self) -> None:
        self.stored: list[StoredEvent] = []
        self.size = 0


class RecentEvents:
    """The last committed events of a run, and its last committed sequence."""

    __slots__ = (
        "__weakref__",
        "_changed",
        "_chunks",
        "_latest",
        "_starts",
        "failure",
        "followers",
        "head",
        "is_ended",
        "size",
        "surprises",
    )

    def __init__(self) -> None:
        self.head = 0
        """The last sequence that is known to be committed; 0 until this process has committed one or looked it up."""
        self.followers = 0
        """Readers that have read up to the head, and are given what follows from memory."""
        self.surprises = 0
        """How often the head turned out to be outdated."""
        self.is_ended = False
        self.failure: Exception | None = None
        """Why this process commits nothing more to the log, although the run has not ended."""
        self.size = 0
        self._chunks: list[_Chunk] = []
        self._starts: list[int] = []
        self._changed: asyncio.Event | None = None
        self._latest: ref[SharedPage] | None = None
        """The last page that a reader got, as long as one has it."""

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set at the next change: read it before looking at this object, and await it afterwards."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def is_known_through(self, after: int) -> bool:
        """True if it is known here that no event is committed after a sequence."""
        return 0 < self.head <= after  # a head of 0 means that the log has not been looked up

    def update_head(self, last_sequence: int, *, is_ended: bool, surprises: int) -> None:
        """Update the head from a read of the log that began after so many surprises.

        It is ignored if an append has overtaken it, or a surprise. It is ignored too if the window has followers: their
        head moves with the events that they are given.
        """
        if last_sequence >= self.head and surprises == self.surprises and not self.followers:
            self.head, self.is_ended = last_sequence, self.is_ended or is_ended

    def forget_head(self) -> None:
        """Let the next reader look up the head: another process may have written to the log."""
        self.head = 0
        self.surprises += 1

    def page(self, after: int) -> Sequence[StoredEvent]:
        """Return a page of events after a sequence; empty if the next event is not in memory.

        Readers at the same place get the same object, as long as one of them has it and no longer page can be had.
        """
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest[0].sequence == after + 1 and self._is_longest(latest):
            return latest
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
        page = SharedPage(page_of(taken))
        self._latest = ref(page)
        return page

    def _is_longest(self, page: SharedPage) -> bool:
        # A message costs ten times as much as joining its events: who comes later gets all that there is by then.
        return page[-1].sequence == self.head or len(page) == PAGE_EVENTS

    def add(self, committed: Sequence[AnyLogEvent] | Sequence[StoredEvent]) -> None:
        """Add committed events; those here are kept if they directly follow them."""
        assert committed, "an append has at least one event"
        if self._chunks and self._chunks[-1].stored[-1].sequence != committed[0].sequence - 1:
            self.clear()  # another process has written to the log in between
        for record in committed:
            if not self._chunks or self._chunks[-1].size >= _CHUNK_BYTES or len(self._chunks[-1].stored) >= PAGE_EVENTS:
                self._chunks.append(_Chunk())
                self._starts.append(record.sequence)
            chunk = self._chunks[-1]
            chunk.stored.append(StoredEvent(record.sequence, record.kind, record.data))
            size = len(record.data) + _EVENT_OVERHEAD
            chunk.size += size
            self.size += size
        self.head = committed[-1].sequence
        self.is_ended = committed[-1].kind in END_KINDS
        self.notify()

    def clear(self) -> None:
        """Drop all events."""
        self._chunks, self._starts, self.size = [], [], 0

    def drop_oldest(self) -> None:
        """Drop the oldest chunk of events; readers find them on disk."""
        self.size -= self._chunks.pop(0).size
        self._starts.pop(0)

    def keep_last(self) -> None:
        """Drop all but the newest chunk, which readers close to the end still need."""
        while len(self._chunks) > 1:
            self.drop_oldest()

    def notify(self) -> None:
        """Wake every waiting reader to look again."""
        # A new event for the next change: a reader that took this one and has yet to await it must find it set.
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class Failure(NamedTuple):
    """Why this process commits nothing more to a log under an epoch; None: under any epoch of others."""

    error: Exception
    epoch: int | None


class RecentEventsOfRuns:
    """Recent events of all runs, within one bound of bytes; the run that takes most drops its oldest events first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._live: dict[str, RecentEvents] = {}
        """Windows of logs that this process writes."""
        self._followed: dict[str, RecentEvents] = {}
        """Windows with followers."""
        # Weak, because any number of ended runs may be read: an entry lives while a reader or a dictionary above refers
        # to it.
        self._known: WeakValueDictionary[str, RecentEvents] = WeakValueDictionary()
        self._failures: dict[str, Failure] = {}
        self.closing_error: Exception | None = None
        """The error that ends every reader once it has read all committed events; None while readers wait for more."""

    @property
    def size(self) -> int:
        """Bytes held for live runs and for followed ones."""
        return self._size

    def get_window(self, run_id: str) -> RecentEvents:
        """Return a run's recent events. If the run is not live, they last only as long as a caller refers to them."""
        window = self._known.get(run_id)
        if window is None:
            window = self._known[run_id] = RecentEvents()
            failure = self._failures.get(run_id)
            window.failure = None if failure is None else failure.error
        return window

    def join(self, run_id: str, window: RecentEvents) -> None:
        """Count a reader that follows a log from its head."""
        window.followers += 1
        if window.followers == 1:
            self._followed[run_id] = window
            if run_id not in self._live:
                self._size += window.size

    def leave(self, run_id: str, window: RecentEvents) -> None:
        """Count a follower less."""
        window.followers -= 1
        if not window.followers:
            del self._followed[run_id]
            if run_id not in self._live:
                self._size -= window.size

    def list_logs_to_poll(self) -> Iterable[str]:
        """Return the logs that are followed here, and that this process does not write."""
        return [run_id for run_id in self._followed if run_id not in self._live]

    def note_growth(self, run_id: str) -> bool:
        """Note that another process has written to a log; return whether its events, or its epoch, should be read."""
        if run_id in self._followed or run_id in self._failures:
            return True
        if (window := self._known.get(run_id)) is not None:
            window.forget_head()
        return False

    def ends_of(self, run_ids: Iterable[str]) -> Mapping[str, int]:
        """Return the last sequence that the followers of each log know; of a log without followers, the largest."""
        return {
            run_id: _NO_END if (window := self._followed.get(run_id)) is None else window.head for run_id in run_ids
        }

    def feed(self, run_id: str, stored: Sequence[StoredEvent], *, epoch: int) -> None:
        """Give the followers of a log what another process has written to it, and the log's epoch."""
        self.clear_stale_failure(run_id, epoch=epoch)
        window = self._followed.get(run_id)
        if window is None or not stored or stored[-1].sequence <= window.head:
            return
        before = window.size
        window.add(stored[max(0, window.head + 1 - stored[0].sequence) :])
        self._size += window.size - before
        self._shrink()

    def clear_stale_failure(self, run_id: str, *, epoch: int) -> None:
        """Clear the failure of a log that has another owner by now, as its epoch says."""
        failure = self._failures.get(run_id)
        if failure is not None and failure.epoch is not None and epoch > failure.epoch:
            self.resume(run_id)

    def notify_deletion(self, run_id: str) -> None:
        """Let the followers of a log that was deleted find that out."""
        self._failures.pop(run_id, None)
        if (window := self._followed.get(run_id)) is not None:
            window.forget_head()
            window.notify()

    def add(self, run_id: str, committed: Sequence[AnyLogEvent]) -> None:
        """Add committed events of a run."""
        window = self._live.get(run_id)
        if window is None:
            window = self.get_window(run_id)
            if not window.followers:
                window.clear()  # it was not counted
            self._live[run_id] = window
            self.resume(run_id)
        before = window.size
        window.add(committed)
        self._size += window.size - before
        # A run that waits for input may wait for months.
        if window.is_ended or committed[-1].kind == events.RUN_INTERRUPTED:
            self.release(run_id)
        self._shrink()

    def _shrink(self) -> None:
        while self._size > self._max_bytes:
            largest = max(chain(self._live.values(), self._followed.values()), key=lambda held: held.size)
            before = largest.size
            largest.drop_oldest()
            self._size -= before - largest.size

    def fail(self, run_id: str, error: Exception, *, epoch: int | None = None) -> None:
        """End a run's readers with an error once they have read all committed events.

        It holds until this process writes to the log again, or finds it under a later epoch than this.
        """
        self._failures[run_id] = Failure(error, epoch)
        window = self._known.get(run_id)
        if window is not None:
            window.failure = error
            self.release(run_id)
            window.notify()

    def resume(self, run_id: str) -> None:
        """Clear a run's failure: it has a new owner."""
        if self._failures.pop(run_id, None) is not None and (window := self._known.get(run_id)) is not None:
            window.failure = None

    def release(self, run_id: str) -> None:
        """Take a log for one that others may write, which this process did until now."""
        window = self._live.pop(run_id, None)
        if window is None:
            return
        self._size -= window.size
        window.keep_last()
        if window.followers:
            self._size += window.size

    def close_readers(self, error: Exception) -> None:
        """End every reader, present and future, once it has read all committed events; appends are still accepted."""
        self.closing_error = error
        for window in list(self._known.values()):
            window.notify()


class PackedEvents(Sequence[StoredEvent]):
    """Consecutive events from a sequence on; each StoredEvent is built when it is accessed."""

    __slots__ = ("_first", "_rows")

    def __init__(self, first: int, rows: Rows) -> None:
        self._first, self._rows = first, rows

    def data(self) -> list[bytes]:
        """Return the stored bytes of every event."""
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
            assert step == 1, "packed events are consecutive"
            return PackedEvents(self._first + first, self._rows[place])
        row = self._rows[place]
        return StoredEvent(self._first + place % len(self._rows), *row)  # modulo for negative indices


def data_of(stored: Sequence[StoredEvent]) -> list[bytes]:
    """Return the stored bytes of each event."""
    return stored.data() if isinstance(stored, PackedEvents) else list(map(_event_data, stored))
