"""Runs whose storage failed are continued soon after it works again, however long it was away."""

import asyncio
from collections.abc import Collection, Sequence
from typing import NoReturn

from bough.v1 import run_pb2
from bough_server.errors import StorageFailed
from bough_server.identity import Principal
from bough_server.ownership.background import MAX_BACKOFF, POLL_SECONDS, Background
from bough_server.runs.recovery import Recovery
from bough_server.store.ports.runs import RunRow
from tests.support.held_clock import HeldClock


class Storage:
    """A database that is away at times, and who tries to use it."""

    def __init__(self) -> None:
        self.clock, self.works = HeldClock(), True
        self.tries = 0
        self.continued = asyncio.Event()

    async def next_expiry(self, *, but: Collection[str]) -> None:
        """Nothing expires."""

    async def claim(self, most: int) -> Sequence[RunRow]:
        """Find no runs, if the database answers."""
        self._check()
        return ()

    async def revive(self, record: RunRow) -> None:
        """Continue a run, if the database answers."""
        self.tries += 1
        self._check()
        self.continued.set()

    async def pass_time(self, seconds: float) -> None:
        """Move the clock once a task sleeps."""
        await self.clock.next_sleep()
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def room(self) -> int:
        """Return how many runs may be continued."""
        return 10

    async def expire(self, run_id: str) -> NoReturn:
        """No request expires."""
        raise AssertionError(run_id)

    async def count_losses(self, record: RunRow) -> NoReturn:
        """No server is lost."""
        raise AssertionError(record)

    async def wait_for_progress(self, record: RunRow) -> NoReturn:
        """No server is lost."""
        raise AssertionError(record)

    def _check(self) -> None:
        if not self.works:
            raise StorageFailed("It is away.")


async def test_a_run_is_continued_at_the_first_look_that_succeeds() -> None:
    storage = Storage()
    background = Background()
    # Of the index only what is read here.
    recovery = Recovery(storage, storage, background, storage.clock, is_shared=True)  # type: ignore[arg-type]
    await recovery.start()
    storage.works = False
    run = run_pb2.Run(run_id="stopped")
    principal = Principal(tenant_id="t", user_id="u")
    recovery.try_later(RunRow(run=run, principal=principal, epoch=1, request_digest=""))
    while storage.tries < 8:
        await storage.pass_time(POLL_SECONDS)
    storage.works, back = True, storage.clock.monotonic()
    while not storage.continued.is_set():
        await storage.pass_time(POLL_SECONDS / 4)
    assert storage.clock.monotonic() - back < MAX_BACKOFF / 4
    await background.close()
