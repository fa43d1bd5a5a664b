"""The messages of sessions, kept between their runs and extended by those that are new.

A stored message never changes as long as its session exists, so what was read once stays right: each read repeats the
last message of the one before, which only the same session can have, and reads all if it finds another.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from bough.v1 import message_pb2
from bough_server.history.growing import SessionView
from bough_server.history.transcript import HistoryEntry
from bough_server.history.visible import is_summary
from bough_server.store.ports.log import Principal
from bough_server.store.ports.sessions import Sessions, StoredCall, StoredMessage

MAX_BYTES: Final = 64 * 1024 * 1024
"""The most memory, estimated, of all messages that are kept and of what was derived from them: 50 sessions of 1,000
turns of 400 characters. A session that is left out is read again at its next run, as after a start of the server."""

MAX_SESSIONS: Final = 1000
"""The most sessions that are kept, so that counting their bytes stays short."""

_MOST_VIEWS: Final = 8
"""The most views that are kept of a session: as many agents, of those that saw it last."""
_OVERHEAD: Final = 800
"""Bytes of memory of a message besides its content."""


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
        view = self._views[key] = before.extended(self.entries)
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
    return _OVERHEAD + entry.message.ByteSize()
