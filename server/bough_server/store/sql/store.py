"""All ports of the store on one database, whichever it is; see opening.open_store."""

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

from sqlalchemy import Connection

from bough_server.clock import Clock
from bough_server.store.sql.accounts import SqlAccounts
from bough_server.store.sql.agents import SqlAgents, SqlCatalog
from bough_server.store.sql.blobs import SqlBlobs
from bough_server.store.sql.evaluations import SqlEvaluations
from bough_server.store.sql.event_log import SqlEventLog
from bough_server.store.sql.followed_logs import FollowedLogs, ReadGrowth
from bough_server.store.sql.mailbox import SqlMailbox
from bough_server.store.sql.notifications import Notifier
from bough_server.store.sql.ownership import SqlLease
from bough_server.store.sql.quotas import SqlRunCounter
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.runs import SqlRunIndex
from bough_server.store.sql.sessions import SqlSessions
from bough_server.store.sql.usage import SqlUsageLedger
from bough_server.store.sql.write_queue import WriteHealth, WriteQueue
from bough_server.store.window import RecentEventsOfRuns

T = TypeVar("T")


class Guard(Protocol):
    """The parts of a database that a server holds while it uses it."""

    def publish(self, address: str) -> None:
        """Name the address at which this server serves the database, for commands; empty: it does not."""
        ...

    async def watch(self, write_health: WriteHealth) -> None:
        """Report whether the database is still there, until cancelled."""
        ...

    def release(self) -> None:
        """Give the database up."""
        ...


class Store:
    """All ports of the store on one database; an async context manager that closes it."""

    def __init__(
        self,
        guard: Guard,
        queue: WriteQueue,
        readers: Readers,
        *,
        windows: RecentEventsOfRuns,
        write_health: WriteHealth,
        crashed: frozenset[str],
        notifier: Notifier,
        clock: Clock,
        read_growth: ReadGrowth | None = None,
        is_shared: bool = False,
    ) -> None:
        self.log = SqlEventLog(queue, readers, windows)
        self.runs = SqlRunIndex(readers)
        self.evaluations = SqlEvaluations(queue, readers)
        self.catalog = SqlCatalog(readers)
        self.sessions = SqlSessions(queue, readers, on_delete=self.catalog.clear)
        self.blobs = SqlBlobs(readers)
        self.agents = SqlAgents(queue, readers, is_shared=is_shared)
        self.usage = SqlUsageLedger(readers)
        self.run_counter = SqlRunCounter(readers)
        self.accounts = SqlAccounts(queue, readers)
        self.leases = SqlLease(queue, readers, notifier, crashed=crashed, is_shared=is_shared)
        self.mailbox = SqlMailbox(queue, readers, notifier, clock)
        self.write_health = write_health
        self.notifier = notifier
        self.followed = None if read_growth is None else FollowedLogs(readers, windows, notifier, read_growth)
        """Reads other servers' logs for their followers here; None if no other server uses the database."""
        self._guard, self._queue, self._readers = guard, queue, readers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def publish(self, address: str) -> None:
        """Name the address that serves the database, for commands that want to use it; empty: none does."""
        self._guard.publish(address)

    def check_writes(self) -> None:
        """See RunStore."""
        self.write_health.check()

    async def write(self, run: Callable[[Connection], T]) -> T:
        """Run a transaction on the writing connection, in order with all other writes, and return its result."""
        return await self._queue.execute(run)

    async def watch(self) -> None:
        """Report writes as impossible whenever the database is not there any more, until cancelled."""
        await self._guard.watch(self.write_health)

    async def close(self) -> None:
        """Write all queued jobs, end readers with ServerStopping, and release the database."""
        self.mailbox.close()
        await self._queue.close()
        await self.notifier.close()
        if self.followed is not None:
            await self.followed.close()
        await self._readers.close()
        self._guard.release()
