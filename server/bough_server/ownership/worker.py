"""A server as a worker: its name, its lease, and the leases of crashed workers, which it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog

from bough_server.clock import Clock
from bough_server.errors import ServerStopping, StorageFailed
from bough_server.observability.metrics import Metrics
from bough_server.store.ports.workers import Lease

_log = structlog.get_logger(__name__)

RENEW_SECONDS: Final = 2.0
"""Seconds between two renewals of a lease."""

DECLARE_DEAD_SECONDS: Final = 6.0
"""A worker whose counter has been read unchanged for so long is declared dead."""

_POLL_SECONDS: Final = 0.5
"""Seconds between two polls of the counters of other workers."""

_GAP_SECONDS: Final = 2.0
"""Polls further apart prove nothing about the time between them: this process was paused, or the database was."""

_UNRENEWED_SECONDS: Final = RENEW_SECONDS + 1.5
"""A server that has not renewed its lease for longer declares no other server dead: the database may be at fault.

The time is so short that no counter can have been unchanged for DECLARE_DEAD_SECONDS by then.
"""


class Owned(Protocol):
    """The row of a log: of a run or an evaluation."""

    @property
    def owner(self) -> str:
        """The worker that executed it last."""
        ...


class Worker:
    """The name under which this process owns logs, and the lease that it has while it executes them.

    It ends the leases of workers that do not renew them. It measures time by its own clock, and counts only time in
    which it could renew its own lease: no worker is declared dead because the database restarts, or accepts only reads.
    """

    def __init__(self, name: str, leases: Lease, clock: Clock, *, metrics: Metrics | None = None) -> None:
        self.name = name
        self._leases, self._clock, self._metrics = leases, clock, metrics
        self._renewed = clock.monotonic()
        self._stops: list[Callable[[], Awaitable[None]]] = []
        self._given_up: set[asyncio.Task[None]] = set()
        """Logs that are being given up to other servers."""
        self._leased = asyncio.Event()
        self._leased.set()

    def on_lost(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Call `stop` when others have declared this worker dead: it stops everything that is executed, unrecorded."""
        self._stops.append(stop)

    async def wait_for_lease(self) -> None:
        """Wait until this worker has a lease: without one, others would take over the logs that it owns."""
        await self._leased.wait()

    async def is_elsewhere(self, row: Owned) -> bool:
        """Return True if another live worker owns a log."""
        if row.owner in ("", self.name):
            return False
        return row.owner in await self._leases.counters()

    async def give_up(self, log_id: str) -> None:
        """Let any server execute a log that this one owns. Raises StorageFailed."""
        await self._leases.give_up(self.name, log_id)

    def give_up_soon(self, log_id: str) -> None:
        """Let other servers execute a log, in a task that `settle` waits for."""
        if not self._leases.is_shared:
            return  # there is no other server to continue it
        giving_up = asyncio.get_running_loop().create_task(self._give_up(log_id))
        self._given_up.add(giving_up)
        giving_up.add_done_callback(self._given_up.discard)

    async def _give_up(self, log_id: str) -> None:
        with suppress(StorageFailed, ServerStopping):  # then it is continued when the lease of this worker has ended
            await self.give_up(log_id)

    async def settle(self) -> None:
        """Wait for the logs that are being given up."""
        if self._given_up:
            await asyncio.wait(self._given_up)

    async def begin(self) -> None:
        """Take a lease, for a worker that executes nothing. Raises StorageFailed."""
        await self._leases.begin(self.name)

    async def release(self) -> None:
        """End the lease: others execute the logs that this worker still owns."""
        with suppress(StorageFailed, ServerStopping):  # a lease that remains is handled as that of a crashed worker
            await self._leases.release(self.name)

    async def replace_lease(self) -> None:
        """Stop everything that this worker executes, which others continue, and take a new lease.

        Raises StorageFailed.
        """
        if self._metrics is not None:
            self._metrics.on_lease_loss()
        self._leased.clear()  # none arrives between the stop and the lease, which has no runs
        try:
            await asyncio.gather(*(stop() for stop in self._stops))
            await self.begin()
        finally:
            self._leased.set()

    async def keep_lease(self) -> None:
        """Renew the lease until cancelled; if this worker was declared dead, stop all its logs and take a new lease."""
        is_failing = False
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            try:
                if not await self._leases.renew(self.name):
                    _log.error("this server was declared dead: other servers continue its runs, which are stopped here")
                    await self.replace_lease()
                    _log.info("this server has a lease again, and executes runs", worker=self.name)
                self._renewed = self._clock.monotonic()
                is_failing = False
            except StorageFailed as error:
                if not is_failing:
                    _log.warning("lease not renewed", error=error.message)
                is_failing = True

    async def watch_others(self) -> None:
        """End the leases of workers that no longer renew them, until cancelled."""
        unchanged: dict[str, tuple[int, float]] = {}  # by worker, its counter and since when it has been so
        looked = self._clock.monotonic()
        while True:
            await self._clock.sleep(_POLL_SECONDS)
            try:
                counters = await self._leases.counters()
                now = self._clock.monotonic()
                if now - looked > _GAP_SECONDS or now - self._renewed > _UNRENEWED_SECONDS:
                    unchanged = {}
                looked = now
                unchanged = {
                    worker: unchanged[worker] if unchanged.get(worker, (0,))[0] == counter else (counter, now)
                    for worker, counter in counters.items()
                    if worker != self.name
                }
                for worker, (counter, since) in unchanged.items():
                    if now - since >= DECLARE_DEAD_SECONDS:
                        _log.warning("a server was declared dead: other servers continue its runs", worker=worker)
                        await self._leases.expire(worker, counter)
            except StorageFailed:
                unchanged = {}
