"""What an agent sees of messages that only grow: of a session between turns, of its invocation between steps.

The messages that a view was built from are not looked at again. A view of the same messages built at once is equal:
what would change the part that is built, a result for a call in it for example, makes it be built anew.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from bough.v1 import message_pb2
from bough_server.history.transcript import HistoryEntry, JoinedChild, Transcript
from bough_server.history.visible import (
    Call,
    Reader,
    VisibleMessage,
    calls_in,
    render_caller_messages,
    render_own_messages,
    render_session_messages,
)

_OVERHEAD: Final = 500
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
        longer.size = self.size + _size_of(shown, {id(entry.message) for entry in new})
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


def _size_of(shown: Sequence[VisibleMessage], as_they_are: set[int]) -> int:
    """Return the bytes of the messages as JSON, and again of those that are not the session's own messages."""
    sizes = [one.message.ByteSize() * (1 if id(one.message) in as_they_are else 2) for one in shown]
    return sum(sizes) + _OVERHEAD * len(shown)
