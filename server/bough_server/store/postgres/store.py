"""PostgreSQL as the server's store."""

import asyncio

from bough_server.store.postgres.database import (
    hold_startup_lock,
    migrate,
    read_growth,
    reader_engine,
    translate_errors,
    writer_engine,
)
from bough_server.store.postgres.driver import POSTGRES
from bough_server.store.postgres.notifications import PostgresNotifier
from bough_server.store.sql.options import StoreOptions
from bough_server.store.sql.ownership import end_leases
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.store import Store
from bough_server.store.sql.write_queue import WriteHealth, WriteQueue
from bough_server.store.window import RecentEventsOfRuns


class _NoGuard:
    """Many servers share the database: none holds it."""

    def publish(self, address: str) -> None:
        """See Guard."""

    async def watch(self, write_health: WriteHealth) -> None:
        """See Guard. The writer probes a database that has failed."""
        await asyncio.Event().wait()

    def release(self) -> None:
        """See Guard."""


def open_postgres(url: str, options: StoreOptions) -> Store:
    """Open a database, creating its schema if it is empty; call it on the event loop.

    Raises ConfigurationError with advice.
    """
    engine = writer_engine(url, durability=options.durability, busy_timeout=options.busy_timeout)
    try:
        migrate(engine, url, may_upgrade=options.may_upgrade)
        with hold_startup_lock(engine, url) as (connection, is_alone):
            # Beside others, who has died is seen from the counters of leases.
            crashed = end_leases(connection) if is_alone else frozenset[str]()
        windows = RecentEventsOfRuns(options.window_bytes)
        write_health = WriteHealth(stall_seconds=options.stall_seconds)
        with translate_errors(url):
            notifier = PostgresNotifier(options.listen_url or url)
            queue = WriteQueue(
                engine,
                POSTGRES,
                windows,
                write_health,
                notifier=notifier,
                retry_delays=options.retry_delays,
                hooks=options.hooks,
                report_commit=options.report_commit,
                clock=options.clock,
            )
    except BaseException:
        engine.dispose()
        raise
    readers = Readers(
        reader_engine(url, connections=options.reader_threads, busy_timeout=options.busy_timeout),
        threads=options.reader_threads,
        clock=options.clock,
    )
    notifier.start()
    return Store(
        _NoGuard(),
        queue,
        readers,
        windows=windows,
        write_health=write_health,
        crashed=crashed,
        notifier=notifier,
        clock=options.clock,
        read_growth=read_growth,
        is_shared=True,
    )
