"""Followers of logs that other servers write: one read fetches the new events of all these logs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection

from bough_server.errors import ServerStopping, StorageFailed
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.workers import Topic
from bough_server.store.sql.notifications import Notifier
from bough_server.store.sql.readers import Readers
from bough_server.store.window import RecentEventsOfRuns

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Growth:
    """The first events of a log after a sequence, perhaps not all, and its epoch."""

    stored: Sequence[StoredEvent]
    epoch: int
    has_more: bool


ReadGrowth = Callable[[Connection, Mapping[str, int]], tuple[Mapping[str, Growth], bool]]
"""Reads the new events of logs, after the last sequence known of each, bounded by bytes.

Returns them by log, and whether all logs were read: if so, a log that is missing was deleted.
"""


class FollowedLogs:
    """Reads events that other servers have committed to logs with followers here, when notified and when polling."""

    def __init__(
        self, readers: Readers, windows: RecentEventsOfRuns, notifier: Notifier, read_growth: ReadGrowth
    ) -> None:
        self._readers, self._windows, self._read_growth = readers, windows, read_growth
        self._due: set[str] = set()
        self._reading: asyncio.Task[None] | None = None
        self._is_failing = False
        self._counted = {"notification": 0, "look": 0}
        self._notified: set[str] = set()
        notifier.subscribe(Topic.LOG, self._on_growth, own=False)

    def count_reads(self) -> Mapping[str, int]:
        """Return how often new events of a log were found by a notification ("notification") and by a poll ("look").

        A few polls find events before their notification comes, or events of logs that did not fit into one.
        """
        return self._counted

    async def close(self) -> None:
        """End the read in progress."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    def _on_growth(self, log_id: str) -> None:
        if not log_id:
            self._due.update(self._windows.list_logs_to_poll())
        elif self._windows.note_growth(log_id):
            self._due.add(log_id)
            self._notified.add(log_id)
        if self._due and (self._reading is None or self._reading.done()):
            self._reading = asyncio.get_running_loop().create_task(self._read_due())

    async def _read_due(self) -> None:
        """Read all logs that are due, one read at a time; after a failure the next poll finds the missing events."""
        try:
            while self._due:
                await self._read()
        except ServerStopping:
            return
        except StorageFailed as error:
            if not self._is_failing:
                _log.warning("new events of other servers could not be read; retrying", error=error.message)
            self._is_failing = True

    async def _read(self) -> None:
        due, self._due = self._due, set()
        notified, self._notified = self._notified, set()
        ends = self._windows.ends_of(due)
        found, is_whole = await self._readers.run(
            lambda connection: self._read_growth(connection, ends), is_logged=not self._is_failing
        )
        self._is_failing = False
        for log_id, growth in found.items():
            if growth.stored:
                self._counted["notification" if log_id in notified else "look"] += 1
            self._windows.feed(log_id, growth.stored, epoch=growth.epoch)
            if growth.has_more:
                self._due.add(log_id)
        missing = due - found.keys()
        if not is_whole:
            self._due |= missing
            return
        for log_id in missing:
            self._windows.notify_deletion(log_id)
