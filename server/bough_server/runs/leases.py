"""Keep this worker's lease, and end those of workers that are lost."""

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from bough_server.clock import Clock
from bough_server.errors import StorageFailed
from bough_server.store.ports.workers import Lease

_log = structlog.get_logger(__name__)

RENEW_SECONDS: Final = 2.0
"""Seconds between two renewals of a lease."""

LOST_SECONDS: Final = 6.0
"""A worker whose counter has been read unchanged for so long is taken for lost."""

_LOOK_SECONDS: Final = 0.5
"""Seconds between two looks at the counters of other workers."""

_GAP_SECONDS: Final = 2.0
"""Two looks further apart prove nothing about the time between: this process was held up, or the database."""

_UNRENEWED_SECONDS: Final = RENEW_SECONDS + 1.5
"""A server that has not renewed its own lease for longer cannot tell others that are lost from a database that writes
nothing. It is short enough for none of those to have been unchanged for LOST_SECONDS by then.
"""


class LeaseKeeper:
    """Keeps the lease of this worker while it executes runs, and ends the leases of others that are not renewed.

    `on_lost` is called when others have taken this worker for lost, such as after a long pause of its process: it must
    stop whatever it executes, and begin a new lease before it executes anything again. Time is that of this process
    alone, and only time in which it could renew its own lease counts: no worker is lost because the database restarts,
    or reads and does not write.
    """

    def __init__(self, leases: Lease, worker: str, clock: Clock, *, on_lost: Callable[[], Awaitable[None]]) -> None:
        self._leases, self._worker, self._clock, self._on_lost = leases, worker, clock, on_lost
        self._renewed = clock.monotonic()

    async def keep(self) -> None:
        """Renew the lease until cancelled."""
        is_failing = False
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            try:
                if not await self._leases.renew(self._worker):
                    _log.error("this server was taken for lost: others continue its runs, which are stopped here")
                    await self._on_lost()
                    _log.info("this server has a lease again, and executes runs", worker=self._worker)
                self._renewed = self._clock.monotonic()
                is_failing = False
            except StorageFailed as error:
                if not is_failing:
                    _log.warning("lease not renewed", error=error.message)
                is_failing = True

    async def watch_others(self) -> None:
        """End the leases of lost workers until cancelled."""
        unchanged: dict[str, tuple[int, float]] = {}  # by worker, its counter and since when it has been so
        looked = self._clock.monotonic()
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            try:
                counters = await self._leases.counters()
                now = self._clock.monotonic()
                if now - looked > _GAP_SECONDS or now - self._renewed > _UNRENEWED_SECONDS:
                    unchanged = {}
                looked = now
                unchanged = {
                    worker: unchanged[worker] if unchanged.get(worker, (0,))[0] == counter else (counter, now)
                    for worker, counter in counters.items()
                    if worker != self._worker
                }
                for worker, (counter, since) in unchanged.items():
                    if now - since >= LOST_SECONDS:
                        _log.warning("a server is lost: its runs are continued by others", worker=worker)
                        await self._leases.expire(worker, counter)
            except StorageFailed:
                unchanged = {}
