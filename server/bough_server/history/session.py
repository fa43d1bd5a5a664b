"""The messages of sessions, kept between their runs and extended by those that are new.

A stored message never changes as long as its session exists, so what was read once stays right: each read repeats the
last message of the one before, which only the same session can have, and reads all if it finds another.

A view is what an agent sees of messages that only grow: of a session between turns, of its invocation between steps.
The messages that a view was built from are not looked at again. A view of the same messages built at once is equal:
what would change the part that is built, a result for a call in it for example, makes it be built anew.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from bough.v1 import message_pb2
from bough_server.history.transcript import HistoryEntry, JoinedChild, Transcript
from bough_server.history.visible import (
    Call,
    Reader,
    VisibleMessage,
    calls_in,
    is_summary,
    render_caller_messages,
    render_own_messages,
    render_session_messages,
)
from bough_server.identity import Principal
from bough_server.store.ports.sessions import Sessions, StoredCall, StoredMessage

MAX_BYTES: Final = 64 * 1024 * 1024
"""The most memory, estimated, of all messages that are kept and of what was derived from them: 50 sessions of 1,000
turns of 400 characters. A session that is left out is read again at its next run, as after a start of the server."""

MAX_SESSIONS: Final = 1000
"""The most sessions that are kept, so that counting their bytes stays short."""

_MOST_VIEWS: Final = 8
"""The most views that are kept of a session: as many agents, of those that saw it last."""
_MESSAGE_OVERHEAD: Final = 800
"""Bytes of memory of a message besides its content."""

_SHOWN_OVERHEAD: Final = 500
"""Bytes of memory of a visible message besides its content."""


class SessionView:
    """What a reader sees of the messages of a session after a position; never changed."""

    __slots__ = ("_after", "_count", "_invocations", "_reader", "shown", "size", "spoken")

    def __init__(self, reader: Reader, *, after: int = 0) -> None:
        self._reader, self._after = reader, after
        self._count = 0
        self._invocations: frozenset[str] = frozenset()
        """The invocations of the messages."""
        self.shown: Sequence[VisibleMessage] = ()
        """The visible messages."""
        self.spoken: frozenset[str] = frozenset()
        """The agents that have spoken in the last run."""
        self.size = 0
        """The estimated bytes of memory that it takes besides the session's messages."""

    def extend_to(self, entries: Sequence[HistoryEntry]) -> "SessionView":
        """Return the view of more messages, which begin with those of this one."""
        if len(entries) == self._count:
            return self
        new = _invocations_in(entries[self._count :])
        if new.isdisjoint(self._invocations):
            return self._with(entries, new)
        # A run continues: its calls, and what was said inside of them, are looked at together.
        return SessionView(self._reader, after=self._after)._with(entries, new | self._invocations)

    def _with(self, entries: Sequence[HistoryEntry], invocations: Iterable[str]) -> "SessionView":
        spoken = {*self.spoken}
        new = [entry for entry in entries[self._count :] if not self._after or entry.position > self._after]
        shown = render_session_messages(self._reader, new, spoken)
        longer = SessionView(self._reader, after=self._after)
        longer._count = len(entries)
        longer._invocations = self._invocations.union(invocations)
        longer.shown = [*self.shown, *shown]
        longer.spoken = frozenset(spoken)
        longer.size = self.size + _view_size(shown, {id(entry.message) for entry in new})
        return longer


class TranscriptView:
    """What a reader sees of its invocation, and of those above it."""

    def __init__(self, transcript: Transcript, reader: Reader) -> None:
        self._transcript, self._reader = transcript, reader
        self._above: tuple[frozenset[str], Sequence[VisibleMessage]] | None = None
        """What it sees of the invocations above, which wait for it and add nothing; after which agents have spoken."""
        self._settled: list[VisibleMessage] = []
        self._calls: set[Call] = set()
        """The calls asked for or answered in what is settled."""
        self._has_begun = False
        """True once the messages before its lane's fork are settled."""
        self._count = 0
        """The number of the transcript's entries that are settled."""
        self._last: object = None
        """The last of them."""

    def below(self, session: SessionView) -> list[VisibleMessage]:
        """Return what the reader sees, the session's messages first."""
        if self._above is None or self._above[0] != session.spoken:
            self._above = session.spoken, render_caller_messages(self._reader, self._transcript, {*session.spoken})
        return [*session.shown, *self._above[1], *self._own()]

    def _own(self) -> Sequence[VisibleMessage]:
        entries = self._transcript.entries
        if self._count > len(entries) or (self._count and entries[self._count - 1] is not self._last):
            self._restart()  # a transfer was removed
        end = _find_settled_end(entries, self._count)
        new = [] if self._has_begun else [*self._transcript.before_fork()]
        new.extend(self._transcript.since(self._count, end))
        still_open = [*self._transcript.since(end)]
        asked, asked_in_open = _calls_in(new), _calls_in(still_open)
        if not (asked.isdisjoint(self._calls) and asked_in_open.isdisjoint(self._calls | asked)):
            self._restart()
            return render_own_messages(self._reader, self._transcript.own())
        self._settled.extend(render_own_messages(self._reader, new))
        self._calls |= asked
        self._has_begun, self._count, self._last = True, end, entries[end - 1] if end else None
        return [*self._settled, *render_own_messages(self._reader, still_open)] if still_open else self._settled

    def _restart(self) -> None:
        self._settled, self._calls, self._has_begun, self._count, self._last = [], set(), False, 0, None


class SessionHistory:
    """The messages of a session up to a position, and what agents see of them; only the views that it keeps change."""

    def __init__(self, stored: Sequence[StoredMessage] = (), *, before: "SessionHistory | None" = None) -> None:
        """`before` is the history that these messages follow."""
        new = list(map(_entry, stored))
        self.stored: Sequence[StoredMessage] = [*before.stored, *stored] if before is not None else list(stored)
        self.entries: Sequence[HistoryEntry] = [*before.entries, *new] if before is not None else new
        summaries = [entry for entry in new if is_summary(entry.message)]
        self.summaries: Sequence[HistoryEntry] = [*before.summaries, *summaries] if before is not None else summaries
        """Those of its messages that are summaries."""
        self.size: int = sum(map(_size_of, new)) + (before.size if before is not None else 0)
        """The estimated bytes of memory of its messages and views."""
        self._views: OrderedDict[Hashable, SessionView] = before._views.copy() if before is not None else OrderedDict()

    @property
    def last_position(self) -> int:
        """The position of its last message; 0 if it has none."""
        return self.entries[-1].position if self.entries else 0

    def at_end(self) -> Sequence[StoredMessage]:
        """Return its messages at the last position: a message, and the calls that follow it."""
        place = len(self.entries)
        while place and self.entries[place - 1].position == self.last_position:
            place -= 1
        return self.stored[place:]

    def view(self, key: Hashable, make: Callable[[], SessionView]) -> SessionView:
        """Return what an agent sees of it; `key` tells views apart, and `make` returns an empty one."""
        before = self._views.get(key) or make()
        view = self._views[key] = before.extend_to(self.entries)
        self._views.move_to_end(key)
        self.size += view.size - before.size
        if len(self._views) > _MOST_VIEWS:
            _, dropped = self._views.popitem(last=False)
            self.size -= dropped.size
        return view


class SessionHistories:
    """The histories of the sessions that were read last, within a bound of bytes."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], SessionHistory] = OrderedDict()

    async def read(self, sessions: Sessions, principal: Principal, session_id: str, *, through: int) -> SessionHistory:
        """Return the messages of a session up to the cut of one of its runs."""
        key = (principal.tenant_id, session_id)
        kept = self._kept.get(key)
        if not through or (kept is not None and kept.last_position > through):
            # A run that is continued, or a session that was deleted and created again.
            return SessionHistory(await sessions.history(principal, session_id, through=through) if through else ())
        since, known = (kept.last_position, kept.at_end()) if kept is not None else (0, ())
        found = await sessions.history(principal, session_id, through=through, since=since)
        if found[: len(known)] == [*known]:
            history = SessionHistory(found[len(known) :], before=kept)
        else:
            history = SessionHistory(await sessions.history(principal, session_id, through=through))
        self._keep(key, history)
        return history

    def _keep(self, key: tuple[str, str], history: SessionHistory) -> None:
        self._kept.pop(key, None)
        if not history.entries:
            return  # its session was deleted meanwhile
        self._kept[key] = history
        size = sum(kept.size for kept in self._kept.values())
        while size > self._max_bytes or len(self._kept) > MAX_SESSIONS:
            _, dropped = self._kept.popitem(last=False)
            size -= dropped.size


def _entry(stored: StoredMessage) -> HistoryEntry:
    message = stored.message
    return HistoryEntry(
        message,
        stored.agent,
        stored.chain,
        message.position,
        is_call=isinstance(stored, StoredCall),
        is_relay=message.role == message_pb2.ROLE_ASSISTANT and message.author != stored.agent,
        inside=stored.inside if isinstance(stored, StoredCall) else (),
    )


def _size_of(entry: HistoryEntry) -> int:
    return _MESSAGE_OVERHEAD + entry.message.ByteSize()


def _find_settled_end(entries: Sequence[HistoryEntry | JoinedChild], begin: int) -> int:
    """Return the number of the last entry that asks for calls if some have no result yet, else that of all entries."""
    answered: set[Call] = set()
    for number in range(len(entries) - 1, begin - 1, -1):
        entry = entries[number]
        if not isinstance(entry, HistoryEntry):
            continue
        calls = calls_in(entry)
        if entry.message.role != message_pb2.ROLE_TOOL and calls:
            return len(entries) if answered.issuperset(calls) else number
        answered.update(calls)
    return len(entries)


def _calls_in(lines: Iterable[HistoryEntry]) -> set[Call]:
    return {call for line in lines for call in calls_in(line)}


def _invocations_in(entries: Iterable[HistoryEntry]) -> set[str]:
    return {name for entry in entries for name in (entry.message.invocation_id, *entry.inside)}


def _view_size(shown: Sequence[VisibleMessage], as_they_are: set[int]) -> int:
    """Return the bytes of the messages as JSON, and again of those that are not the session's own messages."""
    sizes = [one.message.ByteSize() * (1 if id(one.message) in as_they_are else 2) for one in shown]
    return sum(sizes) + _SHOWN_OVERHEAD * len(shown)
